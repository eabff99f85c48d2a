"""PyTorch's own `DistributedDataParallel` on Gloo, as it comes: the honest baseline."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from offbeat.runtime.group import Group, ring_bytes
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.strategies._base import Traits, require
from offbeat.strategies._worker import Exchange, Exchanging


@dataclass(frozen=True)
class DDP(Exchanging):
    """PyTorch's DistributedDataParallel on Gloo, unchanged, as the baseline to beat.

    Its reducer averages the gradients, with `gradient_as_bucket_view=True`, which is its fastest setting. Only where
    workers have different numbers of examples is the output's gradient scaled, so that the mean is over examples.
    """

    bucket: float = 25.0
    """MiB of gradients that are reduced at once."""
    find_unused: bool = False
    """Look for parameters that took no part in the loss; costs a walk through the graph each step."""

    traits = Traits(synchronous=True, exact=True, deterministic=True)
    examples = ("ddp", "ddp(bucket=50.0)", "ddp(find_unused=True)")

    def __post_init__(self) -> None:
        """Refuse a bucket that holds nothing."""
        super().__post_init__()
        require(self.bucket > 0, self, "bucket", self.bucket, "a bucket holds more than 0 MiB")

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: a DistributedDataParallel beside each model."""
        return _Stock(group, stopwatch, self)


class _Stock(Exchange):
    """Runs DDP's forward hooks around the user's model instead of wrapping it, as torch's own `replicate` does."""

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: DDP) -> None:
        super().__init__(group, stopwatch)
        self._settings = settings
        self._wrapped: list[DistributedDataParallel] = []
        self._handles: list[RemovableHandle] = []
        self._passes = 0

    def install(self, model: nn.Module) -> None:
        """Make the DDP object and let it see each forward pass."""
        if not any(p.requires_grad for p in model.parameters()):
            return
        settings = self._settings
        wrapped = DistributedDataParallel(
            model,
            process_group=self.group.process_group,
            bucket_cap_mb=settings.bucket,  # pyright: ignore[reportArgumentType]  # torch multiplies it, fractions work
            find_unused_parameters=settings.find_unused,
            gradient_as_bucket_view=True,
        )
        self._wrapped.append(wrapped)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            # DDP would broadcast buffers in evaluations too, and wait for workers that have fewer batches to evaluate.
            if not torch.is_grad_enabled():
                return None
            return wrapped._pre_forward(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            if not torch.is_grad_enabled():
                return None
            self._passes += wrapped.require_backward_grad_sync
            output = wrapped._post_forward(output)  # pyright: ignore[reportPrivateUsage]
            return output if self.weight_in_backward == 1.0 else _weighted(output, self.weight_in_backward)

        self._handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(model.register_forward_hook(after))

    def weigh(self, examples: int, total: int | None) -> None:
        """DDP gives every worker the same weight: what differs from that must be made up for."""
        if total is None and self.group.size > 1:
            counts = self.group.gather([float(examples)], "the count of examples")
            total = int(counts.sum())
        self.weight_in_backward = examples * self.group.size / total if total else 1.0

    def suspend(self, held: bool) -> None:
        """What DDP calls no_sync."""
        for wrapped in self._wrapped:
            wrapped.require_backward_grad_sync = not held

    def payload(self) -> int:
        """Its reducer sends by itself: every pass sums all gradients."""
        trainable = [p for wrapped in self._wrapped for p in wrapped.module.parameters() if p.requires_grad]
        each = sum(p.numel() * p.element_size() for p in trainable)
        return self._passes * ring_bytes(each, self.group.size)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def settle(self) -> None:
        """Book as communication what DDP's own log says was exposed; it samples some of the steps."""
        for wrapped in self._wrapped:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen = wrapped._get_ddp_logging_data()  # pyright: ignore[reportPrivateUsage]
            total = float(seen.get("avg_backward_comm_time", 0)) * 1e-9
            hidden = float(seen.get("avg_backward_compute_comm_overlap_time", 0)) * 1e-9
            exposed = self._passes * max(total - hidden, 0.0)
            self.stopwatch.move(exposed, "compute", "communicate")
            self.stopwatch.overlapped += self._passes * hidden


def _weighted(output: Any, weight: float) -> Any:
    """Scale the gradients that come back through the output; the output itself stays as it is."""
    if isinstance(output, Tensor):
        if output.requires_grad:
            output.register_hook(partial(torch.mul, other=weight))
    elif isinstance(output, dict):
        for value in output.values():  # pyright: ignore[reportUnknownVariableType]
            _weighted(value, weight)
    elif isinstance(output, list | tuple):
        for value in output:  # pyright: ignore[reportUnknownVariableType]
            _weighted(value, weight)
    return output

"""PyTorch's own `DistributedDataParallel` on Gloo, unchanged: the honest baseline."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.distributed.utils import _sync_params_and_buffers  # pyright: ignore[reportPrivateUsage]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import RunError, StrategyError
from offbeat.protocols.collectives import Collective
from offbeat.runtime.backend import GLOO
from offbeat.runtime.gradients.buckets import hook
from offbeat.runtime.groups.group import Group
from offbeat.runtime.groups.presence import Waiting
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies._base import BUCKET, Traits
from offbeat.strategies.worker.exchange import Exchange, Exchanging

_SUM = "ddp's sum of gradients"
_SECOND_BACKWARD = (
    "a second backward pass reached a model that was not called since the first, as with retain_graph=True or two "
    "losses of one output. ddp exchanges the gradients of one backward pass after each call of the model; those of a "
    "second stay local, and the workers drift apart. Add the losses up and call backward once, call the model before "
    "each backward, or use allreduce, which exchanges every pass."
)
_NOT_CALLED = (
    "ddp exchanges only gradients of what went through model(...), but there are gradients of a model that was not "
    "called so since the last step. Call the model itself, not its methods, or use allreduce."
)


@dataclass(frozen=True)
class DDP(Exchanging):
    """PyTorch's DistributedDataParallel on Gloo, unchanged, as the baseline to beat.

    Its reducer averages the gradients, with `gradient_as_bucket_view=True`, which is its fastest setting. Only where
    workers have different numbers of examples are gradients scaled first, so that the mean is over examples.
    """

    bucket: float = 25.0
    """MiB of gradients that are summed at once."""
    find_unused: bool = False
    """Look for parameters that took no part in the loss; costs a traversal of the graph in each step."""

    promises = Traits(synchronous=True, exact=True, deterministic=True)
    examples = ("ddp", "ddp(bucket=50.0)", "ddp(find_unused=True)")
    unplanned = "torch's own DistributedDataParallel decides when and how it sums its buckets on Gloo"
    _ranges = BUCKET

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side: a DistributedDataParallel beside each model."""
        return DDPWorker(group, stopwatch, self)


class DDPWorker(Exchange):
    """Runs DDP's forward hooks around the user's model instead of wrapping it, as torch's own `replicate` does."""

    joins_late = False
    unpredicted = "torch's own DistributedDataParallel decides when and how it sums its buckets"

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: DDP) -> None:
        super().__init__(group, stopwatch)
        self._settings = settings
        self._stock_group: Any = None
        self._wrapped: list[DistributedDataParallel] = []
        self._passes = 0
        self._begun = 0.0
        self._due: set[int] = set()
        if group.presence is not None:
            group.presence.counted["ddp"] = lambda: self._passes
        self._held = False
        self._computed_at: float | None = None
        self._scalers: list[RemovableHandle] = []
        self._owner: dict[int, int] = {}
        self._expected: dict[int, dict[str, nn.Parameter]] = {}
        self._calls: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._stepped: dict[tuple[int, int], int] = {}
        self._checked: dict[int, int] = {}

    def install(self, model: nn.Module) -> None:
        """Create the DDP object and let it see each forward pass."""
        self._claim(model)
        if not any(p.requires_grad for p in model.parameters()):
            return
        settings, self._begun = self._settings, time.monotonic()
        if self._stock_group is None:  # One for all models, as users of torch have it.
            self._stock_group = self.group.direct.connection.stock()
        wrapped = DistributedDataParallel(
            model,
            process_group=self._stock_group,
            bucket_cap_mb=settings.bucket,  # pyright: ignore[reportArgumentType]  # torch multiplies it, fractions work
            find_unused_parameters=settings.find_unused,
            gradient_as_bucket_view=True,
        )
        self._wrapped.append(wrapped)
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        self._note("broadcast", buffers + sum(p.nbytes for p in model.parameters()))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not settings.find_unused:
            self._expected[id(model)] = trained
        # Backward reaches the first parameter last: from then until the step, DDP's exchange is exposed.
        first = next(iter(trained.values()))
        self.handles.append(first.register_post_accumulate_grad_hook(partial(self._computed, id(model))))
        # Every parameter has a gradient in a pass that DDP completes, unless it looks for unused ones.
        counting = partial(self._exchanged, id(model), sum(p.numel() * p.element_size() for p in trained.values()))
        watched = trained.values() if settings.find_unused else (first,)
        self.handles += [p.register_post_accumulate_grad_hook(counting) for p in watched]

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            # In evaluations DDP would broadcast buffers too, and wait for workers that have fewer batches.
            if not torch.is_grad_enabled():
                return None
            self._begun = time.monotonic()
            if wrapped.require_forward_param_sync:
                self._note("broadcast", buffers)
            try:
                return wrapped._pre_forward(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]
            except RuntimeError as error:
                if (absent := _unfinished(error, list(trained))) is None:
                    raise
                raise _without_gradient(absent) from error

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            if not torch.is_grad_enabled():
                return None
            self._passes += wrapped.require_backward_grad_sync
            if wrapped.require_backward_grad_sync:
                self._due.add(id(model))
            self._calls[id(model)] = self._calls.get(id(model), 0) + 1
            self._awaited.add(id(model))
            return wrapped._post_forward(output)  # pyright: ignore[reportPrivateUsage]

        self.handles.append(model.register_forward_pre_hook(_OwnHook(before), with_kwargs=True))
        self.handles.append(model.register_forward_hook(_OwnHook(after)))
        vars(model)["__getstate__"] = partial(_state_without_ours, model)

    def _claim(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if id(parameter) in self._owner:
                raise StrategyError(
                    f"ddp cannot train two models that share a parameter ({name}). Use allreduce, which can."
                )
            self._owner[id(parameter)] = id(model)
            if not parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex()):
                self.handles.append(hook(parameter, partial(_refuse_unfrozen, name)))

    def _note(self, what: Literal["all_reduce", "broadcast"], nbytes: int) -> None:
        """Count the traffic that DDP causes on Gloo."""
        if nbytes and self.group.size > 1:
            self.group.direct.note(what, nbytes, by=GLOO[Collective(what)])

    def _exchanged(self, model: int, size: int, _: Tensor) -> None:
        """Count a model's gradients once for each backward pass, however often the model was called before."""
        if model in self._due:
            self._due.discard(model)
            self._note("all_reduce", size)

    def _computed(self, model: int, _: Tensor) -> None:
        self._computed_at = None if self._held else time.perf_counter()
        if not self._held and model not in self._awaited:
            stepped = max((calls for (_, owner), calls in self._stepped.items() if owner == model), default=0)
            raise RunError(_SECOND_BACKWARD if self._calls.get(model, 0) > stepped else _NOT_CALLED)
        self._awaited.discard(model)
        if self.group.presence is not None and not self._held:
            # From here until the step or the next pass, torch waits for the others.
            self.group.presence.waiting = Waiting(_SUM, "ddp", self._passes)

    def stepping(self, optimizer: Optimizer) -> None:
        """Refuse gradients that did not go through a model's forward: DDP leaves them different on every worker."""
        if self.group.presence is not None:
            self.group.presence.waiting = None
        if self._computed_at is not None:
            self.stopwatch.total()
            self.stopwatch.move(time.perf_counter() - self._computed_at, "compute", "communicate")
            self._computed_at = None
        parameters = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        owners = {self._owner[id(p)] for p in parameters if id(p) in self._owner}
        calls = {(id(optimizer), owner): self._calls.get(owner, 0) for owner in owners}
        if any(self._stepped.get(key, 0) == count for key, count in calls.items()):
            raise RunError(_NOT_CALLED)
        self._stepped |= calls
        for owner in owners if not self._held else ():
            if self._checked.get(owner) == self._calls.get(owner):
                continue  # The model's other optimizer stepped before, and may have cleared its gradients since.
            self._checked[owner] = self._calls.get(owner, 0)
            absent = [name for name, p in self._expected.get(owner, {}).items() if p.grad is None]
            if absent:
                raise _without_gradient(absent)

    def weigh(self, examples: int, total: int | None) -> None:
        """Compensate for DDP's equal weights where workers have different numbers of examples."""
        if total is None and self.group.size > 1:
            total = int(self.group.gather([float(examples)], "the count of examples").sum())
        self.weight_in_backward = examples * self.group.size / total if total else 1.0
        if (self.weight_in_backward != 1.0) != bool(self._scalers):
            self._scale_gradients()

    def _scale_gradients(self) -> None:
        """Hook every parameter, or remove the hooks: even batches pay nothing for uneven ones."""
        for handle in self._scalers:
            handle.remove()
        self._scalers = []
        if self.weight_in_backward != 1.0:
            trainable = [p for wrapped in self._wrapped for p in wrapped.module.parameters() if p.requires_grad]

            def scale(gradient: Tensor) -> Tensor | None:
                return None if self._held else gradient * self.weight_in_backward

            self._scalers = [p.register_hook(_OwnHook(scale)) for p in trainable]

    def suspend(self, held: bool) -> None:
        """Switch DDP's `no_sync` on or off."""
        self._held = held
        for wrapped in self._wrapped:
            wrapped.require_backward_grad_sync = not held

    def explained(self, error: BaseException | None) -> Exception | None:
        """Name the missing workers: DDP passes on Gloo's error, which does not.

        It waits for Gloo inside torch's engine when backward ends, or before forward for its broadcasts.
        """
        if type(error) is not RuntimeError and not isinstance(error, DistError):
            return None
        # The code of the innermost Python function that raised it.
        place = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        if not (place in _BEFORE_FORWARD or (place is _BACKWARD and self._computed_at is not None)):
            return None
        # Negative, so as not to be taken for a number of the group's own exchanges.
        return self.group.direct.waits.explained(error, _SUM, -self._passes, self._begun)

    def close(self) -> None:
        """Remove the hooks, and release DDP before its group is closed.

        If a reducer holds the last reference to a Gloo group, it joins Gloo's threads with the GIL held, which those
        may be waiting for (torch 2.13).
        """
        super().close()
        for handle in self._scalers:
            handle.remove()
        for wrapped in self._wrapped:
            vars(wrapped.module).pop("__getstate__", None)
        self.handles, self._scalers, self._wrapped = [], [], []


_BACKWARD = torch.autograd.graph._engine_run_backward.__code__  # pyright: ignore[reportPrivateUsage]
_BEFORE_FORWARD = (
    DistributedDataParallel._pre_forward.__code__,  # pyright: ignore[reportPrivateUsage]  # Agrees on buckets.
    _sync_params_and_buffers.__code__,
    DistributedDataParallel._distributed_broadcast_coalesced.__code__,  # pyright: ignore[reportPrivateUsage]
    DistributedDataParallel._default_broadcast_coalesced.__code__,  # pyright: ignore[reportPrivateUsage]
)
"""Functions of torch that wait for Gloo, which raises only RuntimeError: where it was raised says what it is about
(torch 2.13)."""
_UNFINISHED = re.compile(r"Expected to have finished reduction.*?(?:for rank \d+:(?P<indices>[ \d]+)|\Z)", re.DOTALL)
"""The reducer's message about parameters without a gradient in the last pass. It waits for Gloo in the same function,
so only the message tells the two apart."""


def _unfinished(error: RuntimeError, names: Sequence[str]) -> Sequence[str] | None:
    """The parameters without a gradient, as far as torch names their indices; None if the error is another one."""
    if (match := _UNFINISHED.search(str(error))) is None:
        return None
    return [names[int(i)] for i in (match["indices"] or "").split()] or ["some parameters"]


def _without_gradient(names: Sequence[str]) -> StrategyError:
    named = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return StrategyError(
        f"ddp waits for a gradient of every parameter in every step, but {named} had no gradient in this one: frozen "
        f"after prepare(), or not used by this batch's loss. The others' gradients were not all averaged either. Use "
        f"ddp(find_unused=True), freeze before prepare(), or use allreduce, which needs neither."
    )


class _OwnHook(partial[Any]):
    """A hook on the user's model that is dropped when the model is copied, saved or sent to a process.

    A no-op that does not need offbeat to be loaded takes its place.
    """

    __torch_unserializable__ = True  # So that torch does not warn of it.

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def _state_without_ours(model: nn.Module) -> Any:
    """The state to copy or save of a model: without our hooks, which torch.load would refuse as untrusted code."""
    state: Any = type(model).__getstate__(model)  # pyright: ignore[reportAttributeAccessIssue]  # every object has it
    if not isinstance(state, dict):
        return state
    kept = {name: value for name, value in cast("dict[str, Any]", state).items() if name != "__getstate__"}
    ours = {
        number
        for name in ("_forward_pre_hooks", "_forward_hooks")
        for number, hook_ in kept.get(name, {}).items()
        if isinstance(hook_, _OwnHook)
    }
    for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"):
        kept[name] = type(kept[name])((n, value) for n, value in kept[name].items() if n not in ours)
    return kept


def _refuse_unfrozen(name: str, parameter: Tensor) -> None:
    raise RunError(
        f"{name}, of shape {tuple(parameter.shape)}, was frozen in prepare() and has a gradient now, which ddp does "
        f"not exchange. Unfreeze it before prepare(), or use allreduce, which notices."
    )

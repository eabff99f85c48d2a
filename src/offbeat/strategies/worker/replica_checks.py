"""Checks for training that no exchange sees: updates by hand, unprepared optimizers, replicas that differ.

Many strategies exchange when a prepared optimizer steps. A loop that updates parameters in another way would train
every worker on its own part of the data, and nothing would look wrong.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import UsageError
from offbeat.runtime.gradients.buckets import hook
from offbeat.runtime.state.checkpoint_manager import Holdings
from offbeat.strategies.worker.flat_rows import parameters_of

_PASSES = 3
"""Backward passes whose gradients are compared: workers with different data differ in at least one of them."""
_ROUNDING = 1e-6
"""Allowed differences between replicas on unlike processors, relative to the magnitude of their parameters."""
_NAMED = 3
"""Parameters that a message names; it counts the rest."""


class HandUpdates:
    """Detects parameters that have gradients and change although no prepared optimizer stepped on them."""

    def __init__(self, holdings: Holdings, strategy: str, warn: Callable[[str], None]) -> None:
        self._holdings, self._strategy, self._warn = holdings, strategy, warn
        self._hooks: dict[str, RemovableHandle] = {}
        self._models = 0
        self._before: dict[str, tuple[Tensor, float]] = {}
        self._stepped: set[int] = set()
        self._optimizers: set[tuple[int, int]] = set()

    def adopt(self, model: nn.Module) -> None:
        """Wait for the first gradient of each of its parameters."""
        suffix = f" of model {self._models}" if self._models else ""
        self._models += 1
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                self._hooks[name + suffix] = hook(parameter, partial(self._first_gradient, name + suffix))

    def _first_gradient(self, name: str, parameter: Tensor) -> None:
        if not self._holdings.optimizers:
            raise UsageError(
                f"backward was called, but no optimizer was given to prepare(). {self._strategy} exchanges when a "
                f"prepared optimizer steps, so every worker would train by itself. Give the optimizer to "
                f"team.prepare(model, optimizer, ...). If you update parameters by hand, use torch.optim.SGD instead, "
                f"or a strategy that exchanges gradients in backward: allreduce or ddp."
            )
        self._hooks.pop(name).remove()
        if id(parameter) not in self._stepped:
            self._before[name] = parameter, _sum_of(parameter)

    def stepping(self, optimizer: Optimizer) -> None:
        """A prepared optimizer steps: its parameters are the strategy's."""
        known = id(optimizer), len(optimizer.param_groups)
        if known not in self._optimizers:
            self._optimizers.add(known)
            self._stepped.update(map(id, parameters_of(optimizer)))
            self._before = {name: (p, x) for name, (p, x) in self._before.items() if id(p) not in self._stepped}

    def check(self) -> None:
        """Refuse parameters that were updated without a prepared optimizer.

        Only warn where other parameters are stepped on: these may be meant to follow them, as a teacher's do.
        """
        changed = [
            f"{name} {tuple(parameter.shape)}"
            for name, (parameter, before) in self._before.items()
            if (now := _sum_of(parameter)) == now != before  # NaN: its values are on other workers.
        ]
        if not changed:
            return
        message = (
            f"{_some(changed)} changed since the first backward pass, but no prepared optimizer has stepped on them. "
            f"{self._strategy} exchanges when a prepared optimizer steps, so they differ between workers. Update them "
            f"with a torch.optim.Optimizer that was given to team.prepare(...), or use a strategy that exchanges "
            f"gradients in backward: allreduce or ddp."
        )
        if not self._stepped:
            raise UsageError(message)
        self._before.clear()
        self._warn(message)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._hooks.values():
            handle.remove()
        self._before.clear()


def unprepared(optimizer: Optimizer) -> str:
    """A warning of an unprepared optimizer that updates parameters which no team exchanges; empty if it does not."""
    # What an optimizer fits that is not a model's, such as an input, is usually meant to be each worker's own.
    trained = [p for p in _trained(parameters_of(optimizer)) if isinstance(p, Parameter)]
    if not trained:
        return ""
    kind, shapes = type(optimizer).__name__, [str(tuple(p.shape)) for p in trained]
    return (
        f"{kind} updates {len(trained)} parameters that no prepared model has, of shapes {_some(shapes)}. Nobody "
        f"exchanges their gradients, so each worker trains a copy of its own, and the copies drift apart. Give "
        f"that model and this {kind} to team.prepare(...) too. If the copies are meant to differ, ignore this."
    )


class FirstGradients:
    """Fingerprint of this worker's first gradients, to compare with the other workers'.

    Of the first model's largest parameter, before any exchange, in a few backward passes; afterwards it costs nothing.
    Outside lockstep only the first pass starts from the same parameters everywhere.
    """

    def __init__(self, lockstep: bool) -> None:
        self._count = 2 * (_PASSES if lockstep else 1)
        self.settled = False
        """Whether they were compared, or need not be."""
        self._passes: list[float] = []
        self._handle: RemovableHandle | None = None

    def adopt(self, model: nn.Module) -> None:
        """Watch the gradients of this model, if it is the first."""
        trained = _trained(model.parameters())
        if self._handle is None and trained:
            largest = max(trained, key=lambda p: p.numel())
            self._handle = largest.register_post_accumulate_grad_hook(self._look)

    def _look(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and not self.settled:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient.detach()
            real = torch.view_as_real(values) if values.is_complex() else values
            self._passes += [_sum_of(real), float(real.abs().sum(dtype=torch.float64))]
        if self.settled or len(self._passes) >= self._count:
            self.close()

    @property
    def fingerprint(self) -> float:
        """A number that is equal for equal gradients; 0 if there were too few passes, or only zeros."""
        if self.settled or len(self._passes) < self._count or not all(self._passes[1::2]):
            return 0.0
        return float(zlib.crc32(struct.pack(f"<{len(self._passes)}d", *self._passes)) + 1)

    def same(self, fingerprints: Sequence[float]) -> bool:
        """Whether all workers had equal gradients; False until that is known."""
        if self.settled or not all(fingerprints):
            return False
        self.settled = True
        return len(fingerprints) > 1 and len(set(fingerprints)) == 1

    def close(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()


class Replicas:
    """Detects models that should be equal on all workers and are not, by the sums of their parameters.

    It compares at the first, second, fourth, eighth … report and at the end, so that frequent reports cost little.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._reports = 0
        self._reported = False
        self.at_end = False
        """Whether this is the last comparison."""

    def sums(self) -> tuple[float, float]:
        """The sum of all trained parameters and of their magnitudes; zeros if no comparison is due."""
        self._reports += 1
        if self._reported or not (self.at_end or self._reports.bit_count() == 1):
            return 0.0, 0.0
        trained = _trained(p for model in self._holdings.models for p in model.parameters())
        return sum(map(_sum_of, trained)), sum(_sum_of(p.detach().abs()) for p in trained)

    def differ(self, sums: Tensor) -> bool:
        """Whether the workers' sums differ by more than rounding on unlike processors; reported once."""
        if self._reported or not bool(sums[:, 0].max() - sums[:, 0].min() > _ROUNDING * sums[:, 1].max()):
            return False
        self._reported = True
        return True


def _trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.requires_grad and (p.is_floating_point() or p.is_complex())]


def _sum_of(parameter: Tensor) -> float:
    """A checksum that, in practice, changes with any update."""
    values = parameter.detach()
    real = torch.view_as_real(values) if values.is_complex() else values
    return float(real.sum(dtype=torch.float64))


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")

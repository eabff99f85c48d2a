"""Training that no exchange sees: updates by hand, optimizers that were never prepared, workers left to themselves.

Many strategies exchange when a prepared optimizer steps. A loop that updates parameters in another way would train
every worker on its own part of the data, and nothing would look wrong. Here such loops are found out.
"""

from __future__ import annotations

import struct
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import OffbeatWarning, UsageError
from offbeat.runtime.gradients.buckets import hook
from offbeat.runtime.state.prepared import Holdings

_PASSES = 3
"""Backward passes whose gradients are compared: workers with different data do not have the same in all of them."""
_ROUNDING = 1e-6
"""Differences between replicas that unlike processors may make, as a share of the magnitude of their parameters."""
_NAMED = 3
"""Parameters that a message names before it only counts them."""


class HandUpdates:
    """Finds parameters that have gradients and change, although no prepared optimizer has stepped on them."""

    def __init__(self, holdings: Holdings, strategy: str, warn: Callable[[str], None]) -> None:
        self._holdings, self._strategy, self._warn = holdings, strategy, warn
        self._hooks: dict[str, RemovableHandle] = {}
        self._models = 0
        self._before: dict[str, tuple[Tensor, float]] = {}
        self._stepped: set[int] = set()
        self._optimizers: set[tuple[int, int]] = set()

    def adopt(self, model: nn.Module) -> None:
        """Wait for the first gradient of each of its parameters."""
        number, self._models = self._models, self._models + 1
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                called = name if number == 0 else f"{name} of model {number}"
                self._hooks[called] = hook(parameter, partial(self._first_gradient, called))

    def _first_gradient(self, name: str, parameter: Tensor) -> None:
        """What the parameter is now it stays, unless somebody updates it."""
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
        """A prepared optimizer steps: its parameters are the strategy's affair."""
        seen = id(optimizer), len(optimizer.param_groups)
        if seen not in self._optimizers:
            self._optimizers.add(seen)
            self._stepped.update(id(p) for group in optimizer.param_groups for p in group["params"])
            self._before = {name: one for name, one in self._before.items() if id(one[0]) not in self._stepped}

    def check(self) -> None:
        """Refuse to go on, or to end, if parameters were updated without a prepared optimizer.

        Where other parameters are stepped on, these may be meant to follow them, as a teacher's do: that is warned of.
        """
        changed = [
            f"{name} {tuple(parameter.shape)}"
            for name, (parameter, before) in self._before.items()
            if _sum_of(parameter) != before
        ]
        if not changed:
            return
        message = (
            f"{_some(changed)} changed since the first backward pass, but no prepared optimizer has stepped on them. "
            f"{self._strategy} exchanges when a prepared optimizer steps, so every worker has its own. Update them "
            f"with a torch.optim.Optimizer that was given to team.prepare(...), or use a strategy that exchanges "
            f"gradients in backward: allreduce or ddp."
        )
        if not self._stepped:
            raise UsageError(message)
        self._before.clear()
        self._warn(message)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._hooks.values():
            handle.remove()
        self._before.clear()


class Strangers:
    """Warns of optimizers that update parameters which no team exchanges."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._told: set[str] = set()
        self._waiting: list[str] = []

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether it was looked at before."""
        return optimizer in self._seen

    def meet(self, optimizer: Optimizer, training: bool) -> None:
        """It steps, and was not prepared; before training has begun, that may be how the model comes about."""
        self._seen.add(optimizer)
        members = [p for group in optimizer.param_groups for p in group["params"]]
        # What an optimizer fits that is not a model's, such as an input, is usually a worker's own on purpose.
        trained = [p for p in _trained(members) if isinstance(p, Parameter)]
        if not trained:
            return
        kind, shapes = type(optimizer).__name__, [str(tuple(p.shape)) for p in trained]
        message = (
            f"{kind} updates {len(trained)} parameters that no prepared model has, of shapes {_some(shapes)}. Nobody "
            f"exchanges their gradients, so each worker trains a copy of its own, and the copies drift apart. Give "
            f"that model and this {kind} to team.prepare(...) too. If the copies are meant to differ, ignore this."
        )
        if training:
            self._tell(message)
        else:
            self._waiting.append(message)

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._warn(message)

    def check(self, training: bool) -> None:
        """The run ends: if nothing was ever prepared, each worker has run the whole script by itself."""
        for message in () if training else self._waiting:
            self._tell(message)


class FirstGradients:
    """What the first gradients of this worker were, in one number, to compare with those of the others.

    Of the first model's largest parameter, before any exchange, in a few backward passes; afterwards it costs nothing.
    Where workers do not keep step, only the first pass starts from the same parameters everywhere.
    """

    def __init__(self, lockstep: bool) -> None:
        self._count = 2 * (_PASSES if lockstep else 1)
        self.told = False
        """Whether they were compared, or need not be."""
        self._passes: list[float] = []
        self._handle: RemovableHandle | None = None

    def adopt(self, model: nn.Module) -> None:
        """Look at the gradients of this model, if it is the first."""
        trained = _trained(model.parameters())
        if self._handle is None and trained:
            largest = max(trained, key=lambda p: p.numel())
            self._handle = largest.register_post_accumulate_grad_hook(self._look)

    def _look(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and not self.told:
            held = gradient.coalesce().values() if gradient.is_sparse else gradient.detach()
            real = torch.view_as_real(held) if held.is_complex() else held
            self._passes += [_sum_of(real), float(real.abs().sum(dtype=torch.float64))]
        if self.told or len(self._passes) >= self._count:
            self.close()

    @property
    def fingerprint(self) -> float:
        """A number that is the same for the same gradients; 0 if there were too few, or if all were zeros."""
        if self.told or len(self._passes) < self._count or not all(self._passes[1::2]):
            return 0.0
        return float(zlib.crc32(struct.pack(f"<{len(self._passes)}d", *self._passes)) + 1)

    def same(self, fingerprints: Sequence[float]) -> bool:
        """Whether all workers had the same; asked until it is known."""
        if self.told or not all(fingerprints):
            return False
        self.told = True
        return len(fingerprints) > 1 and len(set(fingerprints)) == 1

    def close(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()


class Replicas:
    """Finds models that should be equal on all workers and are not, by the sums of their parameters.

    It looks at the first, second, fourth, eighth … report and at the end, so that frequent reports cost little.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._reports = 0
        self._told = False
        self.at_end = False
        """Whether this is the last look."""

    def sums(self) -> tuple[float, float]:
        """The sum of all trained parameters and of their magnitudes; zeros if they are not to be compared now."""
        self._reports += 1
        if self._told or not (self.at_end or self._reports.bit_count() == 1):
            return 0.0, 0.0
        trained = _trained(p for model in self._holdings.models for p in model.parameters())
        return sum(map(_sum_of, trained)), sum(_sum_of(p.detach().abs()) for p in trained)

    def differ(self, sums: Tensor) -> bool:
        """Whether the workers' sums differ by more than rounding, as on unlike processors; said once."""
        if self._told or not bool(sums[:, 0].max() - sums[:, 0].min() > _ROUNDING * sums[:, 1].max()):
            return False
        self._told = True
        return True


def say(message: str) -> None:
    """Warn the user."""
    warnings.warn(message, OffbeatWarning, stacklevel=2)


def _trained(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p for p in parameters if p.requires_grad and (p.is_floating_point() or p.is_complex())]


def _sum_of(parameter: Tensor) -> float:
    """Changes, in practice, with any update."""
    values = parameter.detach()
    real = torch.view_as_real(values) if values.is_complex() else values
    return float(real.sum(dtype=torch.float64))


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")

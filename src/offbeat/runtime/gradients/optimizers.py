"""Optimizers of torch: which of them can run on slices of parameters; learning rates that are scaled during steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

ELEMENT_WISE: dict[str, type[Optimizer]] = {
    kind.__name__: kind
    for kind in (
        *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta),
        *(optim.Adamax, optim.NAdam, optim.RAdam, optim.ASGD, optim.Rprop),
    )
}
"""Optimizers that treat every number by itself, by name."""

_REASONS: dict[type[Optimizer], str] = {
    optim.LBFGS: "it searches along one direction for all parameters together",
    optim.Adafactor: "it keeps means over rows and columns, and scales each parameter's step by its norm",
    optim.Muon: "it orthogonalizes each matrix as a whole",
    optim.SparseAdam: "it takes sparse gradients, and slices are exchanged dense",
}


def why_not(kind: type[Optimizer], by_rate: bool = False) -> str:
    """Why this optimizer cannot run on a slice of the parameters; empty if it can.

    `by_rate` if every worker's gradient is a step of its own, with a share of the learning rate.
    """
    if kind is optim.Rprop and by_rate:
        return "its steps do not follow the learning rate, by which each worker's push is weighed here"
    if kind in ELEMENT_WISE.values():
        return ""
    return _REASONS.get(kind, f"{kind.__module__}.{kind.__qualname__} is not known to treat every number by itself")


def scale_rates(optimizer: Optimizer, factor: float) -> Callable[[], None]:
    """Multiply an optimizer's learning rates; what this returns restores them."""
    own = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for group, rate in own:
        group["lr"] = rate * factor

    def restore() -> None:
        for group, rate in own:
            group["lr"] = rate

    return restore


class ScaledRate:
    """Multiplies an optimizer's learning rates during each step; outside of steps they are the loop's own.

    So schedulers of any kind keep working, and a checkpoint holds the rates without the factor.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._restore: Callable[[], None] = lambda: None

    def before_others(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Register before any other hook of the optimizer, so that those see the scaled rate."""

        def scale(*_: Any) -> None:
            self._restore = scale_rates(optimizer, self._factor)

        return [] if self._factor == 1 else [optimizer.register_step_pre_hook(scale)]

    def after_others(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Register after all other hooks of the optimizer."""

        def restore(*_: Any) -> None:
            self._restore()

        return [] if self._factor == 1 else [optimizer.register_step_post_hook(restore)]

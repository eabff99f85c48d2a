"""Learning rates times a factor, whatever schedulers make of them: a loop is tuned without being touched."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class ScaledRate:
    """During each step of an optimizer its learning rates are multiplied; outside of steps they are the loop's own.

    So schedulers, which may be made before or after, and absolute in any way, need not be known, and a checkpoint
    holds the rates without the factor.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._own: list[Any] = []

    def before_others(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """To be called before any other hook is put on the optimizer: those then see the rate that holds."""
        return [] if self._factor == 1 else [optimizer.register_step_pre_hook(self._scale)]

    def after_others(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """To be called after every other hook is put on it."""
        return [] if self._factor == 1 else [optimizer.register_step_post_hook(self._put_back)]

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        self._own = [group.get("lr") for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, self._own, strict=True):
            if own is not None:
                group["lr"] = own * self._factor

    def _put_back(self, optimizer: Optimizer, *_: Any) -> None:
        for group, own in zip(optimizer.param_groups, self._own, strict=False):
            if own is not None:
                group["lr"] = own
        self._own = []

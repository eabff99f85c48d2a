"""Scales learning rates by a factor during steps, without touching a loop or its schedulers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class ScaledRate:
    """Multiplies an optimizer's learning rates during each step; outside of steps they are the loop's own.

    So schedulers of any kind keep working, and a checkpoint holds the rates without the factor.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._own: list[Any] = []

    def before_others(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Register before any other hook of the optimizer, so that those see the scaled rate."""
        return [] if self._factor == 1 else [optimizer.register_step_pre_hook(self._scale)]

    def after_others(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Register after all other hooks of the optimizer."""
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

"""Hooks on models and optimizers of a loop that somebody else has written: steps are counted, mistakes found out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offbeat.errors import NonFiniteError, StrategyError, UsageError
from offbeat.runtime.group import Group
from offbeat.runtime.holdings import Holdings
from offbeat.runtime.ledger import Ledger
from offbeat.runtime.reports import KEPT
from offbeat.strategies._worker import EveryBatch, Exchange, Pace, closure_of


class Watch:
    """Watches the models and optimizers of one team."""

    def __init__(self, group: Group, holdings: Holdings, exchange: Exchange, pace: Pace, ledger: Ledger) -> None:
        self._group, self._holdings, self._ledger = group, holdings, ledger
        self._exchange, self._pace = exchange, pace
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._refuse_strangers)]
        self._checked: dict[int, int] = {}
        self.examples = 1.0
        """How many examples the current batch has here: the weight of a closure's loss."""
        self.missed = 0
        """Steps that were made without this worker, and whose batches it has not left out yet."""

    def guard(self, model: nn.Module) -> None:
        """Watch one small gradient of the model: a loss that is not finite shows in all of them."""
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            return
        small = min(reversed(trainable), key=lambda p: p.numel())

        def look(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and not math.isfinite(gradient.sum().abs().item()):
                step = self._ledger.steps + 1
                raise NonFiniteError(
                    f"worker {self._group.rank} has a gradient that is NaN or infinite in step {step}. {KEPT}"
                )

        # Put on before the exchange's hooks, so that it sees this worker's own gradient.
        self._handles.append(small.register_post_accumulate_grad_hook(look))

    def attend(self, optimizer: Optimizer) -> None:
        """Count the steps of the first optimizer, and let closures see the loss of all workers."""
        first = self._holdings.optimizers[0] is optimizer

        def after(*_: Any) -> None:
            if first and self._pace.updating:
                # Counted at once, so that this worker knows where the others are before it does anything else.
                missed = self._exchange.passed_over()
                self._ledger.steps += 1 + missed
                self.missed += missed

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            closure = closure_of(args, kwargs)
            if closure is None and self._group.size > 1:
                self._exchange.stepping(optimizer)
            if closure is None or self._group.size == 1:
                return None
            if not isinstance(self._pace, EveryBatch):
                raise StrategyError(
                    "a strategy that exchanges only now and then cannot be used with optimizer.step(closure). "
                    "Use an exchange alone."
                )
            # A closure's loss steers line searches: every worker must see the same one, or they part ways.
            return (optimizer, lambda: self._mean_loss(closure())), {}

        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(after))

    def _refuse_strangers(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before any optimizer steps: one that was not prepared steps on gradients that are not for it."""
        del args, kwargs
        known = self._holdings.has(optimizer)
        if known and self._checked.get(id(optimizer)) == len(optimizer.param_groups):
            return
        ours = {id(p) for model in self._holdings.models for p in model.parameters()}
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not known and theirs & ours:
            raise UsageError(
                f"{type(optimizer).__name__} updates a prepared model but was not prepared itself, so its steps would "
                f"not be counted, kept in checkpoints or paced. Give it to team.prepare(...) too."
            )
        if known and self._group.size > 1 and theirs - ours:
            raise UsageError(
                f"{type(optimizer).__name__} updates {len(theirs - ours)} parameters that belong to no prepared model: "
                f"nobody would exchange their gradients, and the workers would part ways. Give that model to prepare() "
                f"too."
            )
        if known:
            self._checked[id(optimizer)] = len(optimizer.param_groups)

    def _mean_loss(self, loss: Any) -> Any:
        if loss is None:
            return None
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        rows = self._group.gather([float(value) * self.examples, self.examples], "the mean of a closure's loss")
        mean = rows[:, 0].sum() / rows[:, 1].sum().clamp(min=1e-30)
        return mean.to(value.dtype).reshape(value.shape) if isinstance(loss, Tensor) else float(mean)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

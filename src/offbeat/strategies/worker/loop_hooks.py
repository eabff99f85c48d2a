"""Hooks on the models and optimizers of the user's loop: count steps, detect mistakes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offbeat.errors import NonFiniteError, OffbeatWarning, RunError, StrategyError, UsageError
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.metrics import KEPT, Ledger
from offbeat.runtime.state.checkpoint_manager import Holdings
from offbeat.strategies.worker.capabilities import Overtaken, StepGuard
from offbeat.strategies.worker.exchange import EveryBatch, Exchange, Pace, closure_of
from offbeat.strategies.worker.flat_rows import parameters_of
from offbeat.strategies.worker.replica_checks import FirstGradients, HandUpdates, Replicas, unprepared


class LoopHooks:
    """Watches the models and optimizers of one team."""

    def __init__(
        self,
        group: Group,
        holdings: Holdings,
        exchange: Exchange,
        pace: Pace,
        ledger: Ledger,
        strategy: str,
        parts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Prepare to watch; `parts` has the ranks of the workers with each part of the model, if it is split."""
        self._group, self._holdings, self._ledger = group, holdings, ledger
        self._exchange, self._pace = exchange, pace
        self._overtaken = exchange if isinstance(exchange, Overtaken) else None
        self._step_guard = exchange if isinstance(exchange, StepGuard) and group.size > 1 else None
        exchanged_in_steps = group.size > 1 and (exchange.acts_in_steps or pace.acts_in_steps)
        self._by_hand = HandUpdates(holdings, strategy, self.warn) if exchanged_in_steps else None
        self._unprepared: WeakSet[Optimizer] = WeakSet()
        self._early_warnings: list[str] = []
        self.warnings: list[str] = []
        """Warnings given to the user."""
        self.first_gradients = FirstGradients(exchange.lockstep)
        """Whether all replicas compute the same batches."""
        self._parts = parts
        equal = not parts and group.size > 1 and exchange.replicated and pace.replicated and not exchange.acts_in_steps
        self._replicas = Replicas(holdings) if equal else None
        self.averaging = False
        """Whether parameters are the mean of the replicas at the moment, which differs from each by rounding."""
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._refuse_unprepared)]
        self._checked: dict[int, int] = {}
        self.examples = 1.0
        """Examples of the current batch on this worker: the weight of a closure's loss."""
        self.missed = 0
        """Steps that completed without this worker, and whose batches it has not skipped yet."""

    def warn(self, message: str) -> None:
        """Warn the user, once of each thing; the run continues."""
        if message not in self.warnings:
            self.warnings.append(message)
            warnings.warn(f"worker {self._group.rank}: {message}", OffbeatWarning, stacklevel=2)

    def adopt(self, model: nn.Module, check_finite: bool) -> None:
        """Watch this model."""
        if check_finite:
            self._guard(model)
        if self._group.size > 1:
            self.first_gradients.adopt(model)
        if self._by_hand is not None:
            self._by_hand.adopt(model)

    def check(self, at_end: bool = False) -> None:
        """Refuse parameters that were updated in a way that the strategy does not see."""
        if self._by_hand is not None and not self.averaging:
            self._by_hand.check()
        if at_end:
            if self._replicas is not None:
                self._replicas.at_end = True
            # If nothing was ever prepared, each worker has run the whole script by itself.
            for message in () if self._holdings.models else self._early_warnings:
                self.warn(message)

    def evidence(self) -> tuple[float, float, float]:
        """Fingerprint of this worker's first gradients, and checksums of its parameters."""
        return self.first_gradients.fingerprint, *(self._replicas.sums() if self._replicas is not None else (0.0, 0.0))

    def compare(self, rows: Tensor) -> None:
        """Compare the evidence of all workers, and warn of what is wrong."""
        if self._replicas is not None and self._replicas.differ(rows[:, 1:]) and self._group.membership.leads:
            self.warn(
                f"the workers' models differ after step {self._ledger.steps}, although all have stepped on the same "
                f"gradients. Each worker did something different to them: a learning rate that follows its own loss "
                f"(give ReduceLROnPlateau what team.mean(...) returns), gradients of torch.autograd.grad or torch.func "
                f"(only backward() exchanges them), or random numbers (use a generator with the same seed)."
            )
        first = rows[:, 0].tolist()
        parts = [part for part in self._parts or [range(len(first))] if max(part) < len(first)]
        alike = [self.first_gradients.same([first[rank] for rank in part]) for part in parts]
        if any(alike) and self._group.membership.leads:
            kind = f"{len(self._parts[0])} replicas" if self._parts else f"{self._group.size} workers"
            self.warn(
                f"all {kind} had the same gradients in their first backward passes, so they "
                f"compute the same batches, and do the work of one. Give the training loader to team.prepare(...), "
                f"which divides each batch over them"
                + ("." if self._parts else "; or have each worker draw its own batches, by team.rank and team.size.")
            )

    def check_steps(self, steps: Sequence[float]) -> None:
        """Refuse to continue if workers have made different numbers of steps."""
        if self._replicas is not None and min(steps) < max(steps):
            counts = ", ".join(f"worker {rank} {count:.0f}" for rank, count in enumerate(steps))
            raise RunError(
                f"the workers have made different numbers of steps ({counts}), so their models differ. Every worker "
                f"must call optimizer.step() for every batch, or all must skip the same ones: decide by what is "
                f"the same everywhere, such as gradients after backward() or team.mean(...)."
            )

    def counted(self) -> None:
        """A step was made without the optimizer, by ranges of a vector."""
        self._ledger.steps += 1
        if self._by_hand is not None:
            for optimizer in self._holdings.optimizers:
                self._by_hand.stepping(optimizer)

    def _guard(self, model: nn.Module) -> None:
        """Check one small gradient of the model: a loss that is not finite shows in all of them."""
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

        # Registered before the exchange's hooks, so that it sees this worker's own gradient.
        self._handles.append(small.register_post_accumulate_grad_hook(look))

    def attend(self, optimizer: Optimizer) -> None:
        """Count the steps of the first optimizer, and let closures see the loss of all workers."""
        first = self._holdings.optimizers[0] is optimizer

        def after(*_: Any) -> None:
            if first and self._pace.updating:
                # Counted at once, so that this worker is at the others' step before it does anything else.
                missed = 0 if self._overtaken is None else self._overtaken.passed_over()
                self._ledger.steps += 1 + missed
                self.missed += missed

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            if self._by_hand is not None:
                self._by_hand.stepping(optimizer)  # Before exchanges hide its parameters from it.
            closure = closure_of(args, kwargs)
            if closure is None and self._step_guard is not None:
                self._step_guard.stepping(optimizer)
            if closure is None or self._group.size == 1 or self._exchange.calls_closures:
                return None
            if not isinstance(self._pace, EveryBatch):
                raise StrategyError(
                    "a strategy that exchanges only now and then cannot be used with optimizer.step(closure). "
                    "Use an exchange alone."
                )
            # A closure's loss steers line searches: every worker must see the same loss, or they drift apart.
            return (optimizer, self._shared(closure)), {}

        self._handles.append(optimizer.register_step_pre_hook(_TeamHook(before)))
        self._handles.append(optimizer.register_step_post_hook(after))

    def _refuse_unprepared(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before any optimizer of the process steps."""
        del args, kwargs
        known = self._holdings.has(optimizer)
        if not known and optimizer in self._unprepared:
            return
        if known and self._checked.get(id(optimizer)) == len(optimizer.param_groups):
            return
        ours = {id(p) for model in self._holdings.models for p in model.parameters()}
        theirs = set(map(id, parameters_of(optimizer)))
        if not known and theirs & ours:
            raise UsageError(
                f"{type(optimizer).__name__} updates a prepared model but was not prepared itself, so its steps would "
                f"not be counted, kept in checkpoints or paced. Give it to team.prepare(...) too."
            )
        if not known and self._group.size > 1 and not _prepared_elsewhere(optimizer):
            self._unprepared.add(optimizer)
            if (message := unprepared(optimizer)) and self._holdings.models:
                self.warn(message)
            elif message:  # Before training begins, it may be initializing the model.
                self._early_warnings.append(message)
        if known and self._group.size > 1 and theirs - ours:
            raise UsageError(
                f"{type(optimizer).__name__} updates {len(theirs - ours)} parameters that belong to no prepared model: "
                f"nobody would exchange their gradients, and the workers would drift apart. Give that model to "
                f"prepare() too."
            )
        if known:
            self._checked[id(optimizer)] = len(optimizer.param_groups)

    def _shared(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of one step, returning the mean loss of all workers."""
        calls = 0

        def called() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 and self._exchange.compressions:
                raise StrategyError(
                    "an optimizer that evaluates its closure several times in a step, such as LBFGS, cannot be used "
                    "with a compressor: each gradient would contain the error feedback of those at other points, and "
                    "line searches and curvature would be wrong. Omit the compressor, or use an optimizer without "
                    "closures."
                )
            return self._mean_loss(closure())

        return called

    @contextmanager
    def at_averaging(self, average: AbstractContextManager[None]) -> Generator[None]:
        """Around an evaluation on the mean of the replicas."""
        self.check()
        with average:
            outer, self.averaging = self.averaging, True
            try:
                yield
            finally:
                self.averaging = outer

    def _mean_loss(self, loss: Any) -> Any:
        if loss is None:
            return None
        value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        rows = self._group.gather([float(value) * self.examples, self.examples], "the mean of a closure's loss")
        mean = rows[:, 0].sum() / rows[:, 1].sum().clamp(min=1e-30)
        return mean.to(value.dtype).reshape(value.shape) if isinstance(loss, Tensor) else float(mean)

    def close(self) -> None:
        """Remove the hooks."""
        self.first_gradients.close()
        if self._by_hand is not None:
            self._by_hand.close()
        for handle in self._handles:
            handle.remove()


class _TeamHook(partial[Any]):
    """A hook by which other teams of this process know that one of them counts an optimizer's steps."""


def _prepared_elsewhere(optimizer: Optimizer) -> bool:
    hooks = optimizer._optimizer_step_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]
    return any(isinstance(hook, _TeamHook) for hook in hooks)

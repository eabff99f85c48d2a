"""The team inside a user's own loop: `offbeat.init()`, `team.prepare(...)`, `team.report(...)`, `team.averaged(...)`.

The same objects come back from `prepare`: nothing is wrapped. Gradients are exchanged by hooks on the parameters,
steps are counted by hooks on the optimizers, and loaders hand out this worker's slice of each batch. When the next
training batch is asked for, everything before it is done: that is where checkpoints are written and where a resumed
run goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offbeat.errors import CheckpointError, NonFiniteError, StrategyError, UsageError
from offbeat.protocols.partition import mixed
from offbeat.runtime import randomness
from offbeat.runtime.assignment import ASSIGNED, Assignment
from offbeat.runtime.checkpoint import Checkpoints
from offbeat.runtime.goal import Goal, Target
from offbeat.runtime.group import Group
from offbeat.runtime.holdings import Holdings, Stateful
from offbeat.runtime.ledger import Ledger
from offbeat.runtime.loaders import Batch, Loader, Share, divide
from offbeat.runtime.parts import Parts
from offbeat.runtime.place import Place, where
from offbeat.runtime.records import METRICS_FILE, Metrics
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.strategies import Strategy, combined, parse
from offbeat.strategies._worker import EveryBatch, Exchanging, Timing, closure_of

_TELL_EVERY = 0.1
"""Seconds between two messages to the launcher about how far the work is."""
_CHECKPOINT_SHARE = 0.05
"""The share of a run's time that checkpoints at reports may take."""


def init(
    strategy: str | Strategy | None = None,
    *,
    target: str | float | None = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    timeout: timedelta | None = None,
    check_finite: bool = True,
) -> Team:
    """Join the other workers, alone or under `offbeat run`, `torchrun` or Slurm; use the team as a context manager.

    What the command line says goes before what is said here. `out` names a folder for metrics and checkpoints when
    no launcher has made one.
    """
    said = Goal(
        strategy=None if strategy is None else str(strategy),
        target=None if target is None else str(target),
        seed=seed,
        device="cpu" if device is None else str(device),
        timeout=600.0 if timeout is None else timeout.total_seconds(),
        check_finite=check_finite,
    )
    assigned = ASSIGNED.get()
    if assigned is None:
        return Team(Assignment(said, folder=None if out is None else Path(out)), where())
    told = assigned.goal
    merged = Goal.from_plain(
        told.plain()
        | {
            "strategy": told.strategy or said.strategy,
            "target": told.target or said.target,
            "seed": told.seed if told.seed is not None else said.seed,
            "check_finite": told.check_finite and said.check_finite,
            "device": told.device if told.device != Goal.device else said.device,
            "timeout": told.timeout if told.timeout != Goal.timeout else said.timeout,
        }
    )
    team = Team(dataclasses.replace(assigned, goal=merged), where())
    assigned.open_teams.append(team)
    return team


class Team:
    """The workers of one run, as one of them sees it."""

    def __init__(self, assignment: Assignment, place: Place) -> None:
        goal = assignment.goal
        self.rank = place.rank
        """This worker's number, from 0."""
        self.size = place.size
        """How many workers there are."""
        self.device = torch.device(goal.device)
        """Where this worker's tensors live."""
        self.strategy = combined(parse(goal.strategy or ("single" if place.size == 1 else "allreduce")))
        """How the run is distributed."""
        self.goal = goal
        """What the run is asked to do."""
        self.last_loss: float | None = None
        """The loss of the latest step here, if the loop says it (tasks do)."""
        self.notes: dict[str, Any] = {}
        """More entries for the result."""
        self._assignment = assignment
        self.strategy.check(self.size)
        if goal.seed is not None:
            randomness.seed_everything(goal.seed)
        self.stopwatch = Stopwatch()
        self.group = Group(place, timedelta(seconds=goal.timeout), self.device)
        self.seed = self._agreed_seed()
        """What fixes the order of the data; the same on all workers."""
        self.ledger = Ledger(Target.parse(goal.target) if goal.target else None)
        self.exchange = cast("Exchanging", self.strategy.exchange).connect(self.group, self.stopwatch)
        when = cast("Timing | None", self.strategy.when)
        self.pace = when.pace(self.exchange) if when else EveryBatch(self.exchange)
        self._holdings = Holdings()
        self._handles = [register_optimizer_step_pre_hook(self._refuse_strangers)]
        self._metrics = self._open_metrics()
        self._checkpoints = self._open_checkpoints()
        self._saved = self._read_checkpoint()
        if self._saved is not None:
            self.seed = self._saved[1]["seed"]
        self._asking: int | None = None
        self._checkpoint_due = False
        self._checkpointed_at = -1
        self._checkpoint_cost = 0.0
        self._checkpoint_time = time.monotonic()
        self._told = 0.0
        self._weight = 1.0
        self._evaluated = 0
        self._checked: dict[int, int] = {}
        self._stopping = False
        self._started = False
        self._closed = False

    # -- what a loop calls -------------------------------------------------------------------------------------------

    def prepare(self, *things: Any, split: bool = True) -> Any:
        """Take part in training these: models, optimizers, loaders, schedulers and others with a state, in any order.

        Returns the same objects in the same order (a loader comes back divided over the workers; one thing comes back
        alone, not as a tuple). `split=False` if each worker's loader reads its own part of the data already.
        """
        if not things:
            raise UsageError("prepare() was given nothing. Give it the model, the optimizer and the training loader.")
        before = len(self._holdings.models), len(self._holdings.optimizers)
        prepared = [self._adopted(thing, split) for thing in things]
        if self._saved is not None:
            self._restore_new(*before)
        if not self._started:
            self._started = True
            self._decorrelate()
            self.group.barrier("the start of training")
            if self._saved is None:
                self.stopwatch.restart()
            self._assignment.send({"kind": "ready", "rank": self.rank})
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Numbers of the epochs that are still to do, up to `count`: a resumed run does not start over."""
        done = 0
        for loader in self._holdings.loaders:
            if loader.resume_at is not None:
                loader.epoch = loader.resume_at[0] - 1
                done = max(done, loader.epoch)
        while (count is None or done < count) and not self.stopping:
            yield done
            done += 1

    def report(self, **metrics: float | Tensor) -> bool:
        """Record how good the model is now; True when the run is done: target or budget reached, agreed by all workers.

        Values are averaged over the workers, weighted by the examples that each has read from prepared loaders without
        gradients since the last report (equally if none).
        """
        if self._catching_up():
            return False
        values = {name: float(value) for name, value in metrics.items()}
        bad = [f"{name}={value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            raise NonFiniteError(f"worker {self.rank} reported {', '.join(bad)} after step {self.step}. {_KEPT}")
        with self.stopwatch.spent_on("communicate"):
            mean = self._mean(values)
        seconds = self.stopwatch.total()
        self.ledger.judge(mean, seconds)
        self._record(mean, seconds)
        self._stopping = bool(self.group.gather([float(self.ledger.reached or self._spent())], "a report").max() > 0)
        self._checkpoint_due = self._checkpoint_due or self._worth_a_checkpoint()
        return self.stopping

    @contextmanager
    def averaged(self, *models: nn.Module) -> Generator[None]:
        """Inside, every worker holds the same model, the mean of the replicas: evaluate there."""
        with self.stopwatch.spent_on("evaluate"), self.exchange.averaged(list(models) or self._holdings.models):
            yield

    @property
    def step(self) -> int:
        """Updates done."""
        return self.ledger.steps

    @property
    def stopping(self) -> bool:
        """Whether all workers have agreed that the run is done."""
        return self._stopping

    @property
    def folder(self) -> Path | None:
        """The run's folder; None if nothing is to be left behind."""
        return self._assignment.folder

    @property
    def exhausted(self) -> bool:
        """Whether the budget of steps or epochs is spent."""
        return self._spent()

    def divided(self, loader: Iterable[Any]) -> Loader:
        """A loader for evaluation, divided over the workers; it plays no part in checkpoints."""
        return divide(loader, Share(self.rank, self.size, self.seed, -1), self, Parts())

    def mean(self, **values: float) -> dict[str, float]:
        """Values averaged over the workers, as `report` does, without recording them."""
        return self._mean(values)

    # -- taking part -------------------------------------------------------------------------------------------------

    def _adopted(self, thing: Any, split: bool) -> Any:
        if self._has(thing):
            return thing
        if isinstance(thing, nn.Module):
            thing.to(self.device)
            self._holdings.models.append(thing)
            if self.goal.check_finite:
                self._guard(thing)
            self.pace.adopt(thing)
            self.exchange.adopt(thing)
        elif isinstance(thing, Optimizer):
            self._holdings.optimizers.append(thing)
            self.pace.watch(thing)
            self._watch(thing, first=len(self._holdings.optimizers) == 1)
        elif isinstance(thing, Stateful) and not isinstance(thing, Iterable):
            self._holdings.others.append(thing)
        elif isinstance(thing, Iterable):
            share = Share(self.rank, self.size, self.seed, len(self._holdings.loaders))
            loader = divide(cast("Iterable[Any]", thing), share, self, Parts.parse(self.goal.parts), split)
            self._holdings.loaders.append(loader)
            return loader
        else:
            raise UsageError(
                f"prepare() was given a {type(thing).__name__}, which is no model, optimizer, loader or scheduler, "
                f"and has no "
                f"state_dict(). Leave it out."
            )
        return thing

    def _has(self, thing: Any) -> bool:
        held = self._holdings
        return any(thing is known for known in (*held.models, *held.optimizers, *held.loaders, *held.others))

    def _guard(self, model: nn.Module) -> None:
        """Watch one small gradient of the model: a loss that is not finite shows in all of them."""
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            return
        small = min(reversed(trainable), key=lambda p: p.numel())

        def look(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and not math.isfinite(gradient.sum().abs().item()):
                raise NonFiniteError(
                    f"worker {self.rank} has a gradient that is NaN or infinite in step {self.step + 1}. {_KEPT}"
                )

        # Put on before the exchange's hooks, so that it sees this worker's own gradient.
        self._handles.append(small.register_post_accumulate_grad_hook(look))

    def _watch(self, optimizer: Optimizer, first: bool) -> None:
        def after(*_: Any) -> None:
            if first and self.pace.updating:
                self.ledger.steps += 1

        def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            closure = closure_of(args, kwargs)
            if closure is None and self.size > 1:
                self.exchange.stepping(optimizer)
            if closure is None or self.size == 1:
                return None
            if not isinstance(self.pace, EveryBatch):
                raise StrategyError(
                    f"{self.strategy.when} cannot be used with optimizer.step(closure). Use an exchange alone."
                )
            # A closure's loss steers line searches: every worker must see the same one, or they part ways.
            return (optimizer, lambda: self._mean_loss(closure())), {}

        self._handles.append(optimizer.register_step_pre_hook(before))
        self._handles.append(optimizer.register_step_post_hook(after))

    def _refuse_strangers(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called before any optimizer steps: one that was not prepared steps on gradients that are not for it."""
        del args, kwargs
        known = self._has(optimizer)
        if known and self._checked.get(id(optimizer)) == len(optimizer.param_groups):
            return
        ours = {id(p) for model in self._holdings.models for p in model.parameters()}
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not known and theirs & ours:
            raise UsageError(
                f"{type(optimizer).__name__} updates a prepared model but was not prepared itself, so its steps would "
                f"not be counted, kept in checkpoints or paced. Give it to team.prepare(...) too."
            )
        if known and self.size > 1 and theirs - ours:
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
        rows = self.group.gather([float(value) * self._weight, self._weight], "the mean of a closure's loss")
        mean = rows[:, 0].sum() / rows[:, 1].sum().clamp(min=1e-30)
        return mean.to(value.dtype).reshape(value.shape) if isinstance(loss, Tensor) else float(mean)

    def _agreed_seed(self) -> int:
        chosen = torch.tensor([self.goal.seed if self.goal.seed is not None else torch.initial_seed() % 2**62])
        return int(self.group.share(chosen, "the sharing of the seed"))

    def _decorrelate(self) -> None:
        """Give every other worker random state of its own, so that dropout masks differ; worker 0's stays untouched."""
        if self.rank:
            randomness.seed_everything(mixed(self.seed, self.rank))

    # -- what loaders tell (see runtime.loaders.Feed) ----------------------------------------------------------------

    def asked(self, loader: Loader) -> bool:
        """A boundary: all before it is done. Resume here, write a checkpoint if due, and say whether to go on."""
        self._asking = next((i for i, known in enumerate(self._holdings.loaders) if known is loader), None)
        if self._saved is not None:
            if self._saved[1]["loader"] not in (None, self._asking):
                return True  # The checkpoint was written at another loader's boundary, which is still to come.
            self.resume()
        over = self.goal.epochs is not None and loader.epoch > self.goal.epochs
        return self.boundary(over)

    def boundary(self, over: bool = False) -> bool:
        """Between two steps: write a checkpoint if due, tell the launcher, and say whether to go on."""
        if self._stopping:
            return False
        if over or (self.goal.steps is not None and self.step >= self.goal.steps):
            # Here, not at the end: what the loop does after being cut short is no part of the run that may go on.
            self.checkpoint()
            return False
        every = self.goal.checkpoint_every
        if self._checkpoint_due or (every and self.step and self.step % every == 0):
            self.checkpoint()
        self._tell()
        return True

    def resume(self) -> None:
        """Go back to the checkpoint that a resumed run goes on from, if it has not been done yet."""
        if self._saved is not None:
            self._restore_all()

    def given(self, batch: Batch, training: bool) -> None:
        """A batch goes to the loop."""
        if training:
            self._weight = float(batch.examples)
            self.pace.begin(batch.examples, batch.total, batch.last)
            self.ledger.samples += batch.total if batch.total is not None else batch.examples * self.size
            self.stopwatch.switch("compute")
        else:
            self._evaluated += batch.examples

    def fetching(self, training: bool) -> None:
        """The loop waits for input."""
        if training:
            self.stopwatch.switch("input")

    def ended(self) -> None:
        """The loop has left its training data."""
        self.stopwatch.switch("other")

    def anyone(self, has: bool) -> bool:
        """Whether any worker still has data."""
        if self.size == 1:
            return has
        with self.stopwatch.spent_on("communicate"):
            return bool(self.group.sum(torch.tensor([float(has)]), "the end of the data").item() > 0)

    # -- reports -----------------------------------------------------------------------------------------------------

    def _mean(self, values: Mapping[str, float]) -> dict[str, float]:
        names = sorted(values)
        fingerprint = float(mixed(len(names), *(hash_of(name) for name in names)) % 2**52)
        rows = self.group.gather([fingerprint, float(self._evaluated)], "a report")
        if not bool((rows[:, 0] == rows[0, 0]).all()):
            raise UsageError(
                f"the workers report different metrics; worker {self.rank} has {', '.join(names) or 'none'}."
            )
        self._evaluated = 0
        weights = rows[:, 1] if rows[:, 1].sum() > 0 else torch.ones(self.size, dtype=torch.float64)
        table = self.group.gather([values[name] for name in names], "a report") if names else torch.zeros(self.size, 0)
        mean = (table * weights[:, None]).sum(0) / weights.sum()
        return {name: float(mean[names.index(name)]) for name in values}

    def _record(self, metrics: Mapping[str, float], seconds: float) -> None:
        if self.rank:
            return
        record = {
            "step": self.step,
            "epoch": self._epoch,
            "samples": self.ledger.samples,
            "seconds": round(seconds, 6),
            "seconds_by_kind": {kind: round(spent, 6) for kind, spent in self.stopwatch.seconds.items()},
            **metrics,
        }
        if self._metrics is not None:
            self._metrics.append(record)
        self._assignment.send({"kind": "report", "metrics": dict(metrics), **self._how_far()})

    def _how_far(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self._epoch or 0,
            "samples": self.ledger.samples,
            "seconds": self.stopwatch.total(),
            "seconds_by_kind": dict(self.stopwatch.seconds),
            "loss": self.last_loss,
        }

    def _tell(self) -> None:
        now = time.monotonic()
        if self.rank == 0 and now - self._told >= _TELL_EVERY:
            self._told = now
            self._assignment.send({"kind": "progress", **self._how_far()})

    def _spent(self) -> bool:
        loader, epochs = self._main_loader, self.goal.epochs
        if self.goal.steps is not None and self.step >= self.goal.steps:
            return True
        if epochs is None or loader is None:
            return False
        # An epoch budget is spent only when its last epoch is complete, not at a report in the middle of it.
        return loader.epoch > epochs or (loader.epoch == epochs and loader.complete)

    @property
    def _main_loader(self) -> Loader | None:
        """The loader whose epochs are counted: the first that is trained from."""
        loaders = self._holdings.loaders
        trained = (loader for loader in loaders if loader.epoch or loader.resume_at is not None)
        return next(trained, loaders[0] if loaders else None)

    @property
    def _epoch(self) -> int | None:
        loader = self._main_loader
        return None if loader is None else loader.epoch

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _open_metrics(self) -> Metrics | None:
        folder = self._assignment.folder
        if folder is None or self.rank:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        return Metrics(folder / METRICS_FILE, tensorboard=folder / "tensorboard" if self.goal.tensorboard else None)

    def _open_checkpoints(self) -> Checkpoints | None:
        folder = self._assignment.folder
        if folder is None:
            return None
        identity = dict(self._assignment.identity) | {"strategy": str(self.strategy), "workers": self.size}
        return Checkpoints(folder / "checkpoint", self.group, identity)

    def _read_checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        if not self._assignment.resume:
            return None
        if self._checkpoints is None:
            raise CheckpointError("there is no run folder to resume from. Say which with --resume RUN.")
        shared, own, _ = self._checkpoints.load()
        return shared, own

    def _catching_up(self) -> bool:
        return self._saved is not None and any(loader.resume_at is not None for loader in self._holdings.loaders)

    def _worth_a_checkpoint(self) -> bool:
        if self._checkpoints is None or self.goal.checkpoint_every is not None:
            return False
        affordable = self._checkpoint_cost < _CHECKPOINT_SHARE * (time.monotonic() - self._checkpoint_time)
        return self.group.gather([float(affordable)], "a report")[0].item() > 0

    def checkpoint(self, at_end: bool = False) -> None:
        """Write a checkpoint now; all workers call this between two steps. Training loaders do it by themselves."""
        if self._checkpoints is None or self._checkpointed_at == self.step:
            return
        start = time.monotonic()
        with self.stopwatch.spent_on("other"):
            self._holdings.find_schedulers()
            self._checkpoints.save(
                self.step, self._shared_state(), self._own_state(at_end), {"score": self.ledger.score}
            )
        self._checkpoint_due = False
        self._checkpointed_at = self.step
        self._checkpoint_time = time.monotonic()
        self._checkpoint_cost = self._checkpoint_time - start

    def _shared_state(self) -> dict[str, Any]:
        return {**self._holdings.replicas(), "others": self._holdings.other_states()}

    def _own_state(self, at_end: bool) -> dict[str, Any]:
        return {
            "replicas": {} if self.exchange.replicated else self._holdings.replicas(),
            "buffers": self._holdings.buffers(),
            "loaders": [loader.state_dict(at_end) for loader in self._holdings.loaders],
            "exchange": self.exchange.state_dict(),
            "pace": self.pace.state_dict(),
            "random": randomness.capture(),
            "ledger": self.ledger.state_dict(),
            "seconds": dict(self.stopwatch.seconds),
            "overlapped": self.stopwatch.overlapped,
            "bytes_sent": self.group.bytes_sent,
            "seed": self.seed,
            "trainable": [[p.requires_grad for p in model.parameters()] for model in self._holdings.models],
            "loader": self._asking,
        }

    def _restore_new(self, models: int, optimizers: int) -> None:
        """Right after prepare: what the loop sees before its first batch is already the resumed state."""
        shared, own = cast("tuple[dict[str, Any], dict[str, Any]]", self._saved)
        replicas = own["replicas"] or shared
        new_models = range(models, len(self._holdings.models))
        self._holdings.load_replicas(replicas, new_models, range(optimizers, len(self._holdings.optimizers)))
        for loader, state in zip(self._holdings.loaders, own["loaders"], strict=False):
            if loader.epoch == 0 and loader.resume_at is None:
                loader.load_state_dict(state)
        if not self._started:
            self.ledger.load_state_dict(own["ledger"])
            self.stopwatch.carry_on(own["seconds"], own["overlapped"])

    def _restore_all(self) -> None:
        """At the boundary where the checkpoint was written: everything back to the bits it had there."""
        shared, own = cast("tuple[dict[str, Any], dict[str, Any]]", self._saved)
        self._saved = None
        self._holdings.find_schedulers()
        every = range(len(self._holdings.models)), range(len(self._holdings.optimizers))
        self._holdings.load_replicas(own["replicas"] or shared, *every)
        self._holdings.load_buffers(own["buffers"])
        self._holdings.load_others(shared["others"])
        for model, trainable in zip(self._holdings.models, own["trainable"], strict=True):
            for parameter, flag in zip(model.parameters(), trainable, strict=True):
                parameter.requires_grad_(flag)
        self.exchange.load_state_dict(own["exchange"])
        self.pace.load_state_dict(own["pace"])
        self.ledger.load_state_dict(own["ledger"])
        self.stopwatch.carry_on(own["seconds"], own["overlapped"])
        self.group.bytes_sent = own["bytes_sent"]
        self._checkpointed_at = self.step
        randomness.restore(own["random"])

    # -- the end -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def close(self, failed: bool = False) -> None:
        """Leave the team: the last checkpoint, the result, the goodbye. After a failure only the goodbye."""
        if self._closed:
            return
        self._closed = True
        try:
            if not failed and self._started:
                if not self._catching_up():
                    self.checkpoint(at_end=True)
                self._send_result()
        finally:
            for handle in self._handles:
                handle.remove()
            self.pace.close()
            self.exchange.close()
            self.group.close()

    def _send_result(self) -> None:
        self.stopwatch.total()
        self.exchange.settle()
        sent = self.group.bytes_sent + self.exchange.payload()
        mine = [float(sent), self.ledger.cpu(), self.stopwatch.overlapped, *self.stopwatch.seconds.values()]
        rows = self.group.gather(mine, "the end of the run")
        if self.rank == 0:
            self._assignment.send({"kind": "result", **self.summary(rows)})

    def summary(self, rows: Tensor) -> dict[str, Any]:
        """The numbers of the result, from every worker's bytes, processor time and time by kind."""
        ledger = self.ledger
        mean = rows.mean(dim=0)
        by_kind = {kind: float(mean[3 + i]) for i, kind in enumerate(self.stopwatch.seconds)}
        seconds = sum(by_kind.values())
        return {
            "strategy": str(self.strategy),
            "workers": self.size,
            "seed": self.seed,
            "steps": ledger.steps,
            "epochs": self._epoch,
            "samples": ledger.samples,
            "score": ledger.score,
            "best_score": ledger.best_score,
            "metrics": ledger.metrics,
            "target": None if ledger.target is None else str(ledger.target),
            "reached_target": ledger.reached if ledger.target else None,
            "seconds_to_target": ledger.seconds_to_target,
            "seconds": seconds,
            "samples_per_second": ledger.samples / seconds if seconds > 0 else 0.0,
            "core_seconds": float(rows[:, 1].sum()),
            "bytes_sent": int(rows[:, 0].sum()),
            "seconds_by_kind": by_kind,
            "overlapped_seconds": float(mean[2]),
            "staleness": self.exchange.staleness(ledger.steps),
            "disturbances": {"asked": 0, "fired": 0},
            **self.notes,
        }


_KEPT = "Training stops before it can spread; the last checkpoint is from before. A lower learning rate often helps."


def hash_of(text: str) -> int:
    """A number that is the same for the same text in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

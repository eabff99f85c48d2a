"""The team inside a user's own loop: `offbeat.init()`, `team.prepare(...)`, `team.report(...)`, `team.averaged(...)`.

The same objects come back from `prepare`: nothing is wrapped. Gradients are exchanged by hooks on the parameters, steps
are counted by hooks on the optimizers, and loaders hand out this worker's slice of each batch. When the next training
batch is asked for, everything before it is done: that is where checkpoints are written and where a resumed run goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.partition import mixed
from offbeat.runtime import randomness
from offbeat.runtime.assignment import ASSIGNED, Assignment
from offbeat.runtime.disturb import Disturber
from offbeat.runtime.fingerprint import fingerprint
from offbeat.runtime.gauge import Gauge
from offbeat.runtime.goal import Goal, Target
from offbeat.runtime.holdings import Holdings, Stateful
from offbeat.runtime.ledger import Ledger
from offbeat.runtime.loaders import Batch, Loader, Share, agreed_state, divide
from offbeat.runtime.losses import FirstLoss
from offbeat.runtime.membership import StaticMembership
from offbeat.runtime.memory import Memory, open_memory
from offbeat.runtime.parts import Parts
from offbeat.runtime.place import Place, where
from offbeat.runtime.rates import ScaledRate
from offbeat.runtime.reports import Reports
from offbeat.runtime.served import CoordinatedMembership, group_for
from offbeat.runtime.slicing import note_slice
from offbeat.runtime.stamps import RECORDER, Mark
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.runtime.summaries import reporter
from offbeat.strategies import Strategy, combined, parse
from offbeat.strategies._compressing import Compressing
from offbeat.strategies._vector import Vector
from offbeat.strategies._watch import Watch
from offbeat.strategies._worker import EveryBatch, Exchanging, Microbatches, Timing


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
        folder = None if out is None else Path(out)
        return Team(Assignment(said, folder=folder, send=reporter(folder)), where())
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
        self.notes: dict[str, Any] = {}
        """More entries for the result."""
        self.strategy.check(self.size)
        if goal.seed is not None:
            randomness.seed_everything(goal.seed)
        self._assignment = assignment
        self._stopping = self._started = self._closed = self._admitting = self._uncounted = False
        self._batch: tuple[int, int | None] | None = None
        self._shares: list[Share] = []
        patience = timedelta(seconds=goal.timeout)
        self.group = group_for(place, patience, self.device, assignment.servers, assignment.joins)
        self.stopwatch = Stopwatch()
        self.ledger = Ledger(Target.parse(goal.target) if goal.target else None)
        if self.group.presence is not None:
            self.group.presence.step = lambda: self.step
            self.group.presence.give_up = assignment.fail or self.group.presence.give_up
        self.exchange = cast("Exchanging", self.strategy.exchange).connect(self.group, self.stopwatch)
        self.exchange.compressions = cast("tuple[Compressing, ...]", self.strategy.compressions)
        when = cast("Timing | None", self.strategy.when)
        slices = self.exchange.slices()
        several = len(slices[0]) if slices else 1
        single = Microbatches(self.exchange, several) if several > 1 else EveryBatch(self.exchange)
        self.pace = when.pace(self.exchange) if when else single
        self._batches_per_step = when.batches_per_update() if when else several
        self.seed = self._agreed_seed()
        """What fixes the order of the data; the same on all workers."""
        self._holdings = Holdings()
        self._watch = Watch(self.group, self._holdings, self.exchange, self.pace, self.ledger, str(self.strategy))
        looks = self.size > 1 and self.rank == 0 and self.strategy.traits.exact
        self._first_loss = FirstLoss(self.size) if looks else None
        self.reports = Reports(self.group, self.ledger, self.stopwatch, assignment.send)
        self.reports.figures, self.reports.payload = self.exchange.figures, self.exchange.payload
        self.reports.accounts, self.reports.compare = self.exchange.accounts, self._watch.compare
        self.reports.first_gradients = lambda: self._watch.first_gradients.fingerprint
        self.reports.write_to(assignment.folder, goal.tensorboard)
        self._memory = self._open_memory()
        self.exchange.seed = self.seed
        self._disturber = Disturber(
            goal.disturbances, "worker", self.rank, self.seed, assignment.send, assignment.disturbed
        )
        self._step_hooks: list[RemovableHandle] = []
        self.gauge = None if goal.gauge is None else Gauge(self.group)
        """Measures the noise in gradients, where that is asked for."""

    def _open_memory(self) -> Memory:
        identity = dict(self._assignment.identity) | {"strategy": str(self.strategy), "workers": self.size}
        replicated = self.exchange.replicated and self.pace.replicated
        memory = open_memory(self._assignment.folder, self.group, identity, self._holdings, replicated)
        memory.keep(exchange=self.exchange, pace=self.pace, ledger=self.ledger)
        # Random state comes last, so that nothing that is put back before it can draw from it.
        memory.keep(stopwatch=self.stopwatch, group=self.group, reports=self.reports, random=randomness.Generators())
        if self._assignment.resume and not self._assignment.joins:
            self.seed = memory.recall()["seed"]
        return memory

    def _join(self) -> None:
        """Be let in by the others, who have begun, and go on from the checkpoint that they have written for this."""
        cast("CoordinatedMembership", self.group.membership).knock()
        self.seed = self._memory.recall()["seed"]

    # -- what a loop calls -------------------------------------------------------------------------------------------

    def prepare(self, *things: Any, split: bool = True) -> Any:
        """Take part in training these: models, optimizers, loaders, schedulers and others with a state, in any order.

        Returns the same objects in the same order (a loader comes back divided over the workers; one thing comes back
        alone, not as a tuple). `split=False` if each worker's loader reads its own part of the data already.
        """
        if not things:
            raise UsageError("prepare() was given nothing. Give it the model, the optimizer and the training loader.")
        if self.group.membership.outside and not self._memory.resuming:
            self._join()
        before = len(self._holdings.models), len(self._holdings.optimizers)
        prepared = [self._adopted(thing, split) for thing in things]
        self._memory.give_back(*before, *(() if self._started else ("ledger", "stopwatch")))
        if not self._started:
            self._start()
        # Without a loader nobody says when a step begins: then all time that is not told apart is the loop's own.
        own_batches = self._holdings.optimizers and not self._holdings.loaders
        self.stopwatch.switch("compute" if own_batches else "other")
        if own_batches:
            self.begin_step()
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Numbers of the epochs that are still to do, up to `count`: a resumed run does not start over."""
        done = 0
        for loader in self._holdings.loaders:
            if loader.resume_at is not None:
                loader.epoch = loader.resume_at[0] - 1
                done = max(done, loader.trained_epochs)
        while (count is None or done < count) and not self.stopping:
            yield done
            done += 1

    def report(self, **metrics: float | Tensor) -> bool:
        """Record how good the model is now; True when the run is done: target or budget reached, agreed by all workers.

        Values are averaged over the workers, weighted by the examples that each has read from prepared loaders without
        gradients since the last report (equally if none).
        """
        if self._memory.catching_up():
            return False
        self._watch.check()
        values = self.reports.finite(metrics)
        with self.stopwatch.spent_on("communicate" if self.size > 1 else "other"):
            mean = self.reports.mean(values)
        self.ledger.judge(mean, self.stopwatch.total())
        self.reports.record(mean, self._holdings.epoch)
        done = self.ledger.reached or self.exhausted
        self._stopping = bool(self.group.gather([float(done)], "a report").max() > 0)
        self._admitting = self.group.membership.awaited
        if self.goal.checkpoint_every is None:
            self._memory.consider()
        elif self.exchange.snapshots:
            self._memory.catch_up(self.goal.checkpoint_every, self.step)
        if self._memory.due and not self._holdings.loaders:
            self.checkpoint()  # No boundary will come.
        return self.stopping

    @contextmanager
    def averaged(self, *models: nn.Module) -> Generator[None]:
        """Inside, every worker holds the same model, the mean of the replicas: evaluate there."""
        with self.stopwatch.spent_on("evaluate"), self._averaged(list(models)):
            self._redivide()
            yield

    def _averaged(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        return self._watch.at_averaging(self.pace.averaged(models or self._holdings.models, self.exchange))

    def mean(self, **values: float) -> dict[str, float]:
        """Values averaged over the workers, as `report` does, without recording them."""
        return self.reports.mean(values)

    def divided(self, loader: Iterable[Any]) -> Loader:
        """A loader for evaluation, divided over the workers; it plays no part in checkpoints."""
        share = Share(self.rank, self.size, self.seed, -1)
        self._shares.append(share)
        return divide(loader, [share], self, Parts())

    def checkpoint(self, at_end: bool = False) -> None:
        """Write a checkpoint now; all workers call this between two steps. Training loaders do it by themselves."""
        if (recorder := RECORDER.get()) is not None:
            recorder.stamp(int(Mark.CHECKPOINT), 0, 0, self.step)
        with self.stopwatch.spent_on("other"):
            self._memory.save(self._agreed_step(), at_end, seed=self.seed)

    def snapshot(self) -> None:
        """Have the run recorded while it goes on, where workers do not wait for each other; anyone may ask.

        It becomes the newest checkpoint once every worker has come to its next batch. While one is being taken, that
        is the one.
        """
        self.exchange.want_snapshot()

    def _record(self) -> bool:
        """At a boundary: this worker's part of a snapshot, if one is due. False where checkpoints need a meeting."""
        if not self.exchange.snapshots:
            return False
        if self.exchange.publishes:
            self._memory.publish_complete()
        if self.group.membership.leads and self._memory.wants_snapshot(self.goal.checkpoint_every, self.step):
            self.snapshot()
        cut = self.exchange.cut(self.step)
        if cut is not None:
            with self.stopwatch.spent_on("other"):
                self._memory.cut(cut, step=self.step, seed=self.seed)
        return True

    def _agreed_step(self) -> int:
        """The step that a checkpoint is named after: the furthest, where workers may have done different numbers."""
        if self.exchange.lockstep:
            return self.step
        return int(self.group.gather([float(self.step)], "writing a checkpoint").max())

    @property
    def step(self) -> int:
        """Updates done."""
        return self.ledger.steps

    @property
    def stopping(self) -> bool:
        """Whether all workers have agreed that the run is done."""
        return self._stopping

    @property
    def exhausted(self) -> bool:
        """Whether the budget of steps or epochs is spent."""
        if self.goal.steps is not None and self.step >= self.goal.steps:
            return True
        loader, epochs = self._holdings.trained_loader, self.goal.epochs
        if epochs is None or loader is None:
            return False
        # An epoch budget is spent only when its last epoch is complete, not at a report in the middle of it.
        return loader.trained_epochs > epochs or (loader.trained_epochs == epochs and loader.complete)

    @cached_property
    def vector(self) -> Vector:
        """The parameters as servers hold them, for a loop that pushes and pulls ranges of them (docs/servers.md)."""

        def counted() -> None:
            self._watch.counted()
            self._stepped()

        return self.exchange.vector(counted)

    @property
    def folder(self) -> Path | None:
        """The run's folder; None if nothing is to be left behind."""
        return self._assignment.folder

    # -- taking part -------------------------------------------------------------------------------------------------

    def _adopted(self, thing: Any, split: bool) -> Any:
        if self._holdings.has(thing):
            return thing
        if isinstance(thing, nn.Module):
            thing.to(self.device)
            self._holdings.models.append(thing)
            self._watch.adopt(thing, self.goal.check_finite)
            if self._first_loss is not None:
                self._first_loss.watch(thing)
            self.pace.adopt(thing)
            if self.gauge is not None:
                self.gauge.watch(thing)
            self.exchange.adopt(thing)
        elif isinstance(thing, Optimizer):
            self._holdings.optimizers.append(thing)
            rate = ScaledRate(self.goal.rate_factor)
            self._step_hooks += rate.before_others(thing)
            self.pace.watch(thing)
            self._watch.attend(thing)
            self.exchange.attend(thing)
            self._step_hooks += [*rate.after_others(thing), thing.register_step_post_hook(self._learned)]
            if self._disturber.active:
                self._step_hooks.append(thing.register_step_post_hook(self._stepped))
        elif isinstance(thing, Stateful) and not isinstance(thing, Iterable):
            self._holdings.others.append(thing)
        elif isinstance(thing, Iterable):
            shares = self._shares_of_batches(split)
            loader = divide(cast("Iterable[Any]", thing), shares, self, Parts.parse(self.goal.parts), split)
            self._holdings.loaders.append(loader)
            return loader
        else:
            raise UsageError(
                f"prepare() was given a {type(thing).__name__}, which is no model, optimizer, loader or scheduler, and "
                f"has no state_dict(). Leave it out."
            )
        return thing

    def _shares_of_batches(self, split: bool) -> list[Share]:
        """What of a training loader's batches falls to this worker."""
        slices, number = self.exchange.slices(), len(self._holdings.loaders)
        if slices is None:
            self._shares.append(self._share(self.rank, self.size, number))
            return self._shares[-1:]
        if not split:
            raise StrategyError(
                f"{self.strategy} decides which workers compute the same slice of a batch, so it must divide the "
                f"loader itself. Leave out split=False, or use allreduce."
            )
        return [self._share(slice_, slices[1], number) for slice_ in slices[0]]

    def _share(self, slice_: int, slices: int, number: int) -> Share:
        afresh = self.gauge is not None  # Noise would look smaller where a batch is what was not seen for longest.
        return Share(slice_, slices, self.seed, number, merge=self.goal.merge, afresh=afresh)

    def _stepped(self, *_: Any) -> None:
        """An optimizer has stepped: without loaders, that is where the next step begins."""
        if not self._holdings.loaders:
            self.begin_step()

    def _start(self) -> None:
        """The first prepare is done: from here on time counts."""
        self._started = True
        if self.rank:
            # Random state of its own, so that dropout masks differ between workers; worker 0's stays untouched.
            randomness.seed_everything(mixed(self.seed, self.rank))
        self.exchange.begin()
        self.group.barrier("the start of training")
        if not self._memory.resuming:
            self.stopwatch.restart()
        self._assignment.send({"kind": "ready", "rank": self.rank, "strategy": str(self.strategy)})

    def _agreed_seed(self) -> int:
        chosen = torch.tensor([self.goal.seed if self.goal.seed is not None else torch.initial_seed() % 2**62])
        return int(self.group.share(chosen, "the sharing of the seed"))

    # -- what loaders tell (see runtime.loaders.Feed) ----------------------------------------------------------------

    def asked(self, loader: Loader) -> bool:
        """A boundary: all before it is done. Resume here, write a checkpoint if due, and say whether to go on."""
        here = self._memory.is_here(loader)
        if self._memory.resuming and not here:
            return True  # The checkpoint was written at another loader's boundary, which is still to come.
        if loader is self._holdings.trained_loader:
            self._count_batch()
        self.resume()
        return self.boundary(over=self.goal.epochs is not None and loader.trained_epochs > self.goal.epochs)

    def _count_batch(self) -> None:
        """A batch is done. A loop that updates without a prepared optimizer, by hand or by Keras's, made a step."""
        if self._uncounted:
            self._uncounted = False
            self.ledger.steps += 1
            self._learned()

    def _learned(self, *_: Any) -> None:
        for loader in self._holdings.loaders:
            loader.stepped()

    def evaluates(self, loader: Loader) -> bool:
        """Whether a pass that begins now is an evaluation, though gradients are on: many scripts only call eval()."""
        loaders, models = self._holdings.loaders, self._holdings.models
        training = not models or any(model.training for model in models)
        return not training and not loader.learned and any(other.learned for other in loaders)

    def took_back(self, batches: Sequence[Batch]) -> None:
        """A pass over the data has ended without a step: what it handed out was evaluated, not trained on."""
        self.ledger.samples -= sum(batch.total or 0 for batch in batches)
        self.ledger.own_samples -= sum(batch.examples for batch in batches if batch.total is None)
        self.reports.evaluated += sum(batch.examples for batch in batches)

    def boundary(self, over: bool = False) -> bool:
        """Between two steps: write a checkpoint if due, tell the launcher, and say whether to go on."""
        if self._stopping:
            return False
        self._redivide()
        if over or (self.goal.steps is not None and self.step >= self.goal.steps):
            # Here, not at the end: what the loop does after being cut short is no part of the run that may go on.
            self.checkpoint()
            return False
        due = self._memory.due or (not self._record() and self._memory.every(self.goal.checkpoint_every, self.step))
        if self._admitting or due:
            self.checkpoint()
        if self._admitting:
            self._admitting = False
            with self.stopwatch.spent_on("wait"):
                cast("CoordinatedMembership", self.group.membership).admit()
            self._redivide()
        self.reports.tell(self._holdings.epoch)
        return True

    def _redivide(self) -> None:
        """What the dead would have had is shared by the living."""
        for share in self._shares:
            share.members = self.group.membership.members

    def begin_step(self) -> None:
        """A step begins: what `--disturb` asks to happen before it happens now. Again in the same step does nothing."""
        self._disturber.step(self.step)

    def resume(self) -> None:
        """Go back to the checkpoint that a resumed run goes on from, if it has not been done yet."""
        if self._memory.resuming:
            self._memory.go_back()
            self.reports.go_back()
            if self.group.membership.outside:
                cast("CoordinatedMembership", self.group.membership).come_in()

    def given(self, batch: Batch, training: bool) -> None:
        """A batch goes to the loop."""
        if training:
            self._batch = batch.examples, batch.total
            self._uncounted = not self._holdings.optimizers
            self._watch.examples = float(batch.examples)
            if batch.total is not None:
                self._watch.first_gradients.told = True  # Each has its own part of the batch.
            if self.gauge is not None:
                self.gauge.begin(batch.examples, self.step)
            self.pace.begin(batch.examples, batch.total, batch.last)
            self.ledger.samples += batch.total or 0
            self.ledger.own_samples += batch.examples if batch.total is None else 0
            if "first_batch" not in self.notes:
                self.notes["first_batch"] = fingerprint(batch.content)
            self.stopwatch.switch("compute")
            self.begin_step()
        else:
            self.reports.evaluated += batch.examples

    def skipped(self, batch: Batch) -> None:
        """A batch was learned without this worker: it counts all the same."""
        self.ledger.samples += batch.total or 0

    def fetching(self, training: bool) -> None:
        """The loop waits for input."""
        if training:
            self.stopwatch.switch("input")

    def ended(self) -> None:
        """The loop has left its training data."""
        self._count_batch()
        self.stopwatch.switch("other")

    def anyone(self, has: bool) -> bool:
        """Whether any worker still has data; where workers do not wait for each other, whether this one has."""
        if self.size == 1 or not self.exchange.lockstep:
            return has
        if not self.pace.meeting:
            return True  # Who has none left keeps the others company until they meet.
        with self.stopwatch.spent_on("communicate"):
            return bool(self.group.sum(torch.tensor([float(has)]), "the end of the data").item() > 0)

    def agreed(self, state: randomness.State, seed: int) -> tuple[randomness.State, bool]:
        """The random state to draw an epoch's data from, and whether this worker's own goes on from there."""
        # Where the result is to be that of one process, workers meet for it even if they do not wait for each other.
        meeting = self.exchange.aligned or self.strategy.traits.exact
        with self.stopwatch.spent_on("communicate" if self.size > 1 else "other"):
            return agreed_state(self.group, meeting, state, seed)

    def passed_over(self) -> int:
        """Batches that were learned without this worker since it was last asked."""
        missed, self._watch.missed = self._watch.missed, 0
        return missed * self._batches_per_step

    # -- the end -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        explained = self.exchange.explained(error)
        if explained is None and self._batch is not None:
            note_slice(error, *self._batch)
        # A script may end itself inside the team, and well.
        self.close(failed=error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)))
        if explained is not None:
            raise explained from error

    def close(self, failed: bool = False) -> None:
        """Leave the team: the last checkpoint, the result, the goodbye. After a failure only the goodbye."""
        if self._closed:
            return
        self._closed = True
        done = False
        try:
            self._disturber.close()
            if not failed:
                self._watch.check(at_end=True)
            if not failed and self._started:
                self.group.membership.leave()
                self._memory.give_back_account()
                if not self._memory.catching_up():
                    self.checkpoint(at_end=True)
                self._conclude()
            done = not failed
        finally:
            if isinstance(membership := self.group.membership, StaticMembership):
                membership.depart(failed=not done)
            for hook in self._step_hooks:
                hook.remove()
            if self._first_loss is not None:
                self._first_loss.close()
            if self.gauge is not None:
                self.gauge.close()
            publishes = self.exchange.publishes
            self._watch.close()
            self.pace.close()
            self.exchange.close()
            self._memory.close()
            if publishes:
                self._memory.publish_complete(at_end=True)
            self.group.close()

    def _conclude(self) -> None:
        self.reports.mean({})  # The last word on what was the same everywhere, if nothing was ever reported.
        if self.gauge is not None:
            self.gauge.conclude(self.folder, self._holdings.examples)
        more = {
            "strategy": str(self.strategy),
            "workers": self.size,
            "seed": self.seed,
            "epochs": self._holdings.epoch,
            "staleness": self.exchange.staleness(self.step),
            "foreseen": None if self.size == 1 else msgspec.to_builtins(self.pace.foreseen(self.exchange)),
            **self.exchange.notes(),
            **({"warnings": self._watch.warnings} if self._watch.warnings else {}),
            **self.notes,
        }
        self.reports.conclude(more)

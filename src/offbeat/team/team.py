"""The team inside a user's own loop: `offbeat.init()`, `team.prepare(...)`, `team.report(...)`, `team.averaged(...)`.

`prepare` returns the same objects: nothing is wrapped. Gradients are exchanged by hooks on the parameters, steps are
counted by hooks on the optimizers, and loaders yield this worker's slice of each batch. When the next training batch is
requested, everything before it is done: there checkpoints are written and runs resumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import Tensor, nn

from offbeat.data.bounded_stream import BoundedStream
from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.data.batch_slicing import note_slice
from offbeat.runtime.data.loaders import Loader
from offbeat.runtime.groups.group import StaticMembership
from offbeat.runtime.run.rank_environment import Place, where
from offbeat.runtime.run.report import reporter
from offbeat.runtime.run.settings import ASSIGNED, Assignment, Goal
from offbeat.simulate.pipelines import StagedStep
from offbeat.simulate.predicted_step import Step
from offbeat.strategies import Strategy
from offbeat.strategies.servers.vector import Vector
from offbeat.strategies.worker.capabilities import Explaining, HasNotes, Ranged, Stale
from offbeat.team.between_steps import Boundaries
from offbeat.team.context import Workplace, set_up
from offbeat.team.prepare import Adoption, LoaderFeed


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

    The command line takes precedence over these arguments. `out` names a folder for metrics and checkpoints if there
    is no launcher that has made one.
    """
    from_script = Goal(
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
        return Team(Assignment(from_script, folder=folder, send=reporter(folder)), where())
    requested = assigned.goal.plain()
    for name in ("strategy", "target", "seed", "device", "timeout"):
        if requested[name] == getattr(Goal, name):
            requested[name] = getattr(from_script, name)
    requested["check_finite"] = requested["check_finite"] and check_finite
    merged = Goal.from_plain(requested)
    team = Team(dataclasses.replace(assigned, goal=merged), where())
    assigned.open_teams.append(team)
    return team


class Team:
    """The workers of one run, as one of them sees it."""

    def __init__(self, assignment: Assignment, place: Place) -> None:
        self._place = work = set_up(assignment, place)
        self.memory = work.memory
        """Reads and writes checkpoints."""
        self._boundaries = Boundaries(work)
        self._feed = LoaderFeed(work, self._boundaries)
        self._adoption = Adoption(work, self._feed)
        self._closed = False
        self.rank, self.size = place.rank, place.size
        """The worker's number, from 0, and the number of workers."""
        self.device = work.device
        """The device of this worker's tensors."""
        self.goal, self.strategy = work.goal, work.strategy
        """The run's settings and strategy."""
        self.group, self.exchange, self.pace = work.group, work.exchange, work.pace
        """The workers, and this one's side of the strategy."""
        self.ledger, self.stopwatch, self.reports, self.gauge = work.ledger, work.stopwatch, work.reports, work.gauge
        """The run's progress, times, reports and gradient noise."""
        self.pipeline = work.pipeline
        """`team.pipeline(model, criterion)`: a function for steps of a model that may be split; see docs/split.md."""
        self.tensor_plan = work.tensor_plan
        """`team.tensor_plan({...})`: how `tensor(ways)` splits modules, by their names; see docs/tensor.md."""
        self.notes = work.notes
        """Further entries for the result."""
        self.folder = assignment.folder
        """The run folder; None if there is none."""

    # -- in the loop -------------------------------------------------------------------------------------------------

    def prepare(self, *things: Any, split: bool = True) -> Any:
        """Prepare models, optimizers, loaders, schedulers and other objects with a state for training, in any order.

        Returns the same objects in the same order (a loader is returned divided over the workers; a single object is
        returned alone, not as a tuple). `split=False` if each worker's loader already reads its own part of the data.
        """
        if not things:
            raise UsageError("prepare() was given nothing. Give it the model, the optimizer and the training loader.")
        work, held = self._place, self._place.holdings
        if work.group.membership.outside and not work.memory.resuming:
            self._boundaries.join()
        before = len(held.models), len(held.optimizers)
        prepared = [self._adoption.take(thing, split) for thing in things]
        work.memory.give_back(*before, *(() if work.started else ("ledger", "stopwatch")))
        if not work.started:
            work.start()
        # Without a loader the start of a step is unknown: then all other time is the loop's computation.
        own_batches = held.optimizers and not held.loaders
        work.stopwatch.switch("compute" if own_batches else "other")
        if own_batches:
            work.begin_step()
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Numbers of the remaining epochs, up to `count`: a resumed run does not start over."""
        done = 0
        for loader in self._place.holdings.loaders:
            if loader.resume_at is not None:
                loader.epoch = loader.resume_at[0] - 1
                done = max(done, loader.trained_epochs)
        if self._adoption.closures is not None:  # Each step is on all data.
            self._boundaries.resume()
            done = self.step
        while (count is None or done < count) and not self.stopping:
            yield done
            done += 1

    def report(self, **metrics: float | Tensor) -> bool:
        """Record metrics of the model; True when the run is done: target or budget reached, agreed by all workers.

        Values are averaged over the workers, weighted by the examples that each has read from prepared loaders without
        gradients since the last report (equally if none).
        """
        work = self._place
        if work.memory.catching_up():
            return False
        work.watch.check()
        values = work.reports.finite(metrics)
        with work.stopwatch.spent_on("communicate" if self.size > 1 else "other"):
            mean = work.reports.mean(values)
        work.ledger.judge(mean, work.stopwatch.total())
        work.reports.record(mean, work.holdings.epoch)
        done = work.ledger.reached or self.exhausted
        work.stopping = bool(work.group.gather([float(done)], "a report").max() > 0)
        work.admitting = work.group.membership.awaited
        self._boundaries.at_report()
        return self.stopping

    @contextmanager
    def averaged(self, *models: nn.Module) -> Generator[None]:
        """Inside, every worker holds the same model, the mean of the replicas: evaluate there."""
        work = self._place
        average = work.pace.averaged(list(models) or work.holdings.models)
        whole = nullcontext() if work.split is None else work.split.whole()
        with work.stopwatch.spent_on("evaluate"), work.watch.at_averaging(average), whole:
            work.redivide()
            yield

    def mean(self, **values: float) -> dict[str, float]:
        """Values averaged over the workers, as `report` does, without recording them."""
        return self.reports.mean(values)

    def divided(self, loader: Iterable[Any]) -> Loader:
        """A loader for evaluation, divided over the workers; it is not part of checkpoints."""
        return self._adoption.divided(loader)

    def checkpoint(self) -> None:
        """Write a checkpoint now; all workers call this between two steps. Training loaders do it automatically."""
        self._boundaries.checkpoint()

    def snapshot(self) -> None:
        """Request a snapshot of a run whose workers do not wait for each other; any worker may call this.

        It becomes the newest checkpoint once every worker has reached its next batch. While a snapshot is being taken,
        further requests are ignored.
        """
        self._boundaries.snapshot()

    def boundary(self) -> bool:
        """Between two steps of a loop without loaders: write a checkpoint if due; returns whether to continue."""
        return self._boundaries.cross(over=False)

    def begin_step(self) -> None:
        """A step of a loop without loaders begins."""
        self._place.begin_step()

    def resume(self) -> None:
        """Load the checkpoint of a resumed run, if that is not done yet."""
        self._boundaries.resume()

    @property
    def seed(self) -> int:
        """Seed of the order of the data; the same on all workers."""
        return self._place.seed

    @property
    def step(self) -> int:
        """Updates done."""
        return self.ledger.steps

    @property
    def stopping(self) -> bool:
        """Whether all workers have agreed that the run is done."""
        return self._place.stopping

    @property
    def exhausted(self) -> bool:
        """Whether the budget of steps or epochs is spent."""
        return self._boundaries.exhausted

    @cached_property
    def vector(self) -> Vector:
        """The parameters on servers, for a loop that pushes and pulls ranges of them (docs/servers.md)."""

        def counted() -> None:
            self._place.watch.counted()
            self._adoption.stepped()

        if not isinstance(self.exchange, Ranged):
            raise StrategyError(
                "this run's parameters are on no servers, so no range of them can be pushed or pulled there. Name the "
                "strategy server, such as --strategy 'server(shards=2)'."
            )
        return self.exchange.vector(counted)

    # -- the end -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        explained = self.exchange.explained(error) if isinstance(self.exchange, Explaining) else None
        if explained is None and self._feed.batch is not None:
            note_slice(error, *self._feed.batch)
        # A script may exit inside the team without an error.
        self.close(failed=error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)))
        if explained is not None:
            raise explained from error

    def close(self, failed: bool = False) -> None:
        """Leave the team: write the last checkpoint and the result. After a failure only leave."""
        if self._closed:
            return
        self._closed = True
        work, done = self._place, False
        try:
            work.disturber.close()
            if not failed:
                work.watch.check(at_end=True)
            if not failed and work.started:
                work.group.membership.leave()
                work.memory.give_back_account()
                if not work.memory.catching_up():
                    self._boundaries.checkpoint(at_end=True)
                _conclude(work)
            done = not failed
        finally:
            if isinstance(membership := work.group.membership, StaticMembership):
                membership.depart(failed=not done)
            publishes = self._boundaries.publishes
            splits = () if work.split is None else (work.split,)
            gauges = () if work.gauge is None else (work.gauge,)
            for part in (self._adoption, *splits, *gauges, work.watch, work.pace, work.exchange, work.memory):
                part.close()
            if work.data is not None:
                work.data.close()
            if publishes:
                work.memory.publish_complete(at_end=True)
            work.group.close()


def _conclude(work: Workplace) -> None:
    exchange, size = work.exchange, work.group.size
    work.reports.mean({})  # Compare the workers a last time, in case nothing was ever reported.
    if work.gauge is not None:
        work.gauge.conclude(work.assignment.folder, work.holdings.examples)
    entries = {
        "strategy": str(work.strategy),
        "workers": size,
        "seed": work.seed,
        "epochs": work.holdings.epoch,
        "staleness": exchange.staleness(work.step) if isinstance(exchange, Stale) else {"0": work.step},
        "foreseen": None if size == 1 else msgspec.to_builtins(_predicted(work)),
        **(exchange.notes() if isinstance(exchange, HasNotes) else {}),
        **({} if work.split is None else work.split.notes()),
        **({"warnings": work.watch.warnings} if work.watch.warnings else {}),
        **work.notes,
    }
    if work.holdings.loaders:
        moved = 0 if work.data is None else work.data.moved
        entries["input"] = work.input.summary(work.group, work.holdings.examples, moved)
    if (skipped := _skipped(work)) is not None:
        entries["skipped"] = skipped
    work.reports.conclude(entries)


def _skipped(work: Workplace) -> int | None:
    """Examples that bounded streams have left out, over all workers; None if there is no such stream."""
    datasets = [getattr(loader, "dataset", None) for loader in work.holdings.loaders]
    counts = [float(dataset.skipped) for dataset in datasets if isinstance(dataset, BoundedStream)]
    return int(work.group.gather([sum(counts)], "the end of the run").sum()) if counts else None


def _predicted(work: Workplace) -> Step | StagedStep | str:
    """What a step exchanges, or why its time cannot be predicted."""
    if work.split is not None:
        return work.split.predicted(work.pace.predicted(), work.batches_per_step)
    return work.pace.predicted()

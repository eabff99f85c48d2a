"""The team inside a user's own loop: `offbeat.init()`, `team.prepare(...)`, `team.report(...)`, `team.averaged(...)`.

The same objects come back from `prepare`: nothing is wrapped. Gradients are exchanged by hooks on the parameters, steps
are counted by hooks on the optimizers, and loaders hand out this worker's slice of each batch. When the next training
batch is asked for, everything before it is done: that is where checkpoints are written and where a resumed run goes on.
The parts that do this are in `offbeat.team`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.data.batch_slicing import note_slice
from offbeat.runtime.data.loaders import Loader
from offbeat.runtime.run.assignment import ASSIGNED, Assignment
from offbeat.runtime.run.rank_environment import Place, where
from offbeat.runtime.run.report import reporter
from offbeat.runtime.run.settings import Goal
from offbeat.strategies import Strategy
from offbeat.strategies.servers.vector import Vector
from offbeat.strategies.worker.capabilities import Explaining, Ranged
from offbeat.team import Adoption, Boundaries, LoaderFeed, leave, set_up


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
        self._place = work = set_up(assignment, place)
        self._boundaries = Boundaries(work)
        self._feed = LoaderFeed(work, self._boundaries)
        self._adoption = Adoption(work, self._feed)
        self._closed = False
        self.rank, self.size = place.rank, place.size
        """This worker's number, from 0, and how many there are."""
        self.device = work.device
        """Where this worker's tensors live."""
        self.goal, self.strategy = work.goal, work.strategy
        """What the run is asked to do, and how it is distributed."""
        self.group, self.exchange, self.pace = work.group, work.exchange, work.pace
        """The workers, and this one's side of the strategy."""
        self.ledger, self.stopwatch, self.reports, self.gauge = work.ledger, work.stopwatch, work.reports, work.gauge
        """The run's account: what was done, what the time was spent on, what is said of it, how noisy gradients are."""
        self.notes = work.notes
        """More entries for the result."""
        self.folder = assignment.folder
        """The run's folder; None if nothing is to be left behind."""

    # -- what a loop calls -------------------------------------------------------------------------------------------

    def prepare(self, *things: Any, split: bool = True) -> Any:
        """Take part in training these: models, optimizers, loaders, schedulers and others with a state, in any order.

        Returns the same objects in the same order (a loader comes back divided over the workers; one thing comes back
        alone, not as a tuple). `split=False` if each worker's loader reads its own part of the data already.
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
        # Without a loader nobody says when a step begins: then all time that is not told apart is the loop's own.
        own_batches = held.optimizers and not held.loaders
        work.stopwatch.switch("compute" if own_batches else "other")
        if own_batches:
            work.begin_step()
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def epochs(self, count: int | None = None) -> Iterator[int]:
        """Numbers of the epochs that are still to do, up to `count`: a resumed run does not start over."""
        done = 0
        for loader in self._place.holdings.loaders:
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
        with work.stopwatch.spent_on("evaluate"), work.watch.at_averaging(average):
            work.redivide()
            yield

    def mean(self, **values: float) -> dict[str, float]:
        """Values averaged over the workers, as `report` does, without recording them."""
        return self.reports.mean(values)

    def divided(self, loader: Iterable[Any]) -> Loader:
        """A loader for evaluation, divided over the workers; it plays no part in checkpoints."""
        return self._adoption.divided(loader)

    def checkpoint(self) -> None:
        """Write a checkpoint now; all workers call this between two steps. Training loaders do it by themselves."""
        self._boundaries.checkpoint()

    def snapshot(self) -> None:
        """Have the run recorded while it goes on, where workers do not wait for each other; anyone may ask.

        It becomes the newest checkpoint once every worker has come to its next batch. While one is being taken, that
        is the one.
        """
        self._boundaries.snapshot()

    def boundary(self) -> bool:
        """Between two steps of a loop without loaders: write a checkpoint if due, and say whether to go on."""
        return self._boundaries.cross(over=False)

    def begin_step(self) -> None:
        """A step of a loop without loaders begins."""
        self._place.begin_step()

    def resume(self) -> None:
        """Go back to the checkpoint that a resumed run goes on from, if it has not been done yet."""
        self._boundaries.resume()

    @property
    def seed(self) -> int:
        """What fixes the order of the data; the same on all workers."""
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
        """The parameters as servers hold them, for a loop that pushes and pulls ranges of them (docs/servers.md)."""

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
        # A script may end itself inside the team, and well.
        self.close(failed=error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)))
        if explained is not None:
            raise explained from error

    def close(self, failed: bool = False) -> None:
        """Leave the team: the last checkpoint, the result, the goodbye. After a failure only the goodbye."""
        if not self._closed:
            self._closed = True
            leave(self._place, self._adoption, self._boundaries, failed)

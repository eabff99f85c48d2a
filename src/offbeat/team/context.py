"""Shared context of a team's parts: the group, the strategy's worker side, and the run's progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn

from offbeat.protocols.partition import mixed
from offbeat.runtime.data.input_figures import InputFigures
from offbeat.runtime.data.loaders import Share
from offbeat.runtime.data_servers.link import DataLink
from offbeat.runtime.disturb import Disturber
from offbeat.runtime.gradients.noise import Gauge
from offbeat.runtime.groups.coordinated_group import CoordinatedGroup, group_for
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.metrics import Ledger, Reports
from offbeat.runtime.run.rank_environment import Place
from offbeat.runtime.run.settings import Assignment, Goal, Target
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.state import random_state
from offbeat.runtime.state.checkpoint_manager import Holdings, Memory
from offbeat.strategies import Combined, combined, parse
from offbeat.strategies.compressors import Compressing
from offbeat.strategies.splitting.layouts import check_placement, relaid
from offbeat.strategies.worker.capabilities import Accounted, Metered, Observed, Starter, refuse_halves
from offbeat.strategies.worker.exchange import Exchange, Exchanging, Pace, Timing, pace_of
from offbeat.strategies.worker.loop_hooks import LoopHooks
from offbeat.team.part_exchange import PartExchange
from offbeat.team.split import SplitWork, mesh_of
from offbeat.team.split_context import SplitContext


@dataclass
class Workplace:
    """One worker's place in a run."""

    assignment: Assignment
    group: Group
    device: torch.device
    strategy: Combined
    exchange: Exchange
    pace: Pace
    batches_per_step: int
    stopwatch: Stopwatch
    ledger: Ledger
    holdings: Holdings
    watch: LoopHooks
    reports: Reports
    memory: Memory
    disturber: Disturber
    gauge: Gauge | None
    """Measures gradient noise, if requested."""
    seed: int
    """Seed of the order of the data; the same on all workers."""
    split: SplitWork | None = None
    """This worker's part of a replica, where replicas are spread over several workers."""
    shares: list[Share] = field(default_factory=list[Share])
    """This worker's shares of loaders, where they depend on which workers are alive."""
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further entries for the result."""
    data: DataLink | None = None
    """The connection to the run's data servers, if it has any."""
    input: InputFigures = field(default_factory=InputFigures)
    """What this worker's input costs."""
    stopping: bool = False
    """Whether all workers have agreed that the run is done."""
    admitting: bool = False
    """Whether a joining worker is admitted at the next boundary."""
    started: bool = False
    """Whether the first `prepare` is done."""

    @property
    def goal(self) -> Goal:
        """The run's settings."""
        return self.assignment.goal

    @property
    def replica(self) -> tuple[int, int]:
        """Which replica of the model this worker has, or has a part of, and how many there are."""
        return (self.group.rank, self.group.size) if self.split is None else self.split.replica

    @property
    def step(self) -> int:
        """Updates done."""
        return self.ledger.steps

    def start(self) -> None:
        """The first `prepare` is done: start the clock."""
        self.started = True
        rank = self.group.rank
        if rank:
            # Its own random state, so that dropout masks differ between workers; worker 0's is not touched.
            random_state.seed_everything(mixed(self.seed, rank))
        if self.split is not None:
            self.split.draw_alike()
        if isinstance(self.exchange, Starter) and self.split is None:  # A part of the model begins when it is cut.
            self.exchange.begin()
        self.group.barrier("the start of training")
        if not self.memory.resuming:
            self.stopwatch.restart()
        self.assignment.send({"kind": "ready", "rank": rank, "strategy": str(self.strategy)})

    def begin_step(self) -> None:
        """A step begins: inject the faults due before it. Repeated calls in a step do nothing."""
        self.disturber.step(self.step)

    def pipeline(
        self,
        model: nn.Module,
        criterion: Callable[[Any, Any], Tensor],
        layers: Sequence[nn.Module] | None = None,
    ) -> Callable[[Any, Any], Tensor]:
        """A function `loss = step(inputs, target)`, in place of forward and backward, for a model that may be split.

        `criterion(output, target)` is a mean over the examples of a batch. Under a strategy with `pipeline` the model
        is cut into stages in the first call; under any other, the function calls the model and backward. `layers` are
        modules of the model between which it may be cut, if they are not to be found (see `Task.stages`).
        """
        split_step = None if self.split is None else self.split.step_of(model, criterion, layers)
        if split_step is not None:
            return split_step

        def step(inputs: Any, target: Any) -> Tensor:
            loss = criterion(model(inputs), target)
            loss.backward()
            return loss.detach()

        return step

    def tensor_plan(self, own: Mapping[str, str]) -> None:
        """Say how `tensor(ways)` splits modules, by their names; before `prepare`. Any other strategy ignores it.

        `column`, `row`, `heads`, `vocabulary` or `whole`; modules that are not named stay whole. See docs/tensor.md.
        """
        if self.split is not None:
            self.split.follow(own)

    def redivide(self) -> None:
        """Divide dead workers' shares over the live ones."""
        for share in self.shares:
            share.members = self.group.membership.members

    def learned(self) -> None:
        """A step was made on the batches of the loaders."""
        for loader in self.holdings.loaders:
            loader.stepped()


def set_up(assignment: Assignment, place: Place) -> Workplace:
    """Join the other workers. Collective."""
    goal, device = assignment.goal, torch.device(assignment.goal.device)
    strategy = combined(parse(goal.strategy or ("single" if place.size == 1 else "allreduce")))
    strategy.check(place.size)
    if goal.seed is not None:
        random_state.seed_everything(goal.seed)
    group = group_for(place, timedelta(seconds=goal.timeout), device, assignment.servers, assignment.joins)
    stopwatch, ledger = (
        Stopwatch(bubbles=bool(strategy.split)),
        Ledger(Target.parse(goal.target) if goal.target else None),
    )
    if group.presence is not None:
        group.presence.step = lambda: ledger.steps
        group.presence.give_up = assignment.fail or group.presence.give_up
    check_placement(strategy, goal.placement, [0] * place.size)
    if strategy.split and isinstance(group, CoordinatedGroup):
        group.connect_directly(place)
    mesh = mesh_of(strategy, group, goal) if strategy.split else None
    among = group if mesh is None else mesh.replicas
    if mesh is not None and isinstance(group, CoordinatedGroup):
        group.peers, among = mesh.replicas, group
    exchange = cast("Exchanging", strategy.exchange).connect(among, stopwatch)
    refuse_halves(strategy.exchange, exchange)
    exchange.compressions = cast("tuple[Compressing, ...]", strategy.compressions)
    pace, batches = pace_of(cast("Timing | None", strategy.when), exchange)
    chosen = torch.tensor([goal.seed if goal.seed is not None else torch.initial_seed() % 2**62])
    seed = int(group.share(chosen, "the sharing of the seed"))
    holdings = Holdings()
    watch = LoopHooks(group, holdings, exchange, pace, ledger, str(strategy), mesh.place.parts if mesh else ())
    reports = Reports(group, ledger, stopwatch, assignment.send)
    reports.evidence, reports.compare = watch.evidence, watch.compare
    reports.figures = exchange.figures if isinstance(exchange, Observed) else reports.figures
    reports.payload = exchange.payload if isinstance(exchange, Metered) else reports.payload
    reports.accounts = exchange.accounts if isinstance(exchange, Accounted) else reports.accounts
    reports.write_to(assignment.folder, goal.tensorboard)
    part = None if mesh is None else PartExchange(exchange, mesh, holdings)
    split = None
    if mesh is not None and part is not None:
        split = SplitWork(SplitContext(strategy, mesh, group, part, stopwatch, holdings, assignment.send))
    kept: dict[str, Any] = {"exchange": part or exchange, "pace": pace, "ledger": ledger}
    kept |= {"split": split} if mesh is not None and mesh.place.stages > 1 else {}
    # Random state comes last, so that nothing restored before it can draw from it.
    kept |= {"stopwatch": stopwatch, "group": group, "reports": reports, "random": random_state.Generators()}
    identity = dict(assignment.identity) | {"strategy": strategy.lineage, "workers": place.size}
    replicated = exchange.replicated and pace.replicated
    memory = Memory(assignment.folder, group, identity, holdings, replicated, relaid, assignment.machines)
    memory.keep(**kept)
    if assignment.resume and not assignment.joins:
        seed = memory.recall()["seed"]
    exchange.seed, exchange.team = seed, group
    disturber = Disturber(goal.disturbances, "worker", place.rank, seed, assignment.send, assignment.disturbed)
    gauge = None if goal.gauge is None else Gauge(group)
    return Workplace(
        *(assignment, group, device, strategy, exchange, pace, batches, stopwatch, ledger, holdings, watch, reports),
        *(memory, disturber, gauge, seed, split),
        data=None if assignment.data_servers is None else DataLink(assignment.data_servers, place.rank, goal.timeout),
    )

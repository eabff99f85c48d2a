"""Parameter servers: workers push gradients to them and pull parameters, under a chosen consistency.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014); Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from msgspec import structs
from torch import Tensor
from torch.optim import Optimizer

from offbeat import limits
from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import EveryStep, RhythmAction, RhythmOf, rhythm_of
from offbeat.runtime.compression.coder import finite
from offbeat.runtime.gradients.optimizers import scale_rates
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.servers.shard_state import first_state
from offbeat.runtime.servers.updater import ADD, Recipe
from offbeat.strategies._base import Setting, Traits, require
from offbeat.strategies.servers.driver import PushQueue, ServerDriver
from offbeat.strategies.servers.exchange import ServerExchanging, SnapshotPushWorker, StepHere
from offbeat.strategies.servers.link import ServerLink
from offbeat.strategies.servers.own_updates import OwnUpdates
from offbeat.strategies.servers.parameter_row import ParameterRow, refuse_different_models
from offbeat.strategies.servers.update import ServerUpdate
from offbeat.strategies.servers.vector import Vector
from offbeat.strategies.worker.exchange import Exchange


@dataclass(frozen=True)
class BSP(Setting):
    """No worker starts a step before all have finished the last: equal to one process on the joined batch."""

    name = "bsp"


@dataclass(frozen=True)
class SSP(Setting):
    """A worker may be up to `bound` steps ahead of the slowest."""

    bound: int
    """Steps."""
    mode: Literal["lazy", "eager"] = "lazy"
    """When values are read: when the bound is about to be exceeded (lazy), or whenever servers have newer (eager)."""

    name = "ssp"
    _ranges = (("bound", lambda steps: steps >= 0, "a bound is 0 steps (bsp) or more"),)


@dataclass(frozen=True)
class ASP(Setting):
    """No worker waits for another."""

    name = "asp"


@dataclass(frozen=True)
class DropSlowest(Setting):
    """As bsp, but a step does not wait for the slowest `workers`; what they send later is discarded."""

    workers: int

    name = "drop_slowest"
    _ranges = (("workers", lambda workers: workers > 0, "at least one worker is dropped (else use bsp)"),)


@dataclass(frozen=True)
class Deadline(Setting):
    """As bsp, but a step waits no longer than this, and uses the gradients received by then.

    With `accumulate(k)` each of the k batches of a step is pushed as soon as it is computed, and the batches that a
    slow worker has done by the deadline count by their examples.
    """

    seconds: float
    """From the opening of the step; in the first step, from its first gradient."""

    name = "deadline"
    _ranges = (
        ("seconds", lambda seconds: seconds > 0, "a deadline is more than 0 seconds away"),
        ("seconds", lambda seconds: seconds <= limits.SECONDS, "a deadline is at most a year away"),
    )


Consistency = BSP | SSP | ASP | DropSlowest | Deadline


def rule_of(consistency: Consistency) -> Rule:
    """The rule of a consistency."""
    match consistency:
        case BSP():
            return Rule(0)
        case SSP(bound, mode):
            return Rule(bound, eager=mode == "eager")
        case ASP():
            return Rule(None)
        case DropSlowest(workers):
            return Rule(0, drop=workers)
        case Deadline(seconds):
            return Rule(0, deadline=seconds)


@dataclass(frozen=True)
class Server(ServerExchanging):
    """Workers push gradients to parameter servers and pull fresh values, under a chosen consistency.

    The parameters are cut into `shards`, each on its own server process that updates it with the user's own optimizer
    (any of torch's that treats every number by itself), and on `replicas` more that take over when it dies. Under ssp
    and asp every push is applied on arrival, with the learning rate divided by the number of workers.

    With `update` servers run a program on a push instead of the optimizer: a function of the parameters, the gradient
    and any state vectors, which begin as zeros, that returns the new ones. It knows the scalars lr, step, staleness and
    workers, and the vector read, the parameters that the gradient was computed from. It is parsed and compiled, never
    evaluated as Python. The optimizer must be plain SGD: of it only the learning rate, with its schedule, is used.
    """

    shards: int = 1
    """Number of servers that the parameters are divided over."""
    replicas: int = 0
    """Further copies of every shard: with one, any server may die and nothing is lost."""
    consistency: BSP | SSP | ASP | DropSlowest | Deadline = BSP()
    """How far workers may be apart, and whether steps wait for stragglers."""
    staleness_scaling: bool = False
    """Under ssp and asp: shorten a step by the staleness of its gradient."""
    delay_compensation: float = 0.0
    """Under ssp and asp: correct a gradient by this times its square times the parameters' change since."""
    update: ServerUpdate | Callable[..., object] | None = None
    """What a server does with a push, in place of the optimizer: new parameters and states from old ones."""

    carries = True
    point_to_point = True
    examples = (
        *("server", "server(shards=2, consistency=ssp(3))", "server(shards=2, replicas=1)"),
        *("server(consistency=asp, staleness_scaling=True)", "server(consistency=drop_slowest(1))"),
        "server(consistency=deadline(0.5))",
        "server(consistency=deadline(0.5)) + accumulate(4)",
        "server(shards=2, consistency=ssp(3)) + topk(0.05)",
        "server(consistency=asp, update=delay_compensated(0.1))",
        "server(update=lambda w, g, m: (w - lr * (0.9 * m + g), 0.9 * m + g))",
    )

    _ranges = (("delay_compensation", lambda factor: factor >= 0, "it is 0 or more"),)

    def __post_init__(self) -> None:
        """Refuse corrections of stale gradients where there are none."""
        super().__post_init__()
        late = isinstance(self.consistency, SSP | ASP)
        for name in ("staleness_scaling", "delay_compensation"):
            value, why = getattr(self, name), f"under {self.consistency} no old gradient is applied: use ssp or asp"
            require(late or not value, self, name, value, why)
            why = "the update says what is done with old gradients (by `staleness` and `read`)"
            require(self.program is None or not value, self, name, value, why)

    @property
    def program(self) -> ServerUpdate | None:
        """What servers do with a push; None: as the optimizer does."""
        return cast("ServerUpdate | None", self.update)

    @property
    def traits(self) -> Traits:
        """Exact under bsp; sums are made in the order of arrival, so bits may differ."""
        lockstep = isinstance(self.consistency, BSP)
        return Traits(synchronous=lockstep, exact=lockstep, elastic=True)

    def check(self, workers: int) -> None:
        """Refuse to drop all workers."""
        super().check(workers)
        if isinstance(self.consistency, DropSlowest):
            dropped = self.consistency.workers
            require(dropped < workers, self, "consistency", self.consistency, f"of {workers} workers one must be left")

    @property
    def rule(self) -> Rule:
        """The consistency's; delay compensation also needs the parameters that a gradient was computed from."""
        rule, program = rule_of(self.consistency), self.program
        remembers = self.delay_compensation > 0 or (program is not None and program.program.uses_read)
        summed = rule.aggregated and program is not None and self.shards > 1
        return structs.replace(
            rule,
            remembers=remembers and not rule.aggregated,
            proves=program is not None,
            reductions=program.reductions if summed and program is not None else (),
        )

    def rhythm(self) -> RhythmOf:
        """When workers read depends on how stale that may be."""
        return rhythm_of(rule_of(self.consistency))

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        return ServerWorker(group, stopwatch, self)


class ServerWorker(SnapshotPushWorker):
    """Pushes every step's gradient, and pulls as the consistency demands."""

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Server) -> None:
        super().__init__(group, stopwatch, settings, settings.rhythm()(group.rank))
        self.tolerance |= {name: getattr(settings, name) for name in ("staleness_scaling", "delay_compensation")}
        self._own_updates: OwnUpdates | None = None
        self._totals: ServerTotals | None = None

    def begin(self) -> None:
        """Put the parameters on the servers; with an update, steps between two reads are made by it, too."""
        super().begin()
        if self.update is not None and self.driver is not None and self.link.rule.bound:
            self._own_updates = OwnUpdates(self.driver.row, self.recipes)

    @property
    def aligned(self) -> bool:
        """Where all workers make steps together, even if some are too late for them."""
        return self.link.rule.aggregated

    @property
    def takes_microbatches(self) -> bool:
        """Where a step ends at a deadline, the microbatches done by then count."""
        return self.link.rule.deadline is not None

    def microbatch(self, within_step: bool) -> None:
        """The coming batch is pushed on its own."""
        self.link.within_step = within_step

    def computed(self, driver: ServerDriver) -> StepHere:
        """Push; and pull, unless the last read is fresh enough for the next step."""
        link, queue = self.link, driver.queue
        slot = queue.gradient() if self.examples else None
        if link.within_step:
            if slot is not None:
                queue.push_microbatch(slot, self.examples)
            return StepHere()
        exchange = driver.rhythm.computed(link.clock)
        # What servers will refuse is not an update here either.
        steps_here = exchange.own_step and slot is not None and finite(queue.slots[slot])
        if self._own_updates is not None and slot is not None:
            # Also before a read, which replaces the values, so that the states miss no gradient of this worker.
            workers = len(self.group.membership.members)
            totals = queue.totals_of(queue.slots[slot])
            self._own_updates.step(queue.slots[slot], queue.absent[slot], queue.settings(), workers, totals)
        # With one worker its mean is the step's: multiplying and dividing by the weight would only round it.
        weighed = link.rule.aggregated and self.group.size > 1
        driver.perform(exchange.actions, lambda: slot, max(self.examples, 1e-9) if weighed else 1.0)
        if not steps_here or self._own_updates is not None:
            return StepHere()
        # Read-my-writes: until values are pulled again, this worker's own updates are made here too.
        optimizer = cast("Optimizer", self.optimizer)
        return StepHere(own=True, afterwards=scale_rates(optimizer, 1 / len(self.group.membership.members)))

    def own_state(self, driver: ServerDriver) -> dict[str, Any]:
        """Also the states of its own steps."""
        own = {} if self._own_updates is None else {"own_updates": self._own_updates.state()}
        return {**super().own_state(driver), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the shards' state, and that of its own steps; a replacement begins with new ones."""
        super().load_state_dict(state)
        if self._own_updates is not None and not self.link.group.membership.outside:
            self._own_updates.load(state["own_updates"])

    def vector(self, counted: Callable[[], None]) -> Vector:
        """The parameters on the servers, once they are there."""
        if self.link.client.plan.parts:
            raise StrategyError(
                "each worker has a part of the model, so there is no vector of all parameters whose ranges it could "
                "push and pull. Use server without a split, or let the optimizer step."
            )
        if self.driver is None or self.optimizer is None:
            raise UsageError(
                "nothing is on the servers yet: give the model and its optimizer to prepare() before team.vector."
            )
        if self.link.rule.closes:
            raise StrategyError(
                f"{self.strategy} ends steps without slow workers, whose ranges would then be missing from them. Push "
                f"and pull ranges under bsp, ssp or asp."
            )
        return Vector(self.driver, self.compressions, counted)

    def total(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Statistics summed on the servers: each worker pushes the change of its own."""
        if self.update is not None:
            raise StrategyError(
                f"{self.strategy} has an update for gradients, and this task has none: servers sum its statistics, and "
                f"the task's own `update` makes parameters of them. Leave `update` out."
            )
        if self._totals is None:
            self._totals = ServerTotals(partial(added_up, self.link), statistics, self.link.shards)
            self.driver = self._totals.driver
        return self._totals.total(statistics)

    def take_over(self) -> None:
        """The last statistics of dead workers are subtracted with a live worker's next push."""
        if self._totals is not None:
            self._totals.take_over()


def added_up(link: ServerLink, row: ParameterRow) -> ServerDriver:
    """A row that servers hold, and to which they add what is pushed, without an optimizer."""
    refuse_different_models(link.group, row, None)
    driver = ServerDriver(link, row, EveryStep(), PushQueue(link, row), row.values)
    recipe = Recipe(optimizer=ADD, kind=row.kind)
    driver.put([first_state(recipe, shard) for shard in row.shards(row.values)])
    return driver


class ServerTotals:
    """Statistics of all workers, summed on servers.

    A worker pushes the difference to the statistics that it pushed last, so that the sum on the servers always has
    every worker's latest, however often each of them pushes (incremental EM: Neal and Hinton 1998).
    """

    def __init__(
        self, put: Callable[[ParameterRow], ServerDriver], statistics: Mapping[str, Tensor], shards: int
    ) -> None:
        self._names = sorted(statistics)
        flat = self._flat(statistics)
        self._last = torch.zeros_like(flat)
        self._row = ParameterRow([torch.nn.Parameter(torch.zeros_like(flat), requires_grad=False)], shards)
        self.driver = put(self._row)
        """The sums on the servers."""

    def _flat(self, statistics: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([statistics[name].detach().double().reshape(-1) for name in self._names])

    def take_over(self) -> None:
        """Make the first live worker responsible for the dead workers' share of the sums on servers."""
        self.driver.together()
        group = self.driver.link.group
        living = group.sum(self._last.clone(), "the live workers' statistics")
        if group.rank == min(group.membership.present):
            self._last += self._row.values - living

    def total(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Push the changes, and read the sums."""
        flat, link, queue = self._flat(statistics), self.driver.link, self.driver.queue
        self._row.parameters[0].grad = flat - self._last
        slot = queue.gradient()
        link.record.unused.clear()
        self.driver.perform((RhythmAction.PUSH_AND_PULL, RhythmAction.AWAIT, RhythmAction.SETTLE), lambda: slot)
        # What a shard has discarded is part of the next difference; otherwise it would be lost.
        for shard in set(range(link.shards)) - link.record.unused:
            self._row.shard(self._last, shard).copy_(self._row.shard(flat, shard))
        pieces = self._row.values.clone().split([statistics[name].numel() for name in self._names])
        return {
            name: piece.view(statistics[name].shape).to(statistics[name].dtype)
            for name, piece in zip(self._names, pieces, strict=True)
        }

"""Workers push gradients to servers and pull parameters from them, as consistently as is asked for.

Each server holds a shard of the parameters and the optimizer that updates it. How far workers may be apart is the
`consistency`; how many copies there are of every shard, `replicas`.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014); Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from msgspec import structs
from torch import Tensor
from torch.optim import Optimizer

from offbeat import limits
from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import RhythmOf, rhythm_of
from offbeat.runtime.compression.coder import finite
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.strategies._base import Setting, Traits, require, require_servers
from offbeat.strategies.servers.driver import ServerDriver
from offbeat.strategies.servers.exchange import RecordedWorker, StepHere
from offbeat.strategies.servers.totals import ServerTotals, added_up
from offbeat.strategies.servers.vector import Vector
from offbeat.strategies.worker.exchange import Exchange, Exchanging


@dataclass(frozen=True)
class BSP(Setting):
    """Nobody starts a step before everybody has finished the one before: equal to one process on the joined batch."""

    name = "bsp"


@dataclass(frozen=True)
class SSP(Setting):
    """A worker may be up to `bound` steps ahead of the slowest."""

    bound: int
    """Steps."""
    mode: Literal["lazy", "eager"] = "lazy"
    """When values are read: when the bound is about to break (lazy), or whenever servers have newer ones (eager)."""

    name = "ssp"

    def __post_init__(self) -> None:
        """Refuse a bound that lets nobody start."""
        super().__post_init__()
        require(self.bound >= 0, self, "bound", self.bound, "a bound is 0 steps (bsp) or more")


@dataclass(frozen=True)
class ASP(Setting):
    """Nobody waits for anybody."""

    name = "asp"


@dataclass(frozen=True)
class DropSlowest(Setting):
    """As bsp, but a step does not wait for the slowest `workers`; what they send later is discarded."""

    workers: int

    name = "drop_slowest"

    def __post_init__(self) -> None:
        """Refuse to drop nobody."""
        super().__post_init__()
        require(self.workers > 0, self, "workers", self.workers, "at least one worker is dropped (else say bsp)")


@dataclass(frozen=True)
class Deadline(Setting):
    """As bsp, but a step waits no longer than this: it is made of what has come.

    With `accumulate(k)` each of the k batches of a step is pushed as soon as it is computed, and what a slow worker has
    done of them by the deadline counts by its examples.
    """

    seconds: float
    """From when the step was opened; in the first step, from when its first gradient has come."""

    name = "deadline"

    def __post_init__(self) -> None:
        """Refuse a deadline that has passed."""
        super().__post_init__()
        require(self.seconds > 0, self, "seconds", self.seconds, "a deadline is more than 0 seconds away")
        require(self.seconds <= limits.SECONDS, self, "seconds", self.seconds, "no clock runs longer than a year")


Consistency = BSP | SSP | ASP | DropSlowest | Deadline


def rule_of(consistency: Consistency) -> Rule:
    """A consistency as servers understand it."""
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
class Server(Exchanging):
    """Workers push gradients to parameter servers and pull fresh values, as consistently as is asked for.

    The parameters are cut into `shards`, each on a server process of its own that updates it with the user's own
    optimizer (any of torch's that treats every number by itself), and on `replicas` more that take over when it dies.
    Under ssp and asp every push is applied as it comes, with the learning rate over the number of workers.
    """

    shards: int = 1
    """Server processes that the parameters are divided over."""
    replicas: int = 0
    """Further copies of every shard: with one, any server may die and nothing is lost."""
    consistency: BSP | SSP | ASP | DropSlowest | Deadline = BSP()
    """How far workers may be apart, and whether the slow are waited for."""
    staleness_scaling: bool = False
    """Under ssp and asp: make a step the shorter, the more updates its gradient has missed."""
    delay_compensation: float = 0.0
    """Under ssp and asp: correct a gradient by this times its square times how far the parameters have moved since."""

    carries = True
    sends_letters = True
    examples = (
        "server",
        "server(shards=2, consistency=ssp(3))",
        "server(shards=2, replicas=1)",
        "server(consistency=asp, staleness_scaling=True)",
        "server(consistency=drop_slowest(1))",
        "server(consistency=deadline(0.5))",
        "server(consistency=deadline(0.5)) + accumulate(4)",
        "server(shards=2, consistency=ssp(3)) + topk(0.05)",
    )

    def __post_init__(self) -> None:
        """Refuse numbers of servers that make no sense."""
        super().__post_init__()
        require_servers(self, self.shards, self.replicas)
        require(self.delay_compensation >= 0, self, "delay_compensation", self.delay_compensation, "it is 0 or more")
        late = isinstance(self.consistency, SSP | ASP)
        for name in ("staleness_scaling", "delay_compensation"):
            asked = getattr(self, name)
            require(
                late or not asked,
                self,
                name,
                asked,
                f"under {self.consistency} no old gradient is applied: take ssp or asp",
            )

    @property
    def traits(self) -> Traits:
        """Under bsp what one process computes; sums are made in the order of arrival, so bits may differ."""
        lockstep = isinstance(self.consistency, BSP)
        return Traits(synchronous=lockstep, exact=lockstep, elastic=True)

    def check(self, workers: int) -> None:
        """Refuse to drop everybody."""
        super().check(workers)
        if isinstance(self.consistency, DropSlowest):
            dropped = self.consistency.workers
            require(dropped < workers, self, "consistency", self.consistency, f"of {workers} workers one must be left")

    def servers(self, workers: int) -> tuple[int, int, Rule]:
        """Shards, further copies of each, and the rule."""
        del workers
        rule = rule_of(self.consistency)
        remembers = self.delay_compensation > 0 and not rule.aggregated
        return self.shards, self.replicas, structs.replace(rule, remembers=remembers)

    def rhythm(self) -> RhythmOf:
        """When workers read depends on how stale that may be."""
        return rhythm_of(rule_of(self.consistency))

    def connect(self, group: Group, stopwatch: Stopwatch) -> Exchange:
        """The worker's side."""
        return _Pushing(group, stopwatch, self)


class _Pushing(RecordedWorker):
    """Pushes every step's gradient, and reads as the consistency demands."""

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Server) -> None:
        tolerance = {
            "staleness_scaling": settings.staleness_scaling,
            "delay_compensation": settings.delay_compensation,
        }
        rule = rule_of(settings.consistency)
        super().__init__(group, stopwatch, settings, rule, settings.rhythm()(group.rank), tolerance=tolerance)
        self._totals: ServerTotals | None = None

    @property
    def aligned(self) -> bool:
        """Where steps are common ones, also if some come too late for them."""
        return self.link.rule.aggregated

    @property
    def takes_microbatches(self) -> bool:
        """Where a step ends at a deadline, what a worker has done of it by then counts."""
        return self.link.rule.deadline is not None

    def microbatch(self, within_step: bool) -> None:
        """The coming batch is pushed by itself."""
        self.link.within_step = within_step

    def computed(self, driver: ServerDriver) -> StepHere:
        """Push; and pull, unless what was read before is fresh enough for the next step."""
        link, queue = self.link, driver.queue
        slot = queue.gradient() if self.examples else None
        if link.within_step:
            if slot is not None:
                queue.push_microbatch(slot, self.examples)
            return StepHere()
        exchange = driver.rhythm.computed(link.clock)
        # What servers refuse is not an update here either.
        steps_here = exchange.own_step and slot is not None and finite(queue.slots[slot])
        # One worker's mean is the step's own: weighing it and dividing by the weight would only round it.
        weighed = link.rule.aggregated and self.group.size > 1
        driver.perform(exchange.actions, lambda: slot, max(self.examples, 1e-9) if weighed else 1.0)
        if not steps_here:
            return StepHere()
        # Read-my-writes: until values are read again, this worker's own updates are made here too.
        optimizer: Any = self.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / len(self.group.membership.members)
        return StepHere(own=True, afterwards=partial(_restore_rates, optimizer, rates))

    def vector(self, counted: Callable[[], None]) -> Vector:
        """Once the parameters are on the servers."""
        if self.driver is None or self.optimizer is None:
            raise UsageError(
                "nothing is on the servers yet: give the model and its optimizer to prepare() before team.vector."
            )
        if self.link.rule.closes:
            raise StrategyError(
                f"{self.strategy} ends steps without the slow, whose ranges would then be missing from them. Push and "
                f"pull ranges under bsp, ssp or asp."
            )
        return Vector(self.driver, self.compressions, counted)

    def total(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Statistics summed on the servers: each worker pushes how its own have changed."""
        if self._totals is None:
            self._totals = ServerTotals(partial(added_up, self.link), statistics, self.link.shards)
            self.driver = self._totals.driver
        return self._totals.total(statistics)

    def take_over(self) -> None:
        """What the dead have told last is taken back with somebody's next push."""
        if self._totals is not None:
            self._totals.take_over()


def _restore_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    """Undo what was changed for a step of one's own."""
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate

"""Workers push gradients to servers and pull parameters from them, as consistently as is asked for.

Each server holds a shard of the parameters and the optimizer that updates it. How far workers may be apart is the
`consistency`; how many copies there are of every shard, `replicas`.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014); Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server" (2013).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from msgspec import structs
from torch import Tensor

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.rhythm import RhythmOf, rhythm_of
from offbeat.runtime.compression.coder import finite
from offbeat.runtime.group import Group
from offbeat.runtime.servers.numbers import ADD, Recipe, first_state
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.strategies._base import Setting, Traits, require, require_servers
from offbeat.strategies._parameter_row import Row
from offbeat.strategies._serving import Served
from offbeat.strategies._vector import Vector
from offbeat.strategies._worker import Exchange, Exchanging


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
    def traits(self) -> Traits:  # pyright: ignore[reportIncompatibleVariableOverride]
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


class _Pushing(Served):
    """Pushes every step's gradient, and reads as the consistency demands."""

    cuttable = True

    @property
    def aligned(self) -> bool:
        """Where steps are common ones, also if some come too late for them."""
        return self.rule.aggregated

    def __init__(self, group: Group, stopwatch: Stopwatch, settings: Server) -> None:
        super().__init__(group, stopwatch, settings, rule_of(settings.consistency))
        self._settings_of_strategy = settings
        self._rhythm = settings.rhythm()(group.rank)
        self._rates: list[float] = []
        self._complete = 0
        self._totals: _Totals | None = None

    def tolerance(self) -> dict[str, Any]:
        """As the strategy says."""
        settings = self._settings_of_strategy
        return {
            "staleness_scaling": settings.staleness_scaling,
            "delay_compensation": settings.delay_compensation,
        }

    @property
    def takes_microbatches(self) -> bool:
        """Where a step ends at a deadline, what a worker has done of it by then counts."""
        return self.rule.deadline is not None

    def exchange(self) -> bool:
        """Push; and pull, unless what was read before is fresh enough for the next step."""
        slot = self.gradient() if self.examples else None
        if self.within_step:
            if slot is not None:
                self.push_microbatch(slot, self.examples)
            return True
        exchange = self._rhythm.computed(self.clock)
        # What servers refuse is no update here either.
        steps_here = exchange.own_step and slot is not None and finite(self.slots[slot])
        # One worker's mean is the step's own: weighing it and dividing by the weight would only round it.
        weighed = self.rule.aggregated and self.group.size > 1
        weight = max(self.examples, 1e-9) if weighed else 1.0
        self.perform(exchange.actions, lambda: slot, weight)
        if not steps_here:
            return True
        # Read-my-writes: until values are read again, this worker's own updates are made here too.
        optimizer: Any = self.optimizer
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / len(self.group.membership.members)
        return False

    def await_values(self) -> None:
        """Wait for values, and tell the rhythm how fresh they are."""
        super().await_values()
        self._has_read()

    def reuse(self) -> None:
        """Count how old the values that are used again have become."""
        self.stale[self.clock - self._complete] += 1
        self.client.used_again(self.clock, self.clock - self._complete)

    def _has_read(self) -> None:
        self._complete = min((clock for _, clock in self.client.machine.known.values()), default=0)
        self._rhythm.read(self._complete)

    def refresh(self) -> None:
        """Take the newest values; what is read at an evaluation need not be read again for the steps after it."""
        super().refresh()
        self._has_read()

    def stepped(self) -> None:
        """Undo what was changed for a step of one's own."""
        optimizer: Any = self.optimizer
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []

    def vector(self, counted: Callable[[], None]) -> Vector:
        """Once the parameters are on the servers."""
        if self.row is None or self.optimizer is None:
            raise UsageError(
                "nothing is on the servers yet: give the model and its optimizer to prepare() before team.vector."
            )
        if self.rule.closes:
            raise StrategyError(
                f"{self.strategy} ends steps without the slow, whose ranges would then be missing from them. Push and "
                f"pull ranges under bsp, ssp or asp."
            )
        return Vector(self, self.row, counted)

    def total(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Statistics summed on the servers: each worker pushes how its own have changed."""
        if self._totals is None:
            self._totals = _Totals(self, statistics)
        return self._totals.total(statistics)

    def take_over(self) -> None:
        """What the dead have told last is taken back with somebody's next push."""
        if self._totals is not None:
            self._totals.take_over()


class _Totals:
    """Sums of statistics that servers hold, for tasks that are no gradient descent.

    A worker pushes the difference of its statistics to those that it pushed last, so that the sum on the servers always
    has every worker's latest, however often each of them pushes (incremental EM: Neal and Hinton 1998).
    """

    def __init__(self, exchange: Served, statistics: Mapping[str, Tensor]) -> None:
        self._exchange = exchange
        self._names = sorted(statistics)
        flat = self._flat(statistics)
        self._last = torch.zeros_like(flat)
        self._row = Row([torch.nn.Parameter(torch.zeros_like(flat), requires_grad=False)], exchange.client.plan.shards)
        exchange.first_states = lambda row: [  # pyright: ignore[reportAttributeAccessIssue]
            first_state(Recipe(optimizer=ADD, kind=row.kind), row.shard(row.values, k))
            for k in range(exchange.client.plan.shards)
        ]
        exchange.open(self._row)

    def _flat(self, statistics: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([statistics[name].detach().double().reshape(-1) for name in self._names])

    def take_over(self) -> None:
        """Have the first of those who live answer for what the dead have told: the rest of what servers hold."""
        exchange = self._exchange
        exchange.together()
        living = exchange.group.sum(self._last.clone(), "what the living have told")
        if exchange.group.rank == min(exchange.group.membership.present):
            self._last += self._row.values - living

    def total(self, statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = self._flat(statistics)
        exchange = self._exchange
        exchange.row.parameters[0].grad = flat - self._last  # pyright: ignore[reportOptionalMemberAccess]
        slot = exchange.gradient()
        exchange.unused.clear()
        exchange.arrive(exchange.push(slot, then_pull=True))
        exchange.settle(slot)
        # What a shard has not used is a part of the next difference: else it would be missing for ever.
        for shard in set(range(exchange.client.plan.shards)) - exchange.unused:
            self._row.shard(self._last, shard).copy_(self._row.shard(flat, shard))
        pieces = self._row.values.clone().split([statistics[name].numel() for name in self._names])
        return {
            name: piece.view(statistics[name].shape).to(statistics[name].dtype)
            for name, piece in zip(self._names, pieces, strict=True)
        }

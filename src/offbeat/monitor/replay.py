"""Replays a run to a monitor that hears of it late, to show what each rule of delivery would have made of it.

Every event of the run is reported over a simulated network that delays reports and lets them overtake each other. A
machine of `protocols.causality.delivery` holds them back until their turn, and a `Judge` judges what it has been given
so far. A deadlock or desync found on the way, and not in the whole run, is a *phantom*: judged on events that were
never true together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, to_builtins
from numpy.typing import NDArray

from offbeat.errors import UsageError, did_you_mean
from offbeat.monitor.deadlocks import Judge
from offbeat.monitor.history import FullHistory, ServerStamps, Stamps, trace_of
from offbeat.monitor.verdicts import Verdict
from offbeat.protocols.causality import delivery
from offbeat.protocols.causality.cuts import Cut, latest_consistent
from offbeat.protocols.causality.delivery import MONITOR, EventReport
from offbeat.protocols.causality.histories import Computation, EventPosition, Vector, lamport, tick
from offbeat.protocols.machine import Effect, Event, Machine, Name, Received, Send, SetTimer
from offbeat.runtime.events.recorder import Mark, Stamp
from offbeat.simulate.machines import Kill, LossyNetwork, Simulation

DELAY: Final = 0.005  # Default mean delay of a report in seconds.
BOUND: Final = 10  # The longest delay, as a multiple of the mean, for the rules that need one.
MOST: Final = 20_000  # Maximum number of events that are replayed, the last ones of the run.
RULES: Final[Mapping[str, Callable[[Sequence[Name], float], Machine]]] = {
    "arrival": lambda names, _: delivery.ByArrival(names),
    "fifo": lambda names, delay: delivery.ByNumber(names, BOUND * delay),
    "time": lambda names, delay: delivery.ByTime(names, BOUND * delay),
    "lamport": lambda names, delay: delivery.ByLamport(names, 2 * delay, BOUND * delay),
    "vector": lambda names, delay: delivery.ByVector(names, BOUND * delay),
}
_SOON: Final = 1e-9  # Minimum seconds from a cause to its effect, whatever the wall clocks say.
_TELLING: Final = frozenset({Mark.ENTER, Mark.START, Mark.WAIT, Mark.END, Mark.VIEW})
"""Marks after which the verdict may change."""


class Phantom(Struct, frozen=True):
    """A verdict on the way that the whole run refutes."""

    verdict: str
    after: int  # Number of events delivered before it.
    cut: str  # The latest consistent cut inside them, in words.
    refuted: bool  # Whether there is no such verdict on that cut.

    def __str__(self) -> str:
        why = "which has none" if self.refuted else "and the run went on from it"
        return f"phantom after {self.after:,} events: {self.verdict} The latest consistent cut was {self.cut}, {why}."


class Replay(Struct, frozen=True, kw_only=True):
    """What a monitor would have seen of a run under a rule of delivery."""

    rule: str
    delay: float
    events: int
    left_out: int  # Number of older events that were not replayed.
    overtaken: int  # Number of reports that came after a later one of their process.
    held: int  # Number of reports that were held back.
    longest: float  # Longest time that a report was held back, in seconds.
    longest_held: str
    late: int  # Number of reports that came too late for their place in the order.
    probes: int
    disorder: int  # Number of events that were delivered before one of their causes.
    example: str  # The first of them, in words.
    phantoms: tuple[Phantom, ...]
    verdict: str | None  # On the whole run, after the last delivery.

    @property
    def consistent(self) -> bool:
        """Whether the order is one that the run can have had."""
        return not self.disorder

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {**to_builtins(self), "consistent": self.consistent}

    def lines(self) -> list[str]:
        """In words."""
        older = f" (the last; {self.left_out:,} older ones were left out)" if self.left_out else ""
        held = f"{self.held:,} were held back, for at most {self.longest:.3g} s ({self.longest_held})"
        order = "is consistent: no event comes before its cause"
        if not self.consistent:
            order = f"is not consistent: {self.disorder:,} events come before a cause, the first is {self.example}"
        return [
            f"Delivery by {self.rule}, with reports that take {self.delay:g} s on average: {self.events:,} events"
            f"{older}, {self.overtaken:,} overtaken.",
            f"  {held if self.held else 'None was held back'}{f'; {self.probes:,} probes' if self.probes else ''}"
            f"{f'; {self.late:,} came too late for their place' if self.late else ''}.",
            f"  The order {order}.",
            *(f"  {phantom}" for phantom in self.phantoms),
            f"  At the end: {self.verdict or 'nobody waits in vain'}",
        ]


def check_rule(name: str) -> None:
    """Refuse an unknown rule of delivery."""
    if name not in RULES:
        raise UsageError(f"there is no delivery by {name!r}.{did_you_mean(name, RULES)}")


def replay(stamps: Stamps, servers: ServerStamps | None = None, rule: str = "vector", delay: float = DELAY) -> Replay:
    """Report a run's events to a monitor that follows a rule of delivery, and judge what it is given."""
    check_rule(rule)
    if not delay > 0:
        raise UsageError(f"reports that take {delay:g} s on average cannot be: give more than 0.")
    servers = servers or {}
    times = sorted(stamp.time for own in (*stamps.values(), *servers.values()) for stamp in own)
    first = times[max(0, len(times) - MOST)] if times else 0.0
    recent, served = _since(stamps, first), _since(servers, first)
    trace = trace_of(recent, served)
    whole, part = {**stamps, **servers}, {**recent, **served}
    dropped = tuple(len(whole[name]) - len(part[name]) for name in whole)
    audience = _Audience(trace, list(recent))
    monitor = _Clocked(RULES[rule](trace.run.processes, delay))
    reporters = _reporters(trace.run, dropped)
    ended = [
        Kill(reporter.name, reporter.last + _SOON, BOUND * delay)
        for reporter, own in zip(reporters, trace.stamps, strict=True)
        if any(stamp is not None and stamp.mark is Mark.END for stamp in own[-1:])
    ]
    network = LossyNetwork(delay=0.0, jitter=delay)
    world = Simulation([monitor, *reporters], network=network, faults=ended, observer=MONITOR)
    world.performing(MONITOR, lambda work: audience.take(work, world.now - monitor.came[work.report.event]))
    world.run(float("inf"))
    longest, place = max(audience.holds, default=(0.0, EventPosition(0, 1)))
    verdict = audience.judge.final()
    return Replay(
        rule=rule,
        delay=delay,
        events=sum(trace.run.lengths),
        left_out=sum(dropped),
        overtaken=monitor.overtaken,
        held=len(audience.holds),
        longest=longest,
        longest_held=trace.run.tell(place) if audience.holds else "",
        late=audience.late,
        probes=sum(reporter.probes for reporter in reporters),
        disorder=audience.disorder,
        example=audience.example,
        phantoms=audience.phantoms(),
        verdict=None if verdict is None else verdict.headline,
    )


def _since(stamps: Mapping[Any, Sequence[Stamp]], first: float) -> dict[Any, list[Stamp]]:
    return {name: [stamp for stamp in own if stamp.time >= first] for name, own in stamps.items()}


class _Clocked:
    """The monitor's machine, and when reports came to it."""

    def __init__(self, inner: Machine) -> None:
        self.name, self.begin = inner.name, inner.begin
        self.came: dict[EventPosition, float] = {}
        self.overtaken = 0
        self._inner = inner
        self._highest: dict[Name, int] = {}

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        if isinstance(event, Received) and isinstance(event.message, EventReport):
            highest = self._highest.get(event.sender, 0)
            self.overtaken += event.message.number < highest
            self._highest[event.sender] = max(highest, event.message.number)
            self.came[event.message.event] = now
        return self._inner.on(event, now)


class _Reporter:
    """A process that repeats its events, reports each with its clocks, and answers probes.

    Earlier events are counted, as dropped.
    """

    def __init__(
        self,
        run: Computation,
        process: int,
        at: Sequence[float],
        dropped: Vector,
        clocks: dict[EventPosition, tuple[int, Vector]],
    ) -> None:
        self.name = run.processes[process]
        self.probes = 0
        self.last = at[-1] if at else 0.0
        self._run, self._process, self._at, self._clocks = run, process, at, clocks
        self._dropped, self._vector = dropped[process], dropped
        self._done = self._lamport = 0

    def begin(self, now: float) -> list[Effect]:
        missing: list[Effect] = [Send(MONITOR, delivery.Dropped(1, self._dropped))] if self._dropped else []
        return missing + self._wait(now)

    def _wait(self, now: float) -> list[Effect]:
        return [SetTimer(self._at[self._done] - now, "next")] if self._done < len(self._at) else []

    def on(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Received) and isinstance(event.message, delivery.Probe):
            self.probes += 1
            self._lamport = lamport(self._lamport, event.message.lamport)
            return [Send(MONITOR, delivery.Alive(self._lamport, self._dropped + self._done))]
        place = EventPosition(self._process, self._done + 1)
        causes = [self._clocks[cause] for cause in self._run.causes(place)]
        self._lamport = lamport(self._lamport, *(clock for clock, _ in causes))
        self._vector = tick(self._vector, self._process, *(vector for _, vector in causes))
        self._clocks[place] = self._lamport, self._vector
        self._done += 1
        time = self._run.event(place).time
        report = EventReport(self._dropped + place.number, time, self._lamport, self._vector, place)
        return [Send(MONITOR, report), *self._wait(now)]


def _reporters(run: Computation, dropped: Vector) -> list[_Reporter]:
    """All processes of a run, on one clock: each event at its time, or right after its causes if theirs are later."""

    def soonest(place: EventPosition, row: NDArray[Any]) -> None:
        row[0] = max(run.event(place).time, row[0] + _SOON)

    at = [rows[1:, 0].tolist() for rows in run.fold(1, soonest, float)]
    clocks: dict[EventPosition, tuple[int, Vector]] = {}
    return [_Reporter(run, process, at[process], dropped, clocks) for process in range(run.size)]


class _Audience:
    """The delivered events, and a judge's verdicts on them."""

    def __init__(self, trace: FullHistory, ranks: Sequence[int]) -> None:
        self.judge = Judge()
        self.holds: list[tuple[float, EventPosition]] = []
        self.late = self.disorder = 0
        self.example = ""
        self._trace, self._ranks = trace, ranks
        self._delivered: set[EventPosition] = set()
        self._verdicts: dict[str, tuple[Verdict, int, Cut]] = {}

    def take(self, work: Any, hold: float) -> None:
        """Take in a report that was held back for `hold` seconds."""
        place: EventPosition = work.report.event
        if hold > 0:
            self.holds.append((hold, place))
        self.late += work.late
        before = [EventPosition(place.process, place.number - 1)] if place.number > 1 else []
        missing = [cause for cause in (*before, *self._trace.run.causes(place)) if cause not in self._delivered]
        if missing:
            self.disorder += 1
            tell = self._trace.run.tell
            self.example = self.example or f"{tell(place)}, before {tell(missing[0])}"
        self._delivered.add(place)
        stamp = self._trace.stamps[place.process][place.number - 1]
        if stamp is None:
            return
        self._feed(self.judge, place.process, stamp)
        verdict = self.judge.final() if stamp.mark in _TELLING else None
        if verdict is not None and verdict.headline not in self._verdicts:
            self._verdicts[verdict.headline] = verdict, len(self._delivered), self._prefix()

    def phantoms(self) -> tuple[Phantom, ...]:
        """Verdicts that are not true of the whole run, the first of each kind."""
        truth = self._verdict_on(self._trace.run.lengths)
        phantoms: dict[str, Phantom] = {}
        for verdict, after, prefix in self._verdicts.values():
            if verdict.kind not in phantoms and (truth is None or truth.kind != verdict.kind):
                cut = latest_consistent(self._trace.run, prefix)
                there = self._verdict_on(cut)
                refuted = there is None or there.kind != verdict.kind
                phantoms[verdict.kind] = Phantom(verdict.headline, after, self._trace.describe(cut), refuted)
        return tuple(phantoms.values())

    def _prefix(self) -> Cut:
        """How many of the first events of each process have been delivered without a gap."""
        counts = [0] * self._trace.run.size
        for process in range(len(counts)):
            while EventPosition(process, counts[process] + 1) in self._delivered:
                counts[process] += 1
        return tuple(counts)

    def _verdict_on(self, cut: Cut) -> Verdict | None:
        judge = Judge()
        for process, number in enumerate(cut):
            for stamp in self._trace.stamps[process][:number]:
                if stamp is not None:
                    self._feed(judge, process, stamp)
        return judge.final()

    def _feed(self, judge: Judge, process: int, stamp: Stamp) -> None:
        if process < len(self._ranks):
            judge.feed(self._ranks[process], [stamp])
        else:
            judge.feed_server([stamp])

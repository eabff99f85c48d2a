"""A run replayed to a monitor that hears of it late: what each rule of delivery would have made of it.

Every event of the run is reported over a simulated network on which reports are delayed and overtake each other. A
machine of `protocols.causality.delivery` holds them back until their turn has come, and a `Judge` judges what it has
been given so far. A deadlock, or different calls, that it finds on the way, and that the whole run has not, is a
*phantom*: judged on events that were never true together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, to_builtins

from offbeat.errors import UsageError, did_you_mean
from offbeat.monitor.deadlocks import Judge
from offbeat.monitor.history import FullHistory, trace_of
from offbeat.monitor.verdicts import Verdict
from offbeat.protocols.causality.cuts import Cut, latest_consistent
from offbeat.protocols.causality.delivery import (
    MONITOR,
    Alive,
    ByArrival,
    ByLamport,
    ByNumber,
    ByTime,
    ByVector,
    Dropped,
    EventReport,
    LateReport,
    Probe,
)
from offbeat.protocols.causality.histories import Computation, EventPosition, Vector, lamport, tick
from offbeat.protocols.machine import Effect, Event, Machine, Name, Received, Send, SetTimer
from offbeat.runtime.events.recorder import Mark, Stamp
from offbeat.simulate.machines import Kill, LossyNetwork, Simulation

DELAY: Final = 0.005
"""Seconds that a report takes on average, unless told otherwise."""
BOUND: Final = 10
"""So many times that is taken for the longest delay, by the rule that needs one."""
MOST: Final = 20_000
"""Events that are replayed: the last ones of the run."""
RULES: Final[Mapping[str, Callable[[Sequence[Name], float], Machine]]] = {
    "arrival": lambda names, _: ByArrival(names),
    "fifo": lambda names, delay: ByNumber(names, BOUND * delay),
    "real-time": lambda names, delay: ByTime(names, BOUND * delay),
    "lamport": lambda names, delay: ByLamport(names, 2 * delay, BOUND * delay),
    "vector": lambda names, delay: ByVector(names, BOUND * delay),
}
_SOON: Final = 1e-9
"""Seconds from a cause to its effect, at least, whatever the clocks on the wall say."""
_TELLING: Final = frozenset({Mark.ENTER, Mark.START, Mark.WAIT, Mark.END, Mark.VIEW})
"""Marks after which a verdict may be a new one."""


class Phantom(Struct, frozen=True):
    """A verdict on the way that the whole run refutes."""

    verdict: str
    after: int
    """How many events had been delivered."""
    cut: str
    """The latest consistent cut inside them, in words."""
    refuted: bool
    """Whether there is no such verdict on that cut."""

    def __str__(self) -> str:
        """In words."""
        why = "which has none" if self.refuted else "and the run went on from it"
        return f"phantom after {self.after:,} events: {self.verdict} The latest consistent cut was {self.cut}, {why}."


class Replay(Struct, frozen=True, kw_only=True):
    """What a monitor would have seen of a run under a rule of delivery."""

    rule: str
    delay: float
    events: int
    left_out: int
    """Older events that were not replayed."""
    overtaken: int
    """Reports that came after a later one of their process."""
    held: int
    """Reports that were held back, and for how many seconds at most."""
    longest: float
    longest_held: str
    late: int
    """Reports that came too late for their place in the order."""
    probes: int
    disorder: int
    """Events that were delivered before one of their causes."""
    example: str
    """The first of them, in words."""
    phantoms: tuple[Phantom, ...]
    verdict: str | None
    """On the whole run, after the last delivery."""

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
        told = [
            f"Delivery by {self.rule}, with reports that take {self.delay:g} s on average: {self.events:,} events"
            f"{older}, {self.overtaken:,} overtaken.",
            f"  {held if self.held else 'None was held back'}{f'; {self.probes:,} probes' if self.probes else ''}"
            f"{f'; {self.late:,} came too late for their place' if self.late else ''}.",
            f"  The order {order}.",
        ]
        told += [f"  {one}" for one in self.phantoms]
        return [*told, f"  At the end: {self.verdict or 'nobody waits in vain'}"]


def check_rule(name: str) -> None:
    """Refuse a rule of delivery that there is not."""
    if name not in RULES:
        raise UsageError(f"there is no delivery by {name!r}.{did_you_mean(name, RULES)}")


def replay(
    stamps: Mapping[int, Sequence[Stamp]],
    servers: Mapping[str, Sequence[Stamp]] | None = None,
    rule: str = "vector",
    delay: float = DELAY,
) -> Replay:
    """Report a run's events to a monitor that follows a rule of delivery, and judge what it is given."""
    check_rule(rule)
    if not delay > 0:
        raise UsageError(f"reports that take {delay:g} s on average cannot be: give more than 0.")
    first = _first(sorted(one.time for some in (*stamps.values(), *(servers or {}).values()) for one in some))
    kept, served = _since(stamps, first), _since(servers or {}, first)
    trace = trace_of(kept, served)
    whole, part = ({**stamps, **(servers or {})}, {**kept, **served})
    dropped = tuple(len(whole[who]) - len(part[who]) for who in whole)
    heard = _Heard(trace, list(kept))
    monitor = _Clocked(RULES[rule](trace.run.processes, delay))
    reporters = _reporters(trace.run, dropped)
    ended = [
        Kill(reporter.name, reporter.last + _SOON, BOUND * delay)
        for reporter, some in zip(reporters, trace.stamps, strict=True)
        if any(stamp is not None and stamp.mark is Mark.END for stamp in some[-1:])
    ]
    network = LossyNetwork(delay=0.0, jitter=delay)
    world = Simulation([monitor, *reporters], network=network, faults=ended, observer=MONITOR)
    world.performing(MONITOR, lambda work: heard.take(work, world.now - monitor.came[work.report.event]))
    world.run(float("inf"))
    longest, place = max(heard.holds, default=(0.0, EventPosition(0, 1)))
    return Replay(
        rule=rule,
        delay=delay,
        events=sum(trace.run.lengths),
        left_out=sum(dropped),
        overtaken=monitor.overtaken,
        held=len(heard.holds),
        longest=longest,
        longest_held=trace.run.tell(place) if heard.holds else "",
        late=heard.late,
        probes=sum(reporter.probes for reporter in reporters),
        disorder=heard.disorder,
        example=heard.example,
        phantoms=heard.phantoms(),
        verdict=None if (found := heard.judge.final()) is None else found.headline,
    )


def _first(times: Sequence[float]) -> float:
    return times[max(0, len(times) - MOST)] if times else 0.0


def _since(stamps: Mapping[Any, Sequence[Stamp]], first: float) -> dict[Any, list[Stamp]]:
    return {who: [one for one in some if one.time >= first] for who, some in stamps.items()}


class _Clocked:
    """The monitor's machine, and when reports came to it."""

    def __init__(self, inner: Machine) -> None:
        self.name = inner.name
        self.came: dict[EventPosition, float] = {}
        self.overtaken = 0
        self._inner = inner
        self._highest: dict[Name, int] = {}

    def begin(self, now: float) -> Sequence[Effect]:
        """What the machine begins with."""
        return self._inner.begin(now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """What the machine does."""
        if isinstance(event, Received) and isinstance(event.message, EventReport):
            highest = self._highest.get(event.sender, 0)
            self.overtaken += event.message.number < highest
            self._highest[event.sender] = max(highest, event.message.number)
            self.came[event.message.event] = now
        return self._inner.on(event, now)


class _Reporter:
    """A process that lives through its events again, reports each with its clocks, and answers probes.

    Those before are counted, as dropped.
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
        """Live until the first event."""
        missing: list[Effect] = [Send(MONITOR, Dropped(1, self._dropped))] if self._dropped else []
        return missing + self._wait(now)

    def _wait(self, now: float) -> list[Effect]:
        return [SetTimer(self._at[self._done] - now, "next")] if self._done < len(self._at) else []

    def on(self, event: Event, now: float) -> list[Effect]:
        """Do the next thing, or answer."""
        if isinstance(event, Received) and isinstance(event.message, Probe):
            self.probes += 1
            self._lamport = lamport(self._lamport, event.message.lamport)
            return [Send(MONITOR, Alive(self._lamport, self._dropped + self._done))]
        place = EventPosition(self._process, self._done + 1)
        known = [self._clocks[cause] for cause in self._run.causes(place)]
        self._lamport = lamport(self._lamport, *(clock for clock, _ in known))
        self._vector = tick(self._vector, self._process, *(vector for _, vector in known))
        self._clocks[place] = self._lamport, self._vector
        self._done += 1
        time = self._run.event(place).time
        report = EventReport(self._dropped + place.number, time, self._lamport, self._vector, place)
        return [Send(MONITOR, report), *self._wait(now)]


def _reporters(run: Computation, dropped: Vector) -> list[_Reporter]:
    """All processes of a run, on one clock: each event at its time, or right after its causes if theirs are later."""
    at = [[0.0] * length for length in run.lengths]
    for place in run.order:
        before = [at[i][k - 1] for i, k in run.causes(place)]
        before += [at[place.process][place.number - 2]] if place.number > 1 else []
        at[place.process][place.number - 1] = max([run.event(place).time, *(time + _SOON for time in before)])
    clocks: dict[EventPosition, tuple[int, Vector]] = {}
    return [_Reporter(run, process, at[process], dropped, clocks) for process in range(run.size)]


class _Heard:
    """What has been delivered, and what a judge made of it."""

    def __init__(self, trace: FullHistory, ranks: Sequence[int]) -> None:
        self.judge = Judge()
        self.holds: list[tuple[float, EventPosition]] = []
        self.late = self.disorder = 0
        self.example = ""
        self._trace, self._ranks = trace, ranks
        self._delivered: set[EventPosition] = set()
        self._found: dict[str, tuple[Verdict, int, Cut]] = {}

    def take(self, work: Any, hold: float) -> None:
        """A report is delivered, after it was held back for so long."""
        place: EventPosition = work.report.event
        if hold > 0:
            self.holds.append((hold, place))
        self.late += isinstance(work, LateReport)
        self._check(place)
        self._delivered.add(place)
        stamp = self._trace.stamps[place.process][place.number - 1]
        if stamp is not None:
            _feed(self.judge, self._ranks, place.process, stamp)
            if (
                stamp.mark in _TELLING
                and (found := self.judge.final()) is not None
                and found.headline not in self._found
            ):
                self._found[found.headline] = found, len(self._delivered), self._prefix()

    def phantoms(self) -> tuple[Phantom, ...]:
        """Verdicts that are not true of the whole run, the first of each kind."""
        truth = self._judged(self._trace.run.lengths)
        told: dict[str, Phantom] = {}
        for found, after, heard in self._found.values():
            if found.kind not in told and (truth is None or truth.kind != found.kind):
                cut = latest_consistent(self._trace.run, heard)
                there = self._judged(cut)
                refuted = there is None or there.kind != found.kind
                told[found.kind] = Phantom(found.headline, after, self._trace.told(cut), refuted)
        return tuple(told.values())

    def _check(self, place: EventPosition) -> None:
        before = [EventPosition(place.process, place.number - 1)] if place.number > 1 else []
        missing = [one for one in (*before, *self._trace.run.causes(place)) if one not in self._delivered]
        if missing:
            self.disorder += 1
            tell = self._trace.run.tell
            self.example = self.example or f"{tell(place)}, before {tell(missing[0])}"

    def _prefix(self) -> Cut:
        """How many of the first events of each process have been delivered without a gap."""
        counts = [0] * self._trace.run.size
        for process in range(len(counts)):
            while EventPosition(process, counts[process] + 1) in self._delivered:
                counts[process] += 1
        return tuple(counts)

    def _judged(self, cut: Cut) -> Verdict | None:
        judge = Judge()
        for process, number in enumerate(cut):
            for stamp in self._trace.stamps[process][:number]:
                if stamp is not None:
                    _feed(judge, self._ranks, process, stamp)
        return judge.final()


def _feed(judge: Judge, ranks: Sequence[int], process: int, stamp: Stamp) -> None:
    if process < len(ranks):
        judge.feed(ranks[process], [stamp])
    else:
        judge.feed_server([stamp])

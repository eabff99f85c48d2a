"""How old what workers read was, who held up whose pulls, and where numbers went that are not finite."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec import Struct

from offbeat.monitor.calls import call_of
from offbeat.monitor.history import history_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.histories import Computation, EventKind, EventPosition
from offbeat.runtime.events.recorder import Mark, Stamp
from offbeat.runtime.events.servers import PULL, PUSH

AFTER: Final = 2000
"""How many events of each process are looked at to see whom numbers have reached."""

Stamps = Mapping[int, Sequence[Stamp]]
ServerStamps = Mapping[str, Sequence[Stamp]]


# -- reads -----------------------------------------------------------------------------------------------------------


class Staleness(Struct, frozen=True):
    """How old what a worker read was."""

    worker: str
    reads: Mapping[int, int]
    """How often it was so many steps old."""
    worst: int
    step: int
    """In which step it was oldest, the first time."""

    def __str__(self) -> str:
        """In words: `worker 0: 12 x 0, 5 x 1; the oldest in step 41`."""
        told = ", ".join(f"{count:,} x {steps}" for steps, count in sorted(self.reads.items()))
        return f"{self.worker}: {told}{f'; the oldest in step {self.step}' if self.worst else ''}"


def staleness(stamps: Stamps) -> list[Staleness]:
    """How old the reads of each worker were; nothing for those that read from no server."""
    found: list[Staleness] = []
    for rank, some in stamps.items():
        reads = [(stamp.value, stamp.step) for stamp in some if stamp.mark is Mark.READ]
        if reads:
            worst = max(value for value, _ in reads)
            step = min(step for value, step in reads if value == worst)
            counts = Counter(value for value, _ in reads)
            found.append(Staleness(worker_name(rank), dict(sorted(counts.items())), worst, step))
    return found


class Held(Struct, frozen=True):
    """Who held up the pulls of others, by being behind."""

    worker: str
    pulls: int
    seconds: float

    def __str__(self) -> str:
        """In words."""
        return f"{self.worker} held up {self.pulls:,} pulls of the others, for {self.seconds:.3g} s in all"


def held_up(stamps: Stamps) -> list[Held]:
    """For whom pulls had to wait under a bound on staleness, the costliest first."""
    pushed = {rank: _finished(some) for rank, some in stamps.items()}
    pulls, seconds = Counter[int](), defaultdict[int, float](float)
    for rank, some in stamps.items():
        for step, bound, began, ended in _pulls(some):
            reached = {other: _reached(pushed[other], step - bound) for other in stamps if other != rank}
            last = max(reached, key=lambda other: reached[other], default=rank)
            if last != rank and began < reached[last] <= ended:
                pulls[last] += 1
                seconds[last] += reached[last] - began
    told = [Held(worker_name(rank), pulls[rank], seconds[rank]) for rank in pulls]
    return sorted(told, key=lambda one: -one.seconds)


def _finished(stamps: Sequence[Stamp]) -> list[tuple[int, float]]:
    """When a worker had finished so many steps, in order."""
    return [
        (one.step + 1, one.time)
        for one in stamps
        if one.mark is Mark.START and one.value and one.about is not None and one.about.operation == PUSH
    ]


def _reached(finished: Sequence[tuple[int, float]], clock: int) -> float:
    at = bisect_left(finished, (clock, 0.0))
    return finished[at][1] if at < len(finished) else 0.0


def _pulls(stamps: Sequence[Stamp]) -> Iterator[tuple[int, int, float, float]]:
    """Waits in pulls under a bound: step, bound, from when to when."""
    began: dict[int, float] = {}
    for stamp in stamps:
        about = stamp.about
        if about is None or about.operation != PULL or not about.bound:
            continue
        if stamp.mark is Mark.WAIT:
            began[stamp.sequence] = stamp.time
        elif stamp.mark is Mark.EXIT and stamp.sequence in began:
            yield stamp.step, about.bound, began.pop(stamp.sequence), stamp.time


# -- numbers that are not finite -------------------------------------------------------------------------------------


class Unfit(Struct, frozen=True):
    """Numbers that are not finite: whose, and how far they came."""

    worker: str
    step: int
    what: str
    """In what they were given to the others."""
    reached: tuple[str, ...] = ()
    """Who else got them, as far as is known, in the order in which they came there."""
    refused: bool = False
    """Whether servers found them out, and used them nowhere."""

    def __str__(self) -> str:
        """In words."""
        if self.refused:
            return f"{self.worker} pushed numbers that are not fit to be used in step {self.step}: {self.what}"
        whom = f"they reached {', '.join(self.reached)}" if self.reached else "nobody is known to have got them"
        return f"{self.worker} gave NaN or infinite numbers in {self.what}, in step {self.step}: {whom}"


def unfit(stamps: Stamps, servers: ServerStamps) -> list[Unfit]:
    """Numbers that were not finite: those that servers refused, and those that came through, with whom they reached."""
    return [*_refused(servers), *_came_through(stamps, servers)]


def _refused(servers: ServerStamps) -> list[Unfit]:
    found = defaultdict[tuple[int, int], dict[str, str]](dict)
    for name, some in servers.items():
        for stamp in some:
            if stamp.mark is Mark.REFUSED and stamp.about is not None and stamp.about.peer is not None:
                found[stamp.step, stamp.about.peer][name] = stamp.about.words or "unfit"
    told: list[Unfit] = []
    for (step, worker), by in sorted(found.items()):
        what = "; ".join(f"{name} refused its part ({why})" for name, why in sorted(by.items()))
        told.append(Unfit(worker_name(worker), step, f"{what}, and it reached nobody", refused=True))
    return told


class _Source(NamedTuple):
    place: EventPosition
    stamp: Stamp


def _came_through(stamps: Stamps, servers: ServerStamps) -> list[Unfit]:
    """By the order of events: whoever came after a source has what it gave, and is none itself."""
    first = min((one.time for some in stamps.values() for one in some if one.mark is Mark.NAN), default=None)
    if first is None:
        return []
    run = history_of(_from(stamps, first), _from(servers, first))
    sick = [
        _Source(place, stamp)
        for process, (_, some) in enumerate(stamps.items())
        for stamp, place in zip(
            (one for one in some if one.mark is Mark.NAN),
            (EventPosition(process, n) for n, event in enumerate(run.histories[process], 1) if event.what == "nan"),
            strict=False,
        )
    ]
    sources = [one for one in sick if not any(run.happened_before(other.place, one.place) for other in sick)]
    return [_told(run, one) for one in sources]


def _told(run: Computation, source: _Source) -> Unfit:
    about = source.stamp.about
    what = "an exchange" if about is None else str(call_of(about, source.stamp.sequence))
    reached: list[tuple[float, str]] = []
    for process, history in enumerate(run.histories):
        for number, event in enumerate(history, 1):
            takes = event.kind in (EventKind.EXIT, EventKind.RECEIVE)
            if takes and run.happened_before(source.place, EventPosition(process, number)):
                reached.append((event.time, run.processes[process]))
                break
    worker = run.processes[source.place.process]
    names = tuple(name for _, name in sorted(reached) if name != worker)
    return Unfit(worker, source.stamp.step, what, names)


def _from(stamps: Mapping[Any, Sequence[Stamp]], first: float) -> dict[Any, Sequence[Stamp]]:
    return {who: [one for one in some if one.time >= first - 1.0][:AFTER] for who, some in stamps.items()}

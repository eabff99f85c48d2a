"""Staleness of reads, workers that delayed others' pulls, and where NaN and infinite numbers came from and went."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from offbeat.monitor.calls import call_of
from offbeat.monitor.history import ServerStamps, Stamps, trace_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.histories import Computation, EventKind, EventPosition
from offbeat.runtime.events.recorder import Mark, Stamp
from offbeat.runtime.events.servers import PULL, PUSH

AFTER: Final = 2000  # Number of events of each process that are searched for where numbers went.


# -- reads -----------------------------------------------------------------------------------------------------------


class Staleness(Struct, frozen=True):
    """Staleness of a worker's reads."""

    worker: str
    reads: Mapping[int, int]  # Number of reads by how many steps old they were.
    worst: int
    step: int  # The first step with the oldest read.

    def __str__(self) -> str:
        """In words: `worker 0: 12 x 0, 5 x 1; the oldest in step 41`."""
        counts = ", ".join(f"{count:,} x {steps}" for steps, count in sorted(self.reads.items()))
        return f"{self.worker}: {counts}{f'; the oldest in step {self.step}' if self.worst else ''}"


def staleness(stamps: Stamps) -> list[Staleness]:
    """Staleness of each worker that reads from servers."""
    workers: list[Staleness] = []
    for rank, own in stamps.items():
        reads = [(stamp.value, stamp.step) for stamp in own if stamp.mark is Mark.READ]
        if reads:
            worst = max(value for value, _ in reads)
            step = min(step for value, step in reads if value == worst)
            counts = Counter(value for value, _ in reads)
            workers.append(Staleness(worker_name(rank), dict(sorted(counts.items())), worst, step))
    return workers


class Held(Struct, frozen=True):
    """How much a worker delayed others' pulls by being behind."""

    worker: str
    pulls: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.worker} held up {self.pulls:,} pulls of the others, for {self.seconds:.3g} s in all"


def held_up(stamps: Stamps) -> list[Held]:
    """Workers that pulls had to wait for under a bound on staleness, the costliest first."""
    pushes = {
        rank: [
            (stamp.step + 1, stamp.time)
            for stamp in own
            if stamp.mark is Mark.START and stamp.value and stamp.about is not None and stamp.about.operation == PUSH
        ]
        for rank, own in stamps.items()
    }
    pulls, seconds = Counter[int](), defaultdict[int, float](float)
    for rank, own in stamps.items():
        for step, bound, began, ended in _pulls(own):
            reached = {other: _reached(pushes[other], step - bound) for other in stamps if other != rank}
            last = max(reached, key=lambda other: reached[other], default=rank)
            if last != rank and began < reached[last] <= ended:
                pulls[last] += 1
                seconds[last] += reached[last] - began
    workers = [Held(worker_name(rank), pulls[rank], seconds[rank]) for rank in pulls]
    return sorted(workers, key=lambda worker: -worker.seconds)


def _reached(pushes: Sequence[tuple[int, float]], clock: int) -> float:
    """When a worker's clock reached this value."""
    at = bisect_left(pushes, (clock, 0.0))
    return pushes[at][1] if at < len(pushes) else 0.0


def _pulls(stamps: Sequence[Stamp]) -> Iterator[tuple[int, int, float, float]]:
    """Waits in pulls under a bound: step, bound, start, end."""
    began: dict[int, float] = {}
    for stamp in stamps:
        about = stamp.about
        if about is None or about.operation != PULL or not about.bound:
            continue
        if stamp.mark is Mark.WAIT:
            began[stamp.sequence] = stamp.time
        elif stamp.mark is Mark.EXIT and stamp.sequence in began:
            yield stamp.step, about.bound, began.pop(stamp.sequence), stamp.time


# -- NaN and infinite numbers ----------------------------------------------------------------------------------------


class Unfit(Struct, frozen=True):
    """NaN or infinite numbers: the worker that sent them, and how far they spread."""

    worker: str
    step: int
    what: str  # The exchange in which they were sent.
    reached: tuple[str, ...] = ()  # Processes known to have received them, in order of arrival.
    refused: bool = False  # Whether servers detected and discarded them.

    def __str__(self) -> str:
        if self.refused:
            return f"{self.worker} pushed numbers that are not fit to be used in step {self.step}: {self.what}"
        whom = f"they reached {', '.join(self.reached)}" if self.reached else "nobody is known to have got them"
        return f"{self.worker} gave NaN or infinite numbers in {self.what}, in step {self.step}: {whom}"


def unfit(stamps: Stamps, servers: ServerStamps) -> list[Unfit]:
    """NaN or infinite numbers that servers refused, and those that spread, with the processes that they reached."""
    return [*_refused(servers), *_spread(stamps, servers)]


def _refused(servers: ServerStamps) -> Iterator[Unfit]:
    refusals = defaultdict[tuple[int, int], dict[str, str]](dict)
    for name, own in servers.items():
        for stamp in own:
            if stamp.mark is Mark.REFUSED and stamp.about is not None and stamp.about.peer is not None:
                refusals[stamp.step, stamp.about.peer][name] = stamp.about.words or "unfit"
    for (step, worker), reasons in sorted(refusals.items()):
        what = "; ".join(f"{name} refused its part ({why})" for name, why in sorted(reasons.items()))
        yield Unfit(worker_name(worker), step, f"{what}, and it reached nobody", refused=True)


def _spread(stamps: Stamps, servers: ServerStamps) -> list[Unfit]:
    """By causal order: a process that comes after a source has its numbers, and is not a source itself."""
    first = min((stamp.time for own in stamps.values() for stamp in own if stamp.mark is Mark.NAN), default=None)
    if first is None:
        return []
    trace = trace_of(_since(stamps, first), _since(servers, first))
    sick = {
        EventPosition(process, number): stamp
        for process, own in enumerate(trace.stamps)
        for number, stamp in enumerate(own, 1)
        if stamp is not None and stamp.mark is Mark.NAN
    }
    sources = (place for place in sick if not any(trace.run.happened_before(other, place) for other in sick))
    return [_case(trace.run, place, sick[place]) for place in sources]


def _case(run: Computation, source: EventPosition, stamp: Stamp) -> Unfit:
    what = "an exchange" if stamp.about is None else str(call_of(stamp.about, stamp.sequence))
    reached: list[tuple[float, str]] = []
    for process, history in enumerate(run.histories):
        for number, event in enumerate(history, 1):
            takes = event.kind in (EventKind.EXIT, EventKind.RECEIVE)
            if takes and run.happened_before(source, EventPosition(process, number)):
                reached.append((event.time, run.processes[process]))
                break
    worker = run.processes[source.process]
    return Unfit(worker, stamp.step, what, tuple(name for _, name in sorted(reached) if name != worker))


def _since(stamps: Mapping[Any, Sequence[Stamp]], first: float) -> dict[Any, Sequence[Stamp]]:
    return {name: [stamp for stamp in own if stamp.time >= first - 1.0][:AFTER] for name, own in stamps.items()}

"""What a log with vector clocks says about the program that wrote it, whichever program that was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct, to_builtins

from offbeat.monitor.diagram.build import messages
from offbeat.protocols.causality.histories import Computation, EventPosition
from offbeat.protocols.causality.shiviz import ShivizLog

_LISTED = 12  # Number of lines, or processes of a chain, that are listed before the rest is counted.


class ProcessEnd(Struct, frozen=True):
    """How far one process came."""

    process: str
    events: int
    last: str  # Its last event, in words.
    at: int  # Logical time of that event.
    known: int  # Number of its events that any other process knows of.

    def __str__(self) -> str:
        heard = "nobody else has heard of it" if not self.known else f"others know of its first {self.known:,}"
        heard = "others know of all of them" if self.known == self.events else heard
        return f"{self.process}: {self.events:,} events, {heard}; the last, at {self.at:,}: {self.last or '(no words)'}"


class LogFindings(Struct, frozen=True):
    """Statistics of a log."""

    processes: int
    events: int
    messages: int  # Pairs of an event and one elsewhere that learned of it first: messages, as far as clocks tell.
    concurrent: int  # Pairs of events of different processes of which neither happened before the other.
    pairs: int  # Number of pairs in all.
    chain: tuple[str, ...]  # The processes along the longest causal chain of events, neighbours joined.
    chain_events: int
    completed: tuple[int, ...]  # Lines whose clock omitted what follows from it.
    endings: tuple[ProcessEnd, ...]
    skipped: tuple[int, ...] = ()  # Lines that are not part of any event.

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return to_builtins(self)

    def lines(self) -> Iterator[str]:
        """In words."""
        share = f" ({self.concurrent / self.pairs:.0%} of {self.pairs:,})" if self.pairs else ""
        yield f"{self.processes:,} processes, {self.events:,} events, {self.messages:,} messages."
        yield f"Concurrent pairs of events of different processes: {self.concurrent:,}{share}."
        if self.completed:
            lines = _listed([str(line) for line in self.completed], ", ")
            yield f"Clocks: {len(self.completed):,} left out what follows from them, and were completed: lines {lines}."
        else:
            yield "Clocks: consistent."
        if self.skipped:
            lines = _listed([str(line) for line in self.skipped], ", ")
            yield f"Skipped, because they fit no event: {len(self.skipped):,} lines: {lines}."
        yield f"Longest causal chain: {self.chain_events:,} events, through {_listed(self.chain, ' > ')}."
        yield "Last events, the earliest first:"
        yield from (f"  {end}" for end in sorted(self.endings, key=lambda end: end.at))


def account(log: ShivizLog) -> LogFindings:
    """Statistics of a log."""
    run = log.computation
    total = sum(run.lengths)
    ordered = sum(int(clocks.sum() - clocks[:, process].sum()) for process, clocks in enumerate(run.clocks))
    pairs = (total**2 - sum(count**2 for count in run.lengths)) // 2
    chain = longest_chain(run)
    names = tuple(name for name, _ in groupby(run.processes[place.process] for place in chain))
    sent, ends = sum(1 for _ in messages(run)), tuple(_ends(run))
    return LogFindings(
        run.size, total, sent, pairs - ordered, pairs, names, len(chain), log.completed, ends, log.skipped
    )


def longest_chain(run: Computation) -> list[EventPosition]:
    """A longest chain of events each of which happened before the next: no number of machines makes it shorter."""
    ends = [EventPosition(process, count) for process, count in enumerate(run.lengths) if count]
    if not ends:
        return []

    def clock(place: EventPosition) -> int:
        return int(run.lamports[place.process][place.number])

    chain = [max(ends, key=clock)]
    while clock(chain[-1]) > 1:
        place = chain[-1]
        before = [EventPosition(place.process, place.number - 1)] if place.number > 1 else []
        chain.append(next(cause for cause in (*run.causes(place), *before) if clock(cause) == clock(place) - 1))
    return chain[::-1]


def _ends(run: Computation) -> Iterator[ProcessEnd]:
    for process, name in enumerate(run.processes):
        count = run.lengths[process]
        others = (int(clocks[-1, process]) for other, clocks in enumerate(run.clocks) if other != process)
        event = run.event(EventPosition(process, count))
        what = event.what or str(event.call or event.kind)
        yield ProcessEnd(name, count, what, int(run.lamports[process][count]), max(others, default=0))


def _listed(words: Sequence[str], between: str) -> str:
    rest = len(words) - _LISTED
    return between.join(words[:_LISTED]) + (f"{between}and {rest:,} more" if rest > 0 else "")

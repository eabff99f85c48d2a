"""Bytes that a worker sends: those of the schedules that run, and which exchanges a step is made of."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from offbeat.protocols.collectives import Collective
from offbeat.protocols.exchanges import Exchanged, sent_by
from offbeat.protocols.schedule import View

REMEMBERED = 4096
"""Exchanges whose bytes are remembered; sizes that differ each time must not fill the memory."""


class Totals:
    """Bytes that a worker has sent over all lanes."""

    counted = 0
    """By the exchanges of the run."""
    measured = 0
    """Beside that, only to measure what exchanges take."""


class SentBytes:
    """What a worker has sent over all lanes, and what it exchanges over one of them while somebody asks."""

    def __init__(self, totals: Totals | None = None) -> None:
        self.totals = totals or Totals()
        """The same for all lanes."""
        self._recorded: list[Exchanged] | None = None

    def lane(self) -> SentBytes:
        """The same for another lane of the same worker."""
        return SentBytes(self.totals)

    def add(self, nbytes: int, exchanged: Exchanged | None = None) -> None:
        """Count what was sent, and remember what for."""
        self.totals.counted += nbytes
        if self._recorded is not None and exchanged is not None:
            self._recorded.append(exchanged)

    @contextmanager
    def measuring(self) -> Generator[None]:
        """Inside, exchanges count as measurements: they are not part of a step, nor of what the run has sent."""
        before, recorded = self.totals.counted, self._recorded
        self._recorded = None
        try:
            yield
        finally:
            self._recorded = recorded
            self.totals.measured += self.totals.counted - before
            self.totals.counted = before

    def record(self) -> None:
        """From now on, remember what is exchanged over this lane."""
        self._recorded = []

    def recorded(self) -> tuple[Exchanged, ...]:
        """What was exchanged since, and remember no more."""
        recorded, self._recorded = self._recorded, None
        return tuple(recorded or ())


Key = tuple[str, int, int, str | None, int]
"""What, bytes, bytes of an element, by which algorithm (None: the backend's own), and from which root."""


class ExchangeTraffic(dict[Key, tuple[int, Exchanged]]):
    """What this worker sends in an exchange, and the exchange; the schedule of each is walked once."""

    def __init__(self, view: View, rank: int, algorithm: Callable[[Collective, int], str]) -> None:
        super().__init__()
        self._view, self._rank, self._algorithm = view, rank, algorithm

    def __missing__(self, key: Key) -> tuple[int, Exchanged]:
        what, nbytes, itemsize, by, root = key
        exchanged = Exchanged(
            what=cast("Any", what),
            by=by or self._algorithm(Collective(what), nbytes),
            nbytes=nbytes,
            itemsize=itemsize,
            root=root,
        )
        if len(self) >= REMEMBERED:
            self.clear()
        self[key] = sent_by(*exchanged.part(self._view.size), self._view, self._rank), exchanged
        return self[key]

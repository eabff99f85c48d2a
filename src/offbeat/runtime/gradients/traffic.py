"""Bytes that a worker sends, according to the schedules that run, and the exchanges of a step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from offbeat.protocols.collectives import Collective
from offbeat.protocols.exchanges import Exchanged, sent_by
from offbeat.protocols.schedule import View

REMEMBERED = 4096
"""Exchanges whose bytes are cached; sizes that differ each time must not fill the memory."""


class Totals:
    """Bytes that a worker has sent over all lanes."""

    counted = 0
    """In exchanges of the run."""
    measured = 0
    """In further exchanges, made only to time them."""


class SentBytes:
    """Bytes sent over all lanes, and on request the exchanges over one of them."""

    def __init__(self, totals: Totals | None = None) -> None:
        self.totals = totals or Totals()
        self._recorded: list[Exchanged] | None = None

    def lane(self) -> SentBytes:
        """A counter for another lane of the same worker, with the same totals."""
        return SentBytes(self.totals)

    def add(self, nbytes: int, exchanged: Exchanged | None = None) -> None:
        """Count bytes, and record their exchange if requested."""
        self.totals.counted += nbytes
        if self._recorded is not None and exchanged is not None:
            self._recorded.append(exchanged)

    @contextmanager
    def measuring(self) -> Generator[None]:
        """Inside, exchanges count as measurements: not in a step, nor in the bytes of the run."""
        before, recorded = self.totals.counted, self._recorded
        self._recorded = None
        try:
            yield
        finally:
            self._recorded = recorded
            self.totals.measured += self.totals.counted - before
            self.totals.counted = before

    def record(self) -> None:
        """Start recording the exchanges over this lane."""
        self._recorded = []

    def recorded(self) -> tuple[Exchanged, ...]:
        """The exchanges since `record`; stops recording."""
        recorded, self._recorded = self._recorded, None
        return tuple(recorded or ())


Key = tuple[str, int, int, str | None, int]
"""Collective, bytes, bytes of an element, algorithm (None: the backend's own), and root."""


class ExchangeTraffic(dict[Key, tuple[int, Exchanged]]):
    """Cache of the bytes that this worker sends in an exchange, and the exchange."""

    def __init__(self, view: View, rank: int, algorithm: Callable[[Collective, int], str]) -> None:
        super().__init__()
        self._view, self._rank, self._algorithm = view, rank, algorithm

    def __missing__(self, key: Key) -> tuple[int, Exchanged]:
        what, nbytes, itemsize, by, root = key
        by, what = by or self._algorithm(Collective(what), nbytes), cast("Any", what)
        exchanged = Exchanged(what=what, by=by, nbytes=nbytes, itemsize=itemsize, root=root)
        if len(self) >= REMEMBERED:
            self.clear()
        self[key] = sent_by(*exchanged.part(self._view.size), self._view, self._rank), exchanged
        return self[key]

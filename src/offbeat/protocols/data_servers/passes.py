"""One pass of a worker over its slices of a loader's batches, ordered from data servers ahead of need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from offbeat.errors import DataError
from offbeat.protocols.data_servers.reader import BatchReader
from offbeat.protocols.machine import Effect, Payload

Note = TypeVar("Note")
Piece = Callable[[], tuple[Payload, Note]]
"""Cuts a worker's slice of a batch, by the division that holds when it is called: an order, and the loop's own note."""


class LoaderPass(Generic[Note]):
    """Orders batches a window ahead; what was ordered by a division that no longer holds is ordered again.

    So where a worker has died and the others divide its slices, none of them uses a slice of the old division.

    Args:
        reader: The worker's machine.
        loader: Number of the loader.
        first: Number of the first batch.
        pieces: The batches, in order; drawn a window ahead.
        division: How batches are divided now, to be compared.

    """

    def __init__(
        self,
        reader: BatchReader,
        loader: int,
        first: int,
        pieces: Iterator[Piece[Note]],
        division: Callable[[], object],
    ) -> None:
        self._reader, self._loader, self._pieces, self._division = reader, loader, pieces, division
        self._number = first
        self._pending: deque[tuple[Piece[Note], Note]] = deque()
        self._exhausted = False
        self._known = division()
        self._turn = reader.open(loader, first)

    def ordered(self) -> Sequence[Effect]:
        """Order what is missing; call it before each batch."""
        if self._reader.turn(self._loader) != self._turn:
            raise DataError(
                "a loader was iterated again while an earlier pass over it goes on, which data servers cannot follow. "
                "End the first pass before, or prepare() a second loader over the same data."
            )
        effects: list[Effect] = []
        if (division := self._division()) != self._known:
            self._known = division
            self._turn = self._reader.open(self._loader, self._number)
            again, self._pending = self._pending, deque()
            for piece, _ in again:
                effects += self._order(piece)
        while not self._exhausted and len(self._pending) < self._reader.window:
            piece = next(self._pieces, None)
            if piece is None:
                self._exhausted = True
            else:
                effects += self._order(piece)
        return effects

    def _order(self, piece: Piece[Note]) -> Sequence[Effect]:
        payload, note = piece()
        number = self._number + len(self._pending)
        self._pending.append((piece, note))
        return self._reader.order(self._loader, number, payload)

    @property
    def over(self) -> bool:
        """Whether no batch is left; after `ordered`."""
        return not self._pending

    @property
    def is_last(self) -> bool:
        """Whether the next batch is the last; known only after one more was looked for, as `ordered` does."""
        return self._exhausted and len(self._pending) == 1

    @property
    def note(self) -> Note:
        """The loop's note on the next batch."""
        return self._pending[0][1]

    def use(self) -> Sequence[Effect]:
        """The next batch is used."""
        self._pending.popleft()
        self._number += 1
        return self._reader.use(self._loader)

"""The board of an arena: on it each rank says which operation it is in, who it is, and what has become of it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.collectives.one_sided.tickets import SegmentError

BOARD = 8192
"""Bytes of the board, which lies at the beginning of an arena's memory."""
THERE, FAILED, LEFT = range(3)
"""What has become of a rank."""
CALLS, STAGES, SLOTS = range(3)
"""What is counted: operations entered, single stages, and slots of the ring used."""
DEPTH = 5
"""Slots of the ring, which overlapping stages go round."""
TURNS = (1, 2, DEPTH)
"""How many slots there are of each kind, which are used in turn; operations that take none always have the same."""
_FIELDS = 2
_NUMBERS = 16
"""Words of the board for a ticket, which the first rank gives out to the others."""


class Board:
    """By parity of a call and by rank its number and its mark; then processes, statuses and cores."""

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        words: Any = segment.array(0, BOARD // 8, np.int64)
        self.words: memoryview = memoryview(words)
        """All of it."""
        self._pids = size * _FIELDS * 2
        self._statuses = self._pids + size
        cores = self._statuses + size
        self._ticket = cores + size
        if self._ticket + _NUMBERS > len(words):
            raise SegmentError(f"{size} ranks on one host do not fit on a board")
        self.address = segment.address
        """Where it lies in this process."""
        self.cores = self.address + 8 * cores
        """Where the core of each rank stands, counted from 1: an address in this process."""
        self.counts: NDArray[np.int64] = np.zeros(3, np.int64)
        """What was done so far, where the compiled executor counts it, too."""
        self._counts = memoryview(self.counts)  # pyright: ignore[reportArgumentType]
        self.words[self._pids + rank] = os.getpid()
        self.status = THERE

    @property
    def calls(self) -> int:
        """Operations entered so far."""
        return self._counts[CALLS]

    @property
    def base(self) -> int:
        """Where the marks of the latest call stand."""
        return (self._counts[CALLS] & 1) * self._size * _FIELDS

    def enter(self, mark: int) -> int:
        """Begin an operation: write on the board which one. Returns where the marks of this call stand."""
        self._counts[CALLS] = calls = self._counts[CALLS] + 1
        base = (calls & 1) * self._size * _FIELDS
        place = base + self._rank * _FIELDS
        words = self.words
        words[place + 1] = mark
        words[place] = calls
        return base

    def marks(self, base: int) -> list[int]:
        """What each rank has written for this call; to be read after a signal of each."""
        return self.words[base + 1 : base + 1 + self._size * _FIELDS : _FIELDS].tolist()

    def whereabouts(self) -> list[tuple[int, int]]:
        """The last call that each rank has entered: its number and mark."""
        table = np.array(self.words[: self._pids]).reshape(2, self._size, _FIELDS)
        return [max(map(tuple, table[:, peer].tolist())) for peer in range(self._size)]

    def next_turn(self, slots: int) -> int:
        """Which slot of a kind comes next: of the two for single stages (`STAGES`), or of the ring (`SLOTS`)."""
        return self._counts[slots] % TURNS[slots]

    def turn(self, slots: int, pieces: int = 1) -> int:
        """Take so many slots of a kind: which comes first."""
        first = self.next_turn(slots)
        self._counts[slots] += pieces
        return first

    @property
    def status(self) -> int:
        """What has become of this rank."""
        return self.words[self._statuses + self._rank]

    @status.setter
    def status(self, status: int) -> None:
        self.words[self._statuses + self._rank] = status

    def with_status(self, status: int) -> list[int]:
        """The other ranks of which this has become."""
        statuses = self.words[self._statuses : self._statuses + self._size].tolist()
        return [peer for peer, found in enumerate(statuses) if found == status and peer != self._rank]

    def process(self, peer: int) -> int:
        """Which process a rank is."""
        return self.words[self._pids + peer]

    def give_out(self, ticket: str) -> None:
        """Write down a ticket of memory for all; an empty one says that there is none."""
        for position, number in enumerate(ticket.split(":") if ticket else "000"):
            self.words[self._ticket + position] = int(number)

    def given_out(self) -> str:
        """The ticket that was written down last; empty if there was no memory."""
        numbers = self.words[self._ticket : self._ticket + 3].tolist()
        return ":".join(map(str, numbers)) if numbers[2] else ""

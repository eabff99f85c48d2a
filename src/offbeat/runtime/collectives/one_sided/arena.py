"""What the ranks of one group on one host share: a board with the state of each, signals, and slots for data.

Everything moves in stages: a rank writes its slot, signals all others, takes a signal from each of them, and reads
their slots. It may write that slot again when it has taken the signals of the stage after the next: by then all ranks
have read it. So two alternating slots are enough for single stages, and five for stages that overlap in a pipeline, in
which reduced data may stay in the slots it was read from.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.runtime.collectives.messages import channels
from offbeat.runtime.collectives.one_sided.segment import Segment, SegmentError
from offbeat.runtime.collectives.one_sided.signals import SIGNAL_BYTES, Life, Waiter, lay_out, semaphore_at

BOARD = 8192
"""Bytes of the board, at the beginning of an arena's memory."""
THERE, FAILED, LEFT = range(3)
"""States of a rank."""
CALLS, STAGES, SLOTS = range(3)
"""Counters: operations entered, single stages, and slots of the ring used."""
DEPTH = 5
"""Slots of the ring, which overlapping stages use in turn."""
TURNS = (1, 2, DEPTH)
"""Slots behind each counter; operations that use none have one turn."""
_FIELDS = 2
_NUMBERS = 16
"""Words of the board for a ticket, which the first rank publishes to the others."""
SMALL = 1 << 17
"""Bytes of a slot for single stages."""
ONE_SHOT = 1 << 11
"""Bytes up to which an all-reduce takes one stage; beyond, two are faster, as each reads less of the others' data."""
CHUNK = 1 << 19
"""Bytes of a slot of the ring: small enough for the caches, large enough to hide the interpreter's overhead."""
PHASES = 2
"""Stages that overlap in one operation: inputs and results."""
HAS_FAILED = "has failed"
"""Why a rank that has given up will not signal any more."""
Explains = Callable[[str, Sequence[int]], Exception]
"""Turns a hopeless wait into an error: why no signal can come, and from which ranks of the arena."""


def _nobody(peer: int) -> None:
    raise SegmentError(f"this arena has been left: nothing can come from rank {peer}")


def _channels_at(size: int) -> int:
    """Where the channels begin in an arena's memory."""
    return BOARD + size * size * SIGNAL_BYTES + 2 * size * SMALL


class Board:
    """The state of each rank: by parity of a call its number and mark; then process, status and core."""

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        words: Any = segment.array(0, BOARD // 8, np.int64)
        self.words: memoryview = memoryview(words)
        self._pids = size * _FIELDS * 2
        self._statuses = self._pids + size
        cores = self._statuses + size
        self._ticket = cores + size
        self._abilities = self._ticket + _NUMBERS
        if self._abilities + size > len(words):
            raise SegmentError(f"{size} ranks on one host do not fit on a board")
        self.address = segment.address
        self.cores = self.address + 8 * cores
        """Address of the core of each rank, counted from 1."""
        self.counts: NDArray[np.int64] = np.zeros(3, np.int64)
        """The counters, which the compiled executor advances as well."""
        self._counts = memoryview(self.counts)  # pyright: ignore[reportArgumentType]
        self.words[self._pids + rank] = os.getpid()
        self.status = THERE

    @property
    def calls(self) -> int:
        """Operations entered so far."""
        return self._counts[CALLS]

    @property
    def base(self) -> int:
        """Position of the marks of the latest call."""
        return (self._counts[CALLS] & 1) * self._size * _FIELDS

    def enter(self, mark: int) -> int:
        """Begin an operation: write its mark. Returns the position of the marks of this call."""
        self._counts[CALLS] = calls = self._counts[CALLS] + 1
        base = (calls & 1) * self._size * _FIELDS
        place = base + self._rank * _FIELDS
        words = self.words
        words[place + 1] = mark
        words[place] = calls
        return base

    def marks(self, base: int) -> list[int]:
        """The mark of each rank in this call; valid after a signal from each."""
        return self.words[base + 1 : base + 1 + self._size * _FIELDS : _FIELDS].tolist()

    def whereabouts(self) -> list[tuple[int, int]]:
        """Number and mark of the last call that each rank has entered."""
        table = np.array(self.words[: self._pids]).reshape(2, self._size, _FIELDS)
        return [max(map(tuple, table[:, peer].tolist())) for peer in range(self._size)]

    def next_turn(self, slots: int) -> int:
        """The next slot of a kind: of the two for single stages (`STAGES`), or of the ring (`SLOTS`)."""
        return self._counts[slots] % TURNS[slots]

    def turn(self, slots: int, pieces: int = 1) -> int:
        """Take slots of a kind, and return the first."""
        first = self.next_turn(slots)
        self._counts[slots] += pieces
        return first

    @property
    def status(self) -> int:
        """The state of this rank."""
        return self.words[self._statuses + self._rank]

    @status.setter
    def status(self, status: int) -> None:
        self.words[self._statuses + self._rank] = status

    def with_status(self, status: int) -> list[int]:
        """The other ranks in this state."""
        statuses = self.words[self._statuses : self._statuses + self._size].tolist()
        return [peer for peer, other in enumerate(statuses) if other == status and peer != self._rank]

    def agree_on(self, ability: int) -> Callable[[], int]:
        """Publish this rank's ability; the result returns the least of all ranks', once all have published."""
        self.words[self._abilities + self._rank] = ability
        return lambda: min(self.words[self._abilities : self._abilities + self._size].tolist())

    def process(self, peer: int) -> int:
        """The process of a rank."""
        return self.words[self._pids + peer]

    def publish_ticket(self, ticket: str) -> None:
        """Publish the ticket of a segment; an empty one says that there is none."""
        for position, number in enumerate(ticket.split(":") if ticket else "000"):
            self.words[self._ticket + position] = int(number)

    def ticket(self) -> str:
        """The ticket that was published last; empty if there was no memory."""
        numbers = self.words[self._ticket : self._ticket + 3].tolist()
        return ":".join(map(str, numbers)) if numbers[2] else ""


class Slots:
    """Slots for data: two per rank for single stages, and a ring of larger ones, allocated when first needed."""

    def __init__(self, segment: Segment, size: int) -> None:
        self._segment, self._size = segment, size
        self._begin = BOARD + size * size * SIGNAL_BYTES
        self.ring_size = PHASES * DEPTH * size * CHUNK
        self.ring: Segment | None = None

    @property
    def stretches(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Address and bytes of the slots for single stages and of the ring in this process."""
        ring = (0, 0) if self.ring is None else (self.ring.address, self.ring.size)
        return (self._segment.address, self._segment.size), ring

    def small(self, turn: int, rank: int) -> NDArray[np.uint8]:
        """A rank's slot for a single stage."""
        return self._segment.array(self._begin + (turn * self._size + rank) * SMALL, SMALL, np.uint8)

    def large(self, phase: int, turn: int, rank: int) -> NDArray[np.uint8]:
        """A slot of the ring."""
        ring: Any = self.ring
        return ring.array(((phase * DEPTH + turn) * self._size + rank) * CHUNK, CHUNK, np.uint8)


class Arena:
    """The shared memory of the ranks of one group on one host, as one of them sees it."""

    def __init__(self, segment: Segment, rank: int, names: Sequence[int], explain: Explains) -> None:
        self.rank, self.size = rank, len(names)
        self.others = tuple(peer for peer in range(self.size) if peer != rank)
        self.names = tuple(names)
        """The ranks' numbers outside of the arena."""
        self.board, self.slots = Board(segment, rank, self.size), Slots(segment, self.size)
        self._explain = explain
        self._segment = segment
        self._lives: dict[int, Life] = {}
        self._waiter = Waiter(self._alive)
        self.aborted = False
        self.timeout: Callable[[], float] = lambda: 600.0
        """Seconds that a wait may take; called only when a signal is late."""
        self._late_since: float | None = None
        self._kept = [[semaphore_at(segment, place - segment.address) for place in side] for side in self.signals]
        self.posts: tuple[Callable[[], None], ...] = tuple(semaphore.release for semaphore in self._kept[0])
        self.takes: tuple[tuple[Callable[..., bool], int], ...] = tuple(
            (semaphore.acquire, peer) for semaphore, peer in zip(self._kept[1], self.others, strict=True)
        )

    @staticmethod
    def bytes_for(size: int) -> int:
        """Bytes of an arena for this many ranks."""
        return _channels_at(size) + channels.bytes_for(size)

    @classmethod
    def create(cls, size: int) -> Segment:
        """The memory of an arena, created by its first rank."""
        segment = Segment.create(cls.bytes_for(size))
        lay_out(segment, BOARD, size * size)
        channels.lay_out(segment.address + _channels_at(size), size)
        return segment

    def open_channels(self) -> channels.Channels | None:
        """Open this rank's channels; None on all ranks where one lacks the library. All ranks call this together."""
        opened = None
        if channels.library() is not None:
            place = self._segment.address + _channels_at(self.size)
            opened = channels.Channels(place, self.rank, self.size, self._segment)
        able = self.board.agree_on(int(opened is not None))
        self.sync()
        return opened if able() else None

    @property
    def signals(self) -> tuple[list[int], list[int]]:
        """Addresses of the signals to and from each of the others in this process."""
        begin, size, me = self._segment.address + BOARD, self.size, self.rank
        sent = [begin + (me * size + peer) * SIGNAL_BYTES for peer in self.others]
        return sent, [begin + (peer * size + me) * SIGNAL_BYTES for peer in self.others]

    def post(self) -> None:
        """Signal all others that this rank's slot of this stage is written."""
        for post in self.posts:
            post()

    def take(self) -> None:
        """Wait for a signal from each of the others."""
        for acquire, peer in self.takes:
            if not acquire(False):
                self._late_since = None
                self._waiter.wait(acquire, peer)

    def sync(self) -> None:
        """A stage without data."""
        self.post()
        self.take()

    def doubt(self, peer: int, first: bool) -> None:
        """Raise if no signal can come from `peer`; called every 100 ms, with `first` when it begins to be late."""
        if first:
            self._late_since = None
        self._alive(peer)

    def waited(self) -> float:
        """Seconds that the current wait has taken."""
        return 0.0 if self._late_since is None else time.monotonic() - self._late_since

    def _alive(self, peer: int) -> None:
        now = time.monotonic()
        if self._late_since is None:
            self._late_since = now - 0.1
        if self.aborted:
            raise self._failed("this rank has aborted the group", [])
        if dead := self.dead():
            raise self._failed("has died", dead)
        left = self.board.with_status(LEFT)
        if peer in left:
            raise self._failed("has left the group", [peer])
        if failed := self.board.with_status(FAILED):
            raise self._failed("has left the group", left) if left else self._failed(HAS_FAILED, failed)
        if now - self._late_since > self.timeout():
            raise self._failed("", [peer])

    def dead(self) -> list[int]:
        """The other ranks whose processes are gone."""
        for other in self.others:
            if other not in self._lives:
                self._lives[other] = Life(self.board.process(other))
        return [other for other in self.others if self._lives[other].over]

    def _failed(self, why: str, peers: Sequence[int]) -> Exception:
        error = self._explain(why, peers)
        self.fail()
        return error

    def fail(self) -> None:
        """Tell the others that no more signals will come from this rank."""
        self.board.status = FAILED

    def share_segment(self, size: int) -> Segment:
        """A further segment for all ranks of the arena, created by the first; all call this together."""
        if self.rank == 0:
            try:
                segment = Segment.create(size)
            except SegmentError:
                self.board.publish_ticket("")
                self.sync()
                raise
            segment.bytes[::4096] = 0  # Touched now, so that no later call pays for it.
            self.board.publish_ticket(segment.ticket)
            self.sync()
        else:
            self.sync()
            ticket = self.board.ticket()
            if not ticket:
                raise SegmentError(f"rank 0 of this host could not allocate {size:,} bytes of shared memory")
            segment = Segment.attach(ticket, size)
        self.sync()
        segment.seal()
        return segment

    def leave(self) -> None:
        """Leave the arena; its memory is freed when the last rank has left."""
        if self.board.status == THERE:
            self.board.status = LEFT
        for life in self._lives.values():
            life.close()
        self._lives.clear()
        self._waiter = Waiter(_nobody)  # The old one refers to this arena, which would keep its memory until collected.

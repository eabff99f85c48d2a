"""What the ranks of one group on one host share: a board on which each says where it is, signals, and slots for data.

Everything moves in stages: a rank writes its slot, signals all others, takes a signal from each of them, and reads
their slots. It may write that slot again when it has taken the signals of the stage after the next: by then everybody
has read it. So two slots in turn are enough for single stages, and five for stages that overlap in a pipeline, in which
what was reduced may stay in the slots that were read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.runtime.collectives.one_sided.board import BOARD, DEPTH, FAILED, LEFT, THERE, Board
from offbeat.runtime.collectives.one_sided.segment import Segment, SegmentError
from offbeat.runtime.collectives.one_sided.signals import SIGNAL_BYTES, Life, Waiter, lay_out, semaphore_at

SMALL = 1 << 17
"""Bytes of a slot for single stages."""
ONE_SHOT = 1 << 11
"""Bytes up to which an all-reduce is one stage; beyond, two take less time, as each reads less of what others wrote."""
CHUNK = 1 << 19
"""Bytes of a slot of the ring: small enough for the caches, large enough that the interpreter does not matter."""
PHASES = 2
"""Stages that overlap in one operation: what is brought, and what came of it."""
HAS_FAILED = "has failed"
"""Why nothing more comes from a rank that has given up itself."""


def _nobody(peer: int) -> None:
    raise SegmentError(f"this arena has been left: nothing can come from rank {peer}")


Explains = Callable[[str, Sequence[int]], Exception]
"""Turns a hopeless wait into an error in words: why nothing more can come, and from which ranks of the arena."""


class Slots:
    """Where ranks put data: slots for single stages, and a ring of larger ones, made when it is first needed."""

    def __init__(self, segment: Segment, size: int) -> None:
        self._segment, self._size = segment, size
        self._begin = BOARD + size * size * SIGNAL_BYTES
        self.ring_bytes = PHASES * DEPTH * size * CHUNK
        """How much memory the ring takes."""
        self.ring: Segment | None = None
        """The memory of the ring."""

    @property
    def stretches(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where all slots for single stages and the ring lie in this process: address and bytes."""
        ring = (0, 0) if self.ring is None else (self.ring.address, self.ring.size)
        return (self._segment.address, self._segment.size), ring

    def small(self, turn: int, rank: int) -> NDArray[np.uint8]:
        """The slot of a rank for a single stage."""
        return self._segment.array(self._begin + (turn * self._size + rank) * SMALL, SMALL, np.uint8)

    def large(self, phase: int, turn: int, rank: int) -> NDArray[np.uint8]:
        """A slot of the ring."""
        ring: Any = self.ring
        return ring.array(((phase * DEPTH + turn) * self._size + rank) * CHUNK, CHUNK, np.uint8)


class Arena:
    """The ranks of one group on one host, as one of them sees it."""

    def __init__(self, segment: Segment, rank: int, names: Sequence[int], explain: Explains) -> None:
        self.rank, self.size = rank, len(names)
        self.others = tuple(peer for peer in range(self.size) if peer != rank)
        """All ranks but this one."""
        self.names = tuple(names)
        """What the ranks of the arena are called outside of it."""
        self.board, self.slots = Board(segment, rank, self.size), Slots(segment, self.size)
        self._explain = explain
        self._segment = segment
        self._lives: dict[int, Life] = {}
        self._waiter = Waiter(self._alive)
        self.aborted = False
        self.timeout: Callable[[], float] = lambda: 600.0
        """Seconds that a wait may take; asked only when something really is late."""
        self._late_since: float | None = None
        self._kept = [[semaphore_at(segment, place - segment.address) for place in side] for side in self.signals]
        self.posts: tuple[Callable[[], None], ...] = tuple(made.release for made in self._kept[0])
        """Signal each of the others."""
        self.takes: tuple[tuple[Callable[..., bool], int], ...] = tuple(
            (made.acquire, peer) for made, peer in zip(self._kept[1], self.others, strict=True)
        )
        """Take a signal from each of the others."""

    @staticmethod
    def bytes_for(size: int) -> int:
        """How much memory an arena for so many ranks takes."""
        return BOARD + size * size * SIGNAL_BYTES + 2 * size * SMALL

    @classmethod
    def create(cls, size: int) -> Segment:
        """The memory of an arena, made by its first rank."""
        segment = Segment.create(cls.bytes_for(size))
        lay_out(segment, BOARD, size * size)
        return segment

    @property
    def signals(self) -> tuple[list[int], list[int]]:
        """Where the signals to and from each of the others lie in this process."""
        begin, size, me = self._segment.address + BOARD, self.size, self.rank
        sent = [begin + (me * size + peer) * SIGNAL_BYTES for peer in self.others]
        return sent, [begin + (peer * size + me) * SIGNAL_BYTES for peer in self.others]

    # -- waiting -----------------------------------------------------------------------------------------------------

    def post(self) -> None:
        """Tell all others that my slot of this stage is written."""
        for post in self.posts:
            post()

    def take(self) -> None:
        """Wait until all others have told so."""
        for acquire, peer in self.takes:
            if not acquire(False):
                self._late_since = None
                self._waiter.wait(acquire, peer)

    def sync(self) -> None:
        """A stage without data."""
        self.post()
        self.take()

    def doubt(self, peer: int, first: bool) -> None:
        """Raise if there is no hope for a signal of `peer`; asked every 100 ms, `first` when it begins to be late."""
        if first:
            self._late_since = None
        self._alive(peer)

    def waited(self) -> float:
        """Seconds since the signal that is waited for was asked for."""
        return 0.0 if self._late_since is None else time.monotonic() - self._late_since

    def _alive(self, peer: int) -> None:
        """Raise if there is no more hope for a signal of `peer`; asked while nothing comes."""
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
        """The others whose processes are gone."""
        for other in self.others:
            if other not in self._lives:
                self._lives[other] = Life(self.board.process(other))
        return [other for other in self.others if self._lives[other].over]

    def _failed(self, why: str, peers: Sequence[int]) -> Exception:
        error = self._explain(why, peers)
        self.fail()
        return error

    def fail(self) -> None:
        """Tell the others that nothing more will come from here."""
        self.board.status = FAILED

    # -- memory ------------------------------------------------------------------------------------------------------

    def share_segment(self, size: int) -> Segment:
        """More memory for all ranks of the arena, made by the first; all call this together."""
        if self.rank == 0:
            try:
                segment = Segment.create(size)
            except SegmentError:
                self.board.give_out("")
                self.sync()
                raise
            segment.bytes[::4096] = 0  # Touched now, so that nobody pays for it later.
            self.board.give_out(segment.ticket)
            self.sync()
        else:
            self.sync()
            ticket = self.board.given_out()
            if not ticket:
                raise SegmentError(f"rank 0 of this host could not have {size:,} bytes of shared memory")
            segment = Segment.attach(ticket, size)
        self.sync()
        segment.seal()
        return segment

    def leave(self) -> None:
        """Say goodbye; the memory goes when the last one has left."""
        if self.board.status == THERE:
            self.board.status = LEFT
        for life in self._lives.values():
            life.close()
        self._lives.clear()
        self._waiter = Waiter(_nobody)  # The other one knows this arena, which would keep its memory until collected.

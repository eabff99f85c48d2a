"""What the ranks of one group on one host share: a board on which each says where it is, signals, and slots for data.

Everything moves in stages: a rank writes its slot, signals all others, takes a signal from each of them, and reads
their slots. It may write that slot again when it has taken the signals of the stage after the next: by then everybody
has read it. So two slots in turn are enough for single stages, and five for stages that overlap in a pipeline, in which
what was reduced may stay in the slots that were read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.runtime.shared.segment import Segment, SegmentError
from offbeat.runtime.shared.signals import SIGNAL_BYTES, Life, Waiter, lay_out, semaphore_at

SMALL = 1 << 17
"""Bytes of a slot for single stages."""
ONE_SHOT = 1 << 11
"""Bytes up to which an all-reduce is one stage; beyond, two take less time, as each reads less of what others wrote."""
CHUNK = 1 << 19
"""Bytes of a slot of the ring: small enough for the caches, large enough that the interpreter does not matter."""
DEPTH = 5
"""Slots of the ring, which overlapping stages go round."""
PHASES = 2
"""Stages that overlap in one operation: what is brought, and what came of it."""
_BOARD = 8192
_FIELDS = 2
_NUMBERS = 16
"""Words of the board for tickets, which a rank gives out to the others."""
FAILED = "has failed"
"""Why nothing more comes from a rank that has given up itself."""
CALLS, STAGES, SLOTS = range(3)
"""What is counted: operations entered, single stages, and slots of the ring used."""
_STATUS = ("there", "failed", "left")
"""What has become of a rank, by the number on the board."""


def _nobody(peer: int) -> None:
    raise SegmentError(f"this room has been left: nothing can come from rank {peer}")


class Explains(Protocol):
    """Who turns a hopeless wait into an error in words."""

    def __call__(self, why: str, peers: Sequence[int]) -> Exception:
        """An error that says why nothing more can come from these peers (ranks in the room)."""
        ...


class Room:
    """The ranks of one group on one host, as one of them sees it."""

    def __init__(self, segment: Segment, rank: int, names: Sequence[int], explain: Explains) -> None:
        self.rank, self.size = rank, len(names)
        self.others = tuple(peer for peer in range(self.size) if peer != rank)
        """All ranks but this one."""
        self.names = tuple(names)
        """What the ranks of the room are called outside of it."""
        size = self.size
        self._explain = explain
        self._segment = segment
        self._lives: list[Life | None] = [None] * size
        self._waiter = Waiter(self._alive)
        self.aborted = False
        self.timeout: Callable[[], float] = lambda: 600.0
        """Seconds that a wait may take; asked only when something really is late."""
        self._late_since: float | None = None
        words: Any = segment.array(0, _BOARD // 8, np.int64)
        self.words: memoryview = memoryview(words)
        """The board: by parity of a call and by rank its number and its mark; then processes, statuses and cores."""
        self._pids = size * _FIELDS * 2
        self._statuses = self._pids + size
        self._cores = self._statuses + size
        self._tickets = self._cores + size
        if self._tickets + _NUMBERS > len(words):
            raise SegmentError(f"{size} ranks on one host are more than a board has room for")
        self.counts: NDArray[np.int64] = np.zeros(3, np.int64)
        """What was done so far, where the compiled executor counts it, too."""
        self._counts = memoryview(self.counts)  # pyright: ignore[reportArgumentType]
        self._wire()
        self._ring: Segment | None = None

    @staticmethod
    def bytes_for(size: int) -> int:
        """How much memory a room for so many ranks takes."""
        return _BOARD + size * size * SIGNAL_BYTES + 2 * size * SMALL

    @classmethod
    def create(cls, size: int) -> Segment:
        """The memory of a room, made by its first rank."""
        segment = Segment.create(cls.bytes_for(size))
        lay_out(segment, _BOARD, size * size)
        return segment

    def _wire(self) -> None:
        def signal(source: int, target: int) -> Any:
            return semaphore_at(self._segment, _BOARD + (source * self.size + target) * SIGNAL_BYTES)

        others = self.others
        self._kept = [signal(self.rank, peer) for peer in others], [signal(peer, self.rank) for peer in others]
        self.posts: tuple[Callable[[], None], ...] = tuple(made.release for made in self._kept[0])
        """Signal each of the others."""
        self.takes: tuple[tuple[Callable[..., bool], int], ...] = tuple(
            (made.acquire, peer) for made, peer in zip(self._kept[1], others, strict=True)
        )
        """Take a signal from each of the others."""
        self.words[self._pids + self.rank] = os.getpid()
        self.words[self._statuses + self.rank] = 0

    @property
    def calls(self) -> int:
        """Operations entered so far."""
        return self._counts[CALLS]

    # -- where everybody is ------------------------------------------------------------------------------------------

    def enter(self, mark: int) -> int:
        """Begin an operation: write on the board which one. Returns where the marks of this call stand."""
        self._counts[CALLS] = calls = self._counts[CALLS] + 1
        base = (calls & 1) * self.size * _FIELDS
        place = base + self.rank * _FIELDS
        words = self.words
        words[place + 1] = mark
        words[place] = calls
        return base

    @property
    def base(self) -> int:
        """Where the marks of the latest call stand."""
        return (self._counts[CALLS] & 1) * self.size * _FIELDS

    def marks(self, base: int) -> list[int]:
        """What each rank has written for this call; to be read after a signal of each."""
        words = self.words
        return [words[base + 1 + peer * _FIELDS] for peer in range(self.size)]

    def next_turn(self, small: bool) -> int:
        """Which slot comes next: of the two for single stages, or of the ring."""
        return self._counts[STAGES] % 2 if small else self._counts[SLOTS] % DEPTH

    def turn(self, small: bool, pieces: int = 1) -> int:
        """Begin a single stage, or take so many slots of the ring: which slot comes first."""
        first = self.next_turn(small)
        self._counts[STAGES if small else SLOTS] += pieces
        return first

    def whereabouts(self) -> list[tuple[int, int]]:
        """The last call that each rank has entered: its number and mark."""
        found: list[tuple[int, int]] = []
        for peer in range(self.size):
            both = [
                (self.words[parity * self.size * _FIELDS + peer * _FIELDS], parity * self.size * _FIELDS)
                for parity in (0, 1)
            ]
            number, base = max(both)
            found.append((number, self.words[base + peer * _FIELDS + 1]))
        return found

    # -- waiting -----------------------------------------------------------------------------------------------------

    def post(self) -> None:
        """Tell all others that my slot of this stage is written."""
        for post in self.posts:
            post()

    def take(self) -> None:
        """Wait until all others have told so."""
        for acquire, peer in self.takes:
            if not acquire(False):
                self.wait_for(acquire, peer)

    def wait_for(self, acquire: Callable[..., bool], peer: int) -> None:
        """Wait for a signal of one of the others that is not there yet."""
        self._late_since = None
        self._waiter.wait(acquire, peer)

    def doubt(self, peer: int, first: bool) -> None:
        """Raise if there is no hope for a signal of `peer`; asked every 100 ms, `first` when it begins to be late."""
        if first:
            self._late_since = None
        self._alive(peer)

    def waited(self) -> float:
        """Seconds since the signal that is waited for was asked for."""
        return 0.0 if self._late_since is None else time.monotonic() - self._late_since

    def sync(self) -> None:
        """A stage without data."""
        self.post()
        self.take()

    def _alive(self, peer: int) -> None:
        """Raise if there is no more hope for a signal of `peer`; asked while nothing comes."""
        now = time.monotonic()
        if self._late_since is None:
            self._late_since = now - 0.1
        if self.aborted:
            raise self._failed("this rank has aborted the group", [])
        others, dead = self.others, self.dead()
        if dead:
            raise self._failed("has died", dead)
        statuses = {other: _STATUS[self.words[self._statuses + other]] for other in others}
        if statuses[peer] == "left":
            raise self._failed("has left the group", [peer])
        failed = [other for other in others if statuses[other] == "failed"]
        if failed:
            left = [other for other in others if statuses[other] == "left"]
            raise self._failed("has left the group", left) if left else self._failed(FAILED, failed)
        if now - self._late_since > self.timeout():
            raise self._failed("", [peer])

    def dead(self) -> list[int]:
        """The others whose processes are gone."""
        return [other for other in self.others if self._life(other).over]

    def _failed(self, why: str, peers: Sequence[int]) -> Exception:
        error = self._explain(why, peers)
        self.words[self._statuses + self.rank] = _STATUS.index("failed")
        return error

    def fail(self) -> None:
        """Tell the others that nothing more will come from here."""
        self.words[self._statuses + self.rank] = _STATUS.index("failed")

    def _life(self, peer: int) -> Life:
        life = self._lives[peer]
        if life is None:
            life = self._lives[peer] = Life(self.words[self._pids + peer])
        return life

    # -- slots -------------------------------------------------------------------------------------------------------

    @property
    def board(self) -> int:
        """Where the board lies in this process."""
        return self._segment.address

    @property
    def cores(self) -> int:
        """Where on the board the core of each rank stands, counted from 1: an address in this process."""
        return self._segment.address + 8 * self._cores

    @property
    def signals(self) -> tuple[list[int], list[int]]:
        """Where the signals to and from each of the others lie in this process."""
        begin, size, me = self._segment.address + _BOARD, self.size, self.rank
        sent = [begin + (me * size + peer) * SIGNAL_BYTES for peer in self.others]
        return sent, [begin + (peer * size + me) * SIGNAL_BYTES for peer in self.others]

    @property
    def stretches(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where all slots for single stages and the ring lie in this process: address and bytes."""
        ring = (0, 0) if self._ring is None else (self._ring.address, self._ring.size)
        return (self._segment.address, self._segment.size), ring

    def small(self, parity: int, rank: int) -> NDArray[np.uint8]:
        """The slot of a rank for a single stage."""
        start = _BOARD + self.size * self.size * SIGNAL_BYTES + (parity * self.size + rank) * SMALL
        return self._segment.bytes[start : start + SMALL]

    @property
    def has_ring(self) -> bool:
        """Whether the ring was made."""
        return self._ring is not None

    def ring(self, phase: int, turn: int, rank: int) -> NDArray[np.uint8]:
        """A slot of the ring, which is made at its first use by all ranks together."""
        if self._ring is None:
            self._ring = self.share_segment(PHASES * DEPTH * self.size * CHUNK)
        start = ((phase * DEPTH + turn) * self.size + rank) * CHUNK
        return self._ring.bytes[start : start + CHUNK]

    def share_segment(self, size: int) -> Segment:
        """More memory for all ranks of the room, made by the first; all call this together."""
        place = self._tickets
        if self.rank == 0:
            try:
                segment = Segment.create(size)
            except SegmentError:
                self.words[place + 2] = 0
                self.sync()
                raise
            segment.bytes[::4096] = 0  # Touched now, so that nobody pays for it later.
            for position, number in enumerate(segment.ticket.split(":")):
                self.words[place + position] = int(number)
            self.sync()
        else:
            self.sync()
            if self.words[place + 2] == 0:
                raise SegmentError(f"rank 0 of this host could not have {size:,} bytes of shared memory")
            segment = Segment.attach(":".join(str(self.words[place + position]) for position in range(3)), size)
        self.sync()
        segment.seal()
        return segment

    def leave(self) -> None:
        """Say goodbye; the memory goes when the last one has left."""
        if self.words[self._statuses + self.rank] == 0:
            self.words[self._statuses + self.rank] = _STATUS.index("left")
        for life in self._lives:
            if life is not None:
                life.close()
        self._lives = [None] * self.size
        self._waiter = Waiter(_nobody)  # The other one knows this room, which would keep its memory until collected.

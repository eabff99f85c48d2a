"""The compiled executor: what engine.py would do step by step, handed to a small library in C.

Only sums (and means) of common kinds of numbers are compiled; everything else, and everything where the library could
not be built, is done by engine.py, with the same results. Set OFFBEAT_NATIVE=0 to do without it.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.runtime.collectives.one_sided import signals
from offbeat.runtime.collectives.one_sided.arena import Arena
from offbeat.runtime.collectives.one_sided.board import TURNS
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways

VERSION = 5
LIBRARY = Path(__file__).with_name("_native.so")
"""Where the build puts it."""
LATE, DIFFERENT, UNKNOWN = 1, 2, 3
"""Why an operation returns early: a peer does not come, ranks have come with different ones, it was not compiled."""
_POST, _TAKE, _COPY, _ADD, _SCALE, _BLEND, _DIVIDE, _SPREAD = range(8)
_KINDS = {"float32": 0, "float64": 1, "int32": 2, "int64": 3}
_BASE = 48
"""Bits of an offset; the number of its base stands above them."""
_STEP = np.dtype([(name, np.int64) for name in ("op", "kind", "out", "a", "b", "count")] + [("divisor", np.float64)])
_WAITING = ("tries", "yields", "starved", "fewest_naps", "most_naps", "slice", "sleepy", "naps")
Steps = NDArray[np.void]
Action = tuple[Callable[..., Any], tuple[Any, ...]]


class _ArenaStruct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rank", "ranks")),
        *((name, ctypes.c_void_p) for name in ("counts", "board", "posts", "takes")),
        *((name, ctypes.c_int64) for name in _WAITING),
        ("cores", ctypes.c_void_p),
        ("settled", ctypes.c_int64),
    ]


class _NativeTask(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("arena", "steps")),
        ("count", ctypes.c_int64),
        ("bases", ctypes.c_void_p),
        ("mark", ctypes.c_int64),
        ("weight", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("at", "taken", "checked")),
        ("marks", ctypes.c_void_p),
    ]


class _Turns(ctypes.Structure):
    _fields_ = [
        ("arena", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("counter", "turns", "advance", "turn")),
        ("tasks", ctypes.c_void_p),
    ]


class NativeOperation:
    """An operation as it is done from one slot, wherever its memory lies."""

    def __init__(
        self, arena: _ArenaStruct, steps: Steps, bases: Sequence[int], mark: int = 0, weight: float = 1.0
    ) -> None:
        self._bases = (ctypes.c_int64 * len(bases))(*bases)
        self._arena, self._steps = arena, steps
        places = ctypes.addressof(arena), steps.ctypes.data, len(steps), ctypes.addressof(self._bases)
        self.fields = _NativeTask(*places, mark, weight)
        """What the library sees of it."""

    def move(self, bases: Sequence[int], mark: int, weight: float) -> None:
        """Its memory lies elsewhere now, it is called so, and this rank's numbers count so much."""
        self._bases[:] = bases  # pyright: ignore[reportArgumentType]
        self.fields.mark, self.fields.weight = mark, weight


class Turns:
    """An operation, ready to be done from whichever slot comes next; some may be missing."""

    def __init__(self, arena: _ArenaStruct, slots: int, advance: int) -> None:
        turns = TURNS[slots]
        self.slots = slots
        """Which kind of slots it takes; `CALLS`: none."""
        self.tasks: list[NativeOperation | None] = [None] * turns
        """By the slot with which it begins."""
        self._addresses = (ctypes.c_void_p * turns)()
        self._arena = arena
        self._fields = _Turns(ctypes.addressof(arena), slots, turns, advance, 0, ctypes.addressof(self._addresses))
        self.address = ctypes.addressof(self._fields)
        """Where the library sees it."""

    def put(self, turn: int, task: NativeOperation) -> None:
        """What is to be done when it is this slot's turn."""
        self.tasks[turn] = task
        self._addresses[turn] = ctypes.addressof(task.fields)

    @property
    def latest(self) -> NativeOperation:
        """What was begun last."""
        task: Any = self.tasks[self._fields.turn]
        return task


class Executor:
    """What one rank of an arena has done by the library."""

    def __init__(self, library: Any, arena: Arena) -> None:
        self._arena = arena
        posts, takes = arena.signals
        self._signals = [(ctypes.c_int64 * len(side))(*side) for side in (posts, takes)]
        self._fields = _ArenaStruct(
            arena.rank,
            arena.size,
            arena.board.counts.ctypes.data,
            arena.board.address,
            *(ctypes.addressof(side) for side in self._signals),
            signals.TRIES,
            signals.YIELDS,
            signals.STARVED,
            signals.FEWEST_NAPS,
            signals.MOST_NAPS,
            int(signals.SLICE * 1e9),
            0,
            0,
            arena.board.cores,
            0,
        )
        self.start: Callable[[int, int], int] = library.offbeat_start
        """Begin an operation (its address) on a first row (its address); `finish` it if this is not 0 or `UNKNOWN`."""
        self._go_on: Callable[[Any], int] = library.offbeat_go_on

    def task(self, steps: Steps, bases: Sequence[int], mark: int = 0, weight: float = 1.0) -> NativeOperation:
        """The operation that these steps make on this memory."""
        return NativeOperation(self._fields, steps, bases, mark, weight)

    def turns(self, slots: int, advance: int = 0) -> Turns:
        """An operation that takes so many slots (`STAGES` or `SLOTS`; `CALLS`: none); nothing is known of it yet."""
        return Turns(self._fields, slots, advance)

    def finish(self, turns: Turns, code: int, mismatch: Callable[[], Exception]) -> None:
        """Go on with what was begun, waiting for whoever is late as long as there is hope."""
        fields = turns.latest.fields
        address = ctypes.addressof(fields)
        place: tuple[int, int] | None = None
        while code:
            if code == DIFFERENT:
                raise mismatch()
            before, place = place, (fields.at, fields.taken)
            try:
                self._arena.doubt(self._arena.others[fields.taken], first=place != before)
            except BaseException:
                # It may have signalled, and left, just after the wait had ended: what it said still counts.
                code = self._go_on(address)
                if code == LATE and (fields.at, fields.taken) == place:
                    raise
                continue
            code = self._go_on(address)


@cache
def library() -> Any:
    """The library, or None where there is none or it is not wanted."""
    if os.environ.get("OFFBEAT_NATIVE") == "0" or not LIBRARY.exists():
        return None
    try:
        found = ctypes.CDLL(str(LIBRARY))
        found.offbeat_version.restype = ctypes.c_int64
        if found.offbeat_version() != VERSION:
            return None  # Built from another version of its source.
    except (OSError, AttributeError):
        return None
    found.offbeat_start.argtypes, found.offbeat_go_on.argtypes = (ctypes.c_void_p, ctypes.c_void_p), (ctypes.c_void_p,)
    found.offbeat_start.restype = found.offbeat_go_on.restype = ctypes.c_int64
    return found


def state() -> str:
    """Whether there is a library, in words."""
    if library() is not None:
        return "in use"
    if os.environ.get("OFFBEAT_NATIVE") == "0":
        return "switched off by OFFBEAT_NATIVE=0"
    return "not built: it needs a C compiler at installation; collectives inside a host are slower without it"


def executor(arena: Arena) -> Executor | None:
    """For this rank of an arena, if there is a library."""
    found = library()
    return None if found is None else Executor(found, arena)


class _Places(NamedTuple):
    """Where memory lies: several stretches, each a base."""

    starts: list[int]
    stops: list[int]
    numbers: list[int]

    def of(self, row: Array) -> int | None:
        """A row's base and offset as one number; None if it lies elsewhere."""
        address = address_of(row)
        found = bisect.bisect_right(self.starts, address) - 1
        if found < 0 or address + row.nbytes > self.stops[found]:
            return None
        return self.numbers[found] << _BASE | address - self.starts[found]


def address_of(row: Array) -> int:
    """Where an array begins."""
    return row.__array_interface__["data"][0]


def _places(stretches: Sequence[tuple[int, int]]) -> _Places:
    ordered = sorted((start, start + size, number) for number, (start, size) in enumerate(stretches) if size)
    return _Places(*(list(column) for column in zip(*ordered, strict=True)))


def overlap(stretches: Sequence[tuple[int, int]]) -> bool:
    """Whether any two share memory: then nothing is compiled, as the next time they may not."""
    ordered = sorted((start, start + size) for start, size in stretches if size)
    return any(stop > start for (_, stop), (start, _) in pairwise(ordered))


def compiled(
    script: Iterable[Action], stretches: Sequence[tuple[int, int]], ways: Ways, words: Any, arena: Arena
) -> Steps | None:
    """A script of the engine as steps of the library, on memory given by address and size; None if it cannot be."""
    kind = _KINDS.get(np.dtype(words).name, 0)
    places = _places(stretches)
    steps: list[tuple[Any, ...]] = []
    for act, rows in script:
        if act == arena.post:
            steps.append((_POST, 0, 0, 0, 0, 0, 0.0))
        elif act == arena.take:
            steps.append((_TAKE, 0, 0, 0, 0, 0, 0.0))
        elif rows[0].size:
            found = _step(act, [places.of(row) for row in rows], rows[0], kind, ways)
            if found is None:
                return None
            steps.append(found)
    return _kept_apart(steps)


def _kept_apart(steps: Sequence[tuple[Any, ...]]) -> Steps:
    """Steps in memory of their own: in the heap they would lie between the gradients (decision 9)."""
    held: Steps = np.frombuffer(mmap.mmap(-1, max(len(steps), 1) * _STEP.itemsize), dtype=_STEP)[: len(steps)]
    held[:] = np.array(steps, dtype=_STEP)
    return held


def _step(act: Any, where: Sequence[int | None], row: Array, kind: int, ways: Ways) -> tuple[Any, ...] | None:
    if None in where:
        return None
    plain = ways.plain
    if act is np.copyto:
        return (_COPY, 0, where[0], where[1], 0, row.nbytes, 0.0)
    if plain is None:
        return None
    if act is ways.combine:
        return (_ADD, kind, where[2], where[0], where[1], row.size, 0.0)
    if act is ways.finish:
        return (_DIVIDE, kind, where[0], 0, 0, row.size, float(plain.divisor))
    if act is ways.weigh:
        return (_SCALE, kind, where[0], where[1], 0, row.size, 0.0)
    if act is ways.blend:
        return (_BLEND, kind, where[2], where[0], where[1], row.size, 0.0)
    return None


def spread_steps(ranges: Sequence[tuple[int, int]], ranks: int, words: Any, ways: Ways) -> Steps | None:
    """An all-reduce where everybody's numbers lie in shared memory, as bases: this rank sums some ranges for all.

    Signals before it say that all have come, those behind it that nobody writes any more.
    """
    name = np.dtype(words).name
    if ways.plain is None or name not in _KINDS:
        return None
    sync = [(_POST, 0, 0, 0, 0, 0, 0.0), (_TAKE, 0, 0, 0, 0, 0, 0.0)]
    kind, each, divisor = _KINDS[name], np.dtype(words).itemsize, float(ways.plain.divisor)
    spread = [(_SPREAD, kind, start * each, 0, ranks, stop - start, divisor) for start, stop in ranges if stop > start]
    return _kept_apart([*sync, *spread, *sync])

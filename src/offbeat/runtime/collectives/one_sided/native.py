"""The compiled executor: runs what interpret.py would run step by step in a small C library.

Only sums (and means) of common dtypes are compiled; everything else, and everything where the library could not be
built, is left to interpret.py, with the same results. Set OFFBEAT_NATIVE=0 to disable it.
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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.runtime.collectives.one_sided import signals
from offbeat.runtime.collectives.one_sided.arena import TURNS, Arena
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways, WeightedSum

VERSION = 7
LIBRARY = Path(__file__).with_name("_native.so")
LATE, DIFFERENT, UNKNOWN = 1, 2, 3
"""Why an operation returns early: a peer is late, ranks came with different operations, or it was not compiled."""
_POST, _TAKE, _COPY, _ADD, _SCALE, _BLEND, _DIVIDE, _SPREAD, _STREAM, _WEIGH, _TERM = range(11)
_KINDS = {"float32": 0, "float64": 1, "int32": 2, "int64": 3}
_BASE = 48
"""Bits of an offset; the number of its base is above them."""
_STEP = np.dtype([(name, np.int64) for name in ("op", "kind", "out", "a", "b", "count")] + [("number", np.float64)])
Steps = NDArray[np.void]
_SYNC: list[tuple[Any, ...]] = [(_POST, 0, 0, 0, 0, 0, 0.0), (_TAKE, 0, 0, 0, 0, 0, 0.0)]
Action = tuple[Callable[..., Any], tuple[Any, ...]]


def _int64(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class _ArenaStruct(ctypes.Structure):
    _fields_ = [
        *(*_int64("rank", "ranks"), *_pointers("counts", "board", "posts", "takes")),
        *_int64("tries", "yields", "starved", "fewest_naps", "most_naps", "slice", "sleepy", "naps"),
        *(*_pointers("cores"), *_int64("settled")),
    ]


class _NativeTask(ctypes.Structure):
    _fields_ = [
        *(*_pointers("arena", "steps"), *_int64("count"), *_pointers("bases"), *_int64("mark")),
        *(("weight", ctypes.c_double), *_int64("at", "taken", "checked"), *_pointers("marks")),
    ]


class _Turns(ctypes.Structure):
    _fields_ = [*_pointers("arena"), *_int64("counter", "turns", "advance", "turn"), *_pointers("tasks")]


class NativeOperation:
    """A compiled operation that starts at one slot, on any memory."""

    def __init__(
        self, arena: _ArenaStruct, steps: Steps, bases: Sequence[int], mark: int = 0, weight: float = 1.0
    ) -> None:
        self._bases = (ctypes.c_int64 * len(bases))(*bases)
        self._arena, self._steps = arena, steps
        places = ctypes.addressof(arena), steps.ctypes.data, len(steps), ctypes.addressof(self._bases)
        self.fields = _NativeTask(*places, mark, weight)

    def move(self, bases: Sequence[int], mark: int, weight: float) -> None:
        """Set the addresses of its memory, its mark, and the weight of this rank's numbers."""
        self._bases[:] = bases  # pyright: ignore[reportArgumentType]
        self.fields.mark, self.fields.weight = mark, weight


class Turns:
    """A compiled operation for each slot at which it may start; some may be missing."""

    def __init__(self, arena: _ArenaStruct, counts: Any, slots: int, advance: int) -> None:
        turns = TURNS[slots]
        self._counts = counts
        self.slots = slots
        """Which kind of slots it uses; `CALLS`: none."""
        self.tasks: list[NativeOperation | None] = [None] * turns
        self._addresses = (ctypes.c_void_p * turns)()
        self._arena = arena
        self._fields = _Turns(ctypes.addressof(arena), slots, turns, advance, 0, ctypes.addressof(self._addresses))
        self.address = ctypes.addressof(self._fields)

    def put(self, turn: int, task: NativeOperation) -> None:
        """Set the operation that starts at this slot."""
        self.tasks[turn] = task
        self._addresses[turn] = ctypes.addressof(task.fields)

    def undo(self) -> None:
        """Take back the slots of the operation that was started last: no rank has used them."""
        self._counts[self.slots] -= self._fields.advance

    @property
    def latest(self) -> NativeOperation:
        """The operation that was started last."""
        task: Any = self.tasks[self._fields.turn]
        return task


class Executor:
    """The library, for one rank of an arena."""

    def __init__(self, library: Any, arena: Arena) -> None:
        self._arena = arena
        posts, takes = arena.signals
        self._signals = [(ctypes.c_int64 * len(side))(*side) for side in (posts, takes)]
        self._fields = _ArenaStruct(
            *(arena.rank, arena.size, arena.board.counts.ctypes.data, arena.board.address),
            *(ctypes.addressof(side) for side in self._signals),
            *(signals.TRIES, signals.YIELDS, signals.STARVED, signals.FEWEST_NAPS, signals.MOST_NAPS),
            *(int(signals.SLICE * 1e9), 0, 0, arena.board.cores, 0),
        )
        self._start: Callable[[int, Any, int], int] = library.offbeat_start
        self._go_on: Callable[[Any], int] = library.offbeat_go_on

    def start(self, turns: Turns, addresses: Sequence[int]) -> int:
        """Start an operation on memory at these addresses; `finish` it unless this is 0 or `UNKNOWN`."""
        return self._start(turns.address, (ctypes.c_int64 * len(addresses))(*addresses), len(addresses))

    def task(self, steps: Steps, bases: Sequence[int], mark: int = 0, weight: float = 1.0) -> NativeOperation:
        """An operation with these steps on this memory."""
        return NativeOperation(self._fields, steps, bases, mark, weight)

    def turns(self, slots: int, advance: int = 0) -> Turns:
        """An operation that uses `advance` slots of a kind (`STAGES`, `SLOTS`; `CALLS`: none), not compiled yet."""
        return Turns(self._fields, self._arena.board.counts, slots, advance)

    def finish(self, turns: Turns, code: int, mismatch: Callable[[], Exception]) -> None:
        """Finish an operation, waiting for late ranks as long as they are alive."""
        fields = turns.latest.fields
        address = ctypes.addressof(fields)
        place: tuple[int, int] | None = None
        while code:
            if code == DIFFERENT:
                turns.undo()
                raise mismatch()
            before, place = place, (fields.at, fields.taken)
            try:
                self._arena.doubt(self._arena.others[fields.taken], first=place != before)
            except BaseException:
                # The peer may have signalled and left just after the wait ended: its signal still counts.
                code = self._go_on(address)
                if code == LATE and (fields.at, fields.taken) == place:
                    raise
                continue
            code = self._go_on(address)


@cache
def library() -> Any:
    """The library; None where it was not built, was built from another version of its source, or is switched off."""
    if os.environ.get("OFFBEAT_NATIVE") == "0" or not LIBRARY.exists():
        return None
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        loaded.offbeat_version.restype = ctypes.c_int64
        if loaded.offbeat_version() != VERSION:
            return None
    except (OSError, AttributeError):
        return None
    loaded.offbeat_start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    loaded.offbeat_go_on.argtypes = [ctypes.c_void_p]
    loaded.offbeat_start.restype = loaded.offbeat_go_on.restype = ctypes.c_int64
    return loaded


def state() -> str:
    """Whether the library is in use, in words."""
    if library() is not None:
        return "in use"
    if os.environ.get("OFFBEAT_NATIVE") == "0":
        return "switched off by OFFBEAT_NATIVE=0"
    return "not built: it needs a C compiler at installation; collectives inside a host are slower without it"


def executor(arena: Arena) -> Executor | None:
    """The executor of this rank of an arena; None without the library."""
    loaded = library()
    return None if loaded is None else Executor(loaded, arena)


def address_of(row: Array) -> int:
    """The address of an array's first element."""
    return row.__array_interface__["data"][0]


def _places(stretches: Sequence[tuple[int, int]]) -> Callable[[Array], int | None]:
    """A function from a row to its base (one of the stretches) and offset as one number; None if it is in none."""
    ordered = sorted((start, start + size, number) for number, (start, size) in enumerate(stretches) if size)
    starts = [start for start, _, _ in ordered]

    def place(row: Array) -> int | None:
        address = address_of(row)
        index = bisect.bisect_right(starts, address) - 1
        if index < 0 or address + row.nbytes > ordered[index][1]:
            return None
        return ordered[index][2] << _BASE | address - starts[index]

    return place


def overlap(stretches: Sequence[tuple[int, int]]) -> bool:
    """Whether any two share memory: then nothing is compiled, as the next time they may not."""
    ordered = sorted((start, start + size) for start, size in stretches if size)
    return any(stop > start for (_, stop), (start, _) in pairwise(ordered))


def compiled(
    script: Iterable[Action],
    stretches: Sequence[tuple[int, int]],
    ways: Ways,
    words: Any,
    arena: Arena,
    streams: int = 0,
) -> Steps | None:
    """A script of the interpreter as steps of the library, on memory by address and size; None if it cannot be.

    Copies to the first `streams` stretches bypass the caches.
    """
    kind = _KINDS.get(np.dtype(words).name, 0)
    place = _places(stretches)
    steps: list[tuple[Any, ...]] = []
    for act, rows in script:
        if act == arena.post:
            steps.append((_POST, 0, 0, 0, 0, 0, 0.0))
        elif act == arena.take:
            steps.append((_TAKE, 0, 0, 0, 0, 0, 0.0))
        elif rows[0].size:
            where = [place(row) for row in rows]
            if isinstance(act, WeightedSum):
                if ways.plain is None or None in where:
                    return None
                steps += _weighted_sum(act, where, rows[0].size, kind)
                continue
            step = _step(act, where, rows[0], kind, ways)
            if step is None:
                return None
            if step[0] == _COPY and step[2] >> _BASE < streams:
                step = (_STREAM, *step[1:])
            steps.append(step)
    return _off_heap(steps)


def _off_heap(steps: Sequence[tuple[Any, ...]]) -> Steps:
    """Steps in a mapping of their own: on the heap they would lie between the gradients (decision 9)."""
    held: Steps = np.frombuffer(mmap.mmap(-1, max(len(steps), 1) * _STEP.itemsize), dtype=_STEP)[: len(steps)]
    held[:] = np.array(steps, dtype=_STEP)
    return held


def _step(act: Any, where: Sequence[int | None], row: Array, kind: int, ways: Ways) -> tuple[Any, ...] | None:
    plain = ways.plain
    if None in where or (plain is None and act is not np.copyto):
        return None
    if act is np.copyto:
        return (_COPY, 0, where[0], where[1], 0, row.nbytes, 0.0)
    if act is ways.finish:
        return (_DIVIDE, kind, where[0], 0, 0, row.size, float(0 if plain is None else plain.divisor))
    if act is ways.weigh:
        return (_SCALE, kind, where[0], where[1], 0, row.size, 0.0)
    op = _ADD if act is ways.combine else _BLEND if act is ways.blend else None
    return None if op is None else (op, kind, where[2], where[0], where[1], row.size, 0.0)


def _weighted_sum(act: WeightedSum, where: Sequence[int | None], size: int, kind: int) -> list[tuple[Any, ...]]:
    """A step for the sum and this rank's term, followed by one for each other term."""
    out, own, *others = where
    terms = zip(others, act.weights[1:], strict=True)
    return [
        (_WEIGH, kind, out, own, len(others), size, act.weights[0]),
        *((_TERM, kind, 0, other, 0, size, weight) for other, weight in terms),
    ]


def sync_steps() -> Steps:
    """A stage without data."""
    return _off_heap(_SYNC)


def spread_steps(ranges: Sequence[tuple[int, int]], ranks: int, words: Any, ways: Ways) -> Steps | None:
    """An all-reduce of rows in shared memory, which are the bases: this rank sums some ranges for all.

    Signals before it say that all ranks have arrived, those after it that none writes any more.
    """
    name = np.dtype(words).name
    if ways.plain is None or name not in _KINDS:
        return None
    kind, each, divisor = _KINDS[name], np.dtype(words).itemsize, float(ways.plain.divisor)
    spread = [(_SPREAD, kind, start * each, 0, ranks, stop - start, divisor) for start, stop in ranges if stop > start]
    return _off_heap([*_SYNC, *spread, *_SYNC])

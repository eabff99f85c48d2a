"""Collectives between ranks of one host, each a compiled one-sided schedule run through shared memory."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.protocols.collectives import Collective
from offbeat.protocols.collectives import algorithm as algorithm_of
from offbeat.protocols.schedule import View
from offbeat.runtime.allocation import give_back_excess
from offbeat.runtime.backend._compiled import Compiled, keep, mismatch
from offbeat.runtime.backend._marks import count_of, mark
from offbeat.runtime.shared.engine import Blocks, Engine, Piece
from offbeat.runtime.shared.kernels import Array, Ways, as_words, row_at, ways_of, words_of
from offbeat.runtime.shared.native import Turns, address_of
from offbeat.runtime.shared.programs import Stage, compile_one_sided, even_blocks
from offbeat.runtime.shared.room import ONE_SHOT, SMALL, Room
from offbeat.runtime.shared.segment import Segment

_SUM = dist.ReduceOp.SUM
_MOST_PLANS = 512
_LOOK_AT_MEMORY = 64
"""Large operations between two looks at how much memory this process keeps free."""
LIVE_ROOT = 1
"""Told in the mark of an all-reduce in place, so that it is not mistaken for one that copies."""


class _Written(NamedTuple):
    """A small all-reduce of what lies at one place in memory, for the interpreter."""

    mark: int
    slots: tuple[tuple[Array, ...], tuple[Array, ...]]
    order: tuple[int, ...]
    ways: Ways
    row: Array


Plan = Turns | _Written
"""An all-reduce of what lies at one place in memory, worked out: compiled, or for the interpreter."""
Place = tuple[int, int, torch.dtype, int]
"""Address, count and kind of numbers, and what is done with them."""


class Local:
    """The collectives of one room. Every rank calls them in the same order, one at a time."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._engine = Engine(room)
        self._view = View.of(room.size)
        self._programs: dict[tuple[Collective, str, int], tuple[Stage, ...]] = {}
        self.plans: dict[Place, Plan] = {}
        """All-reduces that were worked out: small ones, and large ones that came to the same place again."""
        self._seen: dict[Place, None] = {}
        # Numbers may overflow here as anywhere in torch, without a word. A context of one's own is the cheapest way to
        # tell numpy so: only who has the turn uses it.
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        self._quietly: Any = context.run
        self.compiled = Compiled(room, self._engine)
        """What is not left to the interpreter."""
        self._live: dict[int, tuple[Segment, int]] = {}
        (one_shot,) = self._program(Collective.ALL_REDUCE, "one_shot")
        self._order = one_shot.reduce[0][1]
        self._large = 0
        self.sharing = False
        """Whether any tensor lies in shared memory, so that it is worth asking which."""

    def _program(self, collective: Collective, name: str, root: int = 0) -> tuple[Stage, ...]:
        key = (collective, name, root)
        found = self._programs.get(key)
        if found is None:
            schedule = algorithm_of(collective, name).schedule
            blocks = 1 if collective is Collective.BROADCAST else self.room.size
            found = compile_one_sided(schedule, self._view, self.room.rank, blocks, root)
            self._programs[key] = found
        return found

    # -- all-reduce --------------------------------------------------------------------------------------------------

    def known(self, tensor: Tensor, operation: int) -> Plan:
        """The plan for a small contiguous tensor; worked out once for each place in memory, kind and operation."""
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, operation)
        return self.plans.get(key) or self._plan(key)

    def _plan(self, key: Place) -> Plan:
        address, count, dtype, number = key
        operation = dist.ReduceOp.RedOpType(number)
        slots = [[slot[:count] for slot in turn] for turn in self._engine.small(words_of(dtype))]
        ways = ways_of(operation, dtype, self.room.size)
        row = row_at(address, count, words_of(dtype))
        number = mark("all_reduce", dtype, count, operation)
        turns = self.compiled.small(slots, self._order, row, ways, number)
        plan = turns or _Written(number, (tuple(slots[0]), tuple(slots[1])), self._order, ways, row)
        if not dtype.is_complex:  # The same memory may count as conjugated the next time.
            keep(self.plans, key, plan, _MOST_PLANS)
        return plan

    def _remember(self, tensor: Tensor, operation: int, compiled: Any, turn: int, number: int) -> None:
        """If a large tensor comes to the same place again, what was compiled for it need not be looked for again."""
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, operation)
        if tensor.dtype.is_complex:
            return
        if key not in self._seen:
            keep(self._seen, key, None, _MOST_PLANS)
            return
        before: Any = self.plans.get(key)
        plan = self.compiled.settled(compiled, turn, key[0], number, before)
        if plan is not None and plan is not before:
            keep(self.plans, key, plan, _MOST_PLANS)

    def all_reduce_small(self, plan: Plan) -> None:
        """Up to `ONE_SHOT` bytes, in one stage: everybody reads everybody's slot. Written out, for speed."""
        room = self.room
        if isinstance(plan, Turns):
            code = self.compiled.start_turn(plan.address)
            if code:
                self.compiled.finish(plan, code)
            return
        number, turns, order, ways, row = plan
        slots = turns[room.turn(small=True)]
        base = room.enter(number)
        np.copyto(slots[room.rank], row)
        for post in room.posts:
            post()
        for acquire, peer in room.takes:
            if not acquire(False):
                room.wait_for(acquire, peer)
        words = room.words
        for place in range(base + 1, base + 2 * room.size, 2):
            if words[place] != number:
                raise mismatch(self.room)
        self._quietly(ways.combine, slots[order[0]], slots[order[1]], row)
        for rank in order[2:]:
            self._quietly(ways.combine, row, slots[rank], row)
        if ways.finish is not None:
            ways.finish(row)

    def all_reduce(
        self, tensors: Sequence[Tensor], operation: Any, weight: float | None = None, algorithm: str = "two_shot"
    ) -> None:
        """Contiguous tensors of one kind, in place, in a pipeline. This rank's numbers count `weight` times."""
        size, dtype = self.room.size, tensors[0].dtype
        stages = self._program(Collective.ALL_REDUCE, algorithm)
        width = self._engine.width(size, dtype.itemsize)

        def pieces(rows: Sequence[Array]) -> list[Piece]:
            return [piece for row in rows for piece in _pieces(row, row, width, size)]

        number = mark("all_reduce", dtype, sum(tensor.numel() for tensor in tensors), operation)
        key = ("all_reduce", algorithm, int(operation), weight is None, weight == 1.0)
        turn = self.room.next_turn(small=False)
        whole = self._in_place(key, stages, tensors, pieces, width, number, ways_of(operation, dtype, size, weight))
        # Small tensors have a plan of one stage under the same key: a rank that took this one would be out of step.
        large = tensors[0].nbytes > ONE_SHOT
        if len(tensors) == 1 and weight is None and algorithm == "two_shot" and large:
            self._remember(tensors[0], int(operation), whole, turn, number)

    def sum_own_blocks(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Sum contiguous tensors, but each rank only its block of each, in place, as `even_blocks` cuts them."""
        size, dtype = self.room.size, tensors[0].dtype
        stages = self._program(Collective.REDUCE_SCATTER, "one_shot")
        width = self._engine.width(size, dtype.itemsize)

        def pieces(rows: Sequence[Array]) -> list[Piece]:
            found: list[Piece] = []
            for row in rows:
                blocks = [row[low:high] for low, high in even_blocks(row.size, size)]
                windows = [_windows(blocks, start, width) for start in range(0, blocks[0].size, width)]
                found += [(window, window) for window in windows]
            return found

        number = mark("reduce_scatter", dtype, sum(tensor.numel() for tensor in tensors), _SUM)
        key = ("own_blocks", weight == 1.0)
        self._in_place(key, stages, tensors, pieces, width, number, ways_of(_SUM, dtype, size, weight))

    def _in_place(
        self,
        key: tuple[Any, ...],
        stages: Sequence[Stage],
        tensors: Sequence[Tensor],
        pieces: Callable[[Sequence[Array]], list[Piece]],
        width: int,
        number: int,
        ways: Ways,
    ) -> tuple[Any, ...]:
        """Run on memory where it lies; answers under which key that was compiled, if it was."""
        self._large += 1
        if self._large % _LOOK_AT_MEMORY == 0:
            give_back_excess()
        words = words_of(tensors[0].dtype)
        whole = (*key, words, *(tensor.numel() for tensor in tensors))
        if not self.compiled.run(whole, number, [tensor.data_ptr() for tensor in tensors], ways):
            rows = [row_at(tensor.data_ptr(), tensor.numel(), words) for tensor in tensors]
            self._run(whole, stages, lambda: pieces(rows), rows, width, words, number, ways)
        return whole

    def _run(
        self,
        key: Any,
        stages: Sequence[Stage],
        pieces: Callable[[], Sequence[Piece]],
        rows: Sequence[Array],
        width: int,
        words: Any,
        number: int,
        ways: Ways = Ways(),  # noqa: B008 - a value, never changed
    ) -> None:
        addresses = [address_of(row) for row in rows]
        if self.compiled.run(key, number, addresses, ways):
            return
        found = pieces()
        if not found:
            self._meet(number)
        elif self.compiled.learn(key, stages, found, rows, width, words, ways):
            self.compiled.run(key, number, addresses, ways)
        else:
            check = partial(self._check, self.room.enter(number), number)
            self._quietly(self._engine.run, stages, found, width, words, check, ways)

    def _meet(self, number: int) -> None:
        """All have come, with the same."""
        base = self.room.enter(number)
        self.room.sync()
        self._check(base, number)

    def _check(self, base: int, number: int) -> None:
        """All ranks must have come with the same operation."""
        words, size = self.room.words, self.room.size
        for place in range(base + 1, base + 2 * size, 2):
            if words[place] != number:
                raise mismatch(self.room)

    # -- on memory that is shared already ----------------------------------------------------------------------------

    def shared_tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that the others can read: an all-reduce of it copies nothing. All ranks call this."""
        self._meet(mark("shared_tensor", dtype, count))
        each = -(-max(count * dtype.itemsize, 1) // 4096) * 4096
        segment = self.room.share_segment(each * self.room.size)
        tensor = segment.tensor(each * self.room.rank, count, dtype)
        self._live[tensor.untyped_storage().data_ptr()] = (segment, each)
        # Other numbers may have lain at this place before, for which memory was not shared.
        self.plans.clear()
        self._seen.clear()
        self.sharing = True
        return tensor

    def shared_rows(self, tensor: Tensor) -> list[Array] | None:
        """Every rank's part of the memory in which this tensor lies, if it lies in shared memory."""
        found = self._live.get(tensor.untyped_storage().data_ptr())
        if found is None or not tensor.is_contiguous():
            return None
        segment, each = found
        offset = tensor.data_ptr() - segment.address - each * self.room.rank
        if not 0 <= offset < each:
            return None
        words, count = words_of(tensor.dtype), tensor.numel()
        return [segment.array(each * rank + offset, count, words) for rank in range(self.room.size)]

    def all_reduce_live(self, rows: Sequence[Array], dtype: torch.dtype, operation: Any) -> None:
        """Everybody's row lies in shared memory: nothing is copied in or out."""
        number = mark("all_reduce", dtype, rows[0].size, operation, root=LIVE_ROOT)
        stages, ways = self._program(Collective.ALL_REDUCE, "zero_copy"), ways_of(operation, dtype, self.room.size)
        if not self.compiled.run_live(stages, rows, ways, number):
            self._meet(number)
            self._quietly(self._engine.run_live, stages, rows, ways)

    # -- the others --------------------------------------------------------------------------------------------------

    def barrier(self, kind: str = "barrier") -> None:
        """Return when all ranks have come."""
        self._meet(mark(kind))

    def broadcast(self, tensor: Tensor, root: int, algorithm: str = "one_shot") -> None:
        """The root's numbers, on every rank, in place."""
        row = as_bytes(tensor)
        number = mark("broadcast", tensor.dtype, tensor.numel(), root=root)
        width = self._engine.width(1, 1)

        def pieces() -> list[Piece]:
            cuts = [row[start : start + width] for start in range(0, row.size, width)]
            return [([cut], [cut]) for cut in cuts]

        stages = self._program(Collective.BROADCAST, algorithm, root)
        self._run(("broadcast", algorithm, root, row.size), stages, pieces, [row], width, np.uint8, number)

    def reduce(self, tensor: Tensor, operation: Any, root: int, algorithm: str = "two_shot") -> None:
        """Combined at the root, in place; the others keep theirs."""
        row = as_words(tensor)
        result = row if self.room.rank == root else np.empty_like(row)
        stages = self._program(Collective.REDUCE, algorithm, root)
        number = mark("reduce", tensor.dtype, row.size, operation, root)
        size = self.room.size
        width = self._engine.width(size, row.itemsize)
        key = ("reduce", algorithm, root, int(operation), row.dtype, tensor.dtype, row.size)
        ways = ways_of(operation, tensor.dtype, size)
        rows = [row, result] if result is not row else [row]
        self._run(key, stages, lambda: _pieces(row, result, width, size), rows, width, row.dtype, number, ways)

    def all_gather(self, outputs: Sequence[Tensor], given: Tensor) -> None:
        """Everybody's tensor, on every rank; sizes may differ."""
        rows = [as_bytes(output) for output in outputs]
        me, mine = self.room.rank, as_bytes(given)
        _same_size(rows[me], mine, f"output {me} of all_gather")
        np.copyto(rows[me], mine)
        number = mark("all_gather", given.dtype, sum(output.numel() for output in outputs))
        bring = _only(len(rows), me, mine)
        self._move(Collective.ALL_GATHER, bring, rows, max(row.size for row in rows), number)

    def gather(self, outputs: Sequence[Tensor], given: Tensor, root: int) -> None:
        """Everybody's tensor, at the root."""
        size, me, mine = self.room.size, self.room.rank, as_bytes(given)
        rows: list[Any] = [as_bytes(output) for output in outputs] if me == root else [None] * size
        if me == root:
            for rank, row in enumerate(rows):
                _same_size(row, mine, f"output {rank} of gather")
            np.copyto(rows[me], mine)
        number = mark("gather", given.dtype, given.numel(), root=root)
        self._move(Collective.GATHER, _only(size, me, mine), rows, mine.size, number, root)

    def scatter(self, output: Tensor, given: Sequence[Tensor], root: int) -> None:
        """The root's tensors, one for each rank."""
        size, me, mine = self.room.size, self.room.rank, as_bytes(output)
        rows: list[Any] = [as_bytes(tensor) for tensor in given] if me == root else [None] * size
        if me == root:
            for rank, row in enumerate(rows):
                _same_size(row, mine, f"input {rank} of scatter")
            np.copyto(mine, rows[me])
        number = mark("scatter", output.dtype, output.numel(), root=root)
        self._move(Collective.SCATTER, rows, _only(size, me, mine), mine.size, number, root)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Tensor t of rank s becomes tensor s of rank t; sizes may differ."""
        bring, rows = [as_bytes(tensor) for tensor in inputs], [as_bytes(tensor) for tensor in outputs]
        me = self.room.rank
        _same_size(rows[me], bring[me], f"output {me} of all_to_all")
        np.copyto(rows[me], bring[me])
        # Nobody knows how much the others exchange: the longest is agreed first, through the marks.
        longest = max(row.size for row in (*bring, *rows))
        base = self.room.enter(mark("all_to_all", None, longest))
        self.room.sync()
        marks = self.room.marks(base)
        if any(other & 15 != marks[me] & 15 for other in marks):
            raise mismatch(self.room)
        longest = max(count_of(other) for other in marks)
        self._move(Collective.ALL_TO_ALL, bring, rows, longest, mark("all_to_all", None, longest))

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], operation: Any) -> None:
        """Rank r gets the combination of everybody's tensor r."""
        rows, me = [as_words(tensor) for tensor in inputs], self.room.rank
        mine = as_words(output)
        _same_size(mine, rows[me], "the output of reduce_scatter")
        number = mark("reduce_scatter", output.dtype, sum(row.size for row in rows), operation)
        longest = max(row.size for row in rows)
        results = _only(len(rows), me, mine)
        self._move(
            Collective.REDUCE_SCATTER,
            rows,
            results,
            longest,
            number,
            0,
            ways_of(operation, output.dtype, self.room.size),
        )

    def _move(
        self,
        collective: Collective,
        bring: Blocks,
        rows: Blocks,
        longest: int,
        number: int,
        root: int = 0,
        ways: Ways = Ways(),  # noqa: B008 - a value, never changed
    ) -> None:
        """Blocks of any lengths up to `longest`, window by window."""
        words = next(row.dtype for row in (*bring, *rows) if row is not None)
        size = self.room.size
        small = longest * words.itemsize * size <= SMALL
        width = self._engine.width(size, words.itemsize, small)

        def pieces() -> list[Piece]:
            starts = range(0, longest, width)
            return [(_windows(bring, start, width), _windows(rows, start, width)) for start in starts]

        given = [row for row in (*bring, *rows) if row is not None]
        sizes = tuple(None if row is None else row.size for row in (*bring, *rows))
        key = (collective, root, words, ways.plain, longest, sizes)
        self._run(key, self._program(collective, "one_shot", root), pieces, given, width, words, number, ways)


def as_bytes(tensor: Tensor) -> Array:
    """The bytes of a contiguous tensor, without a copy."""
    return as_words(tensor).view(np.uint8)


def _only(size: int, rank: int, row: Array) -> list[Any]:
    rows: list[Any] = [None] * size
    rows[rank] = row
    return rows


def _pieces(row: Array, result: Array, width: int, size: int) -> list[Piece]:
    """A row in pieces, each cut evenly into a block for each rank."""
    pieces: list[Piece] = []
    for start in range(0, row.size, width * size):
        stop = min(start + width * size, row.size)
        cuts = even_blocks(stop - start, size)
        given = [row[start + low : start + high] for low, high in cuts]
        pieces.append((given, given if result is row else [result[start + low : start + high] for low, high in cuts]))
    return pieces


def _windows(rows: Blocks, start: int, width: int) -> list[Any]:
    return [None if row is None else row[start : start + width] for row in rows]


def _same_size(row: Array, other: Array, what: str) -> None:
    if row.size != other.size:
        raise ValueError(f"{what} has {row.nbytes:,} bytes, but {other.nbytes:,} are needed")

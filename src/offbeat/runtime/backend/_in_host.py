"""Collectives between the ranks of one host: one-sided schedules run through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.protocols.collectives import Collective
from offbeat.protocols.collectives import algorithm as algorithm_of
from offbeat.protocols.schedule import View
from offbeat.runtime.backend._call_ids import count_of, mark
from offbeat.runtime.backend._checks import in_place
from offbeat.runtime.backend._runner import InterpretedAllReduce, Runner, mismatch
from offbeat.runtime.collectives.one_sided.arena import ONE_SHOT, SMALL, Arena
from offbeat.runtime.collectives.one_sided.compile import ProgramStage, compile_one_sided, even_blocks
from offbeat.runtime.collectives.one_sided.interpret import Blocks, Piece, PreparedCollective
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways, as_words, ways_of, words_of
from offbeat.runtime.collectives.one_sided.native import Turns, address_of
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.system.malloc import give_back_excess

_SUM = dist.ReduceOp.SUM
_OPERATIONS_PER_TRIM = 64
"""Large operations between two checks of how much memory this process keeps free."""
LIVE_ROOT = 1
"""Root in the mark of an all-reduce on shared tensors, so that it is not mistaken for one that copies."""


class SharedTensors:
    """Tensors in memory that all ranks of an arena share."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._segments: dict[int, tuple[Segment, int]] = {}
        """By the address of the storage: the segment, and the bytes of each rank in it."""

    def __bool__(self) -> bool:
        return bool(self._segments)

    def add(self, count: int, dtype: torch.dtype) -> Tensor:
        """A new tensor of zeros; all ranks call this together."""
        each = -(-max(count * dtype.itemsize, 1) // 4096) * 4096
        segment = self._arena.share_segment(each * self._arena.size)
        tensor = segment.tensor(each * self._arena.rank, count, dtype)
        self._segments[tensor.untyped_storage().data_ptr()] = (segment, each)
        return tensor

    def rows(self, tensor: Tensor) -> list[Array] | None:
        """All ranks' counterparts of a tensor, if it lies in shared memory."""
        place = self._segments.get(tensor.untyped_storage().data_ptr())
        if place is None or not tensor.is_contiguous():
            return None
        segment, each = place
        offset = tensor.data_ptr() - segment.address - each * self._arena.rank
        if not 0 <= offset < each:
            return None
        words, count = words_of(tensor.dtype), tensor.numel()
        return [segment.array(each * rank + offset, count, words) for rank in range(self._arena.size)]


class HostCollectives:
    """The collectives of `OffbeatGroup` in one arena; every rank calls them in the same order, one at a time."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.runner = arena, Runner(arena)
        self._engine = self.runner.engine
        self._view = View.of(arena.size)
        self._programs: dict[tuple[Collective, str, int], tuple[ProgramStage, ...]] = {}
        self._shared = SharedTensors(arena)
        self._large = 0

    def _program(self, collective: Collective, name: str, root: int = 0) -> tuple[ProgramStage, ...]:
        key = (collective, name, root)
        program = self._programs.get(key)
        if program is None:
            schedule = algorithm_of(collective, name).schedule
            blocks = 1 if collective is Collective.BROADCAST or _in_one_block(collective, name) else self.arena.size
            program = self._programs[key] = compile_one_sided(schedule, self._view, self.arena.rank, blocks, root)
        return program

    def all_reduce(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """Reduce tensors of one dtype in place, by the algorithm for their size."""
        alone = tensors[0] if len(tensors) == 1 else None
        shared = alone is not None and self._shared and alone.nbytes > SMALL
        if alone is not None and shared and (rows := self._shared.rows(alone)) is not None:
            number = mark("all_reduce", alone.dtype, rows[0].size, operation, root=LIVE_ROOT)
            ways = ways_of(operation, alone.dtype, self.arena.size)
            self.runner.run_live(self._program(Collective.ALL_REDUCE, "zero_copy"), rows, ways, number)
            return
        with in_place(tensors) as held:
            if alone is None:
                self.all_reduce_by("two_shot", held, operation)
                return
            sort = alone.numel(), alone.dtype, int(operation)
            plan, small = self.runner.plans.get(sort), alone.nbytes <= ONE_SHOT
            if isinstance(plan, InterpretedAllReduce):
                self.runner.run_interpreted(plan, held[0])
                return
            if plan is not None:
                if not small:
                    self._trim_memory()
                if self.runner.again(plan, held[0].data_ptr()):
                    return
            plan = self.all_reduce_by("one_shot" if small else "two_shot", held, operation)
            if plan is None and small and alone.numel():
                plan = self._interpreted(alone.numel(), alone.dtype, operation)
            if not shared:  # Where tensors of this size may lie in shared memory, the plan depends on the tensor.
                self.runner.plan(sort, plan)

    def _interpreted(self, count: int, dtype: torch.dtype, operation: Any) -> InterpretedAllReduce:
        (stage,) = self._program(Collective.ALL_REDUCE, "one_shot")
        slots = [[slot[:count] for slot in turn] for turn in self._engine.small(words_of(dtype))]
        number, ways = mark("all_reduce", dtype, count, operation), ways_of(operation, dtype, self.arena.size)
        return InterpretedAllReduce(number, slots, stage.reduce[0][1], ways)

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """The same, with small tensors packed into one, which saves a round trip for each."""
        small = [tensor for tensor in tensors if tensor.nbytes <= SMALL]
        large = [tensor for tensor in tensors if tensor.nbytes > SMALL]
        if small:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in small])
            self.all_reduce([flat], operation)
            pieces = flat.split([tensor.numel() for tensor in small])
            for tensor, piece in zip(small, pieces, strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))
        if large:
            self.all_reduce(large, operation)

    def all_reduce_by(
        self, algorithm: str, tensors: Sequence[Tensor], operation: Any, weight: float | None = None
    ) -> Turns | None:
        """Reduce contiguous tensors of one dtype in place, in a pipeline; this rank's are multiplied by `weight`."""
        size, dtype = self.arena.size, tensors[0].dtype
        blocks = 1 if _in_one_block(Collective.ALL_REDUCE, algorithm) else size
        small = blocks == len(tensors) == 1 and tensors[0].nbytes <= SMALL
        width = self._engine.width(blocks, dtype.itemsize, small)
        stages, ways = self._program(Collective.ALL_REDUCE, algorithm), ways_of(operation, dtype, size, weight)
        key = ("all_reduce", algorithm, int(operation), weight is None, weight == 1.0)
        number = mark("all_reduce", dtype, sum(tensor.numel() for tensor in tensors), operation)
        return self._in_place(key, number, ways, tensors, stages, width, lambda row: _pieces(row, row, width, blocks))

    def sum_own_blocks(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Sum contiguous tensors in place, each rank only its block (`even_blocks`) of each."""
        size, dtype = self.arena.size, tensors[0].dtype
        stages, ways = self._program(Collective.REDUCE_SCATTER, "one_shot"), ways_of(_SUM, dtype, size, weight)
        width = self._engine.width(size, dtype.itemsize)

        def pieces(row: Array) -> list[Piece]:
            blocks = [row[low:high] for low, high in even_blocks(row.size, size)]
            windows = [_windows(blocks, start, width) for start in range(0, blocks[0].size, width)]
            return [(window, window) for window in windows]

        number = mark("reduce_scatter", dtype, sum(tensor.numel() for tensor in tensors), _SUM)
        self._in_place(("own_blocks", weight == 1.0), number, ways, tensors, stages, width, pieces)

    def _in_place(
        self,
        key: tuple[Any, ...],
        number: int,
        ways: Ways,
        tensors: Sequence[Tensor],
        stages: Sequence[ProgramStage],
        width: int,
        pieces: Callable[[Array], list[Piece]],
    ) -> Turns | None:
        """Run an operation in place; `pieces` cuts a row."""
        self._trim_memory()
        words = words_of(tensors[0].dtype)

        def work() -> PreparedCollective:
            rows = [as_words(tensor) for tensor in tensors]
            return PreparedCollective(stages, [piece for row in rows for piece in pieces(row)], rows, width, words)

        whole = (*key, words, *(tensor.numel() for tensor in tensors))
        return self.runner.run(whole, number, ways, [tensor.data_ptr() for tensor in tensors], work)

    def _trim_memory(self) -> None:
        self._large += 1
        if self._large % _OPERATIONS_PER_TRIM == 0:
            give_back_excess()

    def shared_tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that the other ranks can read: an all-reduce of it copies nothing. All ranks call this."""
        self.runner.meet(mark("shared_tensor", dtype, count))
        # From now on large tensors may lie in shared memory, which compiled plans know nothing of.
        self.runner.plans.clear()
        return self._shared.add(count, dtype)

    def barrier(self) -> None:
        self.runner.meet(mark("barrier"))

    def broadcast(self, tensor: Tensor, root: int, algorithm: str = "one_shot") -> None:
        row = as_bytes(tensor)
        number = mark("broadcast", tensor.dtype, tensor.numel(), root=root)
        width = self._engine.width(1, 1)
        stages = self._program(Collective.BROADCAST, algorithm, root)

        def work() -> PreparedCollective:
            return PreparedCollective(stages, _pieces(row, row, width, 1), [row], width, np.uint8)

        self.runner.run(("broadcast", algorithm, root, row.size), number, Ways(), [address_of(row)], work)

    def reduce(self, tensor: Tensor, operation: Any, root: int, algorithm: str = "two_shot") -> None:
        row = as_words(tensor)
        result = row if self.arena.rank == root else np.empty_like(row)
        stages = self._program(Collective.REDUCE, algorithm, root)
        number = mark("reduce", tensor.dtype, row.size, operation, root)
        size = self.arena.size
        width = self._engine.width(size, row.itemsize)
        key = ("reduce", algorithm, root, int(operation), row.dtype, tensor.dtype, row.size)
        ways = ways_of(operation, tensor.dtype, size)
        rows = [row, result] if result is not row else [row]

        def work() -> PreparedCollective:
            return PreparedCollective(stages, _pieces(row, result, width, size), rows, width, row.dtype)

        self.runner.run(key, number, ways, [address_of(row) for row in rows], work)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        rows = [as_bytes(output) for output in outputs]
        me, mine = self.arena.rank, as_bytes(tensor)
        _same_size(rows[me], mine, f"output {me} of all_gather")
        np.copyto(rows[me], mine)
        number = mark("all_gather", tensor.dtype, sum(output.numel() for output in outputs))
        bring = _only(len(rows), me, mine)
        self._move(Collective.ALL_GATHER, bring, rows, max(row.size for row in rows), number)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        size, me, mine = self.arena.size, self.arena.rank, as_bytes(tensor)
        rows: list[Any] = [as_bytes(output) for output in outputs] if me == root else [None] * size
        if me == root:
            for rank, row in enumerate(rows):
                _same_size(row, mine, f"output {rank} of gather")
            np.copyto(rows[me], mine)
        number = mark("gather", tensor.dtype, tensor.numel(), root=root)
        self._move(Collective.GATHER, _only(size, me, mine), rows, mine.size, number, root)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        size, me, mine = self.arena.size, self.arena.rank, as_bytes(output)
        rows: list[Any] = [as_bytes(tensor) for tensor in inputs] if me == root else [None] * size
        if me == root:
            for rank, row in enumerate(rows):
                _same_size(row, mine, f"input {rank} of scatter")
            np.copyto(mine, rows[me])
        number = mark("scatter", output.dtype, output.numel(), root=root)
        self._move(Collective.SCATTER, rows, _only(size, me, mine), mine.size, number, root)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        bring, rows = [as_bytes(tensor) for tensor in inputs], [as_bytes(tensor) for tensor in outputs]
        me = self.arena.rank
        _same_size(rows[me], bring[me], f"output {me} of all_to_all")
        np.copyto(rows[me], bring[me])
        # No rank knows how much the others exchange: they first agree on the longest, through the marks.
        longest = max(row.size for row in (*bring, *rows))
        base = self.arena.board.enter(mark("all_to_all", None, longest))
        self.arena.sync()
        marks = self.arena.board.marks(base)
        if any(other & 15 != marks[me] & 15 for other in marks):
            raise mismatch(self.arena)
        longest = max(count_of(other) for other in marks)
        self._move(Collective.ALL_TO_ALL, bring, rows, longest, mark("all_to_all", None, longest))

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], operation: Any) -> None:
        rows, me = [as_words(tensor) for tensor in inputs], self.arena.rank
        mine = as_words(output)
        _same_size(mine, rows[me], "the output of reduce_scatter")
        number = mark("reduce_scatter", output.dtype, sum(row.size for row in rows), operation)
        longest = max(row.size for row in rows)
        ways = ways_of(operation, output.dtype, self.arena.size)
        self._move(Collective.REDUCE_SCATTER, rows, _only(len(rows), me, mine), longest, number, ways=ways)

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
        """Move blocks of any lengths up to `longest`, window by window."""
        words = next(row.dtype for row in (*bring, *rows) if row is not None)
        size = self.arena.size
        small = longest * words.itemsize * size <= SMALL
        width = self._engine.width(size, words.itemsize, small)
        operands = [row for row in (*bring, *rows) if row is not None]
        sizes = tuple(None if row is None else row.size for row in (*bring, *rows))
        key = (collective, root, words, ways.plain, longest, sizes)
        stages = self._program(collective, "one_shot", root)

        def work() -> PreparedCollective:
            starts = range(0, longest, width)
            pieces = [(_windows(bring, start, width), _windows(rows, start, width)) for start in starts]
            return PreparedCollective(stages, pieces, operands, width, words)

        self.runner.run(key, number, ways, [address_of(row) for row in operands], work)


def _in_one_block(collective: Collective, algorithm: str) -> bool:
    """Whether all ranks reduce everything, so that there is nothing to cut."""
    return collective is Collective.ALL_REDUCE and algorithm == "one_shot"


def as_bytes(tensor: Tensor) -> Array:
    return as_words(tensor).view(np.uint8)


def _only(size: int, rank: int, row: Array) -> list[Any]:
    rows: list[Any] = [None] * size
    rows[rank] = row
    return rows


def _pieces(row: Array, result: Array, width: int, size: int) -> list[Piece]:
    """A row in pieces, each cut evenly into one block per rank."""
    pieces: list[Piece] = []
    for start in range(0, row.size, width * size):
        stop = min(start + width * size, row.size)
        cuts = even_blocks(stop - start, size)
        inputs = [row[start + low : start + high] for low, high in cuts]
        pieces.append((inputs, inputs if result is row else [result[start + low : start + high] for low, high in cuts]))
    return pieces


def _windows(rows: Blocks, start: int, width: int) -> list[Any]:
    return [None if row is None else row[start : start + width] for row in rows]


def _same_size(row: Array, other: Array, what: str) -> None:
    if row.size != other.size:
        raise ValueError(f"{what} has {row.nbytes:,} bytes, but {other.nbytes:,} are needed")

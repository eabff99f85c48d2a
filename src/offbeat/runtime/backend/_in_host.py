"""Collectives between ranks of one host, each a compiled one-sided schedule run through shared memory."""

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
from offbeat.runtime.collectives.one_sided.arena import ONE_SHOT, SMALL, Room
from offbeat.runtime.collectives.one_sided.compile import ProgramStage, compile_one_sided, even_blocks
from offbeat.runtime.collectives.one_sided.interpret import Blocks, Piece, PreparedCollective
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways, as_words, ways_of, words_of
from offbeat.runtime.collectives.one_sided.native import Turns, address_of
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.system.malloc import give_back_excess

_SUM = dist.ReduceOp.SUM
_LOOK_AT_MEMORY = 64
"""Large operations between two looks at how much memory this process keeps free."""
LIVE_ROOT = 1
"""Told in the mark of an all-reduce in place, so that it is not mistaken for one that copies."""


class SharedTensors:
    """Tensors that lie in memory of all ranks of a room."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._segments: dict[int, tuple[Segment, int]] = {}
        """By the address of the storage: the memory, and how much of it each rank has."""

    def __bool__(self) -> bool:
        return bool(self._segments)

    def add(self, count: int, dtype: torch.dtype) -> Tensor:
        """A new one, of zeros; all ranks call this together."""
        each = -(-max(count * dtype.itemsize, 1) // 4096) * 4096
        segment = self._room.share_segment(each * self._room.size)
        tensor = segment.tensor(each * self._room.rank, count, dtype)
        self._segments[tensor.untyped_storage().data_ptr()] = (segment, each)
        return tensor

    def rows(self, tensor: Tensor) -> list[Array] | None:
        """Every rank's part of the memory in which this tensor lies, if it lies in shared memory."""
        found = self._segments.get(tensor.untyped_storage().data_ptr())
        if found is None or not tensor.is_contiguous():
            return None
        segment, each = found
        offset = tensor.data_ptr() - segment.address - each * self._room.rank
        if not 0 <= offset < each:
            return None
        words, count = words_of(tensor.dtype), tensor.numel()
        return [segment.array(each * rank + offset, count, words) for rank in range(self._room.size)]


class HostCollectives:
    """The collectives of one room. Every rank calls them in the same order, one at a time."""

    def __init__(self, room: Room) -> None:
        self.room, self.runner = room, Runner(room)
        self._engine = self.runner.engine
        self._view = View.of(room.size)
        self._programs: dict[tuple[Collective, str, int], tuple[ProgramStage, ...]] = {}
        self._shared = SharedTensors(room)
        self._large = 0

    def _program(self, collective: Collective, name: str, root: int = 0) -> tuple[ProgramStage, ...]:
        key = (collective, name, root)
        found = self._programs.get(key)
        if found is None:
            schedule = algorithm_of(collective, name).schedule
            blocks = 1 if collective is Collective.BROADCAST or _in_one_block(collective, name) else self.room.size
            found = compile_one_sided(schedule, self._view, self.room.rank, blocks, root)
            self._programs[key] = found
        return found

    # -- all-reduce --------------------------------------------------------------------------------------------------

    def all_reduce(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """Tensors of one kind, in place, by the algorithm that suits their size."""
        alone = tensors[0] if len(tensors) == 1 else None
        shared = alone is not None and self._shared and alone.nbytes > SMALL
        if alone is not None and shared and (rows := self._shared.rows(alone)) is not None:
            number = mark("all_reduce", alone.dtype, rows[0].size, operation, root=LIVE_ROOT)
            ways = ways_of(operation, alone.dtype, self.room.size)
            self.runner.run_live(self._program(Collective.ALL_REDUCE, "zero_copy"), rows, ways, number)
            return
        with in_place(tensors) as held:
            if alone is None:
                self.all_reduce_by("two_shot", held, operation)
                return
            sort = alone.numel(), alone.dtype, int(operation)
            plan, small = self.runner.plans.get(sort), alone.nbytes <= ONE_SHOT
            if isinstance(plan, InterpretedAllReduce):
                self.runner.run_written(plan, held[0])
                return
            if plan is not None:
                if not small:
                    self._look_at_memory()
                if self.runner.again(plan, held[0].data_ptr()):
                    return
            plan = self.all_reduce_by("one_shot" if small else "two_shot", held, operation)
            if plan is None and small and alone.numel():
                plan = self._written(alone.numel(), alone.dtype, operation)
            if not shared:  # Where tensors of this length may lie in shared memory, it depends on the tensor.
                self.runner.plan(sort, plan)

    def _written(self, count: int, dtype: torch.dtype, operation: Any) -> InterpretedAllReduce:
        (stage,) = self._program(Collective.ALL_REDUCE, "one_shot")
        slots = [[slot[:count] for slot in turn] for turn in self._engine.small(words_of(dtype))]
        number, ways = mark("all_reduce", dtype, count, operation), ways_of(operation, dtype, self.room.size)
        return InterpretedAllReduce(number, slots, stage.reduce[0][1], ways)

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """The same; small tensors travel together in one, which saves a round trip for each."""
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
        """Contiguous tensors of one kind, in place, in a pipeline. This rank's numbers count `weight` times."""
        size, dtype = self.room.size, tensors[0].dtype
        blocks = 1 if _in_one_block(Collective.ALL_REDUCE, algorithm) else size
        small = blocks == len(tensors) == 1 and tensors[0].nbytes <= SMALL
        width = self._engine.width(blocks, dtype.itemsize, small)

        stages, ways = self._program(Collective.ALL_REDUCE, algorithm), ways_of(operation, dtype, size, weight)
        key = ("all_reduce", algorithm, int(operation), weight is None, weight == 1.0)
        number = mark("all_reduce", dtype, sum(tensor.numel() for tensor in tensors), operation)
        return self._in_place(key, number, ways, tensors, stages, width, lambda row: _pieces(row, row, width, blocks))

    def sum_own_blocks(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Sum contiguous tensors, but each rank only its block of each, in place, as `even_blocks` cuts them."""
        size, dtype = self.room.size, tensors[0].dtype
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
        """Run on memory where it lies; `pieces` cuts a row."""
        self._look_at_memory()
        words = words_of(tensors[0].dtype)

        def work() -> PreparedCollective:
            rows = [as_words(tensor) for tensor in tensors]
            return PreparedCollective(stages, [piece for row in rows for piece in pieces(row)], rows, width, words)

        whole = (*key, words, *(tensor.numel() for tensor in tensors))
        return self.runner.run(whole, number, ways, [tensor.data_ptr() for tensor in tensors], work)

    def _look_at_memory(self) -> None:
        """Now and then, see how much this process keeps free."""
        self._large += 1
        if self._large % _LOOK_AT_MEMORY == 0:
            give_back_excess()

    # -- on memory that is shared already ----------------------------------------------------------------------------

    def shared_tensor(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros that the others can read: an all-reduce of it copies nothing. All ranks call this."""
        self.runner.meet(mark("shared_tensor", dtype, count))
        # What is large may lie in shared memory from now on, of which what was compiled knows nothing.
        self.runner.plans.clear()
        return self._shared.add(count, dtype)

    # -- the others --------------------------------------------------------------------------------------------------

    def barrier(self, kind: str = "barrier") -> None:
        """Return when all ranks have come."""
        self.runner.meet(mark(kind))

    def broadcast(self, tensor: Tensor, root: int, algorithm: str = "one_shot") -> None:
        """The root's numbers, on every rank, in place."""
        row = as_bytes(tensor)
        number = mark("broadcast", tensor.dtype, tensor.numel(), root=root)
        width = self._engine.width(1, 1)

        stages = self._program(Collective.BROADCAST, algorithm, root)

        def work() -> PreparedCollective:
            return PreparedCollective(stages, _pieces(row, row, width, 1), [row], width, np.uint8)

        self.runner.run(("broadcast", algorithm, root, row.size), number, Ways(), [address_of(row)], work)

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

        def work() -> PreparedCollective:
            return PreparedCollective(stages, _pieces(row, result, width, size), rows, width, row.dtype)

        self.runner.run(key, number, ways, [address_of(row) for row in rows], work)

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
        base = self.room.board.enter(mark("all_to_all", None, longest))
        self.room.sync()
        marks = self.room.board.marks(base)
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
        ways = ways_of(operation, output.dtype, self.room.size)
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
        """Blocks of any lengths up to `longest`, window by window."""
        words = next(row.dtype for row in (*bring, *rows) if row is not None)
        size = self.room.size
        small = longest * words.itemsize * size <= SMALL
        width = self._engine.width(size, words.itemsize, small)

        given = [row for row in (*bring, *rows) if row is not None]
        sizes = tuple(None if row is None else row.size for row in (*bring, *rows))
        key = (collective, root, words, ways.plain, longest, sizes)
        stages = self._program(collective, "one_shot", root)

        def work() -> PreparedCollective:
            starts = range(0, longest, width)
            pieces = [(_windows(bring, start, width), _windows(rows, start, width)) for start in starts]
            return PreparedCollective(stages, pieces, given, width, words)

        self.runner.run(key, number, ways, [address_of(row) for row in given], work)


def _in_one_block(collective: Collective, algorithm: str) -> bool:
    """Whether everybody reduces everything, so that there is nothing to be cut."""
    return collective is Collective.ALL_REDUCE and algorithm == "one_shot"


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

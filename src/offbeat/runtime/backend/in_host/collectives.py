"""Collectives between the ranks of one host: one-sided schedules run through shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.protocols.collectives import Collective
from offbeat.protocols.schedule import Schedule, View
from offbeat.runtime.backend._call_ids import mark
from offbeat.runtime.backend._checks import in_place
from offbeat.runtime.backend.in_host.moves import HostMoves, bases_of, in_one_block, pieces_of, plan_key, windows_of
from offbeat.runtime.backend.in_host.runner import InterpretedAllReduce
from offbeat.runtime.collectives.one_sided.arena import ONE_SHOT, SMALL, Arena
from offbeat.runtime.collectives.one_sided.compile import ProgramStage, compile_one_sided, even_blocks
from offbeat.runtime.collectives.one_sided.interpret import Piece, PreparedCollective
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways, as_words, mixing_ways, ways_of, words_of
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


class HostCollectives(HostMoves):
    """All collectives of an arena; every rank calls them in the same order, one at a time."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self._shared = SharedTensors(arena)
        self._large = 0
        self._mixings: dict[Schedule, tuple[ProgramStage, ...]] = {}

    def all_reduce(self, tensors: Sequence[Tensor], operation: Any) -> None:
        """Reduce tensors of one dtype in place, by the algorithm for their size."""
        alone = tensors[0] if len(tensors) == 1 else None
        shared = alone is not None and self._shared and alone.nbytes > SMALL
        if alone is not None and shared and (rows := self._shared.rows(alone)) is not None:
            number = mark("all_reduce", alone.dtype, rows[0].size, operation, root=LIVE_ROOT)
            ways = ways_of(operation, alone.dtype, self.arena.size)
            self.runner.run_live(self.program(Collective.ALL_REDUCE, "zero_copy"), rows, ways, number)
            return
        with in_place(tensors) as held:
            if alone is None:
                self.all_reduce_by("two_shot", held, operation)
                return
            key = plan_key("all_reduce", 0, operation, held)
            plan, small = self.runner.plans.get(key), alone.nbytes <= ONE_SHOT
            if isinstance(plan, InterpretedAllReduce):
                self.runner.run_interpreted(plan, held[0])
                return
            if plan is not None:
                if not small:
                    self._trim_memory()
                if self.runner.again(plan, [held[0].data_ptr()]):
                    return
            plan = self.all_reduce_by("one_shot" if small else "two_shot", held, operation)
            if plan is None and small and alone.numel():
                plan = self._interpreted(alone.numel(), alone.dtype, operation)
            if not shared:  # Where tensors of this size may lie in shared memory, the plan depends on the tensor.
                self.runner.plan(key, plan)

    def _interpreted(self, count: int, dtype: torch.dtype, operation: Any) -> InterpretedAllReduce:
        (stage,) = self.program(Collective.ALL_REDUCE, "one_shot")
        slots = [[slot[:count] for slot in turn] for turn in self.engine.small(words_of(dtype))]
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
        blocks = 1 if in_one_block(Collective.ALL_REDUCE, algorithm) else size
        small = blocks == len(tensors) == 1 and tensors[0].nbytes <= SMALL
        width = self.engine.width(blocks, dtype.itemsize, small)
        stages, ways = self.program(Collective.ALL_REDUCE, algorithm), ways_of(operation, dtype, size, weight)
        key = ("all_reduce", algorithm, int(operation), weight is None, weight == 1.0)
        number = mark("all_reduce", dtype, sum(tensor.numel() for tensor in tensors), operation)
        return self._in_place(key, number, ways, tensors, stages, width, lambda row: pieces_of(row, row, width, blocks))

    def sum_own_blocks(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Sum contiguous tensors in place, each rank only its block (`even_blocks`) of each."""
        size, dtype = self.arena.size, tensors[0].dtype
        stages, ways = self.program(Collective.REDUCE_SCATTER, "one_shot"), ways_of(_SUM, dtype, size, weight)
        width = self.engine.width(size, dtype.itemsize)

        def pieces(row: Array) -> list[Piece]:
            blocks = [row[low:high] for low, high in even_blocks(row.size, size)]
            windows = [windows_of(blocks, start, width) for start in range(0, blocks[0].size, width)]
            return [(window, window) for window in windows]

        number = mark("reduce_scatter", dtype, sum(tensor.numel() for tensor in tensors), _SUM)
        self._in_place(("own_blocks", weight == 1.0), number, ways, tensors, stages, width, pieces)

    def mix(self, tensors: Sequence[Tensor], schedule: Schedule) -> None:
        """Mix contiguous tensors of one dtype in place, as one row, by a schedule with weights."""
        dtype, view, me = tensors[0].dtype, View.of(self.arena.size), self.arena.rank
        if schedule not in self._mixings:
            self._mixings[schedule] = compile_one_sided(schedule, view, me, blocks=1)
        stages = self._mixings[schedule]
        small = len(tensors) == 1 and tensors[0].nbytes <= SMALL
        width = self.engine.width(1, dtype.itemsize, small)
        number = mark("mix", dtype, sum(tensor.numel() for tensor in tensors), root=len(tensors))

        def cut(row: Array) -> list[Piece]:
            return pieces_of(row, row, width, 1)

        self._in_place(("mix", stages, dtype), number, mixing_ways(dtype), tensors, stages, width, cut)

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
            return PreparedCollective(stages, [piece for row in rows for piece in pieces(row)], width, words)

        whole = (*key, words, *(tensor.numel() for tensor in tensors))
        return self.runner.run(whole, number, ways, bases_of(tensors), work)

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
        """Wait for all ranks."""
        key = plan_key("barrier", 0, None, ())
        self.runner.plan(key, self.runner.run_stage(key, mark("barrier")))

    def reduce(self, tensor: Tensor, operation: Any, root: int, algorithm: str = "two_shot") -> None:
        """Reduce a tensor to the root, in place."""
        row = as_words(tensor)
        result = row if self.arena.rank == root else np.empty_like(row)
        stages = self.program(Collective.REDUCE, algorithm, root)
        number = mark("reduce", tensor.dtype, row.size, operation, root)
        size = self.arena.size
        width = self.engine.width(size, row.itemsize)
        key = ("reduce", algorithm, root, int(operation), row.dtype, tensor.dtype, row.size)
        ways = ways_of(operation, tensor.dtype, size)
        bases = [(address_of(each), each.nbytes) for each in ([row, result] if result is not row else [row])]

        def work() -> PreparedCollective:
            return PreparedCollective(stages, pieces_of(row, result, width, size), width, row.dtype)

        self.runner.run(key, number, ways, bases, work)

"""Collectives that move blocks between the ranks of one host, through slots that all ranks can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from offbeat.protocols.collectives import Collective
from offbeat.protocols.collectives import algorithm as algorithm_of
from offbeat.protocols.schedule import View
from offbeat.runtime.backend._call_ids import KIND_OF, count_of, is_all_to_all, mark
from offbeat.runtime.backend.in_host.runner import Key, Runner, UnequalBlocksError, mismatch
from offbeat.runtime.collectives.one_sided.arena import SMALL, Arena
from offbeat.runtime.collectives.one_sided.compile import ProgramStage, compile_one_sided, even_blocks
from offbeat.runtime.collectives.one_sided.interpret import Blocks, Piece, PreparedCollective
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways, as_words, ways_of

LONG = 8 << 20
"""Bytes of a result from which on copies of it bypass the caches."""


class HostMoves:
    """The collectives of an arena that move blocks; every rank calls them in the same order, one at a time."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.runner = arena, Runner(arena)
        self.engine = self.runner.engine
        self._view = View.of(arena.size)
        self._programs: dict[tuple[Collective, str, int], tuple[ProgramStage, ...]] = {}

    def program(self, collective: Collective, name: str, root: int = 0) -> tuple[ProgramStage, ...]:
        """A schedule compiled for this rank."""
        key = (collective, name, root)
        program = self._programs.get(key)
        if program is None:
            schedule = algorithm_of(collective, name).schedule
            blocks = 1 if collective is Collective.BROADCAST or in_one_block(collective, name) else self.arena.size
            program = self._programs[key] = compile_one_sided(schedule, self._view, self.arena.rank, blocks, root)
        return program

    def broadcast(self, tensor: Tensor, root: int, algorithm: str = "one_shot") -> None:
        """Copy the root's tensor to every rank."""
        row = as_bytes(tensor)
        number = mark("broadcast", tensor.dtype, tensor.numel(), root=root)
        key, bases = plan_key("broadcast", root, None, [tensor]), bases_of([tensor])
        small = row.size <= SMALL
        width = self.engine.width(1, 1, small)
        stages = self.program(Collective.BROADCAST, algorithm, root)

        def prepared() -> PreparedCollective:
            streams = row.size >= LONG
            return PreparedCollective(stages, pieces_of(row, row, width, 1), width, np.uint8, streams=streams)

        turns = self.runner.run((*key, algorithm), number, Ways(), bases, prepared)
        if algorithm == "one_shot":
            self.runner.plan(key, turns)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, whole: Tensor | None = None) -> None:
        """Gather all ranks' tensors; `whole`: the tensor of which the outputs are parts."""
        rows = [as_bytes(output) for output in outputs]
        me, mine = self.arena.rank, as_bytes(tensor)
        _same_size(rows[me], mine, f"output {me} of all_gather")
        number = mark("all_gather", tensor.dtype, sum(output.numel() for output in outputs))
        tensors = [*(outputs if whole is None else [whole]), tensor]
        self._move("all_gather", tensors, _only(len(rows), me, mine), rows, max(row.size for row in rows), number)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Gather all ranks' tensors at the root."""
        size, me, mine = self.arena.size, self.arena.rank, as_bytes(tensor)
        rows: list[Any] = [as_bytes(output) for output in outputs] if me == root else [None] * size
        if me == root:
            for rank, row in enumerate(rows):
                _same_size(row, mine, f"output {rank} of gather")
        number = mark("gather", tensor.dtype, tensor.numel(), root=root)
        self._move("gather", [*outputs, tensor], _only(size, me, mine), rows, mine.size, number, root)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Send each rank one of the root's tensors."""
        size, me, mine = self.arena.size, self.arena.rank, as_bytes(output)
        rows: list[Any] = [as_bytes(tensor) for tensor in inputs] if me == root else [None] * size
        if me == root:
            for rank, row in enumerate(rows):
                _same_size(row, mine, f"input {rank} of scatter")
        number = mark("scatter", output.dtype, output.numel(), root=root)
        self._move("scatter", [output, *inputs], rows, _only(size, me, mine), mine.size, number, root)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], wholes: Sequence[Tensor] = (), splits: Any = ()
    ) -> None:
        """Exchange blocks of any lengths; `wholes`: output and input of which they are parts, split so.

        No rank knows how much the others exchange. Each assumes that their longest block is as long as its own. If it
        is not, all ranks see that when they meet first, and agree on the longest before they begin again.
        """
        longest = max(tensor.nbytes for tensor in (*outputs, *inputs))
        width = self.engine.width(self.arena.size, 1, small=True)
        self._check_own_block(outputs, inputs)
        bring, rows = [as_bytes(tensor) for tensor in inputs], [as_bytes(tensor) for tensor in outputs]
        tensors = list(wholes) or [*outputs, *inputs]
        try:
            if longest > width:
                number = mark("all_to_all", None, longest)
                self._move("all_to_all", tensors, bring, rows, longest, number, splits=splits, meets=True)
            else:  # In one stage, whatever the longest block is.
                self._move("all_to_all", tensors, bring, rows, width, mark("all_to_all"), splits=splits)
        except UnequalBlocksError:
            self.large_all_to_all(outputs, inputs)

    def _check_own_block(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        me = self.arena.rank
        _same_size(as_bytes(outputs[me]), as_bytes(inputs[me]), f"output {me} of all_to_all")

    def large_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """The same, once all ranks know that not all blocks fit into slots."""
        self._check_own_block(outputs, inputs)
        bring, rows = [as_bytes(tensor) for tensor in inputs], [as_bytes(tensor) for tensor in outputs]
        longest = max(row.size for row in (*bring, *rows))
        base = self.arena.board.enter(mark("all_to_all", None, longest))
        self.arena.sync()
        marks = self.arena.board.marks(base)
        if not all(is_all_to_all(number) for number in marks):
            raise mismatch(self.arena)
        longest = max(count_of(number) for number in marks)
        number = mark("all_to_all", None, longest)
        self._move("all_to_all", [*outputs, *inputs], bring, rows, longest, number, splits=("of at most", longest))

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], operation: Any, whole: Tensor | None = None
    ) -> None:
        """Reduce a tensor for each rank; `whole`: the tensor of which the inputs are parts."""
        rows, me = [as_words(tensor) for tensor in inputs], self.arena.rank
        mine = as_words(output)
        _same_size(mine, rows[me], "the output of reduce_scatter")
        number = mark("reduce_scatter", output.dtype, sum(row.size for row in rows), operation)
        longest = max(row.size for row in rows)
        tensors = [output, *(inputs if whole is None else [whole])]
        ways = ways_of(operation, output.dtype, self.arena.size)
        results = _only(len(rows), me, mine)
        self._move("reduce_scatter", tensors, rows, results, longest, number, 0, ways, operation)

    def _move(
        self,
        what: str,
        tensors: Sequence[Tensor],
        bring: Blocks,
        rows: Blocks,
        longest: int,
        number: int,
        root: int = 0,
        ways: Ways = Ways(),  # noqa: B008 - a value, never changed
        operation: Any = None,
        splits: Any = (),
        meets: bool = False,
    ) -> None:
        """Move blocks of any lengths up to `longest`, window by window.

        Args:
            what: the collective.
            tensors: of the call, in order.
            bring: an array per block that this rank has; None where it has none.
            rows: an array per block for results, likewise.
            longest: elements of the longest block of any rank.
            number: the mark of the call.
            root: of a collective that has one.
            ways: how blocks are reduced.
            operation: the reduction.
            splits: anything else that tells calls with the same tensors apart.
            meets: whether ranks may find out, when they meet, that they do not agree on the longest block.

        """
        collective, me = Collective(what), self.arena.rank
        words = next(row.dtype for row in (*bring, *rows) if row is not None)
        size = self.arena.size
        small = longest * words.itemsize * size <= SMALL
        key = plan_key(what, root, operation, tensors, splits)
        bases = bases_of(tensors)
        own = _own_copy(bring[me], rows[me]) if ways.combine is None else ()
        width = self.engine.width(size, words.itemsize, small)
        stages = self.program(collective, "one_shot", root)

        def prepared() -> PreparedCollective:
            starts = range(0, longest, width)
            pieces = [(windows_of(bring, start, width), windows_of(rows, start, width)) for start in starts]
            streams = max((row.nbytes for row in rows if row is not None), default=0) >= LONG
            return PreparedCollective(stages, pieces, width, words, own, meets, streams)

        self.runner.plan(key, self.runner.run(key, number, ways, bases, prepared))


def _own_copy(row: Any, result: Any) -> tuple[Array, ...]:
    """What a rank copies from itself: result and row; nothing where it lacks either."""
    return () if row is None or result is None else (result, row)


def plan_key(what: str, root: int, operation: Any, tensors: Sequence[Tensor], splits: Any = ()) -> Key:
    """The key of a plan for a call: as `quick.c` builds it, if there are no splits."""
    detail = root << 8 | (0 if operation is None else int(operation))
    dtype = tensors[0].dtype if tensors else None
    key = (KIND_OF[what], detail, dtype, *(tensor.numel() for tensor in tensors))
    return (*key, *splits) if splits else key


def bases_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Address and bytes of each tensor."""
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]


def in_one_block(collective: Collective, algorithm: str) -> bool:
    """Whether all ranks reduce everything, so that there is nothing to cut."""
    return collective is Collective.ALL_REDUCE and algorithm == "one_shot"


def as_bytes(tensor: Tensor) -> Array:
    """A contiguous tensor as a flat array of bytes."""
    return as_words(tensor).view(np.uint8)


def _only(size: int, rank: int, row: Array) -> list[Any]:
    rows: list[Any] = [None] * size
    rows[rank] = row
    return rows


def pieces_of(row: Array, result: Array, width: int, size: int) -> list[Piece]:
    """A row in pieces, each cut evenly into one block per rank."""
    pieces: list[Piece] = []
    for start in range(0, row.size, width * size):
        stop = min(start + width * size, row.size)
        cuts = even_blocks(stop - start, size)
        inputs = [row[start + low : start + high] for low, high in cuts]
        pieces.append((inputs, inputs if result is row else [result[start + low : start + high] for low, high in cuts]))
    return pieces


def windows_of(rows: Blocks, start: int, width: int) -> list[Any]:
    """The same window of each row."""
    return [None if row is None else row[start : start + width] for row in rows]


def _same_size(row: Array, other: Array, what: str) -> None:
    if row.size != other.size:
        raise ValueError(f"{what} has {row.nbytes:,} bytes, but {other.nbytes:,} are needed")

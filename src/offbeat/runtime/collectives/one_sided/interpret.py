"""Interprets compiled one-sided schedules in an arena: in a pipeline through slots, or directly on shared tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from offbeat.runtime.collectives.one_sided.arena import CHUNK, DEPTH, PHASES, SLOTS, SMALL, STAGES, Arena
from offbeat.runtime.collectives.one_sided.compile import ProgramStage, even_blocks
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways, WeightedSum

LIVE = 1 << 18
"""Bytes reduced at once where nothing is copied."""
Blocks = Sequence[Any]
"""An array per block; None where this rank has none."""
Piece = tuple[Blocks, Blocks]
"""A rank's inputs and outputs."""
Action = tuple[Callable[..., Any], tuple[Any, ...]]
Slots = Sequence[Sequence[Array]]
"""Arrays by turn and rank."""


class PreparedCollective(NamedTuple):
    """A collective, prepared for one rank's inputs and outputs."""

    stages: Sequence[ProgramStage]
    pieces: Sequence[Piece]
    width: int
    """Elements of a block that fit into a slot."""
    words: Any
    """The numpy dtype in which data is moved."""
    own: Sequence[Array] = ()
    """What this rank copies from itself: result and row."""
    meets: bool = False
    """Whether all ranks meet before they begin, as they may find out that they do not agree."""
    streams: bool = False
    """Whether results are so long that copies of them should bypass the caches."""

    @property
    def slots(self) -> int:
        """Which slots it uses: those for single stages, or those of the ring."""
        blocks, elsewhere = self.pieces[0]
        itemsize = next((row.itemsize for row in (*blocks, *elsewhere) if row is not None), 1)
        single = len(self.pieces) == len(self.stages) == 1
        return STAGES if single and len(blocks) * self.width * itemsize <= SMALL else SLOTS


class Engine:
    """The interpreter of one arena, with its slots as arrays."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._rings: dict[Any, list[Slots]] = {}
        self._smalls: dict[Any, Slots] = {}
        self._take = arena.take

    def width(self, blocks: int, itemsize: int, small: bool = False) -> int:
        """Elements per block, if this many blocks go into a slot."""
        return max(1, (SMALL if small else CHUNK) // blocks // 64 * 64 // itemsize)

    def _ring(self, words: Any) -> list[Slots]:
        ring = self._rings.get(words)
        if ring is None:
            arena = self._arena
            if arena.slots.ring is None:  # Allocated at its first use, by all ranks together.
                arena.slots.ring = arena.share_segment(arena.slots.ring_size)
            ranks, large = range(arena.size), arena.slots.large
            ring = self._rings[words] = [
                [[large(phase, turn, rank).view(words) for rank in ranks] for turn in range(DEPTH)]
                for phase in range(PHASES)
            ]
        return ring

    def small(self, words: Any) -> Slots:
        """The slots for single stages."""
        slots = self._smalls.get(words)
        if slots is None:
            arena = self._arena
            slots = self._smalls[words] = [
                [arena.slots.small(turn, rank).view(words) for rank in range(arena.size)] for turn in (0, 1)
            ]
        return slots

    def run(self, work: PreparedCollective, check: Callable[[], None], ways: Ways) -> None:
        """Take every piece through all stages, overlapping.

        All ranks have the same number of pieces. While one piece is being published, the one before is reduced and the
        one before that copied out, so that no rank waits for data that was only just requested. `check` is called when
        all ranks have arrived. Pieces are not kept: small objects that outlive an operation would fragment the heap
        between the gradients, whose memory would then not fit the next step's (decision 9).
        """
        arena, slots = self._arena, work.slots
        if slots == SLOTS and arena.slots.ring is None:
            arena.sync()  # The ring is allocated together: check first that all ranks came with the same operation.
            check()
        turn = arena.board.turn(slots, len(work.pieces))
        waiting = True
        for act, arguments in self.script(work, turn, ways):
            act(*arguments)
            if waiting and act == self._take:
                waiting = False
                try:
                    check()
                except BaseException:
                    arena.board.turn(slots, -len(work.pieces))  # No rank has used them.
                    raise

    def script(self, work: PreparedCollective, first: int, ways: Ways) -> Iterator[Action]:
        """The actions of an operation from a turn on, in order: functions and their arguments."""
        stages, pieces, width, words = work.stages, work.pieces, work.width, work.words
        slots: Sequence[Slots] = [self.small(words)] if work.slots == STAGES else self._ring(words)
        rank, last, turns = self._arena.rank, len(stages), len(slots[0])
        here_again = results_stay(stages)
        if work.meets:
            yield self._arena.post, ()
            yield self._take, ()
        if work.own:
            yield np.copyto, tuple(work.own)
        for iteration in range(len(pieces) + last):
            for phase in range(max(0, iteration - len(pieces) + 1), min(iteration, last) + 1):
                inputs, result = pieces[iteration - phase]
                turn = (first + iteration - phase) % turns
                mine = slots[phase][turn][rank] if phase < last else None
                if phase:
                    yield self._take, ()
                    if phase == 2 and here_again:
                        there = slots[0][turn]
                        here: Sequence[Array] = [there[_host(source)] for source in range(len(there))]
                    else:
                        here = slots[phase - 1][turn]
                    following = None if here_again else mine
                    stay = here_again and phase == 1
                    yield from self._consume(stages[phase - 1], here, inputs, result, width, ways, following, stay)
                elif mine is not None:
                    put = ways.weigh or np.copyto
                    for block in stages[0].publish:
                        yield put, (_part(mine, block, width, inputs[block]), inputs[block])
                if mine is not None:
                    yield self._arena.post, ()

    def _consume(
        self,
        stage: ProgramStage,
        slots: Sequence[Array],
        inputs: Blocks,
        result: Blocks,
        width: int,
        ways: Ways,
        following: Array | None,
        stay: bool,
    ) -> Iterator[Action]:
        """Reduce and copy the data of a stage, and put what was reduced into the slot of the following stage.

        With `stay` it stays in the slot of a rank that contributed to it, where no other rank reads that part and all
        find it: so it needs no more cache.
        """
        me = self._arena.rank
        for block, ranks in stage.reduce:
            out = result[block]
            rows = [_part(slots[rank], block, width, out) for rank in ranks]
            target = rows[ranks.index(_host(me))] if stay else out
            scratch = target
            if me in ranks and block not in stage.publish:
                # This rank's row is not in its slot, which no rank reads: the slot is scratch for the row or the sum.
                position = ranks.index(me)
                if ways.blend is not None and len(ranks) == 2:
                    yield ways.blend, (rows[1 - position], inputs[block], target)
                    rows = []
                elif ways.weigh is not None:
                    yield ways.weigh, (rows[position], inputs[block])
                else:
                    scratch = target if stay or position <= 1 else rows[position]
                    rows[position] = inputs[block]
            if rows:
                yield from reductions(rows, scratch, ways)
            if scratch is not out:
                yield np.copyto, (out, scratch)
            if following is not None:
                yield np.copyto, (_part(following, block, width, out), out)
        for block, terms in stage.weigh:
            row = inputs[block]
            others = (_part(slots[rank], block, width, row) for rank, _ in terms[1:])
            yield _weighted_sum([weight for _, weight in terms], ways), (result[block], row, *others)
        for source, block, place in stage.copy:
            row = result[place]
            yield np.copyto, (row, _part(slots[source], block, width, row))

    def run_live(self, stages: Sequence[ProgramStage], rows: Sequence[Array], ways: Ways) -> None:
        """The same without slots: `rows` are all ranks' tensors in shared memory; all ranks have arrived.

        What a later stage would copy to a peer is written there at once, while it is still in the cache: a peer's part
        of a block is read only by the rank that reduces it.
        """
        arena = self._arena
        me, mine = arena.rank, rows[arena.rank]
        blocks = even_blocks(len(mine), arena.size)
        step = max(1, LIVE // mine.itemsize)
        scratch = np.empty(min(step, len(mine)), mine.dtype) if me > 1 else None
        fused = len(stages) == 2 and not stages[0].copy and not stages[1].reduce
        for stage in stages:
            for block, ranks in stage.reduce:
                for start, stop in _steps(*blocks[block], step):
                    out = mine[start:stop]
                    target = out if scratch is None else scratch[: stop - start]
                    for act, arguments in reductions([rows[rank][start:stop] for rank in ranks], target, ways):
                        act(*arguments)
                    for row in rows if fused else [mine]:
                        if row is not mine or target is not out:
                            np.copyto(row[start:stop], target)
            if fused:
                break
            arena.sync()
            for source, block, _ in stage.copy:
                for start, stop in _steps(*blocks[block], step):
                    np.copyto(mine[start:stop], rows[source][start:stop])
        arena.sync()  # Only now no other rank reads or writes this rank's row any more.


def results_stay(stages: Sequence[ProgramStage]) -> bool:
    """Whether reduced data is only copied afterwards: then it can stay where it was reduced."""
    return len(stages) == 2 and bool(stages[0].reduce) and not stages[0].copy and not stages[1].reduce


def _host(owner: int) -> int:
    """The rank in whose slot a rank leaves its sum: the first other one, whose part comes first or second in a sum."""
    return 0 if owner else 1


def reductions(rows: Sequence[Array], out: Array, ways: Ways) -> list[Action]:
    """Combine rows in their order into `out`, which may be the first or the second of them."""
    combine = ways.combine
    if combine is None:
        raise RuntimeError("a schedule that reduces was run without a way to combine")
    actions: list[Action] = [(combine, (rows[0], rows[1], out))]
    actions += [(combine, (out, row, out)) for row in rows[2:]]
    return actions if ways.finish is None else [*actions, (ways.finish, (out,))]


def _weighted_sum(weights: Sequence[float], ways: Ways) -> WeightedSum:
    if ways.dtype is None:
        raise RuntimeError("a schedule with weights was run without the dtype of its numbers")
    return WeightedSum(tuple(weights), ways.dtype)


def _part(slot: Array, block: int, width: int, row: Array) -> Array:
    """The part of a slot that holds a row of this block."""
    return slot[block * width : block * width + len(row)]


def _steps(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]

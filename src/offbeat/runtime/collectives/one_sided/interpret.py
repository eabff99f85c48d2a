"""Executes compiled one-sided schedules in a room: in a pipeline of pieces through slots, or on live shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from offbeat.runtime.collectives.one_sided.arena import CHUNK, PHASES, SMALL, Room
from offbeat.runtime.collectives.one_sided.board import DEPTH, SLOTS, STAGES
from offbeat.runtime.collectives.one_sided.compile import ProgramStage, even_blocks
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways

LIVE = 1 << 18
"""Bytes that are reduced at once where nothing is copied."""
Blocks = Sequence[Any]
"""An array for each block; None where this rank has nothing of it."""
Piece = tuple[Blocks, Blocks]
"""What a rank brings, and where results go."""
Action = tuple[Callable[..., Any], tuple[Any, ...]]
Slots = Sequence[Sequence[Array]]
"""Arrays by turn and rank."""


class PreparedCollective(NamedTuple):
    """A collective, worked out for what one rank brings and where it wants the results."""

    stages: Sequence[ProgramStage]
    pieces: Sequence[Piece]
    rows: Sequence[Array]
    """All memory of this rank that is read or written."""
    width: int
    """Elements of a block that fit into a slot."""
    words: Any
    """The numpy kind in which numbers are moved."""

    @property
    def slots(self) -> int:
        """Which slots it goes through: those for single stages, or those of the ring."""
        blocks, elsewhere = self.pieces[0]
        itemsize = next((row.itemsize for row in (*blocks, *elsewhere) if row is not None), 1)
        single = len(self.pieces) == len(self.stages) == 1
        return STAGES if single and len(blocks) * self.width * itemsize <= SMALL else SLOTS


class Engine:
    """The slots of one room as arrays, and what is done in them."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._rings: dict[Any, list[Slots]] = {}
        self._smalls: dict[Any, Slots] = {}
        self._take = room.take

    def width(self, blocks: int, itemsize: int, small: bool = False) -> int:
        """How many elements of each of so many blocks fit into a slot."""
        return max(1, (SMALL if small else CHUNK) // blocks // 64 * 64 // itemsize)

    def _ring(self, words: Any) -> list[Slots]:
        found = self._rings.get(words)
        if found is None:
            room = self._room
            if room.slots.ring is None:  # Made at its first use, by all ranks together.
                room.slots.ring = room.share_segment(room.slots.ring_bytes)
            found = self._rings[words] = [
                [
                    [room.slots.large(phase, turn, rank).view(words) for rank in range(room.size)]
                    for turn in range(DEPTH)
                ]
                for phase in range(PHASES)
            ]
        return found

    def small(self, words: Any) -> Slots:
        """The slots for single stages."""
        found = self._smalls.get(words)
        if found is None:
            room = self._room
            found = self._smalls[words] = [
                [room.slots.small(turn, rank).view(words) for rank in range(room.size)] for turn in (0, 1)
            ]
        return found

    def run(self, work: PreparedCollective, check: Callable[[], None], ways: Ways) -> None:
        """Take every piece (what this rank brings, and where results go, by block) through all stages, overlapping.

        All ranks have the same number of pieces. While one piece is being published, the one before is reduced and the
        one before that copied out: nobody waits for what was only just asked for. `check` is called when everybody has
        come. Nothing is kept of the pieces: small things that outlive an operation would lie between the gradients in
        the heap, whose memory would then not fit the next step's (decision 9).
        """
        room, slots = self._room, work.slots
        if slots == SLOTS and room.slots.ring is None:
            room.sync()  # Room for large messages is made together: first see that all have come for the same.
            check()
        turn = room.board.turn(slots, len(work.pieces))
        waiting = True
        for act, arguments in self.script(work, turn, ways):
            act(*arguments)
            if waiting and act == self._take:
                waiting = False
                check()

    def script(self, work: PreparedCollective, first: int, ways: Ways) -> Iterator[Action]:
        """Everything that is to be done from that turn on, in order: functions and what they are given."""
        stages, pieces, width, words = work.stages, work.pieces, work.width, work.words
        slots: Sequence[Slots] = [self.small(words)] if work.slots == STAGES else self._ring(words)
        rank, last, turns = self._room.rank, len(stages), len(slots[0])
        here_again = results_stay(stages)
        for iteration in range(len(pieces) + last):
            for phase in range(max(0, iteration - len(pieces) + 1), min(iteration, last) + 1):
                given, result = pieces[iteration - phase]
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
                    yield from self._consume(stages[phase - 1], here, given, result, width, ways, following, stay)
                elif mine is not None:
                    put = ways.weigh or np.copyto
                    for block in stages[0].publish:
                        yield put, (_part(mine, block, width, given[block]), given[block])
                if mine is not None:
                    yield self._room.post, ()

    def _consume(
        self,
        stage: ProgramStage,
        slots: Sequence[Array],
        given: Blocks,
        result: Blocks,
        width: int,
        ways: Ways,
        following: Array | None,
        stay: bool,
    ) -> Iterator[Action]:
        """Reduce and copy what a stage has brought. What was reduced goes on into the slot of the following one.

        Or it stays in the slot of one who has brought a part of it (`stay`), where nobody else reads that part, and the
        others find it: so it takes no further room in the caches.
        """
        me = self._room.rank
        for block, ranks in stage.reduce:
            out = result[block]
            rows = [_part(slots[rank], block, width, out) for rank in ranks]
            target = rows[ranks.index(_host(me))] if stay else out
            scratch = target
            if me in ranks and block not in stage.publish:
                # Mine is not in my slot, which nobody reads: room for it, or for a sum that may not overwrite it yet.
                position = ranks.index(me)
                if ways.blend is not None and len(ranks) == 2:
                    yield ways.blend, (rows[1 - position], given[block], target)
                    rows = []
                elif ways.weigh is not None:
                    yield ways.weigh, (rows[position], given[block])
                else:
                    scratch = target if stay or position <= 1 else rows[position]
                    rows[position] = given[block]
            if rows:
                yield from reductions(rows, scratch, ways)
            if scratch is not out:
                yield np.copyto, (out, scratch)
            if following is not None:
                yield np.copyto, (_part(following, block, width, out), out)
        for source, block, place in stage.copy:
            row = result[place]
            yield np.copyto, (row, _part(slots[source], block, width, row))

    def run_live(self, stages: Sequence[ProgramStage], rows: Sequence[Array], ways: Ways) -> None:
        """The same with no slots: `rows` are every rank's own numbers, which lie in shared memory; all have come.

        What a later stage copies from here to a peer is written there at once, while it is still in the cache: a peer's
        part of a block is read by nobody but who reduces it.
        """
        room = self._room
        me, mine = room.rank, rows[room.rank]
        blocks = even_blocks(len(mine), room.size)
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
            room.sync()
            for source, block, _ in stage.copy:
                for start, stop in _steps(*blocks[block], step):
                    np.copyto(mine[start:stop], rows[source][start:stop])
        room.sync()  # Only now nobody reads or writes mine any more.


def results_stay(stages: Sequence[ProgramStage]) -> bool:
    """Whether what is reduced is only copied afterwards: then it can stay where it was reduced."""
    return len(stages) == 2 and bool(stages[0].reduce) and not stages[0].copy and not stages[1].reduce


def _host(owner: int) -> int:
    """In whose slot a rank leaves what it has reduced: the first other's, whose part comes first or second in a sum."""
    return 0 if owner else 1


def reductions(rows: Sequence[Array], out: Array, ways: Ways) -> list[Action]:
    """Combine rows in their order into `out`, which may be the first or the second of them."""
    combine = ways.combine
    if combine is None:
        raise RuntimeError("a schedule that reduces was run without a way to combine")
    done: list[Action] = [(combine, (rows[0], rows[1], out))]
    done += [(combine, (out, row, out)) for row in rows[2:]]
    return done if ways.finish is None else [*done, (ways.finish, (out,))]


def _part(slot: Array, block: int, width: int, row: Array) -> Array:
    """Where a row of this block lies in a slot."""
    return slot[block * width : block * width + len(row)]


def _steps(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]

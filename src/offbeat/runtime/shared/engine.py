"""Executes compiled one-sided schedules in a room: in a pipeline of pieces through slots, or on live shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offbeat.runtime.shared.kernels import Array, Ways
from offbeat.runtime.shared.programs import Stage, even_blocks
from offbeat.runtime.shared.room import CHUNK, DEPTH, PHASES, SMALL, Room

LIVE = 1 << 18
"""Bytes that are reduced at once where nothing is copied."""
Blocks = Sequence[Any]
"""An array for each block; None where this rank has nothing of it."""
Slots = Sequence[Sequence[Array]]
"""Arrays by turn and rank."""


class Engine:
    """The slots of one room as arrays, and what is done in them."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._rings: dict[Any, list[Slots]] = {}
        self._smalls: dict[Any, Slots] = {}

    def width(self, blocks: int, itemsize: int, small: bool = False) -> int:
        """How many elements of each of so many blocks fit into a slot."""
        return max(1, (SMALL if small else CHUNK) // blocks // 64 * 64 // itemsize)

    def _ring(self, words: Any) -> list[Slots]:
        found = self._rings.get(words)
        if found is None:
            room = self._room
            found = self._rings[words] = [
                [[room.ring(phase, turn, rank).view(words) for rank in range(room.size)] for turn in range(DEPTH)]
                for phase in range(PHASES)
            ]
        return found

    def small(self, words: Any) -> Slots:
        """The slots for single stages."""
        found = self._smalls.get(words)
        if found is None:
            room = self._room
            found = self._smalls[words] = [
                [room.small(parity, rank).view(words) for rank in range(room.size)] for parity in (0, 1)
            ]
        return found

    def run(
        self,
        stages: Sequence[Stage],
        pieces: Sequence[tuple[Blocks, Blocks]],
        width: int,
        words: Any,
        check: Callable[[], None],
        ways: Ways,
    ) -> None:
        """Take every piece (what this rank brings, and where results go, by block) through all stages, overlapping.

        All ranks have the same number of pieces. While one piece is being published, the one before is reduced and the
        one before that copied out: nobody waits for what was only just asked for. `check` is called
        when everybody has come.
        """
        room = self._room
        small = len(pieces) == 1 and len(stages) == 1 and self._fits(pieces[0], width)
        slots = [self.small(words)] if small else self._ring(words)
        first, turns = (room.stage, 2) if small else (room.round, DEPTH)
        last = len(stages)
        for iteration in range(len(pieces) + last):
            for phase in range(last + 1):
                piece = iteration - phase
                if not 0 <= piece < len(pieces):
                    continue
                given, result = pieces[piece]
                turn = (first + piece) % turns
                if phase:
                    room.take()
                    if iteration == 1:
                        check()
                    self._consume(stages[phase - 1], slots[phase - 1][turn], given, result, width, ways)
                if phase < last:
                    mine = slots[phase][turn][room.rank]
                    put, source = (np.copyto, result) if phase else (ways.weigh or np.copyto, given)
                    for block in stages[phase].publish:
                        row = source[block]
                        put(mine[block * width : block * width + len(row)], row)
                    room.post()
        if small:
            room.stage += 1
        else:
            room.round += len(pieces)

    def _fits(self, piece: tuple[Blocks, Blocks], width: int) -> bool:
        rows = [row for side in piece for row in side if row is not None]
        itemsize = rows[0].itemsize if rows else 1
        return (len(piece[0]) * width) * itemsize <= SMALL

    def _consume(
        self,
        stage: Stage,
        slots: Sequence[Array],
        given: Blocks,
        result: Blocks,
        width: int,
        ways: Ways,
    ) -> None:
        me = self._room.rank
        for block, ranks in stage.reduce:
            out = result[block]
            start, stop = block * width, block * width + len(out)
            rows = [slots[rank][start:stop] for rank in ranks]
            scratch = out
            if me in ranks and block not in stage.publish:
                # Mine is not in my slot, which nobody reads: room for it, or for a sum that may not overwrite it yet.
                position = ranks.index(me)
                if ways.weigh is not None:
                    ways.weigh(rows[position], given[block])
                else:
                    scratch = rows[position] if position > 1 else out
                    rows[position] = given[block]
            reduce_rows(rows, scratch, ways)
            if scratch is not out:
                np.copyto(out, scratch)
        for source, block, place in stage.copy:
            row = result[place]
            np.copyto(row, slots[source][block * width : block * width + len(row)])

    def run_live(
        self,
        stages: Sequence[Stage],
        rows: Sequence[Array],
        ways: Ways,
    ) -> None:
        """The same with no slots: `rows` are every rank's own numbers, which lie in shared memory already."""
        room = self._room
        me, mine = room.rank, rows[room.rank]
        blocks = even_blocks(len(mine), room.size)
        step = max(1, LIVE // mine.itemsize)
        scratch = np.empty(min(step, len(mine)), mine.dtype) if me > 1 else None
        for stage in stages:
            room.sync()
            for block, ranks in stage.reduce:
                for start, stop in _steps(*blocks[block], step):
                    out = mine[start:stop]
                    target = out if scratch is None else scratch[: stop - start]
                    reduce_rows([rows[rank][start:stop] for rank in ranks], target, ways)
                    if target is not out:
                        np.copyto(out, target)
            for source, block, _ in stage.copy:
                for start, stop in _steps(*blocks[block], step):
                    np.copyto(mine[start:stop], rows[source][start:stop])
        room.sync()  # Only now nobody reads mine any more.


def reduce_rows(rows: Sequence[Array], out: Array, ways: Ways) -> None:
    """Combine rows in their order into `out`, which may be the first or the second of them."""
    combine = ways.combine
    if combine is None:
        raise RuntimeError("a schedule that reduces was run without a way to combine")
    combine(rows[0], rows[1], out)
    for row in rows[2:]:
        combine(out, row, out)
    if ways.finish is not None:
        ways.finish(out)


def _steps(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]

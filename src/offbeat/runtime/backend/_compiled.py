"""What the compiled executor does for the collectives of one room: worked out once, done wherever memory lies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from offbeat.runtime.backend._marks import MismatchError, in_words
from offbeat.runtime.shared.engine import Action, Engine, Piece, reductions, results_stay
from offbeat.runtime.shared.kernels import Array, Ways
from offbeat.runtime.shared.native import Task, Turns, address_of, compiled, executor, overlap, spread_steps
from offbeat.runtime.shared.programs import Stage, even_blocks
from offbeat.runtime.shared.room import Room

_MOST = 128


class _Known(NamedTuple):
    """An operation of one kind and sizes."""

    small: bool
    pieces: int
    tasks: dict[int, Task]
    """By the turn with which it begins."""


class Compiled:
    """The operations of one room that were compiled; none where there is no library."""

    def __init__(self, room: Room, engine: Engine) -> None:
        self._room, self._engine, self._mismatch = room, engine, partial(mismatch, room)
        self._native = native = executor(room)
        self._known: dict[Any, _Known | None] = {}
        self._live: dict[Any, Task | None] = {}
        self.start_turn: Any = None if native is None else native.start_turn
        """Begins an operation by the address of its turns; `UNKNOWN` if it was not compiled, else not 0: `finish`."""

    def run(self, key: Any, mark: int, addresses: Sequence[int], ways: Ways) -> bool:
        """Do what was compiled for this key, on memory at these addresses; False if nothing was."""
        room, native, found = self._room, self._native, self._known.get(key)
        if native is None or found is None:
            return False
        task = found.tasks.get(room.next_turn(found.small))
        if task is None:
            return False
        room.turn(found.small, found.pieces)
        weight = 1.0 if ways.plain is None else ways.plain.weight
        task.move([*addresses, *(start for start, _ in room.stretches)], mark, weight)
        native.run(task, self._mismatch)
        return True

    def learn(
        self,
        key: Any,
        stages: Sequence[Stage],
        pieces: Sequence[Piece],
        rows: Sequence[Array],
        width: int,
        words: Any,
        ways: Ways,
    ) -> bool:
        """Compile this operation for the turn that comes next; False if it cannot be."""
        room, native = self._room, self._native
        small = self._engine.is_small(stages, pieces, width)
        if native is None or self._known.get(key, ()) is None or not (small or room.has_ring):
            return False
        stretches = [*((address_of(row), row.nbytes) for row in rows), *room.stretches]
        if overlap(stretches):
            return False
        turn = room.next_turn(small)
        script = self._engine.script(stages, pieces, width, words, small, turn, ways)
        steps = compiled(script, stretches, ways, words, room)
        entry = self._known.get(key)
        if entry is None:
            entry = None if steps is None else _Known(small, len(pieces), {})
            keep(self._known, key, entry)
        if steps is None or entry is None:
            return False
        entry.tasks[turn] = native.task(steps, [start for start, _ in stretches])
        return True

    # -- of what lies at one place ------------------------------------------------------------------------------------

    def settled(self, key: Any, turn: int, address: int, mark: int, turns: Turns | None) -> Turns | None:
        """What was compiled for this key, on one row that stays where it is, with one turn more than before."""
        native, found = self._native, self._known.get(key)
        if native is None or found is None or turn not in found.tasks or (turns is not None and turns.has(turn)):
            return turns
        turns = turns or native.turns(found.small, found.pieces)
        bases = [address, *(start for start, _ in self._room.stretches)]
        turns.put(turn, native.task(found.tasks[turn].steps, bases, mark))
        return turns

    def small(
        self, slots: Sequence[Sequence[Array]], order: Sequence[int], row: Array, ways: Ways, mark: int
    ) -> Turns | None:
        """A small all-reduce of a row, through either set of slots; None if it cannot be compiled."""
        native, tasks = self._native, [self._stage(set_, order, row, ways, mark) for set_ in slots]
        turns = None if native is None else native.turns(small=True, advance=1)
        for turn, task in enumerate(tasks):
            if task is None or turns is None:
                return None
            turns.put(turn, task)
        return turns

    def _stage(self, slots: Sequence[Array], order: Sequence[int], row: Array, ways: Ways, mark: int) -> Task | None:
        room, native = self._room, self._native
        if native is None:
            return None
        script: list[Action] = [
            (np.copyto, (slots[room.rank], row)),
            (room.post, ()),
            (room.take, ()),
            *reductions([slots[rank] for rank in order], row, ways),
        ]
        stretches = [(address_of(row), row.nbytes), room.stretches[0]]
        steps = compiled(script, stretches, ways, row.dtype, room)
        return None if steps is None else native.task(steps, [start for start, _ in stretches], mark)

    def finish(self, turns: Turns, code: int) -> None:
        """Go on with an operation that somebody is late for."""
        native: Any = self._native
        native.finish(turns.latest, code, self._mismatch)

    # -- on memory that is shared already -----------------------------------------------------------------------------

    def run_live(self, stages: Sequence[Stage], rows: Sequence[Array], ways: Ways, mark: int) -> bool:
        """An all-reduce of rows in shared memory; False if it cannot be compiled."""
        native = self._native
        if native is None:
            return False
        key = (mark, address_of(rows[0]), ways.plain)
        if key not in self._live:
            keep(self._live, key, self._live_task(stages, rows, ways, mark))
        task = self._live[key]
        if task is None:
            return False
        native.run(task, self._mismatch)
        return True

    def _live_task(self, stages: Sequence[Stage], rows: Sequence[Array], ways: Ways, mark: int) -> Task | None:
        native: Any = self._native
        everybody = tuple(range(self._room.size))
        if not results_stay(stages) or any(ranks != everybody for _, ranks in stages[0].reduce):
            return None
        blocks = even_blocks(rows[0].size, self._room.size)
        ranges = [blocks[block] for block, _ in stages[0].reduce]
        steps = spread_steps(ranges, self._room.size, rows[0].dtype, ways)
        return None if steps is None else native.task(steps, [address_of(row) for row in rows], mark)


def mismatch(room: Room) -> Exception:
    """What to say when ranks have come to the room's latest operation with different ones."""
    marks = room.marks(room.base)
    told = "; ".join(f"rank {room.names[rank]} with {in_words(number)}" for rank, number in enumerate(marks))
    room.fail()
    return MismatchError(
        f"ranks came to operation #{room.calls} of this group with different calls: {told}. Every rank must "
        f"make the same calls in the same order, with the same shapes and kinds of numbers."
    )


def keep(known: dict[Any, Any], key: Any, value: Any, most: int = _MOST) -> None:
    """Remember it, and forget the oldest of too many."""
    if len(known) >= most:
        known.pop(next(iter(known)))
    known[key] = value

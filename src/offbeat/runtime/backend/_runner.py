"""Runs the collectives of one room: by the compiled executor what can be compiled, else by the engine.

What was compiled is kept by what was asked for and how long it is, and done wherever memory lies. An all-reduce of one
tensor is found under a second key, too, which `quick.c` can make from the call alone: the same operation, not a copy.
Small ones that cannot be compiled stay worked out there, because the engine would take several times as long.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.runtime.backend._call_ids import MismatchError, in_words
from offbeat.runtime.collectives.one_sided.arena import Room
from offbeat.runtime.collectives.one_sided.board import CALLS, SLOTS, STAGES
from offbeat.runtime.collectives.one_sided.compile import ProgramStage, even_blocks
from offbeat.runtime.collectives.one_sided.interpret import Engine, PreparedCollective, results_stay
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways, as_words
from offbeat.runtime.collectives.one_sided.native import (
    UNKNOWN,
    NativeOperation,
    Turns,
    address_of,
    compiled,
    executor,
    overlap,
    spread_steps,
)

_MOST, _MOST_PLANS = 128, 512

Sort = tuple[int, torch.dtype, int]
"""Count and kind of the numbers of an all-reduce, and the number of its operation."""


@dataclass(slots=True)
class InterpretedAllReduce:
    """A small all-reduce that cannot be compiled, worked out for the interpreter."""

    mark: int
    slots: Sequence[Sequence[Array]]
    order: Sequence[int]
    ways: Ways
    address: int = 0
    """Where the latest row lies."""
    row: Any = None


class Runner:
    """The operations of one room, which every rank does in the same order, one at a time."""

    def __init__(self, room: Room) -> None:
        self.room, self.engine = room, Engine(room)
        self._native = executor(room)
        self._known: dict[Any, Turns | None] = {}
        self.plans: dict[Sort, Turns | InterpretedAllReduce] = {}
        """All-reduces of one tensor that are worked out: compiled, or small ones for the interpreter."""
        self.start: Any = None if self._native is None else self._native.start
        """Begins a compiled operation (see `Executor.start`); None where there is no library."""
        # Numbers may overflow here as anywhere in torch, without a word. A context of one's own is the cheapest way to
        # tell numpy so: only who has the turn uses it.
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        self._quietly: Any = context.run

    def run(
        self, key: Any, mark: int, ways: Ways, addresses: Sequence[int], worked_out: Callable[[], PreparedCollective]
    ) -> Turns | None:
        """Do an operation; answers what it is compiled to, if it is.

        Args:
            key: what is done, in which sizes: under it the operation is kept when it is compiled.
            mark: what is done, for the board.
            ways: how numbers are combined.
            addresses: where this rank's rows lie, in the order in which they are worked out.
            worked_out: asked for the operation if it is not compiled yet.

        """
        board, turns = self.room.board, self._known.get(key)
        task = None if turns is None else turns.tasks[board.next_turn(turns.slots)]
        if turns is None or task is None:
            work = worked_out()
            if not work.pieces:
                self.meet(mark)
                return None
            learned = self._learned(key, work, ways)
            if learned is None:
                self._quietly(self.engine.run, work, partial(self._check, board.enter(mark), mark), ways)
                return None
            turns, task = learned
        weight = 1.0 if ways.plain is None else ways.plain.weight
        task.move([*addresses, *(start for start, _ in self.room.slots.stretches)], mark, weight)
        code = self.start(turns.address, addresses[0])
        if code:
            self.finish(turns, code)
        return turns

    def again(self, turns: Turns, address: int) -> bool:
        """Do what was compiled, with its first row at this address; False if not for the slot that comes next."""
        code = self.start(turns.address, address)
        if code == UNKNOWN:
            return False
        if code:
            self.finish(turns, code)
        return True

    def finish(self, turns: Turns, code: int) -> None:
        """Go on with an operation that somebody is late for."""
        native: Any = self._native
        native.finish(turns, code, partial(mismatch, self.room))

    def _learned(self, key: Any, work: PreparedCollective, ways: Ways) -> tuple[Turns, NativeOperation] | None:
        """An operation, compiled for the slot that comes next; None if it cannot be."""
        room, native, slots = self.room, self._native, work.slots
        turns: Any = self._known.get(key, ())
        if native is None or turns is None or (slots == SLOTS and room.slots.ring is None):
            return None
        stretches = [*((address_of(row), row.nbytes) for row in work.rows), *room.slots.stretches]
        if overlap(stretches):
            return None
        turn = room.board.next_turn(slots)
        steps = compiled(self.engine.script(work, turn, ways), stretches, ways, work.words, room)
        if not turns:
            turns = None if steps is None else native.turns(slots, len(work.pieces))
            _keep(self._known, key, turns, _MOST)
        if turns is None or steps is None:
            return None
        task = native.task(steps, [start for start, _ in stretches])
        turns.put(turn, task)
        return turns, task

    def plan(self, sort: Sort, plan: Turns | InterpretedAllReduce | None) -> None:
        """Let such all-reduces be begun at once from now on."""
        # Complex memory may count as conjugated the next time.
        if plan is not None and sort not in self.plans and not sort[1].is_complex:
            _keep(self.plans, sort, plan, _MOST_PLANS)

    def run_written(self, plan: InterpretedAllReduce, tensor: Tensor) -> None:
        """Do a small all-reduce in one stage: everybody reads everybody's slot."""
        address = tensor.data_ptr()
        if address != plan.address:
            plan.address, plan.row = address, as_words(tensor)
        room, row, order, ways = self.room, plan.row, plan.order, plan.ways
        slots = plan.slots[room.board.turn(STAGES)]
        base = room.board.enter(plan.mark)
        np.copyto(slots[room.rank], row)
        room.post()
        room.take()
        self._check(base, plan.mark)
        self._quietly(ways.combine, slots[order[0]], slots[order[1]], row)
        for rank in order[2:]:
            self._quietly(ways.combine, row, slots[rank], row)
        if ways.finish is not None:
            ways.finish(row)

    def run_live(self, stages: Sequence[ProgramStage], rows: Sequence[Array], ways: Ways, mark: int) -> None:
        """An all-reduce of every rank's rows, which lie in shared memory."""
        key = (mark, address_of(rows[0]), ways.plain)
        if key not in self._known:
            _keep(self._known, key, self._live_turns(stages, rows, ways, mark), _MOST)
        turns = self._known[key]
        if turns is None:
            self.meet(mark)
            self._quietly(self.engine.run_live, stages, rows, ways)
        else:
            self.again(turns, key[1])

    def _live_turns(self, stages: Sequence[ProgramStage], rows: Sequence[Array], ways: Ways, mark: int) -> Turns | None:
        native, everybody = self._native, tuple(range(self.room.size))
        if native is None or not results_stay(stages) or any(ranks != everybody for _, ranks in stages[0].reduce):
            return None
        blocks = even_blocks(rows[0].size, self.room.size)
        steps = spread_steps([blocks[block] for block, _ in stages[0].reduce], self.room.size, rows[0].dtype, ways)
        if steps is None:
            return None
        turns = native.turns(CALLS)
        turns.put(0, native.task(steps, [address_of(row) for row in rows], mark))
        return turns

    def meet(self, mark: int) -> None:
        """All have come, with the same."""
        base = self.room.board.enter(mark)
        self.room.sync()
        self._check(base, mark)

    def _check(self, base: int, mark: int) -> None:
        """All ranks must have come with the same operation."""
        marks = self.room.board.marks(base)
        if marks.count(mark) != len(marks):
            raise mismatch(self.room)


def mismatch(room: Room) -> Exception:
    """What to say when ranks have come to the room's latest operation with different ones."""
    marks = room.board.marks(room.board.base)
    told = "; ".join(f"rank {room.names[rank]} with {in_words(number)}" for rank, number in enumerate(marks))
    room.fail()
    return MismatchError(
        f"ranks came to operation #{room.board.calls} of this group with different calls: {told}. Every rank must "
        f"make the same calls in the same order, with the same shapes and kinds of numbers."
    )


def _keep(known: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Remember it, and forget the oldest of too many."""
    if len(known) >= most:
        known.pop(next(iter(known)))
    known[key] = value

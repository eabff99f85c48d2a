"""Runs the collectives of one arena: compiled where possible, otherwise by the interpreter.

Compiled operations are cached by kind and sizes and work on any memory; `quick.c` finds them there without the
interpreter. Small all-reduces that cannot be compiled are cached too, because the interpreter would take several times
as long.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from offbeat.runtime.backend._call_ids import MismatchError, in_words, is_all_to_all
from offbeat.runtime.collectives.one_sided import native
from offbeat.runtime.collectives.one_sided.arena import CALLS, SLOTS, STAGES, Arena
from offbeat.runtime.collectives.one_sided.compile import ProgramStage, even_blocks
from offbeat.runtime.collectives.one_sided.interpret import Engine, PreparedCollective, results_stay
from offbeat.runtime.collectives.one_sided.kernels import Array, Ways, as_words
from offbeat.runtime.collectives.one_sided.native import UNKNOWN, NativeOperation, Turns, address_of

_MOST = 512

Key = tuple[Any, ...]
"""An operation as `quick.c` reads it off a call: its number, root << 8 | number of its reduction, dtype, and the counts
of all tensors in the order of the arguments. Some have more, and are then not for `quick.c`."""


class UnequalBlocksError(Exception):
    """Ranks came to an all-to-all with blocks that do not all fit into slots: all see that, and none has a result."""


@dataclass(slots=True)
class InterpretedAllReduce:
    """A small all-reduce that cannot be compiled, prepared for the interpreter."""

    mark: int
    slots: Sequence[Sequence[Array]]
    order: Sequence[int]
    ways: Ways
    address: int = 0
    row: Any = None


class Runner:
    """The operations of one arena, which every rank runs in the same order, one at a time."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.engine = arena, Engine(arena)
        self._native = native.executor(arena)
        self._known: dict[Any, Turns | None] = {}
        self.plans: dict[Key, Turns | InterpretedAllReduce] = {}
        """Operations that `quick.c` may start, or small all-reduces prepared for the interpreter."""
        self.start: Any = None if self._native is None else self._native.start
        """Starts a compiled operation (see `Executor.start`); None without the library."""
        # Numbers may overflow silently, as elsewhere in torch. A context of our own is the cheapest way to tell numpy:
        # only the holder of the turn uses it.
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        self._quietly: Any = context.run

    def run(
        self,
        key: Any,
        mark: int,
        ways: Ways,
        bases: Sequence[tuple[int, int]],
        prepare: Callable[[], PreparedCollective],
    ) -> Turns | None:
        """Run an operation, and return its compiled form if it has one.

        Args:
            key: the operation and its sizes, under which its compiled form is cached.
            mark: the operation, for the board.
            ways: how numbers are combined.
            bases: address and bytes of this rank's memory, in the order of the call's tensors.
            prepare: returns the operation; called if it is not compiled yet.

        """
        board, turns = self.arena.board, self._known.get(key)
        task = None if turns is None else turns.tasks[board.next_turn(turns.slots)]
        if turns is None or task is None:
            work = prepare()
            if not work.pieces:
                self.meet(mark)
                return None
            compiled = self._compiled(key, work, bases, ways)
            if compiled is None:
                self._quietly(self.engine.run, work, partial(self._check, board.enter(mark), mark), ways)
                return None
            turns, task = compiled
        weight = 1.0 if ways.plain is None else ways.plain.weight
        self._start(turns, task, bases, mark, weight)
        return turns

    def _start(
        self, turns: Turns, task: NativeOperation, bases: Sequence[tuple[int, int]], mark: int, weight: float
    ) -> None:
        addresses = [start for start, _ in bases]
        task.move([*addresses, *(start for start, _ in self.arena.slots.stretches)], mark, weight)
        if code := self.start(turns, addresses):
            self.finish(turns, code)

    def run_stage(self, key: Any, mark: int) -> Turns | None:
        """Run a stage without data."""
        executor = self._native
        if executor is None:
            self.meet(mark)
            return None
        turns = self._known.get(key)
        if turns is None:
            turns = executor.turns(CALLS)
            turns.put(0, executor.task(native.sync_steps(), [], mark))
            _keep(self._known, key, turns)
        self.again(turns, ())
        return turns

    def again(self, turns: Turns, addresses: Sequence[int]) -> bool:
        """Run a compiled operation on memory at these addresses; False if not compiled for the next slot."""
        code = self.start(turns, addresses)
        if code == UNKNOWN:
            return False
        if code:
            self.finish(turns, code)
        return True

    def finish(self, turns: Turns, code: int) -> None:
        """Finish an operation that returned early with this code."""
        executor: Any = self._native
        executor.finish(turns, code, partial(mismatch, self.arena))

    def _compiled(
        self, key: Any, work: PreparedCollective, bases: Sequence[tuple[int, int]], ways: Ways
    ) -> tuple[Turns, NativeOperation] | None:
        """An operation compiled for the next slot; None if it cannot be compiled."""
        arena, executor, slots = self.arena, self._native, work.slots
        turns: Any = self._known.get(key, ())
        if executor is None or turns is None or (slots == SLOTS and arena.slots.ring is None):
            return None
        stretches = [*bases, *arena.slots.stretches]
        if native.overlap(stretches):
            return None
        turn = arena.board.next_turn(slots)
        script, streams = self.engine.script(work, turn, ways), len(bases) if work.streams else 0
        steps = native.compiled(script, stretches, ways, work.words, arena, streams)
        if not turns:
            turns = None if steps is None else executor.turns(slots, len(work.pieces))
            _keep(self._known, key, turns)
        if turns is None or steps is None:
            return None
        task = executor.task(steps, [start for start, _ in stretches])
        turns.put(turn, task)
        return turns, task

    def plan(self, key: Key, plan: Turns | InterpretedAllReduce | None) -> None:
        """Let operations of this kind start at once from now on."""
        dtype = key[2]
        # Complex memory may be conjugated the next time.
        if plan is not None and key not in self.plans and (dtype is None or not dtype.is_complex):
            _keep(self.plans, key, plan)

    def run_interpreted(self, plan: InterpretedAllReduce, tensor: Tensor) -> None:
        """Run a small all-reduce in one stage: all ranks read all slots."""
        address = tensor.data_ptr()
        if address != plan.address:
            plan.address, plan.row = address, as_words(tensor)
        arena, row, order, ways = self.arena, plan.row, plan.order, plan.ways
        slots = plan.slots[arena.board.turn(STAGES)]
        base = arena.board.enter(plan.mark)
        np.copyto(slots[arena.rank], row)
        arena.post()
        arena.take()
        self._check(base, plan.mark)
        self._quietly(ways.combine, slots[order[0]], slots[order[1]], row)
        for rank in order[2:]:
            self._quietly(ways.combine, row, slots[rank], row)
        if ways.finish is not None:
            ways.finish(row)

    def run_live(self, stages: Sequence[ProgramStage], rows: Sequence[Array], ways: Ways, mark: int) -> None:
        """All-reduce the rows of all ranks, which lie in shared memory."""
        key = (mark, address_of(rows[0]), ways.plain)
        if key not in self._known:
            _keep(self._known, key, self._live_turns(stages, rows, ways, mark))
        turns = self._known[key]
        if turns is None:
            self.meet(mark)
            self._quietly(self.engine.run_live, stages, rows, ways)
        else:
            self.again(turns, (key[1],))

    def _live_turns(self, stages: Sequence[ProgramStage], rows: Sequence[Array], ways: Ways, mark: int) -> Turns | None:
        executor, size = self._native, self.arena.size
        all_ranks = tuple(range(size))
        if executor is None or not results_stay(stages) or any(ranks != all_ranks for _, ranks in stages[0].reduce):
            return None
        blocks = even_blocks(rows[0].size, size)
        steps = native.spread_steps([blocks[block] for block, _ in stages[0].reduce], size, rows[0].dtype, ways)
        if steps is None:
            return None
        turns = executor.turns(CALLS)
        turns.put(0, executor.task(steps, [address_of(row) for row in rows], mark))
        return turns

    def meet(self, mark: int) -> None:
        """Wait for all ranks, and check that they came with the same operation."""
        base = self.arena.board.enter(mark)
        self.arena.sync()
        self._check(base, mark)

    def _check(self, base: int, mark: int) -> None:
        marks = self.arena.board.marks(base)
        if marks.count(mark) != len(marks):
            raise mismatch(self.arena)


def mismatch(arena: Arena) -> Exception:
    """The error for ranks that came to the arena's latest operation with different calls."""
    marks = arena.board.marks(arena.board.base)
    if all(is_all_to_all(number) for number in marks):
        return UnequalBlocksError()
    calls = "; ".join(f"rank {arena.names[rank]} with {in_words(number)}" for rank, number in enumerate(marks))
    arena.fail()
    return MismatchError(
        f"ranks came to operation #{arena.board.calls} of this group with different calls: {calls}. Every rank must "
        f"make the same calls in the same order, with the same shapes and dtypes."
    )


def _keep(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Add to a cache, dropping the oldest entry of too many."""
    if len(cache) >= _MOST:
        cache.pop(next(iter(cache)))
    cache[key] = value

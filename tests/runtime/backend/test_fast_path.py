"""The fast path to collectives that were compiled before: which calls it takes, and which it leaves alone."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from native_support import alone, needed
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from offbeat.runtime.backend._call_ids import KIND_OF
from offbeat.runtime.backend._fast_path import DONE, REDUCES, Unbegun, quick
from offbeat.runtime.backend._op_queue import OpQueue
from offbeat.runtime.backend.in_host.moves import plan_key
from offbeat.runtime.backend.in_host.runner import Key, Runner
from offbeat.runtime.collectives.one_sided.arena import STAGES
from offbeat.runtime.collectives.one_sided.kernels import Ways
from offbeat.runtime.collectives.one_sided.native import UNKNOWN, compiled, executor


def asked_for(operation: Any = ReduceOp.SUM, later: bool = False) -> Any:
    made = AllreduceOptions()
    made.reduceOp, made.asyncOp = operation, later
    return made


def key_of(tensor: Tensor, operation: Any = ReduceOp.SUM) -> Key:
    return plan_key("all_reduce", 0, operation, [tensor])


def begin(way: Any, tensors: Any, options: Any) -> Any:
    return way.begin(KIND_OF["all_reduce"], REDUCES, options, tensors, None)


class Bench:
    """A tensor whose sort of all-reduce is compiled, for an arena of one rank, of which one turn of two is known."""

    def __init__(self) -> None:
        self.tensor, self.line = torch.zeros(16), OpQueue("bench")
        self.arena = alone()
        native, self.runner = executor(self.arena), Runner(self.arena)
        assert native is not None
        self.turns = native.turns(STAGES, 1)
        nothing = compiled([], self.arena.slots.stretches, Ways(), np.float32, self.arena)
        assert nothing is not None
        self.turns.put(0, native.task(nothing, [0]))
        self.runner.plan(key_of(self.tensor), self.turns)
        self.quick = quick(self.runner, self.line)


@needed
def test_what_is_known_is_done_and_counted_and_the_turn_given_back() -> None:
    bench = Bench()
    assert begin(bench.quick, [bench.tensor], asked_for()) is DONE
    assert (bench.arena.board.calls, bench.quick.asked, bench.line.lock.locked()) == (1, 1, False)


@needed
def test_what_the_library_comes_back_with_is_left_to_the_caller_with_the_turn() -> None:
    bench = Bench()
    begin(bench.quick, [bench.tensor], asked_for())
    assert begin(bench.quick, [bench.tensor], asked_for()) == (bench.turns, UNKNOWN)
    assert (bench.quick.asked, bench.line.lock.locked()) == (2, True)
    assert begin(bench.quick, [bench.tensor], asked_for()) is None  # Somebody has the turn.


@needed
def test_everything_unusual_is_left_alone() -> None:
    bench = Bench()
    tensor = bench.tensor
    square, emptied = tensor.view(4, 4), torch.zeros(16)
    emptied.untyped_storage().resize_(0)
    unusual: list[tuple[Any, Any]] = [
        ([tensor], asked_for(later=True)),
        ([tensor], asked_for(ReduceOp.MAX)),
        ([tensor], None),
        ([tensor], ReduceOp.SUM),
        ((tensor,), asked_for()),
        ([], asked_for()),
        ([tensor, tensor], asked_for()),
        ([tensor[:8]], asked_for()),
        ([tensor[1:]], asked_for()),
        ([emptied], asked_for()),
        ([tensor.view(torch.int32)], asked_for()),
        ([square.t()], asked_for()),
        ([torch.nn.Parameter(tensor)], asked_for()),
        ([torch._neg_view(tensor)], asked_for()),
        ([tensor.to_sparse()], asked_for()),
        ([torch.empty(16, device="meta")], asked_for()),
        ([torch.zeros(16, dtype=torch.complex64)], asked_for()),
        (["tensor"], asked_for()),
    ]
    for tensors, options in unusual:
        assert begin(bench.quick, tensors, options) is None, (tensors, options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert begin(bench.quick, [tensor], asked_for()) is None
    bench.line.queue.append((lambda: None, None))  # pyright: ignore[reportArgumentType]
    assert begin(bench.quick, [tensor], asked_for()) is None
    assert (bench.quick.asked, bench.arena.board.calls, bench.line.lock.locked()) == (0, 0, False)
    bench.line.queue.clear()
    assert begin(bench.quick, [square], asked_for()) is DONE  # Its shape does not matter,
    bench.arena.board.counts[1] = 0
    assert begin(bench.quick, [torch.zeros(16)], asked_for()) is DONE  # nor does the place where it lies.


def test_where_nothing_is_compiled_all_calls_take_the_way_of_the_others() -> None:
    way = quick(None, OpQueue("bench"))
    assert isinstance(way, Unbegun)
    assert (begin(way, [torch.zeros(4)], asked_for()), way.asked) == (None, 0)


@needed
def test_complex_numbers_have_no_plan_as_they_may_count_as_conjugated() -> None:
    bench, strange = Bench(), torch.zeros(16, dtype=torch.complex64)
    bench.runner.plan(key_of(strange), bench.turns)
    assert list(bench.runner.plans) == [key_of(bench.tensor)]


@needed
def test_nothing_is_held_after_a_call() -> None:
    bench, options, unknown = Bench(), asked_for(), [torch.zeros(3)]
    known = [bench.tensor]
    things = (bench.tensor, options, unknown[0], bench.turns, bench.runner.plans, DONE, None, True, False)

    def held() -> list[int]:
        return [sys.getrefcount(thing) for thing in things]

    def calls() -> None:
        bench.arena.board.counts[1] = 0  # The turn that is known.
        assert begin(bench.quick, known, options) is DONE
        assert begin(bench.quick, unknown, options) is None
        begin(bench.quick, known, options)
        bench.line.leave()

    calls()
    before = held()
    for _ in range(1000):
        calls()
    assert max(after - first for after, first in zip(held(), before, strict=True)) < 100


@needed
def test_the_compiled_one_is_used_where_it_was_built() -> None:
    assert type(Bench().quick).__name__ == "Quicker", "a compiler is here, but it was not built: install again"
    with pytest.raises(TypeError, match="dictionary"):
        type(Bench().quick)(*[1] * 12)  # pyright: ignore[reportCallIssue]

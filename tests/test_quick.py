"""The quick way to all-reduces that were worked out before: compiled or not, it takes and leaves the same calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from offbeat.runtime.backend._line import Line
from offbeat.runtime.backend._quick import DONE, WRITTEN, Begins, Quick, quick
from offbeat.runtime.shared.kernels import Ways
from offbeat.runtime.shared.native import UNKNOWN, compiled, executor
from test_native import alone, needed

MAKERS = [pytest.param(quick, id="compiled", marks=needed), pytest.param(Quick, id="interpreted")]
Maker = Callable[..., Begins]


def asked_for(operation: Any = ReduceOp.SUM, later: bool = False) -> Any:
    made = AllreduceOptions()
    made.reduceOp, made.asyncOp = operation, later
    return made


def place_of(tensor: Tensor, operation: Any = ReduceOp.SUM) -> tuple[int, int, torch.dtype, int]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, int(operation)


class Bench:
    """A tensor whose all-reduce is worked out, for a room of one rank, of which one turn of two is known."""

    def __init__(self, make: Maker) -> None:
        self.tensor, self.line = torch.zeros(16), Line("bench")
        self.room = alone()
        native = executor(self.room)
        assert native is not None
        self.turns = native.turns(small=True, advance=1)
        nothing = compiled([], self.room.stretches, Ways(), np.float32, self.room)
        assert nothing is not None
        self.turns.put(0, native.task(nothing, [0]))
        self.plans: dict[Any, Any] = {place_of(self.tensor): self.turns}
        self.quick = make(self.plans, self.line, native.start_turn)


@needed
@pytest.mark.parametrize("make", MAKERS)
def test_what_is_known_is_done_and_counted_and_the_turn_given_back(make: Maker) -> None:
    bench = Bench(make)
    assert bench.quick.begin([bench.tensor], asked_for()) is DONE
    assert (bench.room.calls, bench.quick.asked, bench.line.lock.locked()) == (1, 1, False)


@needed
@pytest.mark.parametrize("make", MAKERS)
def test_what_the_library_comes_back_with_is_left_to_the_caller_with_the_turn(make: Maker) -> None:
    bench = Bench(make)
    bench.quick.begin([bench.tensor], asked_for())
    assert bench.quick.begin([bench.tensor], asked_for()) == (bench.turns, UNKNOWN)
    assert (bench.quick.asked, bench.line.lock.locked()) == (2, True)
    assert bench.quick.begin([bench.tensor], asked_for()) is None  # Somebody has the turn.


@needed
@pytest.mark.parametrize("make", MAKERS)
def test_everything_unusual_is_left_alone(make: Maker) -> None:
    bench = Bench(make)
    tensor, other = bench.tensor, torch.zeros(16)
    bench.plans[place_of(other)] = None
    square = tensor.view(4, 4)
    unusual: list[tuple[Any, Any]] = [
        ([tensor], asked_for(later=True)),
        ([tensor], asked_for(ReduceOp.MAX)),
        ([tensor], None),
        ([tensor], ReduceOp.SUM),
        (tensor, asked_for()),
        ((tensor,), asked_for()),
        ([], asked_for()),
        ([tensor, tensor], asked_for()),
        ([tensor[:8]], asked_for()),
        ([tensor[1:]], asked_for()),
        ([tensor.view(torch.int32)], asked_for()),
        ([square.t()], asked_for()),
        ([torch.nn.Parameter(tensor)], asked_for()),
        ([torch._neg_view(tensor)], asked_for()),
        ([tensor.to_sparse()], asked_for()),
        ([torch.empty(16, device="meta")], asked_for()),
        ([other], asked_for()),
        (["tensor"], asked_for()),
    ]
    for tensors, options in unusual:
        assert bench.quick.begin(tensors, options) is None, (tensors, options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert bench.quick.begin([tensor], asked_for()) is None
    bench.line.queue.append((lambda: None, None))  # pyright: ignore[reportArgumentType]
    assert bench.quick.begin([tensor], asked_for()) is None
    assert (bench.quick.asked, bench.room.calls, bench.line.lock.locked()) == (0, 0, False)
    bench.line.queue.clear()
    assert bench.quick.begin([square], asked_for()) is DONE  # Its shape does not matter.


def test_a_plan_for_the_interpreter_is_handed_over_with_the_turn() -> None:
    tensor, line = torch.zeros(4), Line("bench")
    way = Quick({place_of(tensor): "plan"}, line, None)
    assert way.begin([tensor], asked_for()) == ("plan", WRITTEN)
    assert line.lock.locked()


@needed
@pytest.mark.parametrize("make", MAKERS)
def test_nothing_is_held_after_a_call(make: Maker) -> None:
    bench, options, unknown = Bench(make), asked_for(), [torch.zeros(3)]
    known = [bench.tensor]
    things = (bench.tensor, options, unknown[0], bench.turns, bench.plans, DONE, None, True, False)

    def held() -> list[int]:
        return [sys.getrefcount(thing) for thing in things]

    def calls() -> None:
        bench.room.counts[1] = 0  # The turn that is known.
        assert bench.quick.begin(known, options) is DONE
        assert bench.quick.begin(unknown, options) is None
        bench.quick.begin(known, options)
        bench.line.leave()

    calls()
    before = held()
    for _ in range(1000):
        calls()
    assert max(after - first for after, first in zip(held(), before, strict=True)) < 100


@needed
def test_the_compiled_one_is_used_where_it_was_built() -> None:
    assert type(Bench(quick).quick).__name__ == "Quicker", "a compiler is here, but it was not built: install again"
    with pytest.raises(TypeError, match="dictionary"):
        type(Bench(quick).quick)(*[1] * 11)  # pyright: ignore[reportCallIssue]

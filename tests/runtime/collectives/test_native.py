"""The compiled executor: it is there where a compiler is, and does to the bit what the engine does."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from native_support import alone, explain, needed
from torch.distributed import ReduceOp

from conftest import clean_environment
from offbeat.runtime.collectives.one_sided.arena import CALLS, SLOTS, STAGES, Arena
from offbeat.runtime.collectives.one_sided.kernels import Ways, WeightedSum, mixing_ways, ways_of, words_of
from offbeat.runtime.collectives.one_sided.native import LATE, UNKNOWN, address_of, compiled, executor, overlap
from offbeat.runtime.collectives.one_sided.segment import Segment


def stretches_of(rows: Any) -> list[tuple[int, int]]:
    return [(address_of(row), row.nbytes) for row in rows]


@needed
@pytest.mark.parametrize("count", [1, 7, 4099])
@pytest.mark.parametrize(
    ("dtype", "operation", "weight"),
    [
        (torch.float32, ReduceOp.SUM, None),
        (torch.float32, ReduceOp.SUM, 0.3),
        (torch.float32, ReduceOp.AVG, None),
        (torch.float64, ReduceOp.SUM, 0.3),
        (torch.float64, ReduceOp.AVG, None),
        (torch.int32, ReduceOp.SUM, None),
        (torch.int64, ReduceOp.SUM, None),
    ],
)
def test_its_steps_do_what_the_functions_of_a_script_do(
    dtype: torch.dtype, operation: Any, weight: float | None, count: int
) -> None:
    arena, ways = alone(), ways_of(operation, dtype, 3, weight)
    rows = (torch.randn(5, count, dtype=torch.float64) * 1000).to(dtype).numpy()
    if not dtype.is_floating_point:
        rows[0, 0] = rows[1, 0] = np.iinfo(rows.dtype).max  # Too large a sum wraps around in both.
    script: list[tuple[Any, tuple[int, ...]]] = [(np.copyto, (3, 0)), (ways.combine, (3, 1, 3))]
    script += [(ways.weigh, (4, 1))] if ways.weigh is not None else []
    script += [(ways.finish, (3,))] if ways.finish is not None else []
    expected = rows.copy()
    with np.errstate(all="ignore"):
        for act, numbers in script:
            act(*(expected[number] for number in numbers))
    steps = compiled(
        [(act, tuple(rows[number] for number in numbers)) for act, numbers in script],
        stretches_of(rows),
        ways,
        words_of(dtype),
        arena,
    )
    native = executor(arena)
    assert steps is not None
    assert native is not None, "a compiler is here, but the library was not built: install offbeat again"
    task = native.task(steps, [start for start, _ in stretches_of(rows)], 5, 1.0 if weight is None else weight)
    turns = native.turns(CALLS)
    turns.put(0, task)
    assert native.start(turns, [address_of(rows[0])]) == 0
    assert np.array_equal(rows, expected)


@needed
@pytest.mark.parametrize("count", [1, 7, 4099, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("terms", [1, 2, 5])
def test_a_weighted_sum_has_the_same_bits_in_both(dtype: torch.dtype, count: int, terms: int) -> None:
    arena, ways = alone(), mixing_ways(dtype)
    rows = torch.randn(terms, count, dtype=torch.float64).mul_(1000).to(dtype).numpy()
    act = WeightedSum(tuple(1 / (3 + number) for number in range(terms)), dtype)
    expected = rows.copy()
    act(expected[0], *expected)
    total = torch.from_numpy(rows[0]) * act.weights[0]
    for row, weight in zip(rows[1:], act.weights[1:], strict=True):
        total = total + torch.from_numpy(row) * weight
    assert np.array_equal(expected[0], total.numpy())
    steps = compiled([(act, (rows[0], *rows))], stretches_of(rows), ways, words_of(dtype), arena)
    native = executor(arena)
    assert steps is not None
    assert native is not None
    turns = native.turns(CALLS)
    turns.put(0, native.task(steps, [start for start, _ in stretches_of(rows)]))
    assert native.start(turns, [address_of(rows[0])]) == 0
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_weighted_sum_of_other_dtypes_is_left_to_the_engine(dtype: torch.dtype) -> None:
    rows = torch.ones(2, 9, dtype=dtype).view(torch.uint16).numpy()
    act = WeightedSum((0.25, 0.5), dtype)
    assert compiled([(act, (rows[0], *rows))], stretches_of(rows), mixing_ways(dtype), rows.dtype, alone()) is None
    act(rows[0], *rows)
    assert torch.from_numpy(rows).view(dtype).tolist() == [[0.75] * 9, [1.0] * 9]


@needed
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core only")
def test_a_rank_that_waits_goes_to_a_core_with_fewer_ranks() -> None:
    allowed = os.sched_getaffinity(0)
    for crowded in sorted(allowed)[:2]:
        arena = Arena(Arena.create(2), 1, (0, 1), explain)
        cores = (ctypes.c_int64 * 2).from_address(arena.board.cores)
        native = executor(arena)
        assert native is not None
        waiting = compiled([(arena.take, ())], arena.slots.stretches, Ways(), np.float32, arena)
        assert waiting is not None
        turns = native.turns(STAGES, 1)
        turns.put(0, native.task(waiting, [0]))
        os.sched_setaffinity(0, {crowded})
        os.sched_setaffinity(0, allowed)
        cores[0] = crowded + 1
        assert native.start(turns, [0]) == LATE  # Nobody else is here.
        assert cores[1] - 1 in allowed - {crowded}
        assert os.sched_getaffinity(0) == allowed


@needed
def test_what_was_not_compiled_for_a_turn_is_left_to_others() -> None:
    arena = alone()
    native = executor(arena)
    assert native is not None
    turns = native.turns(SLOTS, 3)
    nothing = compiled([], arena.slots.stretches, Ways(), np.float32, arena)
    assert nothing is not None
    turns.put(0, native.task(nothing, [0]))
    assert native.start(turns, [0]) == 0
    assert arena.board.next_turn(SLOTS) == 3
    assert native.start(turns, [0]) == UNKNOWN
    assert (arena.board.next_turn(SLOTS), arena.board.calls) == (3, 1)


@needed
def test_an_operation_is_done_wherever_its_first_row_lies() -> None:
    arena, rows = alone(), np.arange(24, dtype=np.float32).reshape(3, 8)
    native, target = executor(arena), rows[2].copy()
    assert native is not None
    steps = compiled([(np.copyto, (rows[0], rows[1]))], stretches_of(rows[:2]), Ways(), np.float32, arena)
    assert steps is not None
    turns = native.turns(STAGES, 1)
    for turn in (0, 1):
        turns.put(turn, native.task(steps, [start for start, _ in stretches_of(rows[:2])]))
    for row in (rows[0], target):
        assert native.start(turns, [address_of(row)]) == 0
        assert np.array_equal(row, rows[1])


def test_large_segments_lie_where_huge_pages_can() -> None:
    made = Segment.create(5 << 20)
    found = Segment.attach(made.ticket, made.size)
    assert made.address % (2 << 20) == found.address % (2 << 20) == 0
    made.bytes[[0, 3 << 20, -1]] = 7
    assert (found.bytes.sum(), found.size) == (21, 5 << 20)


@pytest.mark.parametrize("operation", [ReduceOp.PRODUCT, ReduceOp.MIN])
def test_what_it_cannot_do_is_left_to_the_engine(operation: Any) -> None:
    arena, rows = alone(), np.ones((2, 8), np.float32)
    ways = ways_of(operation, torch.float32, 2)
    combine: list[Any] = [(ways.combine, (rows[0], rows[1], rows[0]))]
    assert compiled(combine, stretches_of(rows), ways, np.float32, arena) is None
    elsewhere = np.ones(8, np.float32)
    assert compiled([(np.copyto, (rows[0], elsewhere))], stretches_of(rows), ways, np.float32, arena) is None


def test_memory_that_overlaps_is_seen() -> None:
    row = np.zeros(16, np.float32)
    assert overlap(stretches_of([row, row[4:8]]))
    assert not overlap(stretches_of([row[:8], row[8:], row[:0]]))


def test_it_can_be_switched_off() -> None:
    module = "offbeat.runtime.collectives.one_sided.native"
    words = f"from {module} import library, state; assert library() is None; print(state())"
    environment = clean_environment() | {"OFFBEAT_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "switched off by OFFBEAT_NATIVE=0"

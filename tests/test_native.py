"""The compiled executor: it is there where a compiler is, and does to the bit what the engine does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

from conftest import clean_environment
from offbeat.runtime.shared.kernels import ways_of, words_of
from offbeat.runtime.shared.native import address_of, compiled, executor, overlap
from offbeat.runtime.shared.room import Room
from offbeat.runtime.shared.segment import SegmentError

needed = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) on this machine")


def alone() -> Room:
    def explain(why: str, peers: Sequence[int]) -> Exception:
        return SegmentError(f"{why} {peers}")

    return Room(Room.create(1), 0, (0,), explain)


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
    room, ways = alone(), ways_of(operation, dtype, 3, weight)
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
        room,
    )
    native = executor(room)
    assert steps is not None
    assert native is not None, "a compiler is here, but the library was not built: install offbeat again"
    task = native.task(steps, [start for start, _ in stretches_of(rows)], 5, 1.0 if weight is None else weight)
    native.run(task, lambda: AssertionError("nobody else is here"))
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("operation", [ReduceOp.PRODUCT, ReduceOp.MIN])
def test_what_it_cannot_do_is_left_to_the_engine(operation: Any) -> None:
    room, rows = alone(), np.ones((2, 8), np.float32)
    ways = ways_of(operation, torch.float32, 2)
    combine: list[Any] = [(ways.combine, (rows[0], rows[1], rows[0]))]
    assert compiled(combine, stretches_of(rows), ways, np.float32, room) is None
    elsewhere = np.ones(8, np.float32)
    assert compiled([(np.copyto, (rows[0], elsewhere))], stretches_of(rows), ways, np.float32, room) is None


def test_memory_that_overlaps_is_seen() -> None:
    row = np.zeros(16, np.float32)
    assert overlap(stretches_of([row, row[4:8]]))
    assert not overlap(stretches_of([row[:8], row[8:], row[:0]]))


def test_it_can_be_switched_off() -> None:
    words = "from offbeat.runtime.shared.native import library, state; assert library() is None; print(state())"
    environment = clean_environment() | {"OFFBEAT_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "switched off by OFFBEAT_NATIVE=0"

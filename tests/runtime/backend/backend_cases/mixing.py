"""Mixing in shared memory: every rank ends with the weighted sum of its neighbours' rows, for every graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_cases.running import World, contribution, same
from torch import Tensor

from offbeat.errors import UsageError
from offbeat.protocols.gossip.mixing import mix
from offbeat.protocols.gossip.topology import GraphShape, Kind, RandomRegular, mixing
from offbeat.protocols.schedule import FloatArray, Schedule
from offbeat.runtime.backend._call_ids import MismatchError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS: tuple[Kind, ...] = (*GraphShape, RandomRegular(3))
ROWS = ([(1,)], [(7,), (40, 101)])
LONG_ROW = [(150_007,), (513,), (131_073,)]
"""Tensors of which some take several pieces."""


def matrices_of(size: int) -> list[FloatArray]:
    """Every matrix of every graph that this many ranks can form, once."""
    matrices: dict[bytes, FloatArray] = {}
    for kind in KINDS:
        try:
            matrices |= {matrix.tobytes(): matrix for matrix in mixing(kind, size).matrices}
        except UsageError:
            continue
    assert len(matrices) >= (1 if size == 2 else 4)
    return list(matrices.values())


def expected_of(world: World, matrix: FloatArray, parts: Sequence[Tensor]) -> Tensor:
    """The weighted sum of a rank, added in the order of the schedule: its own part first, then by distance."""
    order = [(world.rank + shift) % world.size for shift in world.ranks]
    own, *others = [(parts[rank], float(matrix[world.rank, rank])) for rank in order if matrix[world.rank, rank]]
    total = own[0] * own[1]
    for part, weight in others:
        total = total + part * weight
    return total


def mixed(
    world: World, matrix: FloatArray, schedule: Schedule, shapes: Sequence[tuple[int, ...]], dtype: Any, seed: int
) -> list[Tensor]:
    """Mix tensors of these shapes, compare them with what was expected, and show all ranks' results to all."""
    group: Any = dist.distributed_c10d._get_default_group()
    parts = [
        [contribution(rank, shape, dtype, seed + number) for rank in world.ranks] for number, shape in enumerate(shapes)
    ]
    rows = [each[world.rank].clone() for each in parts]
    group.mix_in_place(rows, schedule, "mixing")
    for row, each in zip(rows, parts, strict=True):
        expected = expected_of(world, matrix, each)
        same(row, expected, (matrix.tolist(), dtype, row.shape))
        if dtype in (torch.float32, torch.float64):
            assert torch.equal(row, expected), "the order of additions is not the schedule's"
        theirs = [torch.empty_like(row) for _ in world.ranks]
        dist.all_gather(theirs, row)
        world.shared(*theirs)
    return rows


def case_rows_of_every_graph_dtype_and_size(world: World) -> None:
    for matrix in matrices_of(world.size):
        schedule = mix(matrix, in_memory=True)
        for dtype in FLOATS:
            for shapes in ROWS:
                mixed(world, matrix, schedule, shapes, dtype, 0)
        mixed(world, matrix, schedule, LONG_ROW, torch.float32, 0)


def case_again_and_again_between_other_calls(world: World) -> None:
    """Through every slot, in turns of matrices, while other operations use the slots as well."""
    matrices = mixing(GraphShape.EXPONENTIAL, world.size).matrices
    schedules = [mix(matrix, in_memory=True) for matrix in matrices]
    for turn in range(14):
        number = turn % len(matrices)
        mixed(world, matrices[number], schedules[number], [(140_001,), (33,)], torch.float32, turn)
        mixed(world, matrices[number], schedules[number], [(33,)], torch.float64, turn)
        if turn % 3 == 0:
            total = torch.full((150_000 + turn,), float(world.rank))
            dist.all_reduce(total)
            assert total.eq(sum(world.ranks)).all()


def case_tensors_that_are_not_in_one_piece(world: World) -> None:
    matrix = mixing(GraphShape.RING, world.size).at(0)
    group: Any = dist.distributed_c10d._get_default_group()
    parts = [contribution(rank, (300, 200)) for rank in world.ranks]
    wide = torch.zeros(200, 600)
    row = wide[:, ::2].t()
    row.copy_(parts[world.rank])
    group.mix_in_place([row], mix(matrix, in_memory=True), "mixing")
    assert torch.equal(row, expected_of(world, matrix, parts))
    assert not wide[:, 1::2].any()


def case_the_mean_of_all_rows_is_kept(world: World) -> None:
    matrix = mixing(GraphShape.RING, world.size).at(0)
    schedule, row = mix(matrix, in_memory=True), contribution(world.rank, (50_000,), torch.float64)
    group: Any = dist.distributed_c10d._get_default_group()
    start = torch.stack([contribution(rank, row.shape, torch.float64) for rank in world.ranks]).mean(dim=0)
    for _ in range(60):
        group.mix_in_place([row], schedule, "mixing")
    mean = row.clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / world.size, start, rtol=0, atol=1e-12)
    torch.testing.assert_close(row, start, rtol=0, atol=1e-6)


def case_ranks_with_rows_of_different_lengths_are_told(world: World) -> None:
    group: Any = dist.distributed_c10d._get_default_group()
    schedule = mix(mixing(GraphShape.RING, world.size).at(0), in_memory=True)
    with pytest.raises(MismatchError, match=r"mix \(float32 x 50,001\)"):
        group.mix_in_place([torch.zeros(50_000 + (world.rank == 1))], schedule, "mixing")
    world.close()
    world.open()

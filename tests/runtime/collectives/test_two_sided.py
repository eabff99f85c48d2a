"""Two-sided schedules on real processes over Gloo: right values, the same bits everywhere, and wrong ones found out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import ScheduleError, UsageError
from offbeat.protocols.checker import check
from offbeat.protocols.collectives import ALGORITHMS, Algorithm, Collective, algorithm
from offbeat.protocols.schedule import Layout, Op, Round, View
from offbeat.runtime.collectives.two_sided import (
    Combine,
    Put,
    Receive,
    SendRange,
    SetAside,
    WaitFor,
    compile_schedule,
    programs,
    run,
)
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.rank_environment import where

C = Collective
TWO_SIDED = [one for named in ALGORITHMS.values() for one in named.values() if not one.one_sided]
REDUCING = (C.ALL_REDUCE, C.REDUCE, C.REDUCE_SCATTER)
OPS = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]


def view_of(size: int) -> View:
    return View.of(size, [rank % 2 for rank in range(size)])


def spoiled(view: View, layout: Layout) -> Iterator[Round]:
    """A ring with one line changed: in its second round the last step's sum is put down instead of added."""
    for number, one in enumerate(algorithm(C.ALL_REDUCE, "ring").schedule(view, layout)):
        yield replace(one, op=Op.COPY) if number == 1 else one


# -- in the processes -------------------------------------------------------------------------------------------------


def given(dtype: torch.dtype, count: int, rank: int, exact: bool = True) -> Tensor:
    """What a rank brings; small whole numbers have sums and products that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    if not exact:
        return torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 3, (count,), generator=generator).to(dtype)


def expected(collective: Collective, inputs: list[Tensor], op: str, layout: Layout, rank: int) -> tuple[slice, Tensor]:
    """Which range of the result matters, and what must be in it."""
    size, everything = len(inputs), slice(None)
    cuts = layout.blocks(size).tolist()
    own = slice(cuts[rank], cuts[rank + 1])
    total = inputs[0].clone()
    for other in inputs[1:]:
        total = OPS["SUM" if op == "AVG" else op](total, other)
    if op == "AVG":
        total = total / size
    gathered = torch.cat([one[cuts[r] : cuts[r + 1]] for r, one in enumerate(inputs)])
    at_root = everything if rank == layout.root else slice(0, 0)
    if collective is C.ALL_TO_ALL:
        return everything, torch.cat([one.view(size, -1)[rank] for one in inputs])
    where_and_what = {
        C.ALL_REDUCE: (everything, total),
        C.REDUCE: (at_root, total),
        C.REDUCE_SCATTER: (own, total),
        C.BROADCAST: (everything, inputs[layout.root]),
        C.SCATTER: (own, inputs[layout.root]),
        C.ALL_GATHER: (everything, gathered),
        C.GATHER: (at_root, gathered),
        C.BARRIER: (slice(0, 0), total),
    }
    range_, value = where_and_what[collective]
    return range_, value[range_]


class Bench:
    """One process that runs case after case."""

    def __init__(self) -> None:
        self.group = DirectGroup(where(), timedelta(seconds=30), torch.device("cpu"))
        self.rank, self.size = self.group.rank, self.group.size
        self.compile = programs()
        self.failures: list[str] = []
        self.cases = 0
        self.digest = hashlib.sha256()

    def run(self, one: Algorithm, layout: Layout, dtype: torch.dtype, op: str, exact: bool = True) -> Tensor:
        program = self.compile(one.schedule, view_of(self.size), layout, self.rank)
        tensor = given(dtype, layout.count, self.rank, exact)
        run(program, tensor, self.group.process_group, getattr(dist.ReduceOp, op), tag=self.cases % 7)
        self.cases += 1
        return tensor

    def verify(self, one: Algorithm, layout: Layout, dtype: torch.dtype = torch.float32, op: str = "SUM") -> None:
        result = self.run(one, layout, dtype, op)
        inputs = [given(dtype, layout.count, rank) for rank in range(self.size)]
        chosen, value = expected(one.collective, inputs, op, layout, self.rank)
        if not torch.equal(result[chosen], value):
            self.failures.append(f"{one.collective} {one.name} {layout} {dtype} {op}")

    def remember(self, one: Algorithm, layout: Layout, dtype: torch.dtype, op: str) -> None:
        result = self.run(one, layout, dtype, op, exact=False)
        self.digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())


def every_algorithm(bench: Bench) -> None:
    for one in TWO_SIDED:
        for count in (0, 1, bench.size - 1, 35 * bench.size, 301):
            fits = (
                count % bench.size == 0 if one.collective is C.ALL_TO_ALL else count or one.collective is not C.BARRIER
            )
            for root in {0, bench.size - 1} if fits else ():
                bench.verify(one, Layout(count, root=root))


def every_kind(bench: Bench) -> None:
    whole = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    for name in ("ring", "halving_doubling", "naive", "recursive_doubling"):
        for dtype in DTYPES:
            ops = (
                {"SUM", "PRODUCT"}
                if dtype.is_complex
                else set(OPS)
                if dtype in whole
                else {"SUM", "PRODUCT", "MIN", "MAX"}
            )
            for op in sorted(ops):
                bench.verify(algorithm(C.ALL_REDUCE, name), Layout(13, dtype.itemsize), dtype, op)
    for one in TWO_SIDED:
        if one.collective in REDUCING:
            bench.verify(one, Layout(29), torch.float32, "AVG")


def same_bits(bench: Bench) -> None:
    for one in TWO_SIDED:
        if one.collective is C.ALL_REDUCE:
            for dtype in (torch.float32, torch.bfloat16):
                for op in ("SUM", "PRODUCT", "MAX", "AVG"):
                    bench.remember(one, Layout(1001, dtype.itemsize), dtype, op)


def signed_zeros(bench: Bench) -> None:
    """The larger of 0.0 and -0.0 depends on who stands on the left."""
    for one in TWO_SIDED:
        if one.collective is C.ALL_REDUCE:
            tensor = torch.full((64,), -0.0 if bench.rank % 2 else 0.0)
            program = bench.compile(one.schedule, view_of(bench.size), Layout(64), bench.rank)
            run(program, tensor, bench.group.process_group, dist.ReduceOp.MAX)
            bench.digest.update(tensor.numpy().tobytes())


def scattered_elements(bench: Bench) -> None:
    program = bench.compile(algorithm(C.ALL_REDUCE, "ring").schedule, view_of(bench.size), Layout(24), bench.rank)
    tensor = torch.arange(48.0).view(6, 8)[:, ::2]
    run(program, tensor, bench.group.process_group, scratch=torch.empty(program.scratch + 3))
    if not torch.equal(tensor, torch.arange(48.0).view(6, 8)[:, ::2] * bench.size):
        bench.failures.append("a tensor that is not contiguous")


def worker(config: Mapping[str, Any], control: Control) -> None:
    """The entry: all cases one after the other in the same processes."""
    bench = Bench()
    for case in (every_algorithm, every_kind, same_bits, signed_zeros, scattered_elements):
        case(bench)
    layout = Layout(300)
    broken = bench.run(Algorithm("spoiled", C.ALL_REDUCE, spoiled, ""), layout, torch.float32, "SUM")
    total = torch.stack([given(torch.float32, 300, rank) for rank in range(bench.size)]).sum(0)
    found = {"failures": bench.failures, "cases": bench.cases, "digest": bench.digest.hexdigest()}
    control.send({"rank": bench.rank, "spoiled": not torch.equal(broken, total), **found})
    bench.group.barrier()
    bench.group.close()


# -- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_algorithm_gives_right_values_and_the_same_bits(launcher: Launcher, tmp_path: Path, size: int) -> None:
    store = serve_store()
    roles = [
        Role(
            kind="worker",
            rank=rank,
            entry="test_two_sided:worker",
            config={},
            environment=worker_environment(rank, size, store.port),
            log=tmp_path / f"{rank}.log",
            threads=1,
        )
        for rank in range(size)
    ]
    seen: dict[int, dict[str, Any]] = {}
    launcher.run(roles, on_message=lambda _role, message: seen.update({message["rank"]: dict(message)}))
    found = [seen[rank] for rank in range(size)]
    assert [one["failures"] for one in found] == [[]] * size
    assert len({one["digest"] for one in found}) == 1
    assert {one["cases"] for one in found} == {found[0]["cases"]}
    assert found[0]["cases"] > 500
    assert any(one["spoiled"] for one in found), "a changed line must show in the values"
    with pytest.raises(ScheduleError):
        check((spoiled, C.ALL_REDUCE), view_of(size), Layout(300))


def kinds(name: str, rank: int, size: int, collective: Collective = C.ALL_REDUCE) -> list[type]:
    """What kinds of steps a program has, in order."""
    schedule = algorithm(collective, name).schedule
    return [type(step) for step in compile_schedule(schedule, View.of(size), Layout(8), rank).steps]


def test_what_is_only_copied_is_received_in_its_place() -> None:
    for one in TWO_SIDED:
        for rank in range(4):
            program = compile_schedule(one.schedule, View.of(4), Layout(8), rank)
            reduces = any(isinstance(step, Combine) for step in program.steps)
            waits = one.collective is C.ALL_TO_ALL
            in_order = one.collective is C.ALL_REDUCE and one.name == "naive" and rank > 0
            assert (program.scratch > 0) == (reduces or waits), (one, rank)
            assert any(isinstance(step, Put) for step in program.steps) == (waits or in_order), (one, rank)


def test_an_all_to_all_waits_in_scratch_because_its_place_is_still_to_be_sent() -> None:
    pairwise, naive = (
        compile_schedule(algorithm(C.ALL_TO_ALL, name).schedule, View.of(8), Layout(16), 3).scratch
        for name in ("pairwise", "naive")
    )
    assert (pairwise, naive) == (2 * 2, 4 * 2), "what comes late finds its place already sent"


def test_independent_rounds_are_under_way_together() -> None:
    steps = kinds("naive", 1, 4, C.REDUCE_SCATTER)
    assert steps.index(WaitFor) == 6, "three sends and three receives before the first wait"


def test_nothing_is_waited_for_before_it_is_in_the_way() -> None:
    """The first block that a ring sends may still be under way until its place is received into."""
    assert kinds("ring", 0, 2) == [SendRange, Receive, WaitFor, Combine, SendRange, WaitFor, Receive, WaitFor, WaitFor]


def test_naive_sets_its_own_contribution_aside() -> None:
    assert kinds("naive", 1, 3).count(SetAside) == 1
    assert kinds("naive", 0, 3).count(SetAside) == 0, "the first in the order has it where it belongs"


def test_a_scratch_is_used_again() -> None:
    ring = compile_schedule(algorithm(C.ALL_REDUCE, "ring").schedule, View.of(8), Layout(800), 0)
    assert ring.scratch == 100


def test_partners_put_the_lower_rank_on_the_left() -> None:
    schedule = algorithm(C.ALL_REDUCE, "recursive_doubling").schedule
    for rank, lower_came in ((0, False), (1, True)):
        steps = compile_schedule(schedule, View.of(2), Layout(4), rank).steps
        assert [step.received_first for step in steps if isinstance(step, Combine)] == [lower_came]


def test_programs_are_remembered_by_whoever_owns_them() -> None:
    mine, yours = programs(), programs()
    schedule = algorithm(C.ALL_REDUCE, "ring").schedule
    first = mine(schedule, View.of(3), Layout(9), 1)
    assert mine(schedule, View.of(3), Layout(9), 1) is first
    assert yours(schedule, View.of(3), Layout(9), 1) is not first
    assert yours(schedule, View.of(3), Layout(9), 1) == first


def test_one_sided_schedules_are_not_for_messages() -> None:
    for name in ("one_shot", "zero_copy"):
        with pytest.raises(UsageError, match="use a two-sided algorithm"):
            compile_schedule(algorithm(C.ALL_REDUCE, name).schedule, View.of(2), Layout(4), 0)


def test_a_tensor_of_another_size_and_an_unknown_operation_are_refused() -> None:
    program = compile_schedule(algorithm(C.ALL_REDUCE, "ring").schedule, View.of(1), Layout(4), 0)
    with pytest.raises(UsageError, match="for 4 elements, and this tensor has 5"):
        run(program, torch.zeros(5), None)
    with pytest.raises(UsageError, match="use SUM, AVG"):
        run(program, torch.zeros(4), None, dist.ReduceOp.PREMUL_SUM)
    assert torch.equal(run(program, torch.ones(4), None), torch.ones(4)), "one rank needs nobody"

"""What is sharded changes no result: `allreduce(shard=...)` against one process, and what each worker holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_scripts.running import Matrix, run_script, same
from safetensors.torch import load_file
from sharding_tasks import Deep

import offbeat
from offbeat.errors import OffbeatError
from offbeat.runtime.gradients.sliced_gradient import joined_norms, partial_norm
from offbeat.runtime.gradients.slices import units_of
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.strategies import parse
from offbeat.testing import Check, bench, checks_for

EXACT = ("mlp", "mlp_double", "mlp_half", "text", "text_double", "text_half")
DOUBLE = tuple(case for case in EXACT if case.endswith("_double"))
SINGLE = tuple(case for case in EXACT if not case.endswith("_double"))
TOLERANCES = {"_double": 1e-10, "_half": 5e-3}
"""By the end of a case's name. Sums of half-precision products depend on how batches are divided."""
WAYS = (
    ("zero1", 2, False),
    ("zero2", 2, False),
    ("zero2", 3, False),
    ("zero1", 2, True),
    ("zero2", 2, True),
    ("zero3", 2, True),
    ("zero3", 3, True),
)


@pytest.fixture(scope="module")
def matrix(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(launcher, tmp_path_factory.mktemp("sharding"), "sharding.py", DOUBLE)


@pytest.fixture(scope="module")
def others(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(launcher, tmp_path_factory.mktemp("others"), "sharding.py", SINGLE)


# -- without processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_element_has_one_owner(size: int, shared: bool) -> None:
    shapes = [(3,), (700, 900), (1,), (), (40, 500), (5, 5), (1000, 1000), (17,), (300, 1000)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    parameters[3].requires_grad_(False)
    units = units_of(parameters, size, 25 << 20, shared)
    assert [i for unit in units for i in unit.members] == list(range(len(shapes)))
    assert all(len({parameters[i].requires_grad for i in unit.members}) == 1 for unit in units)
    for unit in units:
        for k, i in enumerate(unit.members):
            ranges = [unit.owned[rank][k] for rank in range(size)]
            owners = torch.zeros(parameters[i].numel())
            for low, high in ranges:
                owners[low:high] += 1
            assert bool((owners == 1).all()), (i, ranges)
        assert shared or 0 <= unit.block * size - sum(parameters[i].numel() for i in unit.members) < size


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, 3.5, float("inf"), float("-inf")])
def test_norms_of_parts_make_the_norm_of_the_whole(order: float) -> None:
    whole = torch.randn(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole[5] = 0.0
    parts = [[partial_norm(part, order)] for part in (whole[:30], whole[30:30], whole[30:])]
    expected = torch.linalg.vector_norm(whole, order)
    assert float(joined_norms(torch.tensor(parts), order)) == pytest.approx(float(expected), rel=1e-6)


def test_the_names_people_know_are_aliases() -> None:
    for alias, shard in (("zero2", "gradients"), ("zero3", "parameters"), ("fsdp", "parameters")):
        assert str(parse(alias)) == f"allreduce(shard={shard})"
    assert parse("zero3 + accumulate(2)").lineage == parse("allreduce + accumulate(2)").lineage


@pytest.mark.parametrize(("text", "words"), [("zero3 + half", "sees them whole"), ("zero2 + local(2)", "cannot do")])
def test_what_needs_whole_gradients_or_parameters_is_refused(text: str, words: str) -> None:
    with pytest.raises(offbeat.errors.StrategyError, match=words):
        parse(text)


# -- equality --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers", "apart"), WAYS)
@pytest.mark.parametrize("case", EXACT)
def test_twenty_clipped_steps_equal_one_process(
    matrix: Matrix, others: Matrix, networks: None, case: str, strategy: str, workers: int, apart: bool
) -> None:
    runs = matrix if case in DOUBLE else others
    tolerance = next((known for end, known in TOLERANCES.items() if case.endswith(end)), 1e-5)
    [expected] = runs.outcome(case, "single", 1)
    outcomes = runs.outcome(case, strategy, workers, apart=apart)
    for outcome in outcomes:
        same(expected["state"], outcome["state"], tolerance)
        same(outcomes[0]["state"], outcome["state"], 0)
        assert outcome["facts"]["norms"] == pytest.approx(expected["facts"]["norms"], rel=max(100 * tolerance, 1e-9))
        assert outcome["facts"]["norms"] == outcomes[0]["facts"]["norms"]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "apart"), [("zero2", False), ("zero3", True)])
def test_batch_norm_learns_as_without_shards(others: Matrix, networks: None, strategy: str, apart: bool) -> None:
    expected = others.outcome("cnn", "allreduce", 2, ("cnn",))
    for mine, theirs in zip(others.outcome("cnn", strategy, 2, ("cnn",), apart=apart), expected, strict=True):
        same(theirs["state"], mine["state"])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "apart"), [("zero1", False), ("zero2", False), ("zero3", True)])
def test_a_sliced_gradient_reads_as_the_whole_and_refuses_what_only_the_whole_could_do(
    others: Matrix, networks: None, strategy: str, apart: bool
) -> None:
    for outcome in others.outcome("foreign", strategy, 2, ("foreign",), apart=apart):
        facts = outcome["facts"]
        expected = facts["expected"]
        torch.testing.assert_close(facts["whole"], expected)
        assert facts["mean"] == pytest.approx(float(expected.abs().mean()), rel=1e-5)
        norms = [float(expected.norm(p)) for p in (1, 2, 3, float("inf"))]
        assert facts["norms"] == pytest.approx(norms, rel=1e-5)
        assert [("view" in text, "clone()" in text) for text in facts["refused"]] == [
            (True, True),
            (False, False),
            (False, False),
        ]
        # Assigned whole, it is applied as it is.
        torch.testing.assert_close(outcome["state"]["model.0.weight"], facts["expected weight"])


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_between_layers_a_worker_on_its_own_host_holds_its_slices(matrix: Matrix, networks: None) -> None:
    for outcome in matrix.outcome("text_double", "zero3", 2, apart=True):
        assert outcome["facts"]["held"] < 0.01 * outcome["facts"]["all"], "released parameters have memory"


@pytest.mark.slow
def test_the_result_has_what_each_worker_held(networks: None, launcher: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": 1, "steps": 4, "out": tmp_path, "launcher": launcher, "hosts": Hosts.alike(2)}
    whole, limit = 4 * sum(p.numel() for p in Deep().model().parameters()), 0.1
    halves = pytest.approx([whole / 2] * 2, rel=0.01)
    second = offbeat.fit(Deep(), "zero2", **options)
    assert second.parameter_bytes == pytest.approx([whole] * 2, rel=0.01)
    assert second.gradient_bytes == halves
    third = offbeat.fit(Deep(), "zero3", **options)
    # Beside its slices, a worker has the units in use and next, each a tenth of the model, and one that is released.
    assert all(whole * 0.5 < held < whole * (0.5 + 3 * limit) for held in third.parameter_bytes)
    assert third.gradient_bytes == third.optimizer_bytes == halves


# -- checkpoints, and the contract between hosts ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_a_run_resumes_whatever_is_sharded(networks: None, launcher: Launcher, tmp_path: Path, apart: bool) -> None:
    options: dict[str, Any] = {"seed": 1, "launcher": launcher, "workers": 2}
    if apart:
        options["hosts"] = Hosts.alike(2)
    expected = load_file(offbeat.fit(Deep(), "zero3", steps=12, out=tmp_path / "a", **options).run / MODEL_FILE)
    run: Path | None = None
    ways = ("zero3", "allreduce", "zero2", "zero1", "zero3", "zero1")
    for number, strategy in enumerate(ways, 1):
        resumed: dict[str, Any] = {"resume": run} if run else {"out": tmp_path / "b"}
        run = offbeat.fit(Deep(), strategy, steps=2 * number, **options, **resumed).run
    assert run is not None
    same(expected, load_file(run / MODEL_FILE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=check.name.replace(" ", "_"))
        for check in checks_for(parse("zero3"))
        if check.name.startswith(("exact: workers", "deterministic: a resumed", "uneven", "a killed", "synchronous"))
    ],
)
def test_the_contract_is_kept_between_hosts(check: Check, networks: None, launcher: Launcher) -> None:
    with bench(parse("zero3"), 2, launcher, Hosts.alike(2)) as place:
        check.run(place)


@pytest.mark.slow
def test_workers_that_take_different_ways_through_the_model_are_told(
    networks: None, launcher: Launcher, tmp_path: Path
) -> None:
    goal: dict[str, Any] = {"strategy": "zero3", "workers": 2, "hosts": Hosts.alike(2), "timeout": 8.0}
    with pytest.raises(OffbeatError, match=r"gathering of parameters for their use|different ways"):
        run_script(launcher, tmp_path, "sharding.py", tmp_path, "apart", **goal)

"""Models of every shape train to the same parameters on one worker and on several, in a user's own loop."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest
from own_scripts.running import Matrix, run_script, same

from offbeat.runtime.launch import Launcher

CASES = (
    "branches",
    "branches_of_a_stream",
    "words_of_a_stream",
    "two_models_one_branch",
    "frozen",
    "unfrozen_later",
    "all_frozen_at_first",
    "tied",
    "shared_by_two_models",
    "sparse_sgd",
    "sparse_adam",
    "float64_part",
    "bfloat16_part",
    "odd_buffers",
    "complex_part",
    "channels_last",
    "methods",
    "recomputed",
    "recomputed_reentrant",
    "several_outputs",
)
COMPILED = ("compiled", "compiled_in_place")
NOT_DDP = {
    "unfrozen_later",
    "all_frozen_at_first",
    "shared_by_two_models",
    "methods",
    "sparse_sgd",
    "sparse_adam",
    "words_of_a_stream",
    "odd_buffers",
}
UNUSED = {"branches", "branches_of_a_stream", "two_models_one_branch"}
FOR_DDP = tuple(case for case in CASES if case not in NOT_DDP | UNUSED | {"recomputed_reentrant"})
WAYS = (("allreduce", 2), ("allreduce", 3), ("allreduce(gloo, bucket=0.0001)", 2), ("allreduce + accumulate(2)", 3))


@pytest.fixture(scope="module")
def matrix(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(launcher, tmp_path_factory.mktemp("models"), "nets.py", CASES)


ROUNDING = {"bfloat16_part": 0.03}
"""How far sums in another order may bring parameters, where it is further than usual: few digits."""


def compare(matrix: Matrix, case: str, strategy: str, workers: int, cases: tuple[str, ...] = CASES) -> list[dict]:
    alone = "single + accumulate(2)" if "accumulate" in strategy else "single"
    [expected] = matrix.outcome(case, alone, 1)
    found = matrix.outcome(case, strategy, workers, cases)
    for one in found:
        same(expected["state"], one["state"], tolerance=ROUNDING.get(case, 1e-5))
        same(found[0]["state"], one["state"], tolerance=0)
        assert one["facts"] == expected["facts"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), WAYS)
@pytest.mark.parametrize("case", CASES)
def test_a_model_ends_with_the_parameters_of_one_process(
    matrix: Matrix, case: str, strategy: str, workers: int
) -> None:
    compare(matrix, case, strategy, workers)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOR_DDP)
def test_ddp_trains_it_alike(matrix: Matrix, case: str) -> None:
    compare(matrix, case, "ddp", 2, FOR_DDP)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_model_trains_alike(launcher: Launcher, tmp_path: Path, case: str) -> None:
    compare(Matrix(launcher, tmp_path, "nets.py", (case,)), case, "allreduce", 2, (case,))


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(UNUSED))
def test_ddp_trains_branches_if_it_is_told_to_look_for_unused_parameters(matrix: Matrix, case: str) -> None:
    compare(matrix, case, "ddp(find_unused=True)", 2, tuple(UNUSED))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("branches", r"ddp waits for .*never\.weight.*no gradient.*ddp\(find_unused=True\)"),
        ("zeros_kept", r"ddp waits for .*never\.weight.*no gradient.*ddp\(find_unused=True\)"),
        ("frozen_later", r"ddp waits for .*weight.*no gradient.*ddp\(find_unused=True\)"),
        ("unfrozen_later", "was frozen in prepare"),
        ("all_frozen_at_first", "was frozen in prepare"),
        ("shared_by_two_models", "share a parameter"),
        ("methods", "not called so since"),
    ],
)
def test_what_ddp_cannot_train_it_refuses(launcher: Launcher, tmp_path: Path, case: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        run_script(launcher, tmp_path, "nets.py", tmp_path / "left", case, workers=2, strategy="ddp", timeout=30.0)


@pytest.mark.slow
def test_many_small_layers_and_a_huge_one_share_buckets(launcher: Launcher, tmp_path: Path) -> None:
    matrix = Matrix(launcher, tmp_path, "nets.py", ("many_small_one_huge",))
    compare(matrix, "many_small_one_huge", "allreduce(gloo, bucket=0.01)", 2, ("many_small_one_huge",))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp + accumulate(2)", "allreduce(shard=optimizer)", "server", "hogwild"])
def test_a_loop_may_copy_and_save_its_model_and_optimizer(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    run_script(launcher, tmp_path, "saving.py", tmp_path / "out", workers=2, strategy=strategy, timeout=30.0)
    for rank in range(2):
        with ZipFile(tmp_path / f"out-objects-{rank}.pt") as saved:
            [pickled] = [saved.read(name) for name in saved.namelist() if name.endswith("data.pkl")]
        assert b"Linear" in pickled
        assert b"offbeat" not in pickled, "it can be loaded where offbeat is not installed"

"""Own loops train to the same parameters on one worker and on several, whatever the loop looks like."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from own_scripts.running import HERE, Matrix, left, run_script, same

from conftest import Cli, clean_environment, wait_until
from offbeat.errors import OffbeatError, WaitError, WorkerError
from offbeat.runtime.launch import Launcher, free_port

CASES = (
    "plain",
    "clip_norm",
    "clip_value",
    "schedule_per_epoch",
    "schedule_per_batch",
    "parameter_groups",
    "two_optimizers",
    "cleared_one_by_one",
    "gan",
    "gan_maker_first",
    "zeros_kept",
    "two_losses",
    "own_accumulation",
    "penalty_on_weights",
    "called_twice",
    "numbered_epochs",
    "evaluated",
)
CLOSURES = ("lbfgs", "lbfgs_strong_wolfe", "sgd_with_closure")
WAYS = (
    *(("allreduce", 2), ("allreduce", 3), ("ddp", 2), ("allreduce + accumulate(2)", 2), ("ddp + accumulate(2)", 3)),
    *(("allreduce(shard=optimizer) + accumulate(2)", 2), ("allreduce(shard=gradients)", 3)),
)


@pytest.fixture(scope="module")
def matrix(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder: Path = tmp_path_factory.mktemp("loops")
    return Matrix(launcher, folder, "loops.py", CASES)


@pytest.fixture(scope="module")
def with_closures(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(launcher, tmp_path_factory.mktemp("closures"), "loops.py", CLOSURES)


def alone(strategy: str) -> str:
    return "single + accumulate(2)" if "accumulate" in strategy else "single"


# Who accumulates in the loop does not ask a strategy to do it too.
COMBINATIONS = [
    (case, strategy, workers)
    for case in CASES
    for strategy, workers in WAYS
    if not (case == "own_accumulation" and "accumulate" in strategy)
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "strategy", "workers"), COMBINATIONS)
def test_a_loop_ends_with_the_parameters_of_one_process(matrix: Matrix, case: str, strategy: str, workers: int) -> None:
    [expected] = matrix.outcome(case, alone(strategy), 1)
    found = matrix.outcome(case, strategy, workers)
    for one in found:
        same(expected["state"], one["state"])
        same(found[0]["state"], one["state"], tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce(shard=parameters)", "allreduce(shard=parameters) + accumulate(2)"])
@pytest.mark.parametrize("case", CASES)
def test_a_loop_whose_parameters_are_gathered_between_hosts_ends_so_too(
    matrix: Matrix, networks: None, case: str, strategy: str
) -> None:
    if case == "own_accumulation" and "accumulate" in strategy:
        pytest.skip("who accumulates in the loop does not ask a strategy to do it too")
    [expected] = matrix.outcome(case, alone(strategy), 1)
    outcomes = matrix.outcome(case, strategy, 2, apart=True)
    for outcome in outcomes:
        same(expected["state"], outcome["state"])
        same(outcomes[0]["state"], outcome["state"], tolerance=0)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), [("allreduce", 2), ("allreduce", 3), ("ddp", 2)])
@pytest.mark.parametrize("case", CLOSURES)
def test_closures_see_the_loss_of_the_whole_batch(
    with_closures: Matrix, case: str, strategy: str, workers: int
) -> None:
    [expected] = with_closures.outcome(case, "single", 1)
    found = with_closures.outcome(case, strategy, workers)
    for one in found:
        same(expected["state"], one["state"], tolerance=1e-4)
        same(found[0]["state"], one["state"], tolerance=0)
        assert one["facts"]["calls"] == expected["facts"]["calls"]
        assert one["facts"]["losses"] == pytest.approx(expected["facts"]["losses"], abs=1e-4)


@pytest.mark.slow
def test_accumulated_batches_are_clipped_and_applied_like_one_large_batch(matrix: Matrix) -> None:
    [by_hand] = matrix.outcome("clip_norm_of_two", "single", 1)
    for strategy, workers in (("single + accumulate(2)", 1), ("allreduce + accumulate(2)", 2)):
        for one in matrix.outcome("clip_norm", strategy, workers):
            same(by_hand["state"], one["state"])


# -- facts about single cases ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_and_optimizers_stay_the_objects_they_were(matrix: Matrix) -> None:
    for one in matrix.outcome("plain", "allreduce", 2):
        assert one["facts"]["same objects"]
        assert one["facts"]["kinds"] == ["Sequential", "SGD"]
        assert one["facts"]["keys"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert (one["facts"]["batches"], one["facts"]["length"]) == (10, 5)


@pytest.mark.slow
def test_clipping_sees_the_norm_of_the_mean_gradient(matrix: Matrix) -> None:
    [expected] = matrix.outcome("clip_norm", "single", 1)
    for one in matrix.outcome("clip_norm", "allreduce", 3):
        assert one["facts"]["norms"] == pytest.approx(expected["facts"]["norms"], rel=1e-4)
        assert max(one["facts"]["norms"]) > 0.3, "something was clipped"


@pytest.mark.slow
def test_reports_are_weighted_by_the_examples_behind_them(matrix: Matrix) -> None:
    [expected] = matrix.outcome("evaluated", "single", 1)
    for one in matrix.outcome("evaluated", "allreduce", 3):
        assert one["facts"]["losses"] == pytest.approx(expected["facts"]["losses"], rel=1e-4)


@pytest.mark.slow
def test_steps_are_counted_once_however_many_optimizers_there_are(matrix: Matrix) -> None:
    assert [one["facts"]["steps"] for one in matrix.outcome("two_optimizers", "allreduce", 2)] == [10, 10]
    assert [one["facts"]["steps"] for one in matrix.outcome("own_accumulation", "allreduce", 2)] == [4, 4]
    assert [one["facts"]["epochs"] for one in matrix.outcome("numbered_epochs", "ddp", 2)] == [[0, 1, 2]] * 2


# -- what happens around training ------------------------------------------------------------------------------------


def behave(launcher: Launcher, folder: Path, case: str, workers: int = 2, **goal: Any) -> list[dict[str, Any]]:
    run_script(launcher, folder, "behaving.py", folder / "left", case, workers=workers, **({"timeout": 30.0} | goal))
    return [one["facts"] for one in left(folder / "left", workers)]


def test_dropout_differs_between_workers(launcher: Launcher, tmp_path: Path) -> None:
    masks = [tuple(one["mask"]) for one in behave(launcher, tmp_path, "dropout", 3)]
    assert len(set(masks)) == 3


@pytest.mark.parametrize("strategy", ["allreduce", "ddp"])
def test_running_statistics_are_averaged_for_an_evaluation_of_any_length(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    one, other = behave(launcher, tmp_path, "batch_norm", strategy=strategy)
    assert one["own"] != other["own"]
    mean = [(a + b) / 2 for a, b in zip(one["own"], other["own"], strict=True)]
    assert one["inside"] == other["inside"] == pytest.approx(mean, abs=1e-6)
    assert one["back"]
    assert other["back"]


def test_autocast_trains_alike_to_the_precision_it_has(launcher: Launcher, tmp_path: Path) -> None:
    [expected] = behave(launcher, tmp_path / "one", "mixed_precision", 1)
    for one in behave(launcher, tmp_path / "two", "mixed_precision", 2):
        assert one["weights"] == pytest.approx(expected["weights"], abs=0.02)


def test_all_workers_stop_at_the_same_report(launcher: Launcher, tmp_path: Path) -> None:
    found = behave(launcher, tmp_path, "stops_by_report", 3, target="quality=0.45")
    assert [(one["epochs"], one["steps"]) for one in found] == [(5, 25)] * 3


def test_what_is_prepared_twice_takes_part_once(launcher: Launcher, tmp_path: Path) -> None:
    for one in behave(launcher, tmp_path, "prepared_twice"):
        assert one == {"same": [True, True, True], "steps": 5}


@pytest.mark.slow
def test_loading_processes_end_with_their_worker(launcher: Launcher, tmp_path: Path) -> None:
    before = set(children())
    behave(launcher, tmp_path, "loading_processes")
    wait_until(lambda: set(children()) <= before, "the loading processes to end", 10)


def test_an_error_about_shapes_says_that_batches_are_divided(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as raised:
        behave(launcher, tmp_path, "fixed_batch_size")
    assert "This worker's batch held 4 of the 8 examples" in str(raised.value.remote_traceback)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_evaluations_that_do_not_say_so_are_not_counted_as_training(
    launcher: Launcher, tmp_path: Path, workers: int
) -> None:
    result = run_script(
        launcher, tmp_path, "behaving.py", tmp_path / "left", "looks_without_saying", workers=workers, epochs=2
    )
    assert (result.steps, result.epochs, result.samples) == (10, 2, 66)
    found = [one["facts"] for one in left(tmp_path / "left", workers)]
    assert [sum(one["seen"][i] for one in found) for i in range(2)] == [7, 7]
    weighted = sum(one["losses"][-1] * one["seen"][-1] for one in found) / 7
    assert [one["report"] for one in found] == [pytest.approx(weighted, rel=1e-5)] * workers


@pytest.mark.parametrize("strategy", ["ddp", "ddp(find_unused=True)"])
def test_ddp_counts_the_bytes_of_its_backward_passes(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    for one in behave(launcher, tmp_path, "called_several_times", strategy=strategy):
        assert one["sent"] == one["expected"]


@pytest.mark.parametrize("strategy", ["allreduce", "ddp"])
def test_a_saved_model_is_loaded_by_who_trusts_its_classes_alone(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    for one in behave(launcher, tmp_path, "saved_whole", strategy=strategy):
        assert one == {"same": [True, True], "hooks": 0}


def test_training_in_evaluation_mode_goes_on_as_training(launcher: Launcher, tmp_path: Path) -> None:
    [alone] = behave(launcher, tmp_path / "one", "trains_as_if_evaluating", 1)
    for one in behave(launcher, tmp_path / "two", "trains_as_if_evaluating", 2):
        assert (one["epochs"], one["steps"]) == (alone["epochs"], alone["steps"]) == (3, 15)
        assert one["weights"] == pytest.approx(alone["weights"], abs=1e-5)


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_steps_where_no_optimizer_is_prepared(launcher: Launcher, tmp_path: Path, workers: int) -> None:
    assert [one["steps"] for one in behave(launcher, tmp_path / "all", "updates_by_hand", workers)] == [10] * workers
    assert [one["steps"] for one in behave(launcher, tmp_path / "some", "updates_by_hand", workers, steps=3)] == [
        3
    ] * workers


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("different_metrics", r"different metrics; worker \d has accuracy_top"),
        ("not_a_number", r"worker 1 has a gradient that is NaN or infinite in step 3"),
        ("skips_one_backward", r"a worker has skipped a backward pass"),
        ("optimizer_forgotten", r"was not prepared itself"),
        ("model_forgotten", r"belong to no prepared model"),
    ],
)
def test_a_mistake_is_named(launcher: Launcher, tmp_path: Path, case: str, words: str) -> None:
    with pytest.raises(OffbeatError, match=words):
        behave(launcher, tmp_path, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "strategy", "missing"),
    [
        ("sleeps", "allreduce + accumulate(2)", "worker 1"),
        ("sleeps", "ddp", "worker 1"),
        ("never_backward", "allreduce", "worker 1"),
    ],
)
def test_who_does_not_come_is_named_when_the_deadline_passes(
    launcher: Launcher, tmp_path: Path, case: str, strategy: str, missing: str
) -> None:
    with pytest.raises(WaitError, match=rf"waited 3 s for {missing}\."):
        behave(launcher, tmp_path, case, 3, timeout=3.0, strategy=strategy)


@pytest.mark.slow
def test_a_report_instead_of_a_step_is_named_before_the_deadline(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(WaitError, match=r"but worker \d waits in (a report|the sum of example counts)"):
        behave(launcher, tmp_path, "reports_instead", 3, timeout=150.0, strategy="allreduce")


def children() -> list[str]:
    """Processes of this session's fork server that load data."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if "pt_data_worker" in line or "behaving.py" in line]


# -- ways to start ---------------------------------------------------------------------------------------------------

SCRIPT = HERE / "as_people_do.py"


def start(*command: str | Path, folder: Path, **environment: str) -> None:
    words = list(map(str, command))
    done = subprocess.run(
        words,
        cwd=folder,
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script comes to in plain Python, with nobody around it."""
    out = tmp_path_factory.mktemp("alone") / "left"
    start(sys.executable, SCRIPT, "--out", out, folder=out.parent)
    [one] = left(out, 1)
    assert one["facts"]["size"] == 1
    return one


def check(out: Path, workers: int, expected: dict[str, Any], *arguments: str) -> None:
    for one in left(out, workers):
        same(expected["state"], one["state"])
        facts = expected["facts"] | {"size": workers, "argv": ["--out", str(out), *arguments]}
        assert one["facts"] == facts


@pytest.mark.slow
def test_a_script_sees_what_it_would_see_in_plain_python(
    launcher: Launcher, tmp_path: Path, expected: dict[str, Any]
) -> None:
    assert expected["facts"]["name"] == "__main__"
    assert expected["facts"]["file"] == expected["facts"]["first"] == str(SCRIPT)
    run_script(launcher, tmp_path, SCRIPT.name, "--out", tmp_path / "left", workers=2)
    check(tmp_path / "left", 2, expected)


@pytest.mark.slow
def test_a_script_may_have_a_process_group_of_its_own(
    launcher: Launcher, tmp_path: Path, expected: dict[str, Any]
) -> None:
    run_script(launcher, tmp_path, SCRIPT.name, "--out", tmp_path / "left", "--own-group", workers=2)
    check(tmp_path / "left", 2, expected, "--own-group")


def test_a_script_need_not_know_offbeat_at_all(launcher: Launcher, tmp_path: Path) -> None:
    result = run_script(launcher, tmp_path, SCRIPT.name, "--out", tmp_path / "left", "--no-init", workers=2)
    assert result.steps == 0
    assert len(left(tmp_path / "left", 2)) == 2


@pytest.mark.slow
def test_the_command_line_says_more_than_the_script(cli: Cli, tmp_path: Path) -> None:
    done = cli("run", SCRIPT, "--workers", "2", "--target", "loss<=9", "--", "--out", tmp_path / "left")
    assert done.returncode == 0, done.stderr
    assert left(tmp_path / "left", 2)[0]["facts"]["target"] == "loss<=9"


@pytest.mark.slow
def test_torchrun_starts_it_too(tmp_path: Path, expected: dict[str, Any]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start(*torchrun, SCRIPT, "--out", tmp_path / "left", folder=tmp_path, OMP_NUM_THREADS="1")
    check(tmp_path / "left", 2, expected)


@pytest.mark.slow
def test_slurm_starts_it_too(tmp_path: Path, expected: dict[str, Any]) -> None:
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(free_port() - 20000), "SLURM_JOB_NODELIST": "127.0.0.1"}
    job |= {"SLURM_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "left")]
    environments = [
        clean_environment() | job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)
    ]
    runs = [subprocess.Popen(command, env=environment) for environment in environments]
    assert [run.wait(60) for run in runs] == [0, 0]
    check(tmp_path / "left", 2, expected)


AS_BEFORE = (
    "shuffled",
    "items",
    "generator",
    "weighted",
    "split",
    "subset",
    "replaced",
    "batch_sampler",
    "stream",
    "windows",
    "list",
    "loading",
    "loading_stream",
)
"""Cases of as_before.py in which each example does the same whoever computes it: two workers equal one."""
ONLY_ALONE = (
    "augmented",
    "loading_augmented",
    "seeded_processes",
    "lasting_processes",
    "dropout",
    "dropout_and_lengths",
    "dropout_and_windows",
    "normalized",
)
"""Cases that draw for each example, or look at all of them together."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the scripts leave without their lines of offbeat."""
    folder = tmp_path_factory.mktemp("plain")
    _in_python(folder, "plain", *AS_BEFORE, *ONLY_ALONE)
    return folder


def _in_python(folder: Path, *words: str) -> None:
    command = [sys.executable, str(HERE / "as_before.py"), str(folder), *words]
    # One thread, as workers have that are started here: with more of them sums are rounded differently.
    environment = clean_environment() | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=120)


def _as_before(expected: Path, found: Path, *cases: str) -> None:
    for case in cases:
        [one], [other] = left(expected / case, 1), left(found / case, 1)
        same(one["state"], other["state"], tolerance=0)
        assert one["facts"] == other["facts"], f"{case}: the generators stand elsewhere at the end"


@pytest.mark.slow
def test_alone_a_script_ends_with_the_bits_that_it_has_without_offbeat(tmp_path: Path, plain: Path) -> None:
    _in_python(tmp_path, "team", *AS_BEFORE, *ONLY_ALONE)
    _as_before(plain, tmp_path, *AS_BEFORE, *ONLY_ALONE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        (None, (*AS_BEFORE, *ONLY_ALONE)),
        ("allreduce", ("shuffled", "loading_stream", "dropout")),
        ("allreduce(shard=optimizer)", ("shuffled", "loading_stream", "dropout")),
        ("ddp", ("shuffled", "loading_stream", "dropout")),
        ("server(shards=2)", ("dropout",)),  # Servers serve one team in a run.
    ],
)
def test_one_worker_ends_with_the_bits_of_the_script_without_offbeat(
    launcher: Launcher, tmp_path: Path, plain: Path, strategy: str | None, cases: tuple[str, ...]
) -> None:
    run_script(launcher, tmp_path, "as_before.py", tmp_path, "team", *cases, strategy=strategy, timeout=30.0)
    _as_before(plain, tmp_path, *cases)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "cases"), [("allreduce", AS_BEFORE), ("server(shards=2)", ("shuffled",))])
def test_two_workers_see_the_batches_of_the_script_without_offbeat(
    launcher: Launcher, tmp_path: Path, plain: Path, strategy: str, cases: tuple[str, ...]
) -> None:
    run_script(launcher, tmp_path, "as_before.py", tmp_path, "team", *cases, workers=2, strategy=strategy, timeout=60.0)
    for case in cases:
        [expected], found = left(plain / case, 1), left(tmp_path / case, 2)
        same(expected["state"], found[0]["state"])
        assert expected["facts"] == found[0]["facts"], f"{case}: worker 0's generators stand elsewhere at the end"

"""Federated runs on real workers: the same bits however many there are, after a kill, and with sick clients."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_task import Clusters, federated_run
from federated_tasks import SIZES, Empty, Images, Means, Nobodys, Owners
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

import offbeat
from offbeat.errors import DataError, NonFiniteError, OffbeatError, StrategyError, TaskError, WorkerError
from offbeat.run.drive import Result, fit
from offbeat.runtime.federated.round_log import read_rounds
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE

HARD = "federated(clients=12, fraction=0.5, epochs=2, batch=7, over=1.4, speeds=lognormal(1), dropout=0.2, {})"
"""Dropout, batch norm, skewed and empty clients, late and lost ones."""
KINDS = {
    "fedavg": HARD.format("data=dirichlet(0.3)"),
    "scaffold": HARD.format("data=quantity(0.5), algorithm=scaffold"),
    "fedyogi": HARD.format("data=shards(2), algorithm=fedyogi"),
    "fedsgd": HARD.format("data=task, algorithm=fedsgd"),
    "fedbuff": "federated(clients=12, batch=7, fraction=0.5, algorithm=fedbuff(4), speeds=lognormal(1), dropout=0.2)",
    "poisson": "federated(clients=12, fraction=0.2, batch=7, sampling=poisson, data=dirichlet(0.1))",
}


def bits(result: Result) -> dict[str, Tensor]:
    return load_file(result.run / MODEL_FILE)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_gives_the_same_bits(kind: str, launcher: Launcher, tmp_path: Path) -> None:
    results = [
        fit(Images(), KINDS[kind], workers=workers, steps=5, seed=4, launcher=launcher, out=tmp_path)
        for workers in (1, 2, 4)
    ]
    first, *others = (bits(result) for result in results)
    assert all(same(first, other) for other in others)
    assert len({(str(r.federated), r.score, r.test_score, r.bytes_sent, r.samples) for r in results}) == 1
    other = fit(Images(), KINDS[kind], workers=2, steps=5, seed=5, launcher=launcher, out=tmp_path)
    assert not same(first, bits(other))


def test_statistics_have_the_same_bits_with_any_number_of_workers(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=4, fraction=0.75, data=task, dropout=0.1)"
    results = [fit(Means(), text, workers=n, steps=6, launcher=launcher, out=tmp_path) for n in (1, 2, 4)]
    assert all(same(bits(results[0]), bits(other)) for other in results[1:])


@pytest.mark.parametrize(("kind", "batch"), [("fedavg", 50), ("scaffold", 50), ("fedbuff", 20)])
def test_a_run_killed_within_a_round_goes_on_to_the_same_bits(
    kind: str, batch: int, launcher: Launcher, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"launcher": launcher, "out": tmp_path / "runs", "checkpoint_every": 2}
    task = Images(folder=str(tmp_path), kill=f"1.{batch}")
    with pytest.raises(WorkerError, match="SIGKILL"):
        fit(task, KINDS[kind], workers=2, steps=8, seed=4, **options)
    assert (tmp_path / "killed").exists()
    cut = (tmp_path / "runs" / "latest").resolve()
    assert 2 <= len(read_rounds(cut)) < 8
    resumed = fit(task, KINDS[kind], workers=2, steps=8, resume=cut, **options)
    whole = fit(Images(), KINDS[kind], workers=2, steps=8, seed=4, **options)
    assert same(bits(resumed), bits(whole))
    assert resumed.federated == whole.federated
    assert read_rounds(resumed.run) == read_rounds(whole.run)


def test_scaffold_keeps_variates_on_disk_and_no_more_than_a_resume_needs(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=12, fraction=0.5, algorithm=scaffold, data=task)"
    result = fit(Images(), text, workers=2, steps=9, launcher=launcher, out=tmp_path, checkpoint_every=3)
    clients = {path.parent.name: [] for path in (result.run / "clients").glob("*/*/*.safetensors")}
    for path in (result.run / "clients").glob("*/*/*.safetensors"):
        clients[path.parent.name].append(int(path.stem))
    rounds = read_rounds(result.run)
    last = {f"{each['client']:06d}": entry["number"] for entry in rounds for each in entry["participants"]}
    assert {client: max(numbers) for client, numbers in clients.items()} == last
    # Written in round r, a client's older states go, but for the newest before the checkpoint that precedes it.
    assert all(len(numbers) <= 4 for numbers in clients.values())
    assert not list((result.run / "clients").glob("*/*/*.draft"))


@pytest.mark.parametrize("own_datasets", [False, True])
def test_each_client_trains_on_its_own_examples(own_datasets: bool, launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=4, fraction=1, epochs=2, data=task)"
    one = fit(Owners(own_datasets=own_datasets), text, workers=2, steps=2, launcher=launcher, out=tmp_path, target=1)
    entry = read_rounds(one.run)[0]
    assert sorted(each["client"] for each in entry["participants"]) == [0, 1, 2, 3]
    assert one.samples == 2 * 2 * sum(SIZES)
    other = fit(Owners(), text, workers=1, steps=2, launcher=launcher, out=tmp_path, target=1)
    assert same(bits(one), bits(other))


def test_a_dataset_of_each_client_serves_other_strategies(launcher: Launcher, tmp_path: Path) -> None:
    result = fit(Owners(own_datasets=True), "allreduce", workers=2, epochs=2, launcher=launcher, out=tmp_path, target=1)
    assert result.samples == 2 * sum(SIZES)


def test_clients_without_examples_are_never_selected(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=4, fraction=1, data=task)"
    result = fit(
        Owners(empty=True, own_datasets=True), text, workers=2, steps=4, launcher=launcher, out=tmp_path, target=1
    )
    assert {client for entry in read_rounds(result.run) for client in entry["cohort"]} == {0, 2, 3}
    assert result.samples == 4 * 17


def test_more_clients_than_examples_are_fine(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=1000, fraction=0.02)"
    result = fit(Images(), text, workers=2, steps=3, launcher=launcher, out=tmp_path)
    assert (result.samples, result.federated["updates"]) == (60, 60)


class Crowd(Clusters):
    """Examples that are made when they are read: what takes memory is kept for clients."""

    def data(self) -> offbeat.Data:
        return offbeat.Data(Sparse(range(self.examples)), Sparse(range(20)), Sparse(range(20)))


class Sparse(Dataset[Any]):
    def __init__(self, numbers: range) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((8,), self._numbers[index] / len(self)), index % 4


def test_a_hundred_thousand_clients_cost_some_numbers_each() -> None:
    def run(clients: int) -> None:
        task, text = Crowd(examples=2 * clients), f"federated(clients={clients}, fraction={20 / clients}, over=1.2)"
        assert federated_run(task, text, 3)["federated"]["updates"] == 60

    def peak(clients: int) -> int:
        tracemalloc.start()
        try:
            run(clients)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    run(100)  # What is imported in the first run is not counted.
    assert peak(100_000) - peak(100) < 100 * 100_000, "a few whole numbers for each, and no object"


def test_updates_with_nan_are_refused_and_counted(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=12, fraction=1, data=task)"
    task = Images(nan_clients=(3, 7))
    result = fit(task, text, workers=2, steps=3, launcher=launcher, out=tmp_path)
    assert (result.federated["refused"], result.federated["updates"], result.federated["failed_rounds"]) == (6, 30, 0)
    assert all(bool(value.isfinite().all()) for value in bits(result).values() if value.is_floating_point())
    assert [entry["refused"] for entry in read_rounds(result.run)] == [2, 2, 2]


def test_a_round_with_too_few_good_updates_leaves_the_model_as_it_is(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=12, fraction=1, fewest=11, data=task)"
    result = fit(Images(nan_clients=(3, 7)), text, workers=2, steps=3, launcher=launcher, out=tmp_path)
    untouched = Images().model().state_dict()
    assert result.federated["failed_rounds"] == 3
    assert {entry["failed"][:16] for entry in read_rounds(result.run)} == {"10 of 12 clients"}
    assert same(bits(result), {name: value.contiguous() for name, value in untouched.items()})


def test_a_run_ends_if_every_update_of_ten_rounds_has_nan(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=12, fraction=0.5)"
    with pytest.raises(NonFiniteError, match="last 10 rounds every client's update had NaN"):
        fit(Images(nan_clients=(-1,)), text, workers=2, steps=30, launcher=launcher, out=tmp_path)


def test_a_deadline_that_nobody_keeps_fails_the_rounds_and_counts_the_late(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=12, fraction=0.5, deadline=1, speeds=lognormal(0.1, 100))"
    result = fit(Images(), text, workers=2, steps=2, launcher=launcher, out=tmp_path)
    counts = result.federated
    assert (counts["updates"], counts["late"], counts["failed_rounds"]) == (0, 12, 2)
    assert counts["simulated_seconds"] == 2
    assert "updates in time" not in counts
    assert all("sent an update in time" in entry["failed"] for entry in read_rounds(result.run))


# -- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str, type[OffbeatError], str]] = {
    "nobody says whose": (Nobodys(), "federated(clients=4, data=task)", TaskError, "client_of"),
    "another number": (Owners(), "federated(clients=5, data=task)", DataError, "clients=4"),
    "another number of datasets": (Owners(own_datasets=True), "federated(clients=9)", DataError, "clients=4"),
    "divided twice": (Owners(own_datasets=True), "federated(clients=4, data=iid)", DataError, "divide it anew"),
    "no example": (Empty(), "federated(clients=4)", DataError, "no client has an example"),
    "too few able": (
        Owners(empty=True, own_datasets=True),
        "federated(clients=4, fraction=1, fewest=4)",
        DataError,
        "only 3 of 4 clients have examples",
    ),
    "momentum under scaffold": (
        Owners(momentum=0.9),
        "federated(clients=4, fraction=1, data=task, algorithm=scaffold)",
        StrategyError,
        "plain SGD",
    ),
    "statistics of changing shape": (
        Means(sick="shape"),
        "federated(clients=4, fraction=1, data=task)",
        TaskError,
        "keep their names and shapes",
    ),
    "complex statistics": (Means(sick="complex"), "federated(clients=4, data=task)", TaskError, "Split it in two"),
    "parameters with NaN": (Means(sick="update"), "federated(clients=4, data=task)", NonFiniteError, "'means'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_and_tasks_that_cannot_be_federated_are_refused(case: str, launcher: Launcher, tmp_path: Path) -> None:
    task, text, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        fit(task, text, workers=2, steps=2, launcher=launcher, out=tmp_path, target=1)

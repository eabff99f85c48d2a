"""Private and compressed federated runs on real workers: the same bits, the same budget after a kill, and its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from federated_tasks import Images
from private_tasks import Smooth
from safetensors.torch import load_file
from torch import Tensor

from offbeat.errors import StrategyError, WorkerError
from offbeat.run.drive import Result, fit
from offbeat.runtime.federated.round_log import read_rounds
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import METRICS_FILE, MODEL_FILE
from offbeat.runtime.run.report import federated_in_words

PRIVATE = "federated(clients=12, fraction=0.4, batch=7, data=task, privacy=privacy({}delta=0.01, clip=0.5)){}"
BOTH = PRIVATE.format("noise=1.2, ", " + topk(0.2) + quantize(8)")
COMPRESSED = "federated(clients=12, fraction=0.5, batch=7, data=dirichlet(0.3)) + "


def bits(result: Result) -> dict[str, Tensor]:
    return load_file(result.run / MODEL_FILE)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Smooth(), BOTH),
        (Images(), COMPRESSED + "randomk(0.2) + quantize(4, stochastic=True)"),
    ],
    ids=["private", "compressed"],
)
def test_any_number_of_workers_gives_the_same_bits(task: Images, text: str, launcher: Launcher, tmp_path: Path) -> None:
    results = [fit(task, text, workers=n, steps=4, seed=4, launcher=launcher, out=tmp_path) for n in (1, 2, 4)]
    first, *others = (bits(result) for result in results)
    assert all(same(first, other) for other in others)
    assert len({(str(r.federated), r.score, r.bytes_sent, r.samples) for r in results}) == 1


def test_a_killed_run_forgets_neither_budget_nor_what_clients_owe(launcher: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"launcher": launcher, "out": tmp_path / "runs", "checkpoint_every": 2}
    task = Smooth(folder=str(tmp_path), kill="1.40")
    with pytest.raises(WorkerError, match="SIGKILL"):
        fit(task, BOTH, workers=2, steps=8, seed=4, **options)
    cut = (tmp_path / "runs" / "latest").resolve()
    assert 2 <= len(read_rounds(cut)) < 8
    resumed = fit(task, BOTH, workers=2, steps=8, resume=cut, **options)
    whole = fit(Smooth(), BOTH, workers=2, steps=8, seed=4, **options)
    assert same(bits(resumed), bits(whole))
    assert resumed.federated == whole.federated
    assert resumed.federated["privacy"]["rounds"] == 8


def test_a_spent_budget_ends_a_run_that_is_resumed_to_be_longer(launcher: Launcher, tmp_path: Path) -> None:
    text = PRIVATE.format("8, ", "")
    first = fit(Smooth(), text, workers=2, steps=5, launcher=launcher, out=tmp_path)
    spent = first.federated["epsilon"]
    assert 7.8 < spent <= 8
    assert "stopped" not in first.federated
    longer = fit(Smooth(), text, workers=2, steps=9, resume=first.run, launcher=launcher, out=tmp_path)
    assert longer.steps == 5
    assert (longer.federated["epsilon"], longer.federated["privacy"]) == (spent, first.federated["privacy"])
    assert "privacy budget of epsilon 8 is spent: 5 rounds" in longer.federated["stopped"]
    assert same(bits(longer), bits(first))
    assert dict(federated_in_words(longer.federated))["stopped early"] == longer.federated["stopped"]


def test_a_run_with_given_noise_stops_at_its_budget_and_shows_what_it_spends(
    launcher: Launcher, tmp_path: Path
) -> None:
    result = fit(
        Smooth(), PRIVATE.format("noise=2, budget=3, ", ""), workers=2, steps=60, launcher=launcher, out=tmp_path
    )
    assert 1 < result.steps < 60
    assert "privacy budget of epsilon 3 is spent" in result.federated["stopped"]
    lines = [json.loads(line) for line in (result.run / METRICS_FILE).read_text().splitlines()]
    spent = [line["epsilon"] for line in lines]
    assert [line["step"] for line in lines] == list(range(1, result.steps + 1))
    assert spent == sorted(spent)
    assert spent[-1] == result.federated["epsilon"] <= 3
    assert all("loss" not in line for line in lines), "epsilon does not cover the training loss"
    assert dict(federated_in_words(result.federated))["privacy"].startswith("epsilon 2.9")


def test_rounds_without_clients_move_the_model_and_count(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=12, fraction=0.001, data=task, privacy=privacy(noise=1, delta=0.01))"
    result = fit(Smooth(), text, workers=2, steps=3, launcher=launcher, out=tmp_path)
    counts = result.federated
    assert (counts["updates"], counts["failed_rounds"], counts["privacy"]["rounds"]) == (0, 0, 3)
    assert not same(bits(result), {k: v.contiguous() for k, v in Smooth().model().state_dict().items()})


def test_clients_count_the_bytes_that_compression_leaves(launcher: Launcher, tmp_path: Path) -> None:
    sent = {
        part: fit(Smooth(), COMPRESSED + part, workers=1, steps=2, launcher=launcher, out=tmp_path).federated
        for part in ("half", "quantize(8)")
    }
    numbers = sum(p.numel() for p in Smooth().model().parameters())
    updates = sent["half"]["updates"]
    assert updates == sent["quantize(8)"]["updates"]
    assert sent["half"]["bytes_up"] == 2 * numbers * updates
    assert sent["quantize(8)"]["bytes_up"] == (numbers + 4) * updates
    assert sent["half"]["bytes_down"] == 4 * numbers * updates


def test_models_with_running_statistics_are_refused(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="a variance becomes negative"):
        fit(Images(), PRIVATE.format("8, ", ""), workers=1, steps=2, launcher=launcher, out=tmp_path)

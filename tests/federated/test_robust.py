"""Robust aggregation: the rules against their definitions, the same bits for any number of workers, and refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster_task import Clusters, federated_run
from torch import Tensor

from offbeat.errors import DataError, StrategyError, UsageError
from offbeat.run.drive import fit
from offbeat.runtime.federated import robust
from offbeat.runtime.federated.aggregation import Aggregation, ClientUpdate, Selected, UpdateLayout, alone
from offbeat.runtime.federated.poison import flipped
from offbeat.runtime.federated.robust_rules import between, bounded, middle, nearest, products
from offbeat.runtime.launch import Launcher
from offbeat.strategies import parse
from offbeat.strategies.federated.strategy import Federated

RULES = ("median", "trimmed(0.3)", "krum(2)", "krum(2, keep=4)", "normbound(0.5)")
ATTACKERS = (2, 7, 11, 16)
"""A fifth of 20 clients."""


def strategy(rule: str) -> Federated:
    parsed = parse(f"federated(clients=20, fraction=0.5, robust={rule})")
    assert isinstance(parsed, Federated)
    return parsed


def aggregation(rule: str, size: int) -> Aggregation:
    setting = strategy(rule).robust
    assert setting is not None
    return setting.aggregation(UpdateLayout(size, size, torch.float32))


def together(workers: int) -> list[Callable[[Tensor, str], None]]:
    """The `AddUp` of each of several workers, which are threads here."""
    barrier, given = threading.Barrier(workers, timeout=30), dict[int, Tensor]()

    def add_up(rank: int, tensor: Tensor) -> None:
        given[rank] = tensor.clone()
        barrier.wait()
        total = torch.zeros_like(tensor)
        for other in range(workers):
            total += given[other]
        barrier.wait()
        tensor.copy_(total)

    return [lambda tensor, _what, rank=rank: add_up(rank, tensor) for rank in range(workers)]


def combined_by(workers: int, rule: str, updates: Tensor, refused: Sequence[int] = ()) -> list[Tensor]:
    """The combined update, as each of several workers has it."""
    count, size = updates.shape
    parts = [aggregation(rule, size) for _ in range(workers)]

    def play(rank: int, add_up: Callable[[Tensor, str], object]) -> None:
        # Selected in another order than they come, and some never come.
        parts[rank].begin(Selected(1, [*range(100, 100 + count), 500], [5.0] * (count + 1)))
        for client in reversed(range(rank, count, workers)):
            update = updates[client].clone()
            if client in refused:
                update[0] = float("nan")
            assert parts[rank].add(ClientUpdate(100 + client, update, None, 5.0, 1.0, 5)) is (client not in refused)
        parts[rank].combine(add_up)

    threads = [threading.Thread(target=play, args=each) for each in enumerate(together(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {part.updates for part in parts} == {count - len(refused)}
    assert {part.examples for part in parts} == {5 * (count - len(refused))}
    assert {part.loss for part in parts} == {1.0}
    return [part.mean()[0] for part in parts]


# --- the rules


@pytest.mark.parametrize("count", [3, 8, 11])
def test_the_median_is_that_of_each_column(count: int) -> None:
    rows = torch.randn(count, 40)
    assert torch.allclose(middle(rows), torch.from_numpy(np.median(rows.double().numpy(), axis=0)))


def test_the_trimmed_mean_leaves_out_both_ends_of_each_column() -> None:
    rows = torch.randn(10, 30)
    expected = np.sort(rows.double().numpy(), axis=0)[2:8].mean(axis=0)
    assert torch.allclose(between(rows, 2), torch.from_numpy(expected))


def test_krum_scores_by_the_nearest_neighbours() -> None:
    rows, byzantine = torch.randn(9, 20), 2
    wide = rows.double().numpy()
    scores: list[float] = []
    for row in wide:
        distances = sorted(float(((row - other) ** 2).sum()) for other in wide)
        scores.append(sum(distances[1 : 1 + 9 - byzantine - 2]))
    ranked = np.argsort(scores).tolist()
    assert nearest(products(rows), byzantine, 1) == ranked[:1]
    assert nearest(products(rows), byzantine, 3) == sorted(ranked[:3])


def test_krum_chooses_the_first_of_equal_updates() -> None:
    assert nearest(products(torch.ones(7, 3)), 2, 2) == [0, 1]


def test_a_bound_shortens_long_updates_only() -> None:
    short, long = torch.tensor([0.3, 0.4]), torch.tensor([30.0, 40.0])
    assert torch.equal(bounded(short.clone(), 1.0), short)
    assert torch.allclose(bounded(long, 1.0), torch.tensor([0.6, 0.8]))


# --- workers


@pytest.mark.parametrize("rule", RULES)
def test_any_number_of_workers_gives_the_same_bits(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "BLOCK_NUMBERS", 170)  # Several blocks, the last one smaller.
    updates = torch.randn(13, 57, generator=torch.Generator().manual_seed(3))
    updates[:, 5] = -0.0
    expected, *_ = combined_by(1, rule, updates, refused=[4])
    for workers in (2, 4):
        for mean in combined_by(workers, rule, updates, refused=[4]):
            assert torch.equal(mean.view(torch.int32), expected.view(torch.int32))


def test_rows_that_do_not_fit_in_memory_are_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    updates = torch.randn(9, 33)
    expected = combined_by(2, "median", updates)
    monkeypatch.setattr(robust, "IN_MEMORY", 0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert torch.equal(combined_by(2, "median", updates)[0], expected[0])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("rule", ["median", "krum(2)"])
def test_too_few_updates_move_nothing(rule: str) -> None:
    plan, rows = strategy(rule).plan(), aggregation(rule, 4)
    rows.begin(Selected(1, [7, 9], [1.0, 1.0]))
    rows.add(ClientUpdate(7, torch.ones(4), None, 1.0, 1.0, 1))
    rows.combine(alone)
    assert rows.updates == 1 < plan.fewest
    assert not rows.mean()[0].any()


# --- attacks


@pytest.mark.parametrize("kind", ["sign, 10", "noise, 1000"])
def test_a_fifth_of_attackers_ruins_the_mean_and_no_robust_rule(kind: str) -> None:
    disturb = tuple(f"client {client}: poison({kind})" for client in ATTACKERS)
    scores: dict[str, float] = {}
    for rule in ("None", "median", "trimmed(0.3)", "krum(3)", "krum(3, keep=5)"):
        result = federated_run(Clusters(), f"federated(clients=20, fraction=0.5, robust={rule})", 12, disturb=disturb)
        assert set(result["fired"]) == {0, 1, 2, 3}
        scores[rule] = result["score"]
    assert scores.pop("None") < 0.6
    assert min(scores.values()) > 0.85, scores


def test_a_bound_limits_what_attackers_do() -> None:
    disturb = tuple(f"client {client}: poison(sign, 10)" for client in ATTACKERS)
    scores = [
        federated_run(Clusters(), f"federated(clients=20, fraction=0.5, robust={rule})", 12, disturb=disturb)["score"]
        for rule in ("None", "normbound(0.5)")
    ]
    assert scores[0] < 0.6 < 0.75 < scores[1]


def test_flipped_labels_of_all_clients_teach_the_wrong_classes() -> None:
    honest = federated_run(Clusters(), "federated(clients=20, fraction=0.5)", 8)
    wrong = federated_run(Clusters(), "federated(clients=20, fraction=0.5)", 8, disturb=("client *: poison(labels)",))
    assert honest["score"] > 0.85 > 0.2 > wrong["score"]
    assert len(wrong["fired"]) == wrong["federated"]["updates"] == 80


def test_any_client_attacks_with_its_probability_and_the_seed_decides_which() -> None:
    runs = [
        federated_run(
            Clusters(), "federated(clients=20, fraction=0.5)", 20, disturb=(f"any client: {fault}",), seed=seed
        )
        for fault, seed in (("poison with probability 0.2", 1), ("poison with probability 0.2", 1))
    ]
    assert runs[0]["fired"] == runs[1]["fired"]
    assert runs[0]["score"] == runs[1]["score"]
    assert 20 < len(runs[0]["fired"]) < 60  # Of 200.


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("clients=20, fraction=0.5, robust=krum(4)", r"krum\(4\) needs 11 updates in a round \(2f \+ 3 with f = 4"),
        ("clients=20, fraction=0.5, robust=krum(2, keep=9)", "needs 11 updates in a round .the 9 that it keeps and"),
        ("clients=20, robust=median", "median needs 3 updates in a round, and a round has 2"),
        ("clients=100, robust=trimmed(0.05)", r"trimmed\(0.05\) needs 20 updates in a round, so that one is left out"),
        ("robust=trimmed(0.5)", "at each end less than half is left out"),
        ("robust=normbound(0)", "an update moves the model by more than 0"),
        ("robust=krum(0)", "with nobody who lies the mean is better"),
        ("robust=median, algorithm=scaffold", "send control variates beside their updates"),
        ("robust=normbound(1), algorithm=scaffold", "send control variates beside their updates"),
        ("robust=median, algorithm=fedbuff(5)", "fedbuff counts stale ones less"),
    ],
)
def test_a_rule_that_could_not_protect_is_refused_with_the_numbers(arguments: str, why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        parse(f"federated({arguments})")


def test_a_bound_goes_with_stale_updates() -> None:
    result = federated_run(Clusters(), "federated(clients=20, algorithm=fedbuff(5), robust=normbound(1.0))", 3)
    assert result["federated"]["updates"] == 15


def test_a_round_with_too_few_updates_for_the_rule_fails_and_is_counted() -> None:
    result = federated_run(Clusters(), "federated(clients=20, fraction=0.35, robust=krum(2), dropout=0.3)", 10)
    assert 0 < result["federated"]["failed_rounds"] <= 10


def test_labels_that_cannot_be_flipped_are_refused() -> None:
    with pytest.raises(DataError, match="not a pair"):
        flipped({"x": torch.ones(2)}, 3)
    inputs, labels = flipped((torch.ones(3, 2), torch.tensor([0, 1, 3])), 4)
    assert inputs.shape == (3, 2)
    assert labels.tolist() == [3, 2, 0]


def test_only_clients_of_the_run_can_be_poisoned(launcher: Launcher, tmp_path: Path) -> None:
    for fault, names, why in (
        ("client 20: poison", "federated(clients=20, fraction=0.5)", "no client 20 in this run, clients 0 to 19"),
        ("client 1: poison", "allreduce", "this run has no clients"),
    ):
        with pytest.raises(UsageError, match=why):
            fit("offbeat.tasks.digits", names, steps=1, disturb=fault, out=tmp_path, launcher=launcher)

"""Personal models: each client's own, scored on what it holds out; the same bits for any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster_task import Clusters, federated_run
from federated_tasks import Images
from safetensors.torch import load_file
from torch.optim import SGD

from offbeat.errors import StrategyError
from offbeat.protocols.federated.client_parts import by_client, held_out, iid
from offbeat.run.drive import Result, fit
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.local_training import LocalTrainer, Visit, examples_of
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.report import personal_in_words
from offbeat.strategies import parse
from offbeat.strategies.federated.personal import TetheredClient, spread

SKEWED = "clients=20, fraction=0.5, data=dirichlet(0.3)"


def kept_models(run: Path) -> dict[str, torch.Tensor]:
    """The newest personal model of each client."""
    newest: dict[str, Path] = {}
    for path in sorted((run / "personal").rglob("*.safetensors"), key=lambda path: int(path.stem)):
        newest[path.parent.name] = path
    return {client: load_file(path)["model"] for client, path in newest.items()}


# --- held-out examples


@pytest.mark.parametrize("share", [0.01, 0.2, 0.99])
def test_each_client_holds_out_some_of_its_examples_and_trains_on_the_others(share: float) -> None:
    parts = by_client([0] * 10 + [1] * 2 + [2] + [3] * 100)
    train, held = held_out(parts, share, seed=3)
    for client in range(4):
        both = np.concatenate([train.part(client), held.part(client)])
        assert sorted(both.tolist()) == sorted(parts.part(client).tolist())
    assert (train.sizes > 0).all()
    assert held.sizes[1:3].tolist() == [1, 0]
    assert held.sizes[3] == round(100 * share)
    assert train.names == held.names == parts.names


def test_what_is_held_out_follows_from_the_seed() -> None:
    parts = iid(200, 10, seed=1)
    first, again, other = (held_out(parts, 0.3, seed)[1].order.tolist() for seed in (1, 1, 2))
    assert first == again != other


# --- training


def test_ditto_steps_are_those_of_its_paper() -> None:
    task = Clusters(rate=0.2)
    flat = FlatModel(task.model())
    data = task.data().train
    torch.manual_seed(4)
    common, own = torch.randn_like(flat.values), torch.randn_like(flat.values)
    spring = TetheredClient(flat, 0.7)
    spring.tie(common)

    def loss(batch: Any) -> torch.Tensor:
        return task.loss(flat.module, batch)

    trainer = LocalTrainer(flat, SGD(flat.parameters, lr=0.2), loss, examples_of(data, None), 1, 1, None)
    indices = np.arange(30, dtype=np.int64)
    trainer.train(Visit(0, 1, indices), own, spring)
    trained = flat.values.clone()
    gradient = trainer.gradient(Visit(0, 1, indices), own).update
    assert torch.allclose(trained, own - 0.2 * (gradient + 0.7 * (own - common)), atol=1e-6)


@pytest.mark.parametrize("method", ["finetune(epochs=3)", "ditto(0.5, epochs=3)"])
def test_personal_models_help_clients_whose_data_differ_and_leave_the_global_one_alone(
    method: str, tmp_path: Path
) -> None:
    result = federated_run(Clusters(), f"federated({SKEWED}, personal={method})", 10, tmp_path)
    personal = result["federated"]["personal"]
    assert personal["before"]["mean"] < personal["after"]["mean"]
    assert personal["better"] > personal["worse"]
    assert personal["clients"] + personal["without"] >= 18
    assert len(kept_models(tmp_path)) >= personal["clients"]
    words = personal_in_words(personal)
    assert words.startswith(f"{method}: mean {personal['before']['mean']:.4g} to {personal['after']['mean']:.4g}")


def test_both_methods_start_from_the_same_global_model(tmp_path: Path) -> None:
    scores = [
        federated_run(Clusters(), f"federated({SKEWED}, personal={method})", 6, tmp_path / method[:3])
        for method in ("finetune", "ditto(1)")
    ]
    assert scores[0]["score"] == scores[1]["score"]
    assert scores[0]["federated"]["personal"]["before"] == scores[1]["federated"]["personal"]["before"]


def test_fedsgds_momentum_outlives_personal_training(tmp_path: Path) -> None:
    class WithMomentum(Clusters):
        """The task with an optimizer that has a state."""

        def optimizer(self, params: Any) -> SGD:
            return SGD(params, lr=0.1, momentum=0.9)

    of = "federated(clients=20, batch=full, algorithm=fedsgd, personal={})"
    runs = [federated_run(WithMomentum(), of.format(each), 5, tmp_path / each[:3]) for each in ("finetune", "ditto(1)")]
    assert all(run["federated"]["personal"]["clients"] for run in runs)
    models = [load_file(tmp_path / each / "model.safetensors") for each in ("fin", "dit")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_of_many_clients_a_sample_is_scored_and_those_that_never_took_part_are_counted(tmp_path: Path) -> None:
    result = federated_run(Clusters(), "federated(clients=50, fraction=0.2, personal=ditto(1, scored=30))", 2, tmp_path)
    personal = result["federated"]["personal"]
    assert personal["clients"] + personal["without"] == 30
    assert personal["without"] > 0
    assert "never took part" in personal_in_words(personal)


def test_labels_flipped_in_a_round_are_not_those_of_personal_models(tmp_path: Path) -> None:
    of = "federated(clients=20, fraction=0.5, personal=finetune(epochs=20))"
    result = federated_run(Clusters(), of, 3, tmp_path, disturb=("client *: poison(labels)",))
    personal = result["federated"]["personal"]
    assert personal["before"]["mean"] < 0.4 < 0.6 < personal["after"]["mean"]


def test_a_client_whose_update_is_refused_keeps_the_model_that_it_had(tmp_path: Path) -> None:
    class Sick(Images):
        """The task whose clients 3 and 7 have NaN."""

        def score(self, model: Any, data: Any) -> float:
            return 0.0

    federated_run(
        Sick(nan_clients=(3, 7)), "federated(clients=12, fraction=1, data=task, personal=ditto(1))", 2, tmp_path
    )
    assert {int(client) for client in kept_models(tmp_path)} == set(range(12)) - {3, 7}


def test_a_spread_names_the_worst_tenth() -> None:
    assert spread([float(number) for number in range(20)])["worst_tenth"] == pytest.approx(0.5)
    assert spread([3.0])["worst_tenth"] == 3.0
    assert spread([]) == {}


# --- workers


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_models_and_scores(launcher: Launcher, tmp_path: Path) -> None:
    strategy = f"federated({SKEWED}, robust=krum(2, keep=3), personal=ditto(0.5))"
    results: list[Result] = [
        fit(
            Clusters(examples=300),
            strategy,
            workers=workers,
            steps=4,
            seed=2,
            launcher=launcher,
            out=tmp_path,
            disturb="any client: poison(noise, 3) with probability 0.2",
        )
        for workers in (1, 2, 4)
    ]
    first, *others = results
    models = kept_models(first.run)
    for other in others:
        assert other.score == first.score
        assert other.federated == first.federated
        assert other.disturbances == first.disturbances
        states = [load_file(run / "model.safetensors") for run in (first.run, other.run)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        again = kept_models(other.run)
        assert models.keys() == again.keys()
        assert all(torch.equal(model, again[client]) for client, model in models.items())


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("personal=ditto(0)", "a spring pulls with more than 0"),
        ("personal=ditto", "ditto"),
        ("personal=finetune(epochs=0)", "a client makes one pass over its data or more"),
        ("personal=finetune(held=1)", "the share of a client's examples that models are scored on"),
        ("personal=finetune(scored=0)", "clients are scored"),
    ],
)
def test_nonsense_is_refused(arguments: str, why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        parse(f"federated({arguments})")


def test_iterative_tasks_and_several_hosts_are_refused() -> None:
    strategy = parse("federated(personal=finetune)")
    with pytest.raises(StrategyError, match="which 2 hosts do not share"):
        strategy.check_hosts(2)
    with pytest.raises(StrategyError, match="personal=finetune cannot be used with Mixture"):
        strategy.check_iterative("Mixture")  # pyright: ignore[reportAttributeAccessIssue]

"""Every federated algorithm ends where a plain loop over the clients ends, written by hand from its paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from federated_tasks import RATE, SIZES, Means, Owners, network, points
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from offbeat.run.drive import Result, fit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.simulate.federated import RoundOutcome, VirtualRounds
from offbeat.strategies import combined, parse
from offbeat.strategies.federated.strategy import Federated

ROUNDS = 3
EPOCHS = 2
Correct = Callable[[Tensor, Tensor], Tensor]
"""A gradient, corrected, at these parameters."""


def learned(result: Result) -> Tensor:
    model = network()
    model.load_state_dict(load_file(result.run / MODEL_FILE))
    return parameters_to_vector(model.parameters()).detach()


def start() -> Tensor:
    return parameters_to_vector(network().parameters()).detach()


def gradient(vector: Tensor, client: int, sizes: tuple[int, ...] = SIZES) -> Tensor:
    """Of the mean loss over all of a client's data."""
    model = network()
    vector_to_parameters(vector, model.parameters())
    inputs, targets, owners = points(sizes)
    mine = owners == client
    nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def local(base: Tensor, client: int, epochs: int = EPOCHS, correct: Correct = lambda g, _: g) -> Tensor:
    """The update of a client that steps with its whole data."""
    vector = base.clone()
    for _ in range(epochs):
        vector -= RATE * correct(gradient(vector, client), vector)
    return vector - base


def mean(updates: list[Tensor], weights: list[float]) -> Tensor:
    return torch.stack([u * w for u, w in zip(updates, weights, strict=True)]).sum(dim=0) / sum(weights)


def average(base: Tensor, correct: Correct = lambda g, _: g) -> Tensor:
    """The mean update of all clients by examples."""
    return mean([local(base, client, correct=correct) for client in range(4)], list(SIZES))


def outcomes(text: str) -> Iterator[RoundOutcome]:
    strategy = combined(parse(text)).exchange
    assert isinstance(strategy, Federated)
    nbytes = start().numel() * 8
    return VirtualRounds(strategy.plan(), np.array(SIZES), nbytes, nbytes, seed=0)


# -- the algorithms by hand ------------------------------------------------------------------------------------------


def fedavg() -> Tensor:
    model = start()
    for _ in range(ROUNDS):
        model = model + average(model)
    return model


def half_fedavg() -> Tensor:
    model = start()
    for _ in range(ROUNDS):
        model = model + 0.5 * average(model)
    return model


def fedsgd() -> Tensor:
    model = start()
    for _ in range(ROUNDS):
        model = model - RATE * mean([gradient(model, client) for client in range(4)], list(SIZES))
    return model


def fedprox() -> Tensor:
    model = start()
    for _ in range(ROUNDS):
        base = model
        model = base + average(base, lambda g, at, base=base: g + 0.4 * (at - base))
    return model


def scaffold() -> Tensor:
    model = start()
    common, own = torch.zeros_like(model), [torch.zeros_like(model) for _ in range(4)]
    for _ in range(ROUNDS):
        updates = [
            local(model, client, correct=lambda g, _, c=client: g - own[c] + common)  # noqa: B023 - called at once
            for client in range(4)
        ]
        fresh = [own[i] - common - updates[i] / (EPOCHS * RATE) for i in range(4)]
        change = torch.stack([after - before for after, before in zip(fresh, own, strict=True)]).sum(dim=0)
        model, common, own = model + mean(updates, list(SIZES)), common + change / 4, fresh
    return model


def adaptive(kind: str) -> Tensor:
    """Reddi et al. 2021, algorithm 2, with its rates."""
    rate, tau, beta1, beta2 = 0.1, 1e-3, 0.0 if kind == "fedadagrad" else 0.9, 0.99
    model = start()
    first, second = torch.zeros_like(model), torch.full_like(model, tau**2)
    for _ in range(ROUNDS):
        update = average(model)
        first = beta1 * first + (1 - beta1) * update
        square = update**2
        if kind == "fedadagrad":
            second = second + square
        elif kind == "fedadam":
            second = beta2 * second + (1 - beta2) * square
        else:
            second = second - (1 - beta2) * square * torch.sign(second - square)
        model = model + rate * first / (second.sqrt() + tau)
    return model


FEDBUFF = "federated(clients=4, fraction=0.75, epochs=2, batch=full, data=task, algorithm=fedbuff(2), " + (
    "speeds=lognormal(1.5))"
)


def fedbuff() -> Tensor:
    models = [start()]
    for _, outcome in zip(range(6), outcomes(FEDBUFF), strict=False):
        came = outcome.participants
        factors = [1 / math.sqrt(1 + len(models) - 1 - each.version) for each in came]
        updates = [local(models[each.version], each.client) for each in came]
        weights = [SIZES[each.client] * factor for each, factor in zip(came, factors, strict=True)]
        models.append(models[-1] + mean(updates, weights))
    return models[-1]


def text_of(algorithm: str) -> str:
    return f"federated(clients=4, fraction=1, epochs={EPOCHS}, batch=full, data=task, algorithm={algorithm})"


CASES: dict[str, Callable[[], Tensor]] = {
    "fedavg": fedavg,
    "fedavg(0.5)": half_fedavg,
    "fedprox(0.4)": fedprox,
    "scaffold": scaffold,
    "fedadam": lambda: adaptive("fedadam"),
    "fedyogi": lambda: adaptive("fedyogi"),
    "fedadagrad": lambda: adaptive("fedadagrad"),
}


@pytest.mark.parametrize("algorithm", CASES)
def test_an_algorithm_ends_where_a_plain_loop_ends(algorithm: str, launcher: Launcher, tmp_path: Path) -> None:
    result = fit(
        Owners(), text_of(algorithm), workers=2, steps=ROUNDS, launcher=launcher, out=tmp_path, seed=0, target=1
    )
    expected = CASES[algorithm]()
    torch.testing.assert_close(learned(result), expected, rtol=0, atol=1e-9)
    assert (start() - expected).abs().max() > 0.05
    assert result.samples == ROUNDS * EPOCHS * sum(SIZES)
    assert result.federated["updates"] == ROUNDS * 4


def test_fedsgd_steps_with_the_mean_gradient(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=4, fraction=1, batch=full, data=task, algorithm=fedsgd)"
    result = fit(Owners(), text, workers=2, steps=ROUNDS, launcher=launcher, out=tmp_path, target=1)
    torch.testing.assert_close(learned(result), fedsgd(), rtol=0, atol=1e-9)


def test_fedbuff_weighs_updates_by_their_staleness(launcher: Launcher, tmp_path: Path) -> None:
    stale = [
        outcome.version - 1 - each.version
        for _, outcome in zip(range(6), outcomes(FEDBUFF), strict=False)
        for each in outcome.participants
    ]
    assert max(stale) >= 2, "some updates are stale, or this tests nothing"
    result = fit(Owners(), FEDBUFF, workers=2, steps=6, launcher=launcher, out=tmp_path, seed=0, target=1)
    torch.testing.assert_close(learned(result), fedbuff(), rtol=0, atol=1e-9)


def test_one_local_step_of_all_clients_is_one_step_of_gradient_descent(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=4, fraction=1, batch=full, data=task)"
    result = fit(Owners(), text, workers=2, steps=ROUNDS, launcher=launcher, out=tmp_path, target=1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs, targets, _ = points(SIZES)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    expected = parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(learned(result), expected, rtol=0, atol=1e-9)


def test_expectation_maximization_on_clients_is_that_on_all_data(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=4, fraction=1, data=task)"
    result = fit(Means(), text, workers=3, steps=4, launcher=launcher, out=tmp_path)
    task = Means()
    whole = points(SIZES)[0][:, 0], points(SIZES)[2]
    params = task.initial()
    for _ in range(4):
        params = task.update(params, task.statistics(params, whole))
    found = load_file(result.run / MODEL_FILE)
    torch.testing.assert_close(found, dict(params), rtol=0, atol=1e-6)
    assert found["steps"] == 4
    assert result.samples == 4 * sum(SIZES)
    assert result.federated["bytes_up"] == 4 * 4 * 4 * 8  # Rounds, clients, and two sums and two counts.


def test_a_cohorts_statistics_stand_for_those_of_all_clients(launcher: Launcher, tmp_path: Path) -> None:
    text = "federated(clients=4, fraction=0.5, data=task)"
    result = fit(Means(), text, workers=2, steps=1, launcher=launcher, out=tmp_path, seed=0)
    (outcome,) = (next(outcomes(text)),)
    inputs, _, owners = points(SIZES)
    part = torch.isin(owners, torch.tensor([each.client for each in outcome.participants]))
    task = Means()
    expected = task.update(task.initial(), task.statistics(task.initial(), (inputs[part, 0], owners[part])))
    torch.testing.assert_close(load_file(result.run / MODEL_FILE)["means"], expected["means"], rtol=0, atol=1e-6)

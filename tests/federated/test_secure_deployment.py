"""Secure sums of deployed rounds, on real processes that are killed at every stage."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from federated_tasks import Images
from federation import Deployment, same_model
from private_tasks import Smooth
from safetensors.torch import load_file
from torch import Tensor

from offbeat.federated.client_work import ClientWork, simulated_part
from offbeat.federated.store import FOLDER
from offbeat.federated.vectors import packed
from offbeat.protocols.federated.messages import RoundTask, Welcome
from offbeat.run.drive import fit
from offbeat.run.round_advice import explained_rounds
from offbeat.runtime.federated.aggregation import Selected, alone
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.round_log import read_rounds
from offbeat.runtime.federated.secure_mean import SecureMean
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE

SECURE = "federated(clients={}, fraction=1, batch=8, secure=True{})"
STAGES = ("UpdateSent", "AdvertisedKeys", "DealtShares", "MaskedUpdate", "ReleasedShares")
"""What a client sends last, in the order of the protocol."""
PHASES = ("keys", "shares", "masks", "release", "unmask", "over")


@pytest.mark.slow
def test_a_secure_sum_deployed_gives_the_bits_that_it_gives_simulated_and_a_killed_server_goes_on(
    deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    strategy = SECURE.format(3, ", data=quantity(1)")
    simulated = fit(Images(), strategy, steps=3, seed=4, launcher=launcher, out=tmp_path)
    real = deployment("Images")
    server = real.serve(strategy, rounds=3, seed=4, fault="dies in masks")
    clients = [real.join(part) for part in range(3)]
    server.fails()
    assert real.state().phase == "summing"
    server = real.resume()
    result = server.result()
    assert [client.result()["rounds"] for client in clients] == [{"accepted": 3}] * 3
    assert result["federated"]["failed_rounds"] == 0
    assert same_model(real.run, simulated.run)
    assert not list((real.run / FOLDER).glob("round-*")), "no update is written down"


@pytest.mark.slow
@pytest.mark.parametrize("text", ["randomk(0.3)", "quantize(4)", "randomk(0.5) + quantize(8)"])
def test_compressed_secure_sums_have_the_bits_of_the_simulation_and_what_clients_owe_outlives_them(
    text: str, deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    strategy = SECURE.format(3, ", data=quantity(1)") + f" + {text}"
    simulated = fit(Images(), strategy, steps=4, seed=4, launcher=launcher, out=tmp_path)
    real = deployment("Images")
    fault = "dies in release" if "quantize" in text else ""
    server = real.serve(strategy, rounds=4, seed=4, fault=fault, silence=20.0)
    clients = [real.join(part) for part in range(3)]
    if "quantize" in text:
        server.fails()
        server = real.resume()
    assert server.result()["federated"]["failed_rounds"] == 0
    assert [client.result()["rounds"] for client in clients] == [{"accepted": 4}] * 3
    assert same_model(real.run, simulated.run)


@pytest.mark.slow
def test_private_clients_add_noise_of_their_own_and_a_resumed_server_forgets_no_round_that_is_spent(
    deployment: Any,
) -> None:
    clip, rounds, clients = 1e-3, 3, 4
    real = deployment("Smooth", source="private_tasks")
    private = SECURE.format(clients, f", privacy=privacy(8, delta=0.01, clip={clip})")
    strategy = f"{private} + quantize(8, stochastic=True)"
    server = real.serve(strategy, rounds=rounds, seed=4, fault="dies in over", silence=20.0)
    parts = [real.join(part, fault="nan" if part == 2 else "") for part in range(clients)]
    server.fails()
    assert real.state().round.secure.server.total, "the sum of the first round was known"
    result = real.resume().result()["federated"]
    assert [part.result()["rounds"] for part in parts] == [{"accepted": rounds}] * clients, "nobody saw the NaN"
    assert result["privacy"]["rounds"] == rounds
    assert 7.9 < result["epsilon"] <= 8
    # Every client's update is shorter than the bound, and of 115 numbers each has noise of nearly the bound.
    flat = FlatModel(Smooth().model())
    before = flat.values.clone()
    flat.module.load_state_dict(load_file(real.run / MODEL_FILE))
    deviation = result["privacy"]["noise"] * clip * (clients / 3 * rounds) ** 0.5 / clients
    assert float((flat.values - before).std()) == pytest.approx(deviation, rel=0.4)


def expected_model(strategy: str, cohort: list[int], came: list[int], folder: Path) -> Tensor:
    """The model after one round, from the clients' updates as they would be seen without masks."""
    flat, mean = FlatModel(Images().model()), None
    sizes: list[float] = []
    sent: dict[int, Any] = {}
    for client in cohort:
        task = Images()
        work = ClientWork(task, task.model(), simulated_part(task, client), folder, lambda _line: None)
        sizes.append(float(work._prepare(Welcome(client, 1.0, 0, strategy, "x"))))
        mean = work._ready().secure
        if client in came:
            work._train(RoundTask(1, 0, score=False), packed([flat.values]))
            sent[client] = work._unsent
    assert isinstance(mean, SecureMean)
    mean.begin(Selected(1, cohort, sizes))
    for each in sent.values():
        assert mean.add(each)
    mean.combine(alone)
    return flat.values + mean.mean()[0]


def played(real: Deployment, clients: int, faults: dict[int, str], server_fault: str = "", **words: float) -> str:
    """A round in which some die: checks that its sum is right, or returns why there is none."""
    strategy = SECURE.format(clients, "")
    server = real.serve(strategy, rounds=1, fault=server_fault, **{"silence": 2.0, **words})
    for part in range(clients):
        real.join(part, fault=faults.get(part, ""))
    if server_fault:
        server.fails()
        server = real.resume()
    assert server.result()["steps"] == 1
    (outcome,) = read_rounds(real.run)
    before, flat = FlatModel(Images().model()).values, FlatModel(Images().model())
    with torch.no_grad():
        flat.module.load_state_dict(load_file(real.run / MODEL_FILE))
    if outcome["failed"]:
        assert torch.equal(flat.values, before)
        return outcome["failed"]
    came = sorted(participant["client"] for participant in outcome["participants"])
    assert len(came) >= 3
    wanted = expected_model(strategy, outcome["cohort"], came, real.folder)
    assert torch.allclose(flat.values, wanted, atol=1e-6)
    return ""


@pytest.mark.slow
def test_the_sum_is_right_when_clients_die_after_their_shares_and_after_their_masked_updates(deployment: Any) -> None:
    assert not played(deployment("Images"), 7, {1: "dies after DealtShares", 4: "dies after MaskedUpdate"})


@pytest.mark.slow
def test_a_round_that_waited_for_a_client_that_disappeared_says_so(deployment: Any) -> None:
    real = deployment("Images")
    # Silence, not impatience; longer than the others train, also where other tests keep the machine busy.
    assert not played(real, 4, {2: "dies training"}, silence=4.0, patience=1000.0)
    known = explained_rounds(real.run, json.loads((real.run / "run.json").read_text()))
    assert known is not None
    (cause,) = known.rounds
    assert (cause.client, cause.phase) == (2, "silence")
    assert cause.seconds >= 4


@pytest.mark.slow
def test_too_many_deaths_end_the_round_without_a_sum_and_say_how_many_are_needed(deployment: Any) -> None:
    why = played(deployment("Images"), 4, {1: "dies after DealtShares", 2: "dies after DealtShares"})
    assert "2 sent a masked update, and 3 are needed" in why


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_deaths_on_real_processes_leave_the_right_sum_or_none(seed: int, deployment: Any) -> None:
    random = Random(seed)
    clients = random.randint(3, 7)
    dying = random.sample(range(clients), random.randint(0, clients // 2))
    faults = {client: f"dies after {random.choice(STAGES)}" for client in dying}
    # A death of the server is certain only in phases that the round reaches.
    server_fault = f"dies in {random.choice(PHASES)}" if len(dying) * 3 < clients and seed % 2 else ""
    played(deployment("Images"), clients, faults, server_fault)

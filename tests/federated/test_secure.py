"""Secure aggregation in simulated rounds: the integers of the masked protocol, bit for bit, and its traffic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster_task import Clusters, federated_run
from federated_tasks import Images, Means
from safetensors.torch import load_file
from secure_support import Table
from torch import Tensor

from offbeat.errors import StrategyError
from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.secure.client import MaskWork
from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.server import SecureSum
from offbeat.protocols.federated.secure.traffic import client_traffic
from offbeat.run.drive import fit
from offbeat.runtime.federated.aggregation import ClientUpdate, ExactMean, Selected, UpdateLayout, alone
from offbeat.runtime.federated.round_log import read_rounds
from offbeat.runtime.federated.secure_mean import SecureMean
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.simulate.faults.secure_rounds import Dropout, SecureWorld
from offbeat.strategies import parse

LAYOUT = UpdateLayout(50, 50, torch.float32)
CLIENTS = list(range(10, 20))
PLAN = RoundPlan(clients=100, fraction=0.1)
SELECTED = Selected(3, CLIENTS, [20.0 + client for client in CLIENTS])


def sent(client: int, scale: float = 1.0) -> ClientUpdate:
    random = torch.Generator().manual_seed(client)
    update = scale * torch.randn(50, generator=random)
    return ClientUpdate(client, update, None, 20.0 + client, client / 10, 5 * (20 + client))


def added(clients: Sequence[int], parts: int = 1) -> SecureMean:
    """A round over these clients, as worker 0 of several has it in the end."""
    means = [SecureMean(LAYOUT, PLAN, seed=7) for _ in range(parts)]
    for mean in means:
        mean.begin(SELECTED)
    for position, client in enumerate(clients):
        assert means[position % parts].add(sent(client))
    rows = [mean._row.clone() for mean in means]

    def add_up(row: Tensor, _: str) -> None:
        row.copy_(sum(rows))

    for mean in means:
        mean.combine(add_up)
    assert all(torch.equal(mean.mean()[0], means[0].mean()[0]) for mean in means)
    return means[0]


@pytest.mark.parametrize("absent", [(), (12, 17)])
def test_the_masked_protocol_gives_the_same_integers_bit_for_bit(absent: tuple[int, ...]) -> None:
    simulated = added([client for client in CLIENTS if client not in absent])
    plan = SecureRound.of(bytes(32), simulated.encoding, len(CLIENTS), signed=True)
    world = SecureWorld(plan, 1, dict.fromkeys(absent, Dropout(2, before=True)))
    for client, each in world.clients.items():
        each.update = simulated.encode(sent(client))
    outcome = Table(world).play()
    assert isinstance(outcome, SecureSum)
    assert simulated.clients == outcome.clients
    assert simulated._sum is not None
    assert np.array_equal(simulated._sum, outcome.total)
    deployed = SecureMean(LAYOUT, PLAN, seed=7)
    deployed.begin(SELECTED)
    deployed.receive(outcome.total, outcome.clients)
    assert torch.equal(simulated.mean()[0], deployed.mean()[0])
    assert (simulated.loss, simulated.updates) == (deployed.loss, deployed.updates)
    assert not deployed.failure


def test_any_number_of_workers_has_the_same_sum() -> None:
    first = added(CLIENTS)
    for parts in (2, 4):
        other = added(CLIENTS, parts)
        assert torch.equal(first.mean()[0], other.mean()[0])
        assert (first.updates, first.examples, first.loss) == (other.updates, other.examples, other.loss)


def test_the_mean_is_nearly_the_exact_one() -> None:
    exact = ExactMean(LAYOUT)
    exact.begin(SELECTED)
    for client in CLIENTS:
        exact.add(sent(client))
    exact.combine(alone)
    secure = added(CLIENTS)
    assert torch.allclose(secure.mean()[0], exact.mean()[0], atol=1e-6, rtol=0)
    assert secure.loss == pytest.approx(exact.loss, abs=1e-5)
    assert (secure.updates, secure.examples) == (exact.updates, exact.examples)


def test_updates_with_nan_are_refused_and_large_numbers_clipped() -> None:
    mean = SecureMean(LAYOUT, PLAN, seed=0)
    mean.begin(SELECTED)
    assert not mean.add(ClientUpdate(10, torch.full((50,), torch.nan), None, 1.0, 0.0, 1))
    assert mean.add(ClientUpdate(11, torch.full((50,), -100.0), None, 1.0, torch.nan, 1))
    mean.combine(alone)
    assert mean.updates == 1
    assert mean.notes() == {"clipped": 50}
    assert mean.mean()[0].tolist() == pytest.approx([-8.0] * 50)
    again = SecureMean(LAYOUT, PLAN, seed=0)
    again.load_state_dict(mean.state_dict())
    assert again.notes() == mean.notes()


@pytest.mark.parametrize(("came", "failure"), [(10, ""), (7, ""), (6, "6 of 10 clients sent"), (0, "0 of 10 clients")])
def test_a_round_fails_as_the_server_would(came: int, failure: str) -> None:
    mean = added(CLIENTS[:came]) if came else SecureMean(LAYOUT, PLAN, seed=7)
    if not came:
        mean.begin(SELECTED)
        mean.combine(alone)
    assert mean.failure.startswith(failure) if failure else not mean.failure


def test_a_round_of_two_fails() -> None:
    mean = SecureMean(LAYOUT, PLAN, seed=7)
    mean.begin(Selected(1, [1, 2], [5.0, 5.0]))
    for client in (1, 2):
        mean.add(ClientUpdate(client, torch.zeros(50), None, 5.0, 0.0, 5))
    mean.combine(alone)
    assert "2 clients are too few for secure aggregation" in mean.failure


def test_many_clients_have_some_neighbours_each_and_survivors_are_counted_around_everyone() -> None:
    clients = list(range(400))
    mean = SecureMean(UpdateLayout(1, 1, torch.float32), RoundPlan(clients=400, fraction=1.0), seed=1)

    def play(absent: set[int]) -> str:
        mean.begin(Selected(1, clients, [1.0] * 400))
        for client in clients:
            if client not in absent:
                mean.add(ClientUpdate(client, torch.ones(1), None, 1.0, 0.0, 1))
        mean.combine(alone)
        return mean.failure

    assert play(set(range(40))) == ""
    assert mean.mean()[0].tolist() == pytest.approx([1.0])
    assert "and 87 are needed to recover its secret" in play(set(range(150)))


def test_traffic_is_that_of_the_messages() -> None:
    mean = SecureMean(LAYOUT, PLAN, seed=7)
    down, up = mean.message_bytes(1000, 200)
    for client in (0, 50, 99):
        others = [each for each in range(0, 100, 11) if each != client][:9]
        plan = SecureRound.of(bytes(32), mean.encoding, 10)
        traffic = client_traffic(plan, client, others)
        assert (1000 + traffic.down, traffic.up) == (down, up), "numbers up to 127 take one byte"


def test_a_masked_update_looks_unlike_the_update() -> None:
    mean = SecureMean(UpdateLayout(20_000, 20_000, torch.float32), PLAN, seed=7)
    mean.begin(SELECTED)
    row = mean.encode(ClientUpdate(10, torch.linspace(-1, 1, 20_000), None, 30.0, 0.5, 1))
    masked = MaskWork(row, [bytes(16)], [])()
    assert np.corrcoef(np.arange(20_000), row[:20_000].view(np.int32))[0, 1] > 0.999
    assert abs(np.corrcoef(np.arange(20_000), masked[:20_000].view(np.int32))[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("federated(secure=True, algorithm=fedbuff(5))", "all of a round must start together"),
        ("federated(secure=True, algorithm=scaffold)", "control variates have no bound"),
        ("federated(secure=True, robust=krum(2))", "cannot see which update is unlike the others"),
        ("federated(secure=True, robust=median)", "cannot see which update is unlike the others"),
        ("federated(secure=True, clients=10)", "1 are selected: of two, each would learn the other's update"),
        ("federated(secure=True, over=2)", "secure=True needs 14, more than two thirds"),
        ("federated(secure=True, dropout=0.4)", "leaves 6 of 10 clients on average"),
        ("federated(secure=True, clients=1000, fraction=1, dropout=0.2)", "of every client's 128 neighbours stay"),
        ("federated(secure=True, clients=1000, fraction=0.5, over=1.3)", "the first 500 count"),
        ("federated(secure=True) + topk(0.01)", "must be decoded before they are summed"),
        ("federated(secure=True) + sign", "each client chooses its own places or scale"),
        ("federated(secure=True, privacy=privacy(8, delta=1e-3)) + quantize(8)", "would take the noise out again"),
        ("federated(secure=True, privacy=privacy(8, delta=1e-3)) + quantize(4)", "too few integers for the noise"),
        ("federated(secure=True) + randomk(0.1) + half", "messages of half"),
    ],
)
def test_what_cannot_be_summed_without_being_seen_is_refused(text: str, why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        parse(text)


@pytest.mark.parametrize(
    "text", ["over=1.3", "dropout=0.25", "clients=1000, fraction=1, dropout=0.15", "fraction=0.03"]
)
def test_rounds_of_which_enough_stay_are_accepted(text: str) -> None:
    assert parse(f"federated(secure=True, {text})") is not None


SECURE = "federated(clients=12, fraction=0.5, epochs=2, batch=7, over=1.2, dropout=0.1, data=dirichlet(0.5), {})"


def test_a_run_has_the_same_bits_with_any_number_of_workers(launcher: Launcher, tmp_path: Path) -> None:
    text = SECURE.format("secure=True")
    results = [fit(Images(), text, workers=n, steps=5, seed=4, launcher=launcher, out=tmp_path) for n in (1, 2, 4)]
    bits = [load_file(result.run / MODEL_FILE) for result in results]
    assert all(torch.equal(bits[0][name], other[name]) for other in bits[1:] for name in bits[0])
    assert len({(str(r.federated), r.score, r.bytes_sent) for r in results}) == 1
    plain = fit(Images(), SECURE.format("secure=False"), workers=2, steps=5, seed=4, launcher=launcher, out=tmp_path)
    for name, value in load_file(plain.run / MODEL_FILE).items():
        assert torch.allclose(bits[0][name], value, atol=1e-4)
    for way in ("bytes_up", "bytes_down"):
        assert plain.federated[way] < results[0].federated[way] < plain.federated[way] + 5 * 8 * 4000


def test_rounds_without_a_sum_leave_the_model_and_say_why(tmp_path: Path) -> None:
    """Of 9 selected 7 must stay, and with this dropout it is often fewer."""
    strategy = "federated(clients=30, fraction=0.3, dropout=0.2, secure=True)"
    result = federated_run(Clusters(), strategy, 12, tmp_path)
    counts, rounds = result["federated"], read_rounds(tmp_path)
    assert 0 < counts["failed_rounds"] < 12
    failed = [each for each in rounds if each["failed"]]
    assert len(failed) == counts["failed_rounds"]
    assert all("of 9 clients sent a masked update, and 7 are needed" in each["failed"] for each in failed)
    assert {each["updates"] < 7 for each in rounds} == {True, False}
    assert all((each["updates"] < 7) == bool(each["failed"]) for each in rounds)


def test_statistics_are_refused(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="statistics do not have"):
        fit(
            Means(),
            "federated(clients=4, fraction=1, data=task, secure=True)",
            steps=1,
            launcher=launcher,
            out=tmp_path,
        )


@pytest.mark.parametrize(
    ("more", "folder"), [("quantize(4)", "clients"), ("randomk(0.3)", "clients"), ("", "personal")]
)
def test_clients_of_a_round_without_a_sum_keep_what_they_had(more: str, folder: str, tmp_path: Path) -> None:
    """What a real client owes, and its own model, change when it hears that its update is in the sum, and only then."""
    ditto = ", personal=ditto(1)" * (folder == "personal")
    strategy = f"federated(clients=30, fraction=0.3, dropout=0.2, secure=True{ditto})" + f" + {more}" * bool(more)
    federated_run(Clusters(), strategy, 12, tmp_path, checkpoint_every=100)
    rounds = read_rounds(tmp_path)
    assert {bool(each["failed"]) for each in rounds} == {True, False}
    kept = {(int(path.stem), int(path.parent.name)) for path in (tmp_path / folder).glob("*/*/*.safetensors")}
    summed = {
        (each["number"], member["client"]) for each in rounds if not each["failed"] for member in each["participants"]
    }
    assert kept == summed


def test_clients_of_a_round_with_fewer_updates_than_it_needs_keep_what_they_had(tmp_path: Path) -> None:
    """The masks of ten could be taken off, but the strategy wants eleven."""
    strategy = "federated(clients=12, fraction=1, fewest=11, data=task, secure=True) + quantize(4)"
    result = federated_run(Images(nan_clients=(3, 7)), strategy, 2, tmp_path)
    assert result["federated"]["failed_rounds"] == 2
    assert not list((tmp_path / "clients").rglob("*.safetensors"))

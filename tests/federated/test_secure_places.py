"""Secure aggregation of a share of the numbers: the same places for all, fewer bytes, and nothing lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from federated_tasks import Images
from private_tasks import Smooth
from safetensors.torch import load_file
from secure_support import Table

from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.server import SecureSum
from offbeat.protocols.federated.secure.traffic import client_traffic
from offbeat.run.drive import fit
from offbeat.runtime.federated.aggregation import ClientUpdate, ExactMean, Selected, UpdateLayout, alone
from offbeat.runtime.federated.client_state import OWED, ClientState
from offbeat.runtime.federated.private_secure_mean import PrivateSecureMean
from offbeat.runtime.federated.secure_mean import SecureMean
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.simulate.faults.secure_rounds import SecureWorld
from offbeat.strategies import combined, parse
from offbeat.strategies.federated.compressed_updates import CompressFilter
from offbeat.strategies.federated.update_path import aggregation, update_filters

SIZE, TRAINABLE, KEPT = 500, 490, 49
LAYOUT = UpdateLayout(SIZE, TRAINABLE, torch.float32)
CLIENTS = list(range(10, 20))
SELECTED = Selected(3, CLIENTS, [20.0 + client for client in CLIENTS])


def path(text: str = "federated(secure=True) + randomk(0.1)") -> tuple[CompressFilter, SecureMean]:
    strategy = combined(parse(text))
    (compress,) = update_filters(strategy, LAYOUT, 7)
    mean = aggregation(strategy, LAYOUT, 7)
    assert isinstance(compress, CompressFilter)
    assert isinstance(mean, SecureMean)
    return compress, mean


def row(client: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(client))


def sent(client: int, update: torch.Tensor) -> ClientUpdate:
    return ClientUpdate(client, update, None, 20.0 + client, 0.5, 10)


def test_the_sum_is_that_of_the_plain_updates_to_the_rounding() -> None:
    compress, mean = path()
    plain = ExactMean(LAYOUT)
    for each in (mean, plain):
        each.begin(SELECTED)
    for client in CLIENTS:
        update = sent(client, compress.apply(row(client), client, 3, ClientState()))
        assert mean.add(update)
        assert plain.add(update)
    for each in (mean, plain):
        each.combine(alone)
    secure, exact = mean.mean()[0], plain.mean()[0]
    assert torch.allclose(secure, exact, atol=1e-6, rtol=0)
    assert int(secure[:TRAINABLE].count_nonzero()) == KEPT
    assert torch.equal(secure == 0, exact == 0)


def test_the_masked_protocol_gives_the_same_integers() -> None:
    compress, mean = path()
    mean.begin(SELECTED)
    plan = SecureRound.of(bytes(32), mean.encoding, len(CLIENTS))
    world = SecureWorld(plan, 1)
    for client, each in world.clients.items():
        update = sent(client, compress.apply(row(client), client, 3, ClientState()))
        each.update = mean.encode(update)
        mean.add(update)
    mean.combine(alone)
    outcome = Table(world).play()
    assert isinstance(outcome, SecureSum)
    assert mean._sum is not None
    assert np.array_equal(mean._sum, outcome.total)


def test_only_the_kept_numbers_are_sent() -> None:
    _, mean = path()
    _, whole = path("federated(secure=True) + randomk(1.0)")
    assert mean.encoding.length == KEPT + SIZE - TRAINABLE + 1, "buffers and the loss come on top"
    down, up = mean.message_bytes(1000, 200)
    assert (down, up + 4 * (TRAINABLE - KEPT)) == whole.message_bytes(1000, 200)
    plan = SecureRound.of(bytes(32), mean.encoding, 10)
    assert up == client_traffic(plan, 50, [each for each in range(0, 100, 11) if each != 55][:9]).up


def test_what_is_left_out_is_owed_and_sent_later() -> None:
    compress, mean = path()
    state, put, got = ClientState(), torch.zeros(TRAINABLE), torch.zeros(TRAINABLE)
    for number in (1, 2, 3):
        update = row(number)
        put += update[:TRAINABLE]
        mean.begin(Selected(number, CLIENTS, [20.0 + client for client in CLIENTS]))
        mean.add(sent(10, compress.apply(update, 10, number, state)))
        mean.combine(alone)
        got += mean.mean()[0][:TRAINABLE]
    assert torch.allclose(got + state.tensors[OWED], put, atol=1e-4)


def test_an_update_with_nan_where_nothing_is_sent_is_refused_all_the_same() -> None:
    compress, mean = path()
    mean.begin(SELECTED)
    for place in range(0, TRAINABLE, 7):
        update = row(1)
        update[place] = torch.nan
        assert not mean.add(sent(10, compress.apply(update, 10, 3, ClientState())))
    mean.combine(alone)
    assert mean.updates == 0


def test_private_clients_add_noise_to_the_kept_numbers_only() -> None:
    text = "federated(secure=True, privacy=privacy(noise=2, delta=1e-3)) + randomk(0.1)"
    strategy, layout = combined(parse(text)), UpdateLayout(SIZE, SIZE, torch.float32)
    mean = aggregation(strategy, layout, 7)
    assert isinstance(mean, PrivateSecureMean)
    mean.prepare(5)
    mean.begin(SELECTED)
    for client in CLIENTS:
        assert mean.add(sent(client, torch.zeros(SIZE)))
    mean.combine(alone)
    assert int(mean.mean()[0].count_nonzero()) == 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "more"), [(Images(), "data=dirichlet(0.5)"), (Smooth(), "data=task, privacy=privacy(8, delta=0.01)")]
)
def test_a_run_has_the_same_bits_with_any_number_of_workers(
    task: Images, more: str, launcher: Launcher, tmp_path: Path
) -> None:
    text = f"federated(clients=12, fraction=0.7, batch=7, secure=True, {more}) + randomk(0.2)"
    results = [fit(task, text, workers=n, steps=4, seed=4, launcher=launcher, out=tmp_path) for n in (1, 2, 4)]
    bits = [load_file(result.run / MODEL_FILE) for result in results]
    assert all(torch.equal(bits[0][name], other[name]) for other in bits[1:] for name in bits[0])
    assert len({(str(r.federated), r.score, r.bytes_sent) for r in results}) == 1

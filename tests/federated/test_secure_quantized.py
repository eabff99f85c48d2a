"""Secure sums of quantized updates: one scale for all clients of a round, fewer bytes, and what is lost is owed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from federated_tasks import Images
from safetensors.torch import load_file
from secure_support import Table

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.federated.secure.common_scale import CommonScale
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.server import SecureSum
from offbeat.run.drive import fit
from offbeat.runtime.federated.aggregation import ClientUpdate, ExactMean, Selected, UpdateFilter, UpdateLayout, alone
from offbeat.runtime.federated.client_state import OWED, ClientState
from offbeat.runtime.federated.round_scale import START, RoundScale
from offbeat.runtime.federated.secure_mean import SecureMean, adopt
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.simulate.faults.secure_rounds import SecureWorld
from offbeat.strategies import combined, parse
from offbeat.strategies.federated.update_path import aggregation, update_filters

SIZE, TRAINABLE = 500, 490
LAYOUT = UpdateLayout(SIZE, TRAINABLE, torch.float32)
CLIENTS = list(range(10, 20))


def path(text: str = "quantize(8)", layout: UpdateLayout = LAYOUT) -> tuple[Sequence[UpdateFilter], SecureMean]:
    strategy = combined(parse(f"federated(secure=True) + {text}"))
    mean = aggregation(strategy, layout, 7)
    assert isinstance(mean, SecureMean)
    return update_filters(strategy, layout, 7), mean


def selected(number: int) -> Selected:
    return Selected(number, CLIENTS, [20.0 + client for client in CLIENTS])


def row(client: int, number: int = 1, size: float = 0.02) -> torch.Tensor:
    return size * torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * number + client))


def sent(client: int, update: torch.Tensor, state: ClientState | None = None) -> ClientUpdate:
    return ClientUpdate(client, update, None, 20.0 + client, 0.5, 10, state)


def played(filters: Sequence[UpdateFilter], mean: SecureMean, states: dict[int, ClientState], number: int) -> None:
    """A round of all clients."""
    mean.begin(selected(number))
    for client in CLIENTS:
        update = row(client, number)
        for each in filters:
            update = each.apply(update, client, number, states[client])
        assert mean.add(sent(client, update, states[client]))
    mean.combine(alone)


def states() -> dict[int, ClientState]:
    return {client: ClientState() for client in CLIENTS}


@pytest.mark.parametrize(("bits", "error"), [(8, 0.002), (4, 0.03), (2, 0.2)])
def test_the_mean_is_that_of_the_plain_updates_to_the_rounding_and_buffers_keep_their_precision(
    bits: int, error: float
) -> None:
    filters, mean = path(f"quantize({bits})")
    played(filters, mean, states(), 1)
    exact = ExactMean(LAYOUT)
    exact.begin(selected(1))
    for client in CLIENTS:
        exact.add(sent(client, row(client)))
    exact.combine(alone)
    got, wanted = mean.mean()[0], exact.mean()[0]
    assert float((got - wanted)[:TRAINABLE].square().mean().sqrt()) < error
    assert torch.allclose(got[TRAINABLE:], wanted[TRAINABLE:], atol=1e-6)
    assert mean.loss == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("text", ["quantize(8)", "quantize(2)", "randomk(0.3) + quantize(4)"])
def test_the_masked_protocol_gives_the_same_integers(text: str) -> None:
    filters, mean = path(text)
    mean.begin(selected(3))
    world = SecureWorld(SecureRound.of(bytes(32), mean.encoding, len(CLIENTS)), 1)
    for client, each in world.clients.items():
        update = row(client)
        for change in filters:
            update = change.apply(update, client, 3, ClientState())
        each.update = mean.encode(sent(client, update))
        mean.add(sent(client, update))
    mean.combine(alone)
    outcome = Table(world).play()
    assert isinstance(outcome, SecureSum)
    assert np.array_equal(mean._sum, outcome.total)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["quantize(8)", "quantize(2)", "randomk(0.3) + quantize(4)"])
def test_what_clipping_and_rounding_have_lost_is_owed_and_sent_later(text: str) -> None:
    filters, mean = path(text)
    known, put, got = states(), torch.zeros(TRAINABLE), torch.zeros(TRAINABLE)
    weights = torch.tensor([20.0 + client for client in CLIENTS])
    for number in range(1, 7):
        played(filters, mean, known, number)
        rows = torch.stack([row(client, number) for client in CLIENTS])
        put += (weights @ rows)[:TRAINABLE] / weights.sum()
        got += mean.mean()[0][:TRAINABLE]
    owed = weights @ torch.stack([known[client].tensors[OWED] for client in CLIENTS]) / weights.sum()
    assert torch.allclose(got + owed, put, atol=1e-5)
    assert float(owed.abs().max()) > 0


def test_the_scale_follows_the_size_of_the_updates_and_survives_a_resume() -> None:
    filters, mean = path("quantize(8, stochastic=True)")
    assert not filters, "rounded at random, nothing is owed"
    for number, size in enumerate((0.02, 3.0, 1e-5), start=1):
        mean.begin(selected(number))
        for client in CLIENTS:
            assert mean.add(sent(client, row(client, number, size)))
        mean.combine(alone)
        mean.mean()
        mean.begin(selected(number + 1))
        assert 8 < mean.encoding.bound / size < 32
        assert np.log2(mean.encoding.bound).is_integer()
    _, again = path("quantize(8, stochastic=True)")
    again.load_state_dict(mean.state_dict())
    again.begin(selected(4))
    assert again.encoding == mean.encoding


def test_a_round_without_a_sum_leaves_the_scale() -> None:
    _, mean = path()
    mean.begin(selected(1))
    mean.add(sent(10, row(10)))
    mean.combine(alone)
    assert mean.failure
    mean.begin(selected(2))
    assert mean.encoding.bound == START


@pytest.mark.parametrize("size", [1e9, -1e9])
def test_a_scale_that_clients_lied_about_stays_a_number(size: float) -> None:
    scale = RoundScale(8, owes=True)
    scale.learn(size)
    assert 2.0**-60 <= scale.bound <= 2.0**24


def test_updates_of_zeros_leave_the_scale_where_it_is() -> None:
    _, mean = path("quantize(8, stochastic=True)")
    mean.begin(selected(1))
    for client in CLIENTS:
        mean.add(sent(client, torch.zeros(SIZE)))
    mean.combine(alone)
    assert not mean.mean()[0].any()
    mean.begin(selected(2))
    assert mean.encoding.bound == START


def test_a_client_takes_the_scale_of_the_server_and_nothing_else() -> None:
    _, server = path()
    server.scale.bound = 0.5  # type: ignore[union-attr]
    server.begin(selected(4))
    _, client = path()
    assert not adopt(client, server.encoding, 4, 7)
    assert np.array_equal(client.encode(sent(12, row(12))), server.encode(sent(12, row(12))))
    _, other = path("quantize(4)")
    assert "the server wants CommonScale" in adopt(other, server.encoding, 4, 7)
    plain = SecureMean(LAYOUT, client._plan, 7)
    assert "and this client has FixedPoint" in adopt(plain, server.encoding, 4, 7)
    assert isinstance(plain.encoding, FixedPoint)


def test_uploads_are_as_narrow_as_the_sum_allows() -> None:
    (_, few), plain = path(), SecureMean(UpdateLayout(SIZE, TRAINABLE, torch.float32), path()[1]._plan, 7)
    assert isinstance(few.encoding, CommonScale)
    assert few.encoding.width == 8 + 4, "ten clients"
    saved = plain.message_bytes(0, 0)[1] - few.message_bytes(0, 0)[1]
    assert saved == plain.encoding.nbytes - few.encoding.nbytes
    assert few.encoding.words == TRAINABLE + 4 * (SIZE - TRAINABLE + 3), "buffers, size, loss and weight are fine"


def test_an_update_with_nan_is_refused_and_owes_what_it_owed() -> None:
    filters, mean = path()
    state = ClientState({OWED: torch.ones(TRAINABLE)})
    mean.begin(selected(1))
    bad = row(10)
    bad[3] = torch.nan
    for each in filters:
        bad = each.apply(bad, 10, 1, state)
    assert not mean.add(sent(10, bad, state))
    assert torch.equal(state.tensors[OWED], torch.ones(TRAINABLE))


def test_error_feedback_without_a_place_is_refused() -> None:
    filters, _ = path()
    with pytest.raises(UsageError, match=r"quantize needs a place where client 3 keeps what it has not sent"):
        filters[0].apply(row(3), 3, 1, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("quantize(3)", "bits"),
        ("quantize(1)", "bits"),
        ("quantize(16)", "bits"),
        ("topk(0.1) + quantize(8)", "messages of topk"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        parse(f"federated(secure=True) + {text}")


def test_the_scale_of_few_bits_leaves_less_room() -> None:
    assert [RoundScale(bits, owes=True).room for bits in (8, 4, 2)] == [16, 8, 4]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["quantize(4)", "randomk(0.4) + quantize(8)"])
def test_a_run_has_the_same_bits_with_any_number_of_workers_and_after_a_resume(
    text: str, launcher: Launcher, tmp_path: Path
) -> None:
    strategy = f"federated(clients=12, fraction=0.5, batch=7, data=dirichlet(0.5), secure=True) + {text}"
    results = [fit(Images(), strategy, workers=n, steps=5, seed=4, launcher=launcher, out=tmp_path) for n in (1, 2, 4)]
    short = fit(Images(), strategy, workers=2, steps=2, seed=4, launcher=launcher, out=tmp_path)
    results.append(fit(Images(), strategy, workers=2, steps=5, resume=short.run, launcher=launcher, out=tmp_path))
    bits = [load_file(result.run / MODEL_FILE) for result in results]
    assert all(torch.equal(bits[0][name], other[name]) for other in bits[1:] for name in bits[0])
    assert len({(r.score, r.bytes_sent) for r in results}) == 1

"""Compressed updates: what is sent of them, what clients keep, and what has no place there."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols import compression as formats
from offbeat.runtime.federated.aggregation import UpdateLayout
from offbeat.runtime.federated.client_state import OWED, ClientState
from offbeat.strategies import combined, parse
from offbeat.strategies.compressors import Compressing
from offbeat.strategies.federated.compressed_updates import CompressFilter
from offbeat.strategies.federated.update_path import update_filters

SIZE, TRAINABLE = 5000, 4990
LAYOUT = UpdateLayout(SIZE, TRAINABLE, torch.float32)
BIASED = ("quantize(8)", "quantize(4)", "sign", "topk(0.05)", "randomk(0.1)", "topk(0.1) + quantize(8)")
UNBIASED = ("half", "bfloat", "quantize(4, stochastic=True)", "randomk(0.1, feedback=False)")


def filter_of(text: str, seed: int = 3) -> CompressFilter:
    (only,) = update_filters(combined(parse(f"federated + {text}")), LAYOUT, seed)
    assert isinstance(only, CompressFilter)
    return only


def row(seed: int = 1) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("text", [*BIASED, *UNBIASED])
def test_an_update_follows_from_seed_round_and_client_alone(text: str) -> None:
    one = filter_of(text).apply(row(), 5, 2, ClientState())
    used = filter_of(text)
    for client, number in ((5, 1), (6, 2), (0, 9)):
        used.apply(row(7), client, number, ClientState())
    assert torch.equal(one, used.apply(row(), 5, 2, ClientState()))
    assert not torch.equal(one, row())
    assert torch.equal(one[TRAINABLE:], row()[TRAINABLE:]), "buffers stay as they are"


@pytest.mark.parametrize("text", [*BIASED, *UNBIASED])
def test_the_bytes_counted_are_those_of_the_payload(text: str) -> None:
    compress = filter_of(text)
    payload = compress.encode(row(), 1, 1, ClientState())
    dense = LAYOUT.nbytes
    assert compress.update_bytes(SIZE, dense) == payload.numel() + 4 * (SIZE - TRAINABLE)
    first, *inner = [cast("Compressing", part).format() for part in combined(parse(f"federated + {text}")).compressions]
    assert isinstance(first, formats.RowFormat)
    assert payload.numel() == first.message_bytes([(TRAINABLE,)], 4, inner[0] if inner else None)


@pytest.mark.parametrize("text", BIASED)
def test_what_a_message_leaves_out_is_owed_by_the_client_and_nothing_is_lost(text: str) -> None:
    compress, state = filter_of(text), ClientState()
    assert compress.keeps_state
    put, sent = torch.zeros(TRAINABLE), torch.zeros(TRAINABLE)
    for number in (1, 4, 9):
        update = row(number)
        put += update[:TRAINABLE]
        sent += compress.apply(update, 5, number, state)[:TRAINABLE]
    assert float(state.tensors[OWED].abs().sum()) > 0
    assert torch.allclose(sent + state.tensors[OWED], put, atol=1e-4)


@pytest.mark.parametrize("text", UNBIASED)
def test_without_bias_clients_keep_nothing(text: str) -> None:
    compress, state = filter_of(text), ClientState()
    assert not compress.keeps_state
    compress.apply(row(), 5, 1, state)
    assert not state.tensors
    assert torch.equal(compress.apply(row(), 5, 1, None), filter_of(text).apply(row(), 5, 1, state))


def test_clients_of_a_round_draw_the_same_places_and_their_own_roundings() -> None:
    places = filter_of("randomk(0.1)")
    kept = [
        places.apply(row(n), client, number, ClientState()) for n, client, number in ((1, 5, 2), (2, 6, 2), (1, 5, 3))
    ]
    where = [update[:TRAINABLE].nonzero().flatten() for update in kept]
    assert torch.equal(where[0], where[1])
    assert not torch.equal(where[0], where[2])
    rounding = filter_of("quantize(2, stochastic=True)")
    assert not torch.equal(rounding.apply(row(), 5, 2, None), rounding.apply(row(), 6, 2, None))


def test_random_places_without_feedback_are_right_on_average() -> None:
    compress = filter_of("randomk(0.25, feedback=False)")
    mean = torch.stack([compress.apply(row(), 1, number, None)[:TRAINABLE] for number in range(1, 401)]).mean(dim=0)
    assert float((mean - row()[:TRAINABLE]).norm() / row()[:TRAINABLE].norm()) < 0.15


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_with_nan_reaches_the_server_and_spoils_no_feedback(bad: float) -> None:
    compress, state = filter_of("randomk(0.1)"), ClientState()
    compress.apply(row(), 5, 1, state)
    before = state.tensors[OWED].clone()
    update = row(2)
    update[17] = bad
    assert not bool(compress.apply(update, 5, 2, state).isfinite().all())
    assert torch.equal(before, state.tensors[OWED])


def test_half_precision_models_are_compressed_too() -> None:
    layout = UpdateLayout(SIZE, TRAINABLE, torch.bfloat16)
    (compress,) = update_filters(combined(parse("federated + topk(0.05)")), layout, 3)
    sent = compress.apply(row().bfloat16(), 5, 1, ClientState())
    assert sent.dtype == torch.bfloat16
    assert int(sent[:TRAINABLE].count_nonzero()) == round(0.05 * TRAINABLE)
    assert compress.update_bytes(SIZE, layout.nbytes) == 8 * round(0.05 * TRAINABLE) + 2 * (SIZE - TRAINABLE)


def test_feedback_without_a_place_to_keep_it_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a place where client 5 keeps"):
        filter_of("topk(0.1)").apply(row(), 5, 1, None)


REFUSED = {
    "threshold(0.1)": "simulated beforehand. Use topk",
    "lowrank": "each message to one receiver",
    "powersgd": "each message to one receiver",
    "quantize(8) + sign": "leaves codes",
}


@pytest.mark.parametrize("text", REFUSED)
def test_compressors_without_a_place_among_clients_are_refused(text: str) -> None:
    with pytest.raises(StrategyError, match=REFUSED[text]):
        parse(f"federated + {text}")

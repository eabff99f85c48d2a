"""Updates as integers, and masks on them."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR
from secure_support import Table

from offbeat.errors import NonFiniteError, UsageError
from offbeat.protocols.federated.secure.client import MaskWork
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.masks import CHUNK, Masks
from offbeat.protocols.federated.secure.messages import MaskedUpdate
from offbeat.protocols.federated.secure.server import SecureFailure
from offbeat.protocols.machine import Payload, Send
from offbeat.simulate.faults.secure_rounds import SecureWorld, round_for

KEY = bytes(range(16))


def test_the_mean_of_encoded_updates_is_the_weighted_mean() -> None:
    random = np.random.default_rng(0)
    encoding = FixedPoint(length=1000, clients=50, bound=4.0, examples=600)
    updates, weights = random.normal(size=(50, 1000)), random.integers(1, 601, 50)
    total = np.zeros(1001, np.uint32)
    for number, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        total += encoding.encode(update, int(weight), number)
    mean, examples = encoding.decode(total)
    assert examples == weights.sum()
    unit = encoding.bound / encoding.largest * 600 / weights.sum()
    assert np.abs(mean - np.average(np.clip(updates, -4, 4), axis=0, weights=weights)).max() < 50 * unit


def test_the_sum_of_the_largest_updates_does_not_wrap() -> None:
    for clients in (1, 3, 100, 1000):
        encoding = FixedPoint(length=2, clients=clients, bound=1.0, examples=7)
        total = np.zeros(3, np.uint32)
        for number in range(clients):
            total += encoding.encode(np.array([1.0, -1.0]), 7, number)
        mean, examples = encoding.decode(total)
        assert mean == pytest.approx([1.0, -1.0], rel=1e-5)
        assert examples == 7 * clients


def test_rounding_is_right_on_average_and_follows_from_the_seed() -> None:
    encoding = FixedPoint(length=1, clients=1000, bound=8.0, examples=1000)
    value = np.array([3.3e-3])  # 0.88 of a unit, for a weight of 1.
    rows = [encoding.encode(value, 1, seed)[0] for seed in range(4000)]
    assert set(rows) == {0, 1}
    exact = 3.3e-3 / 8.0 * encoding.largest / 1000
    assert np.mean(rows) == pytest.approx(exact, abs=0.05)
    assert np.array_equal(encoding.encode(value, 1, 7), encoding.encode(value, 1, 7))


def test_large_numbers_are_clipped_and_counted() -> None:
    encoding = FixedPoint(length=3, clients=10, bound=0.5, examples=1)
    update = np.array([0.25, 3.0, -3.0], np.float32)
    mean, _ = encoding.decode(encoding.encode(update, 1, 0))
    assert mean == pytest.approx([0.25, 0.5, -0.5], abs=1e-6)
    assert encoding.clipped(update) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_with_nan_is_not_sent(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="NaN or infinite numbers"):
        FixedPoint(length=2, clients=3).encode(np.array([0.0, bad]), 1, 0)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"length": 0}, "length 0"),
        ({"clients": 0}, "clients 0"),
        ({"bound": 0.0}, "bound 0.0 makes no sense"),
        ({"bound": float("nan")}, "bound nan"),
        ({"bound": 1e31}, "the limit"),
        ({"examples": 2**31}, "must add up below 2\\^32"),
        ({"examples": 0}, "examples 0"),
    ],
)
def test_encodings_that_cannot_be_are_refused(settings: dict[str, float], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        FixedPoint(**({"length": 5, "clients": 3} | settings))


def test_updates_that_do_not_fit_are_refused() -> None:
    encoding = FixedPoint(length=3, clients=3, examples=10)
    with pytest.raises(UsageError, match="shape \\(4,\\)"):
        encoding.encode(np.zeros(4), 1, 0)
    for examples in (0, 11):
        with pytest.raises(UsageError, match=f"examples {examples}"):
            encoding.encode(np.zeros(3), examples, 0)
    with pytest.raises(UsageError, match="a sum without examples"):
        encoding.decode(np.zeros(4, np.uint32))
    with pytest.raises(UsageError, match="a sum has shape"):
        encoding.decode(np.zeros(3, np.uint32))


@pytest.mark.parametrize("words", [1, 3, CHUNK // 4 - 1, CHUNK // 4, CHUNK // 4 + 1, 3 * CHUNK // 4 + 5])
def test_a_mask_is_the_key_stream_of_aes_in_counter_mode(words: int) -> None:
    stream = Cipher(AES128(KEY), CTR(bytes(16))).encryptor().update(bytes(4 * words))
    row = np.full(words, 2**32 - 5, np.uint32)
    Masks().add(row, KEY)
    assert np.array_equal(row, np.frombuffer(stream, "<u4") - np.uint32(5))
    Masks().subtract(row, KEY)
    assert (row == 2**32 - 5).all()


def test_a_masked_update_looks_unlike_the_update() -> None:
    """Every word is uniform, however small the update is; and no other update's mask is the same."""
    encoding = FixedPoint(length=50_000, clients=100)
    rows = [encoding.encode(np.full(50_000, value), 1, 0) for value in (0.0, 0.01)]
    masked = [MaskWork(row, [KEY, bytes(16)], [bytes(15) + bytes([i])])() for i, row in enumerate(rows)]
    for row, hidden in zip(rows, masked, strict=True):
        assert not np.shares_memory(row, hidden)
        assert np.count_nonzero(row == hidden) <= 2
        assert abs(np.corrcoef(row[:-1] + np.arange(50_000), hidden[:-1])[0, 1]) < 0.03
        counts = np.bincount(hidden >> np.uint32(24), minlength=256)
        # Chi-squared of 256 bins: 255 on average, with a standard deviation of 22.6.
        expected = len(hidden) / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 6 * 22.6
    assert np.count_nonzero(masked[0] == masked[1]) <= 2


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("more", [-1_000_000, 1_000_000, 2**31])
def test_a_sum_with_weights_that_honest_clients_cannot_have_is_refused(bits: int | None, more: int) -> None:
    """A client adds to the weight of the sum, which nobody sees: the mean could become as large as it likes."""
    world = SecureWorld(round_for(5, 3, bits=bits), 3)
    encoding = world.server.encoding

    def lie(sender: str, send: Send) -> list[Send]:
        if sender != "client 12" or not isinstance(send.message, MaskedUpdate):
            return [send]
        row = encoding.unpacked(send.payload.handle).copy()
        # The digits of the weight, or all of it.
        digits = [more % 2**32] if bits is None else [(more >> (8 * place)) % 256 for place in range(4)]
        row[-len(digits) :] += np.array(digits, np.int64).astype(row.dtype)
        return [Send(send.to, send.message, Payload(encoding.nbytes, encoding.packed(encoding.reduced(row))))]

    table = Table(world, lie)
    for name, machine in table.machines.items():
        table.carry_out(name, machine.begin(0.0))
    while world.server.outcome is None:
        table.step()
    outcome = world.server.outcome
    assert isinstance(outcome, SecureFailure)
    assert "5 clients weigh" in outcome.reason
    assert "one has lied" in outcome.reason

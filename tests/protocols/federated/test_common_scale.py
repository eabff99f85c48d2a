"""Updates as integers of few bits, on a scale that all clients share: they are summed undecoded, in narrow words."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from secure_support import Table

from offbeat.errors import NonFiniteError, UsageError
from offbeat.protocols.federated.secure.common_scale import CommonScale
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.messages import MaskedUpdate
from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.server import SecureSum
from offbeat.simulate.faults.secure_rounds import SecureWorld, round_for


def scale(bits: int = 8, clients: int = 10, **more: float) -> CommonScale:
    settings = {"length": 1000, "bound": 4.0, "examples": 600, "fine": 3, **more}
    return CommonScale(bits=bits, clients=clients, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_the_mean_of_encoded_updates_is_the_weighted_mean_to_the_rounding(bits: int) -> None:
    random, encoding = np.random.default_rng(0), scale(bits)
    updates, weights = random.normal(size=(10, 1000)), random.integers(1, 601, 10)
    total = np.zeros(encoding.words, np.uint64)
    for number, (update, weight) in enumerate(zip(updates, weights, strict=True)):
        total += encoding.encode(update, int(weight), number)
    mean, examples = encoding.decode(encoding.reduced((total % 2**encoding.width).astype(encoding.dtype)))
    exact = np.average(np.clip(updates, -4, 4), axis=0, weights=weights)
    unit = encoding.bound / encoding.largest * 600 / weights.sum()
    assert examples == weights.sum()
    assert np.abs(mean - exact)[:-3].max() < 10 * unit
    assert abs((mean - exact)[:-3].mean()) < unit, "rounding at random is right on average"
    assert np.abs(mean - exact)[-3:].max() < 1e-6, "fine numbers keep their precision"


@pytest.mark.parametrize("clients", [1, 2, 3, 64, 100, 1000])
@pytest.mark.parametrize("bits", [2, 8])
def test_the_sum_of_the_largest_updates_does_not_wrap(clients: int, bits: int) -> None:
    encoding = CommonScale(length=3, clients=clients, bits=bits, bound=1.0, examples=4_000_000, fine=1)
    assert encoding.width == bits + int(np.ceil(np.log2(clients)))
    row = encoding.encode(np.array([1.0, -1.0, 8.0]), 4_000_000, 1).astype(np.uint64)
    total = row * np.uint64(clients) % np.uint64(2**encoding.width)
    mean, examples = encoding.decode(total.astype(encoding.dtype))
    assert mean == pytest.approx([1.0, -1.0, 8.0], rel=1e-5)
    assert examples == 4_000_000 * clients


@pytest.mark.parametrize("length", [5, 8, 1001, 65_541])
@pytest.mark.parametrize(("bits", "clients"), [(2, 3), (4, 10), (8, 1), (8, 100), (8, 256), (16, 3), (16, 60_000)])
def test_a_row_is_packed_without_a_bit_more_and_unpacked_as_it_was(bits: int, clients: int, length: int) -> None:
    encoding = CommonScale(length=length, clients=clients, bits=bits, fine=1)
    row = np.random.default_rng(1).integers(0, 2**encoding.width, encoding.words).astype(encoding.dtype)
    packed = encoding.packed(row)
    assert packed.nbytes == encoding.nbytes == -(-encoding.words * encoding.width // 8)
    assert np.array_equal(encoding.unpacked(packed), row)
    assert np.array_equal(encoding.unpacked(memoryview(packed.tobytes())), row)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_masked_updates_are_packed_on_their_way_and_the_sum_is_right(bits: int) -> None:
    plan = round_for(10, 3, bits=bits, signed=True)
    table = Table(SecureWorld(plan, 3))
    outcome = table.play()
    assert isinstance(outcome, SecureSum)
    sizes = {send.payload.nbytes for _, send in table.sent if isinstance(send.message, MaskedUpdate)}
    assert sizes == {-(-plan.encoding.words * (bits + 4) // 8)}


def test_a_masked_update_is_uniform_over_the_width_of_the_sum() -> None:
    """However small the update is, and in the upper bits as well as the lower ones."""
    encoding = CommonScale(length=50_000, clients=5, bits=8)
    world = SecureWorld(SecureRound.of(bytes(32), encoding, 5), 2)
    for each in world.clients.values():
        each.update = encoding.encode(np.full(50_000, 0.01), 1, 0)
    table = Table(world)
    table.play()
    payload = next(send.payload for _, send in table.sent if isinstance(send.message, MaskedUpdate))
    counts = np.bincount(encoding.unpacked(payload.handle), minlength=2**11)
    expected = encoding.words / 2**11
    assert len(counts) == 2**11
    # Chi-squared of 2,048 bins: its standard deviation is 64.
    assert abs(((counts - expected) ** 2 / expected).sum() - 2047) < 6 * 64


def test_what_a_row_stands_for_differs_from_the_update_by_less_than_a_unit() -> None:
    encoding, update = scale(4), np.linspace(-5, 5, 1000)
    row = encoding.encode(update, 300, 7)
    unit = encoding.bound / encoding.largest * 600 / 300
    lost = np.clip(update, -4, 4)[:-3] - encoding.sent(row, 300)
    assert np.abs(lost).max() < unit
    assert encoding.clipped(update) == np.count_nonzero(np.abs(update[:-3]) > 4)


def test_fewer_bits_are_fewer_bytes_on_the_way() -> None:
    plain = FixedPoint(length=1_000_000, clients=100, examples=600)
    few = CommonScale(length=1_000_000, clients=100, examples=600, bits=8, fine=2)
    assert few.nbytes == pytest.approx(plain.nbytes * 15 / 32, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"bits": 1}, "bits 1 makes no sense"),
        ({"bits": 17}, "bits 17"),
        ({"bits": 16, "clients": 100_000}, "need 33 bits for each integer"),
        ({"fine": 5}, "fine 5.*other numbers must be left"),
        ({"bound": float("nan")}, "bound nan"),
        ({"bound": 0.0}, "bound 0.0 makes no sense"),
        ({"fine": 1, "fine_bound": float("inf")}, "bound inf"),
        ({"examples": 2**31}, "must add up below 2\\^32"),
    ],
)
def test_scales_that_cannot_be_are_refused(settings: dict[str, float], match: str) -> None:
    known = {"length": 5, "clients": 3, "bits": 8} | settings
    with pytest.raises(UsageError, match=match):
        CommonScale(**known)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 999])
def test_an_update_with_nan_is_not_sent(place: int) -> None:
    update = np.zeros(1000)
    update[place] = np.nan
    with pytest.raises(NonFiniteError, match="NaN or infinite numbers"):
        scale().encode(update, 1, 0)


def test_a_sum_without_examples_and_one_of_another_length_have_no_mean() -> None:
    with pytest.raises(UsageError, match="a sum without examples"):
        scale().decode(np.zeros(scale().words, np.uint16))
    with pytest.raises(UsageError, match="a sum has shape"):
        scale().decode(np.zeros(3, np.uint16))


def test_a_plan_with_a_common_scale_is_read_as_it_was_written() -> None:
    plan = SecureRound.of(bytes(32), scale(), 10)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=SecureRound)
    assert again == plan
    assert again.digest != SecureRound.of(bytes(32), scale(4), 10).digest

"""Coders: what they leave of a row, in how many bytes, what they owe, and which letters they refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from compression_support import ThreadLink, summed, together
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.errors import NonFiniteError, RunError
from offbeat.protocols.compression import (
    BLOCK,
    BFloatFormat,
    HalfFormat,
    LowRankFormat,
    QuantizeFormat,
    RandomKFormat,
    RowFormat,
    SignFormat,
    SumMethod,
    ThresholdFormat,
    TopKFormat,
    kept_of,
    matrices_in,
    numbers_in,
)
from offbeat.protocols.exchanges import sent_by
from offbeat.protocols.schedule import View
from offbeat.runtime.compression import Coder, Feedback, build
from offbeat.runtime.compression.sparse import largest
from offbeat.simulate.predicted_step import exchange_of

DENSE = [
    *(HalfFormat(), BFloatFormat(), SignFormat()),
    *(QuantizeFormat(bits, stochastic) for bits in (8, 4, 2) for stochastic in (False, True)),
]
SPARSE = [TopKFormat(0.1), ThresholdFormat(1.0), RandomKFormat(0.1)]
INNER = [HalfFormat(), BFloatFormat(), QuantizeFormat(8), QuantizeFormat(4), QuantizeFormat(2, True), SignFormat()]
ALL: list[tuple[RowFormat, RowFormat | None]] = [
    *((form, None) for form in (*DENSE, *SPARSE)),
    *((form, inner) for form in SPARSE for inner in INNER),
]
LENGTHS = [1, 7, 9, BLOCK - 1, BLOCK, 2 * BLOCK + 5]
SHAPES = [(40, 30), (40,), (40, 30), (40,), (3, 2), (8, 4, 3, 3), (1, 50), (17,)]


def coder(form: RowFormat, inner: RowFormat | None = None, seed: int = 3, **more: Any) -> Coder:
    within = None if inner is None else build(inner, seed=seed, own_seed=seed)
    return build(form, more.pop("shapes", ()), seed=seed, own_seed=more.pop("own", seed), inner=within, **more)


def normal(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def read(maker: Coder, letter: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.zeros(count, dtype=dtype)
    maker.add(letter, out)
    return out


def length_of(form: RowFormat, inner: RowFormat | None, row: Tensor) -> int:
    if isinstance(form, ThresholdFormat):
        return form.holding(int((row.abs() > form.above).sum()), row.element_size(), inner)
    return form.message_bytes([(row.numel(),)], row.element_size(), inner)


# --- bytes


@pytest.mark.parametrize(("form", "inner"), ALL, ids=str)
def test_letters_have_the_length_that_was_predicted_and_leave_the_row_alone(
    form: RowFormat, inner: RowFormat | None
) -> None:
    for count in LENGTHS:
        for dtype in (torch.float32, torch.float64):
            row = normal(count, count, dtype)
            before = row.clone()
            letter = coder(form, inner).encode(row)
            assert letter.dtype == torch.uint8
            assert letter.numel() == length_of(form, inner, row)
            assert torch.equal(row, before)


def test_bits_are_packed_without_a_gap() -> None:
    count = 10 * BLOCK
    scales = 10 * 4
    assert QuantizeFormat(8).nbytes([(count,)]) == scales + count
    assert QuantizeFormat(4).nbytes([(count,)]) == scales + count // 2
    assert QuantizeFormat(2).nbytes([(count,)]) == scales + count // 4
    assert SignFormat().nbytes([(count,)]) == scales + count // 8
    assert SignFormat().nbytes([(9,)]) == 4 + 2
    assert TopKFormat(0.01).nbytes([(1000,)], width=8) == 10 * (4 + 8)
    assert TopKFormat(0.01).nbytes([(1000,)], inner=HalfFormat()) == 10 * (4 + 2)
    assert RandomKFormat(0.01).nbytes([(1000,)]) == 10 * 4
    assert ThresholdFormat(1.0).fixed is False


def test_low_ranks_send_both_thin_matrices_and_the_rest() -> None:
    matrices = matrices_in(SHAPES, 2)
    assert [(m.start, m.rows, m.columns) for m in matrices] == [(0, 40, 30), (1240, 40, 30), (2486, 8, 36)]
    thin = 2 * (70 + 70 + 44)
    rest = 40 + 40 + 6 + 50 + 17
    assert LowRankFormat(2).nbytes(SHAPES) == 4 * (thin + rest)


def test_what_is_summed_on_the_way_goes_around_a_ring_and_letters_to_everybody() -> None:
    assert [form.way() for form in (HalfFormat(), BFloatFormat(), RandomKFormat(), LowRankFormat())] == [
        SumMethod.REDUCE
    ] * 4
    assert [form.way() for form in (QuantizeFormat(), SignFormat(), TopKFormat(), ThresholdFormat())] == [
        SumMethod.GATHER
    ] * 4
    assert RandomKFormat().way(SignFormat()) is SumMethod.GATHER
    for way, sent in ((SumMethod.GATHER, 400), (SumMethod.REDUCE, 160)):
        assert sent_by(*exchange_of(100, way).part(5), View.of(5), rank=0) == sent


@pytest.mark.parametrize(("form", "inner"), [*ALL, (LowRankFormat(2), None)], ids=str)
def test_workers_bring_the_bytes_that_were_predicted(form: RowFormat, inner: RowFormat | None) -> None:
    count = numbers_in(SHAPES)
    rows = [normal(count, seed) for seed in range(3)]

    def act(link: ThreadLink) -> list[int]:
        coder(form, inner, shapes=SHAPES).sum(rows[link.rank].clone(), torch.empty(count), link)
        return link.sent

    for row, sent in zip(rows, together(3, act), strict=True):
        predicted = length_of(form, inner, row) if isinstance(form, ThresholdFormat) else form.nbytes(SHAPES, 4, inner)
        assert sum(sent) == predicted
        assert len(sent) == (2 if isinstance(form, LowRankFormat) else 1), "one side after the other"


# --- values


def test_halves_round_to_the_nearest() -> None:
    row = normal(1000)
    assert torch.equal(read(coder(HalfFormat()), coder(HalfFormat()).encode(row), 1000), row.half().float())
    assert torch.equal(read(coder(BFloatFormat()), coder(BFloatFormat()).encode(row), 1000), row.bfloat16().float())


@pytest.mark.parametrize("value", [60_000.0, -60_000.0, float("nan"), float("-inf")])
def test_a_sum_beyond_half_precision_is_refused(value: float) -> None:
    rows = [torch.tensor([1.0, value, -1.0]), torch.tensor([0.0, value, 0.0])]
    with pytest.raises(NonFiniteError, match="ends at 65,504"):
        summed([Feedback(coder(HalfFormat()), on=False) for _ in rows], rows)


def test_bfloat_has_the_range_of_float32_and_half_its_own() -> None:
    limit = [torch.tensor([32_752.0, -32_752.0])] * 2
    assert summed([Feedback(coder(HalfFormat()), on=False) for _ in limit], limit)[0].tolist() == [65_504, -65_504]
    rows = [torch.tensor([60_000.0]), torch.tensor([60_000.0])]
    (found, _) = summed([Feedback(coder(BFloatFormat()), on=False) for _ in rows], rows)
    assert float(found) == pytest.approx(120_000, rel=0.01)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("count", [5, BLOCK + 3, 70_001])
def test_quantized_numbers_are_within_a_step_of_the_truth_in_every_block(
    bits: int, stochastic: bool, count: int
) -> None:
    row = normal(count)
    row[0] = 1000.0  # An outlier spoils its own block only.
    found = read(coder(QuantizeFormat(bits)), coder(QuantizeFormat(bits, stochastic)).encode(row), count)
    for start in range(0, count, BLOCK):
        block, got = row[start : start + BLOCK], found[start : start + BLOCK]
        step = float(block.abs().max()) / (2 ** (bits - 1) - 1)
        assert float((block - got).abs().max()) <= step * (1 if stochastic else 0.5) * (1 + 1e-4)


def test_every_level_of_every_width_comes_back_in_its_place() -> None:
    for bits in (8, 4, 2):
        levels = 2 ** (bits - 1) - 1
        row = (torch.arange(3 * BLOCK + 13) * 7 % (2 * levels + 1) - levels).float()
        row[::BLOCK] = float(levels)
        torch.testing.assert_close(
            read(coder(QuantizeFormat(bits)), coder(QuantizeFormat(bits)).encode(row), len(row)), row
        )


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_stochastic_rounding_is_right_on_average(bits: int) -> None:
    row, draws = normal(3000), 600
    maker = coder(QuantizeFormat(bits, stochastic=True))
    mean = torch.stack([read(maker, maker.encode(row), len(row)) for _ in range(draws)]).mean(0)
    step = float(row.abs().max()) / (2 ** (bits - 1) - 1)
    off = (mean - row) / (step * 0.5 / math.sqrt(draws))
    assert float(off.abs().max()) < 6
    assert abs(float(off.mean())) < 0.2


def test_stochastic_rounding_differs_between_steps_and_workers_but_not_between_runs() -> None:
    row = normal(3000)
    first, again, other = (coder(QuantizeFormat(8, stochastic=True), own=own) for own in (1, 1, 2))
    letters = [first.encode(row), first.encode(row), other.encode(row)]
    assert len({bytes(letter.numpy()) for letter in letters}) == 3
    assert torch.equal(again.encode(row), letters[0])
    resumed = coder(QuantizeFormat(8, stochastic=True), own=1)
    resumed.load_state_dict(again.state_dict())
    assert torch.equal(resumed.encode(row), letters[1])


def test_blocks_of_zeros_stay_zeros() -> None:
    for form in DENSE:
        row = torch.zeros(2 * BLOCK + 5)
        assert not read(coder(form), coder(form).encode(row), len(row)).any()


def test_signs_stand_for_the_mean_magnitude_of_their_block() -> None:
    row = normal(2 * BLOCK + 11)
    found = read(coder(SignFormat()), coder(SignFormat()).encode(row), len(row))
    for start in range(0, len(row), BLOCK):
        block = row[start : start + BLOCK]
        torch.testing.assert_close(found[start : start + BLOCK], block.sign() * block.abs().mean())


@settings(max_examples=40)
@given(st.data())
def test_topk_finds_exactly_the_largest(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 400))
    values = data.draw(
        st.lists(st.sampled_from([0.0, 0.0, 1.0, -1.0, 2.5, -3.0, 1e-9]), min_size=count, max_size=count)
    )
    kept = data.draw(st.integers(1, count))
    row = np.array(values, dtype=np.float32)
    found = largest(row, kept)
    assert len(found) == kept
    assert (np.diff(found) > 0).all()
    assert sorted(np.abs(row[found]).tolist()) == sorted(np.abs(row).tolist())[count - kept :]


@pytest.mark.parametrize("kind", ["normal", "sparse", "rising", "constant", "periodic", "one"])
def test_topk_of_long_rows_is_that_of_torch(kind: str) -> None:
    count = 300_000
    row = normal(count)
    row = {
        "normal": row,
        "sparse": row * (torch.arange(count) % 211 == 0),
        "rising": torch.arange(count, dtype=torch.float32),
        "constant": torch.full((count,), -2.0),
        "periodic": (torch.arange(count) % 5).float(),  # The sample's stride must not make it blind.
        "one": torch.nn.functional.one_hot(torch.tensor(77), count).float(),
    }[kind]
    kept = kept_of(count, 0.01)
    found = row.abs()[torch.from_numpy(largest(row.numpy(), kept))].sort().values
    assert torch.equal(found, row.abs().topk(kept).values.sort().values)


def test_nan_is_among_the_largest_so_that_somebody_sees_it() -> None:
    row = normal(100_000)
    row[12_345] = float("nan")
    assert 12_345 in largest(row.numpy(), 10)
    assert read(coder(ThresholdFormat(3.0)), coder(ThresholdFormat(3.0)).encode(row), len(row)).isnan().sum() == 1
    for form in (SignFormat(), QuantizeFormat(8), QuantizeFormat(2, True)):
        assert read(coder(form), coder(form).encode(row), len(row)).isnan().any()


def test_thresholds_send_all_that_is_beyond() -> None:
    row = normal(5000)
    found = read(coder(ThresholdFormat(1.5)), coder(ThresholdFormat(1.5)).encode(row), len(row))
    assert torch.equal(found, torch.where(row.abs() > 1.5, row, 0.0))
    assert coder(ThresholdFormat(100.0)).encode(row).numel() == 8


def test_random_places_are_the_same_everywhere_change_every_time_and_are_right_on_average() -> None:
    row, draws = normal(1003), 1500
    one, other = (coder(RandomKFormat(0.1), unbiased=True) for _ in range(2))
    total = torch.zeros_like(row)
    for draw in range(draws):
        letter = one.encode(row)
        if draw < 3:
            assert torch.equal(letter, other.encode(row))
        one.add(letter, total)
    assert (one.encode(row)[8:] != letter[8:]).any()
    off = (total / draws - row).abs() / row.abs()
    assert float(off.max()) < 6 * math.sqrt(10 / draws)


def test_a_low_rank_matrix_comes_back_whole() -> None:
    left, right = normal(40 * 2).view(40, 2), normal(30 * 2, 1).view(2, 30)
    matrices = [left @ right * weight for weight in (1.0, 2.0, -0.5)]
    rows = [torch.cat([matrix.reshape(-1), torch.ones(5)]) for matrix in matrices]
    makers = [Feedback(coder(LowRankFormat(2), shapes=[(40, 30), (5,)]), on=True) for _ in rows]
    for found in summed(makers, rows):
        torch.testing.assert_close(found, sum(rows), rtol=1e-4, atol=1e-4)
    for maker in makers:
        assert maker.owed is not None
        assert not maker.owed[-5:].any(), "what is not a matrix is said as it is"


def test_power_iteration_goes_on_from_step_to_step_and_outlives_zeros() -> None:
    matrix = normal(40 * 30).view(40, 30)
    best = float((matrix - torch.linalg.svd(matrix).U[:, :2] @ torch.linalg.svd(matrix).U[:, :2].T @ matrix).norm())
    maker = Feedback(coder(LowRankFormat(2), shapes=[(40, 30)]), on=False)
    errors = [float((summed([maker], [matrix.reshape(-1)])[0].view(40, 30) - matrix).norm()) for _ in range(60)]
    assert errors[0] > errors[5] > best
    assert errors[-1] == pytest.approx(best, rel=0.01)
    (nothing,) = summed([maker], [torch.zeros(1200)])
    assert not nothing.any()
    (again,) = summed([maker], [matrix.reshape(-1)])
    assert float((again.view(40, 30) - matrix).norm()) == pytest.approx(best, rel=0.01)


def test_low_ranks_have_no_letter() -> None:
    with pytest.raises(RunError, match="no payload for one receiver"):
        coder(LowRankFormat(2), shapes=[(40, 30)]).encode(normal(1200))


# --- what is owed


@pytest.mark.parametrize(("form", "inner"), [*ALL, (LowRankFormat(2), None)], ids=str)
def test_what_was_said_and_what_is_owed_are_what_was_given(form: RowFormat, inner: RowFormat | None) -> None:
    count = numbers_in(SHAPES)
    makers = [Feedback(coder(form, inner, shapes=SHAPES, own=rank), on=True) for rank in range(3)]
    said, given = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for step in range(4):
        rows = [normal(count, 10 * step + rank, torch.float64) for rank in range(3)]
        if isinstance(form, HalfFormat) or isinstance(
            inner, HalfFormat
        ):  # Its sums are rounded on the way; so that this is exact, few bits are used.
            rows = [row.mul(4).round().div(4) for row in rows]
        found = summed(makers, rows)
        assert all(torch.equal(found[0], other) for other in found), "the same sum on all workers"
        said += found[0]
        given += torch.stack(rows).sum(0)
    owed = sum(maker.owed for maker in makers if maker.owed is not None)
    torch.testing.assert_close(said + owed, given, rtol=1e-9, atol=1e-9)


def test_letters_to_a_server_say_what_is_owed_later() -> None:
    maker, said = Feedback(coder(TopKFormat(0.1)), on=True), torch.zeros(100)
    rows = [normal(100, step) for step in range(30)]
    for row in [*rows, *[torch.zeros(100)] * 20]:
        maker.coder.add(maker.encode(row), said)
    torch.testing.assert_close(said, sum(rows), rtol=1e-4, atol=1e-4)


def test_without_feedback_nothing_is_owed() -> None:
    maker = Feedback(coder(TopKFormat(0.1)), on=False)
    letters = [maker.encode(normal(100)) for _ in range(2)]
    assert torch.equal(*letters)
    assert maker.owed is None


def test_what_is_owed_to_idle_parts_stays_owed() -> None:
    maker = Feedback(coder(TopKFormat(0.5)), on=True)
    summed([maker], [torch.tensor([4.0, 3, 2, 1])])
    (found,) = summed([maker], [torch.tensor([0.0, 0, 9, 5])], idle=[slice(2, 4)])
    assert not found.any()
    assert maker.owed is not None
    assert maker.owed.tolist() == [0, 0, 2, 1]


def test_a_state_goes_on_to_the_same_bits() -> None:
    rows = [normal(numbers_in(SHAPES), step) for step in range(6)]
    for form in (TopKFormat(0.1), RandomKFormat(0.1), LowRankFormat(2), SignFormat(), QuantizeFormat(4, True)):
        whole, cut = (Feedback(coder(form, shapes=SHAPES), on=True) for _ in range(2))
        expected = [summed([whole], [row])[0] for row in rows]
        for row in rows[:3]:
            summed([cut], [row])
        resumed = Feedback(coder(form, shapes=SHAPES), on=True)
        resumed.load_state_dict(cut.state_dict())
        assert all(torch.equal(summed([resumed], [row])[0], e) for row, e in zip(rows[3:], expected[3:], strict=True))


# --- letters from a wire


@pytest.mark.parametrize(("form", "inner"), ALL, ids=str)
def test_letters_of_another_length_are_refused(form: RowFormat, inner: RowFormat | None) -> None:
    letter = coder(form, inner).encode(normal(5000))
    for wrong in (letter[:-1], torch.cat([letter, letter[:1]]), letter[:3], letter[:0]):
        with pytest.raises(RunError, match=r"came where one of|cannot be"):
            read(coder(form, inner), wrong, 5000)
    with pytest.raises(RunError):
        read(coder(form, inner), letter, 9 if isinstance(form, ThresholdFormat) else 300)


@pytest.mark.parametrize("index", [-1, 5000, 2**31 - 1])
def test_indices_outside_of_the_row_are_refused(index: int) -> None:
    letter = coder(TopKFormat(0.01)).encode(normal(5000))
    letter[:200].view(torch.int32)[-1 if index > 0 else 0] = index
    with pytest.raises(RunError, match="do not fit a row of 5,000"):
        read(coder(TopKFormat(0.01)), letter, 5000)


def test_indices_that_come_twice_are_refused() -> None:
    letter = coder(TopKFormat(0.01)).encode(normal(5000))
    letter[:200].view(torch.int32)[1] = letter[:200].view(torch.int32)[0].clone()
    with pytest.raises(RunError, match="not in order"):
        read(coder(TopKFormat(0.01)), letter, 5000)


@pytest.mark.parametrize("count", [-1, 5001, 2**62])
def test_a_count_that_cannot_be_is_refused(count: int) -> None:
    letter = coder(ThresholdFormat(1.0)).encode(normal(5000))
    letter[:8].view(torch.int64)[0] = count
    with pytest.raises(RunError, match="cannot be"):
        read(coder(ThresholdFormat(1.0)), letter, 5000)

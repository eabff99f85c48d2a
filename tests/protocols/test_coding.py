"""Gradient coding: from any p - s answers, the sum, exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from offbeat.errors import StrategyError, UsageError
from offbeat.protocols import coding
from offbeat.protocols.coding import EXACT, SOUND, Code, cyclic_repetition, fractional_repetition

SMALL = [(p, s) for p in range(1, 9) for s in range(p)]
FRACTIONAL = [(p, s) for p, s in SMALL if p % (s + 1) == 0]
LARGER = [(12, 2), (16, 3), (16, 5), (20, 2)]


def decodes(code: Code, answers: list[int]) -> None:
    coefficients = code.decode(answers)
    assert np.abs(coefficients @ code.matrix - 1).max() <= EXACT
    assert set(np.flatnonzero(coefficients)) <= set(answers)


@pytest.mark.parametrize(("p", "s"), SMALL)
def test_any_p_minus_s_answers_of_a_cyclic_code_give_the_sum(p: int, s: int) -> None:
    code = cyclic_repetition(p, s)
    for kept in range(p - s, p + 1):
        for answers in itertools.combinations(range(p), kept):
            decodes(code, list(answers))
            assert code.amplification(answers) <= SOUND or kept > p - s


@pytest.mark.parametrize(("p", "s"), FRACTIONAL)
def test_any_p_minus_s_answers_of_a_fractional_code_give_the_sum_without_rounding(p: int, s: int) -> None:
    code = fractional_repetition(p, s)
    for kept in range(p - s, p + 1):
        for answers in itertools.combinations(range(p), kept):
            assert (code.decode(answers) @ code.matrix == 1).all()
            assert code.amplification(answers) == 1


@pytest.mark.parametrize(("p", "s"), LARGER)
def test_random_sets_of_answers_of_larger_codes_give_the_sum(p: int, s: int) -> None:
    code = cyclic_repetition(p, s)
    random = np.random.default_rng(5)
    for _ in range(300):
        decodes(code, random.permutation(p)[: p - s].tolist())


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (cyclic_repetition(5, 2), [[0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 3, 4], [0, 1, 4]]),
        (fractional_repetition(4, 1), [[0, 1], [2, 3], [0, 1], [2, 3]]),
        (fractional_repetition(3, 0), [[0], [1], [2]]),
        (cyclic_repetition(3, 0), [[0], [1], [2]]),
        (cyclic_repetition(3, 2), [[0, 1, 2]] * 3),
    ],
)
def test_each_worker_computes_s_plus_1_parts(code: Code, expected: list[list[int]]) -> None:
    assert [sorted(code.parts(worker)) for worker in range(code.workers)] == expected


@pytest.mark.parametrize("code", [cyclic_repetition(6, 2), fractional_repetition(6, 2)])
def test_gradients_of_parts_sum_to_what_one_process_has(code: Code) -> None:
    gradients = np.random.default_rng(0).standard_normal((6, 1000)).astype(np.float32)
    sent = {k: code.matrix[k].astype(np.float32) @ gradients for k in (5, 1, 2, 4)}
    coefficients = code.decode(sent)
    total = sum(coefficients[k] * vector for k, vector in sent.items())
    np.testing.assert_allclose(total, gradients.sum(axis=0), atol=1e-4)


def test_too_few_answers_are_refused_and_the_error_says_how_far_off_they_are() -> None:
    with pytest.raises(UsageError, match=r"6 parts .* answers of \[0, 3, 4\].* off by [\d.]+ .* any 4 answers"):
        cyclic_repetition(6, 2).decode({4, 0, 3})
    with pytest.raises(UsageError, match=r"off by 1 in some part.* any 3 answers"):
        fractional_repetition(4, 1).decode({0, 2})


def test_fewer_answers_are_enough_where_they_hold_every_part() -> None:
    assert fractional_repetition(4, 1).decode({0, 3}).tolist() == [1, 0, 0, 1]
    assert fractional_repetition(6, 2).decode({1, 2}).tolist() == [0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("answers", [set[int](), {-1, 0, 1}, {0, 1, 4}])
def test_answers_of_nobody_are_refused(answers: set[int]) -> None:
    with pytest.raises(UsageError, match="workers 0 to 3"):
        cyclic_repetition(4, 1).decode(answers)


@pytest.mark.parametrize(("p", "s"), [(4, 4), (4, -1), (0, 0)])
def test_a_number_of_stragglers_that_cannot_be_is_refused(p: int, s: int) -> None:
    for make in (cyclic_repetition, fractional_repetition):
        with pytest.raises(StrategyError, match=f"{p} workers cannot tolerate {s} stragglers"):
            make(p, s)


def test_fractional_repetition_needs_equal_groups() -> None:
    with pytest.raises(StrategyError, match="5 workers cannot be cut into 2 equal groups"):
        fractional_repetition(5, 1)


def test_a_code_is_fixed_by_its_seed() -> None:
    first, again, other = (cyclic_repetition(6, 2, seed).matrix for seed in (3, 3, 4))
    assert (first == again).all()
    assert (first != other).any()


def test_a_code_that_would_lose_digits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "SOUND", 2.0)
    with pytest.raises(StrategyError, match=r"8 workers and 3 stragglers .* rounding errors grow [\d.e+]+-fold"):
        cyclic_repetition(8, 3)


def test_the_soundest_of_the_draws_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def worst(code: Code) -> float:
        return max(code.amplification(answers) for answers in itertools.combinations(range(8), 5))

    chosen = worst(cyclic_repetition(8, 3))
    monkeypatch.setattr(coding, "_DRAWS", 1)
    assert chosen < worst(cyclic_repetition(8, 3))

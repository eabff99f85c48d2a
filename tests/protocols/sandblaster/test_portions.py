"""Portions: each counts once, the tail goes to two workers, and those of the dead are handed out again."""

from __future__ import annotations

import random

import pytest

from offbeat.protocols.sandblaster.pairwise import PairwiseSum
from offbeat.protocols.sandblaster.portions import Portions


def test_every_portion_is_handed_out_before_any_is_backed_up() -> None:
    portions = Portions(3)
    assert [portions.hand_out("a") for _ in range(2)] == [0, 1]
    assert portions.hand_out("b") == 2
    assert portions.hand_out("b") == 0
    assert portions.duplicated == {"b": 1}
    assert portions.hand_out("a") == 2
    assert portions.hand_out("a") is None
    assert portions.hand_out("b") == 1
    assert portions.hand_out("c") is None


def test_the_first_answer_counts_and_the_second_does_not() -> None:
    portions = Portions(1)
    portions.hand_out("a")
    portions.hand_out("b")
    assert portions.finish(0)
    assert not portions.finish(0)
    assert portions.over
    assert portions.hand_out("c") is None


def test_portions_of_the_dead_come_first_unless_another_worker_has_them() -> None:
    portions = Portions(3)
    portions.hand_out("a")
    portions.hand_out("a")
    portions.hand_out("b")
    assert portions.hand_out("b") == 0
    assert portions.lose(["a"]) == 1
    assert portions.hand_out("b") == 1


def test_a_dead_workers_late_answer_still_counts_once() -> None:
    portions = Portions(1)
    portions.hand_out("a")
    portions.lose(["a"])
    assert portions.finish(0)
    assert portions.hand_out("b") is None


def test_without_backups_an_idle_worker_waits() -> None:
    portions = Portions(1, backups=False)
    portions.hand_out("a")
    assert portions.hand_out("b") is None


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 33])
def test_the_bits_of_a_sum_do_not_depend_on_the_order_of_its_terms(count: int) -> None:
    terms = [random.Random(n).gauss(0, 10.0 ** (n % 9)) for n in range(count)]
    sums: set[float] = set()
    for seed in range(20):
        order = list(range(count))
        random.Random(seed).shuffle(order)
        tree = PairwiseSum[float](count, lambda left, right: left + right)
        for place in order:
            assert tree.put(place, terms[place])
            assert not tree.put(place, 1e6)
        sums.add(tree.total())
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(sum(terms))


def test_a_sum_with_missing_terms_is_refused() -> None:
    tree = PairwiseSum[float](2, lambda left, right: left + right)
    tree.put(1, 1.0)
    with pytest.raises(ValueError, match="1 of 2 terms are missing"):
        tree.total()

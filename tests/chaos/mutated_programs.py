"""A million random and mutated program texts at a server's door, and many random terms under all strategies."""

from __future__ import annotations

import resource
from itertools import islice

import pytest
import random_terms


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("count", [5_000, 1_000_000])
def test_program_texts_are_refused_or_accepted_and_nothing_else(count: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted = sum(random_terms.knock(text) for text in islice(random_terms.texts(count), count))
    assert 0 < accepted < count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kilobytes"


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("count", [200, 10_000])
def test_all_strategies_that_end_agree_on_random_typed_terms(count: int) -> None:
    terms = (random_terms.typed_term(seed) for seed in range(count))
    assert [problem for term in terms if (problem := random_terms.disagreement(term))] == []

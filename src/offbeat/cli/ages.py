"""How old reads were, in a line."""

from __future__ import annotations

from collections.abc import Mapping

MOST_AGES = 8
"""Ages of reads that are told of by themselves."""


def ages_in_words(counts: Mapping[int, int]) -> str:
    """`0: 53, 1: 135, 2: 12`: steps, and how many reads were so old; the oldest together."""
    ages = [age for age in sorted(counts) if counts[age]]
    said = [f"{age}: {counts[age]:,}" for age in ages[:MOST_AGES]]
    older = sum(counts[age] for age in ages[MOST_AGES:])
    return ", ".join([*said, f"older: {older:,}"] if older else said)

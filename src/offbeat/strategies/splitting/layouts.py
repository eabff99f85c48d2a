"""Layouts of a model over workers between which a checkpoint may move, because it says nothing of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offbeat.errors import UsageError
from offbeat.protocols.placement import AUTO, Order, chosen
from offbeat.strategies._base import Combined, Strategy, combined
from offbeat.strategies.language.parser import parse


def relaid(before: Strategy | str, now: Strategy | str) -> bool:
    """Whether a run under `now` may continue one under `before`, although its model is spread over workers otherwise.

    That is where one of them splits the model, and both keep one state that all replicas share, in the same rhythm.
    """
    sides = [combined(parse(side) if isinstance(side, str) else side) for side in (before, now)]
    return any(side.split for side in sides) and all(map(_shares_one_state, sides)) and sides[0].when == sides[1].when


def check_placement(strategy: Combined, setting: str, hosts: Sequence[int]) -> None:
    """Refuse a placement of workers that the strategy does not have."""
    if strategy.split:
        order_of(strategy, setting, hosts)
    elif setting != AUTO:
        raise UsageError(
            f"--placement {setting} says which workers share a replica, and under {strategy} each has a whole one. "
            f"Omit it, or add pipeline(2) or tensor(2)."
        )


def order_of(strategy: Combined, setting: str, hosts: Sequence[int]) -> Order:
    """The worker at each place of a strategy with a split, for the host of each worker."""
    stages, ways = shape_of(strategy)
    return chosen(setting, hosts, stages, ways)


def shape_of(strategy: Combined) -> tuple[int, int]:
    """Stages, and ways of each."""
    stages = math.prod(part.spread for part in strategy.split if part.name == "pipeline")
    return stages, strategy.replica_size // stages


def place_in_words(strategy: Strategy | str, rank: int, setting: str, hosts: Sequence[int]) -> str:
    """Which part of the model a worker has, such as `stage 1 of replica 0`; empty if it has all of it."""
    whole = combined(parse(strategy) if isinstance(strategy, str) else strategy)
    split = whole.split
    rank = order_of(whole, setting, hosts).index(rank) if split else rank
    words: list[str] = []
    for part in reversed(split):
        rank, place = divmod(rank, part.spread)
        words.insert(0, f"{'stage' if part.name == 'pipeline' else part.name} {place}")
    return f"{', '.join(words)} of replica {rank}" if words else ""


def _shares_one_state(strategy: Combined) -> bool:
    equal = strategy.exchange.name in ("single", "allreduce")
    in_step = strategy.when is None or strategy.when.name == "accumulate"
    return equal and in_step and not strategy.compressions

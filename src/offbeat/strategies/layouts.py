"""Layouts of a model over workers between which a checkpoint may move, because it says nothing of them."""

from __future__ import annotations

from offbeat.strategies._base import Combined, Strategy, combined
from offbeat.strategies.language.parser import parse


def relaid(before: Strategy | str, now: Strategy | str) -> bool:
    """Whether a run under `now` may continue one under `before`, although its model is spread over workers otherwise.

    That is where one of them splits the model, and both keep one state that all replicas share, in the same rhythm.
    """
    sides = [combined(parse(side) if isinstance(side, str) else side) for side in (before, now)]
    return any(side.split for side in sides) and all(map(_shares_one_state, sides)) and sides[0].when == sides[1].when


def _shares_one_state(strategy: Combined) -> bool:
    exchange = strategy.exchange
    replicated = exchange.name == "single" or getattr(exchange, "shard", None) == "nothing"
    return replicated and not strategy.compressions

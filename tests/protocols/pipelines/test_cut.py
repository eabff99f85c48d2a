"""The best cut of a chain of layers, against all cuts there are."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import StrategyError
from offbeat.protocols.pipelines.cut import LayerCost, as_cut, best_cut

LAYERS = st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=9).map(
    lambda rows: [
        LayerCost(f"layer {i}", float(a), float(2 * a + b), 10 * c, d, saved_bytes=b)
        for i, (a, b, c, d) in enumerate(rows)
    ]
)


def every_cut(count: int, parts: int) -> list[tuple[int, ...]]:
    return [(0, *inner, count) for inner in combinations(range(1, count), parts - 1)]


def memories(costs: list[LayerCost], bounds: tuple[int, ...]) -> list[int]:
    return [sum(cost.memory for cost in costs[a:b]) for a, b in pairwise(bounds)]


def rank(costs: list[LayerCost], bounds: tuple[int, ...]) -> tuple[float, int, float]:
    times = [sum(cost.seconds for cost in costs[a:b]) for a, b in pairwise(bounds)]
    crossing = sum(costs[bound - 1].activation_bytes for bound in bounds[1:-1])
    return max(times), crossing, sum(time**2 for time in times)


@settings(max_examples=200, deadline=None)
@given(costs=LAYERS, data=st.data())
def test_no_cut_is_better_than_the_best_one(costs: list[LayerCost], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    limit = data.draw(st.none() | st.integers(0, 40))
    fitting = [
        bounds for bounds in every_cut(len(costs), parts) if limit is None or max(memories(costs, bounds)) <= limit
    ]
    if not fitting:
        with pytest.raises(StrategyError, match=f"into {parts} parts keeps each part within"):
            best_cut(costs, parts, limit)
        return
    cut = best_cut(costs, parts, limit)
    assert cut.bounds in fitting
    assert rank(costs, cut.bounds) == min(rank(costs, bounds) for bounds in fitting)
    assert (cut.slowest, cut.total) == (rank(costs, cut.bounds)[0], sum(cost.seconds for cost in costs))


@settings(max_examples=100, deadline=None)
@given(costs=LAYERS, data=st.data())
def test_slack_trades_time_for_fewer_bytes_and_no_more_time_than_it_says(
    costs: list[LayerCost], data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    cuts = [rank(costs, bounds) for bounds in every_cut(len(costs), parts)]
    least = min(slowest for slowest, _, _ in cuts)
    cut = rank(costs, best_cut(costs, parts, slack=0.25).bounds)
    assert cut[0] <= 1.25 * least
    assert cut[1] == min(crossing for slowest, crossing, _ in cuts if slowest <= 1.25 * least)


def layers(*seconds: float, memory: int = 4_000_000) -> list[LayerCost]:
    return [LayerCost(f"h.{i}", t / 3, 2 * t / 3, 100, memory) for i, t in enumerate(seconds)]


def test_evenness_is_the_mean_over_the_slowest() -> None:
    assert best_cut(layers(1, 1, 1, 1), 2).evenness == pytest.approx(1)
    assert best_cut(layers(3, 1), 2).evenness == pytest.approx(2 / 3)
    assert best_cut(layers(0, 0), 2).evenness == 1


def test_more_parts_than_layers_are_refused_with_their_names() -> None:
    with pytest.raises(StrategyError, match=r"2 layers .*\(h\.0, h\.1\), too few for 3 parts"):
        best_cut(layers(1, 1), 3)
    with pytest.raises(StrategyError, match="0 parts"):
        best_cut(layers(1, 1), 0)


def test_a_limit_that_no_cut_keeps_is_refused_with_the_least_that_works() -> None:
    costs = layers(1, 1, 1, 1)
    with pytest.raises(StrategyError, match=r"within 7\.00 MB .*needs 8\.00 MB in its largest part"):
        best_cut(costs, 2, 7_000_000)
    assert best_cut(costs, 2, 8_000_000).bounds == (0, 2, 4)
    with pytest.raises(StrategyError, match=r"largest layer, h\.0, alone needs 4\.00 MB"):
        best_cut(costs, 4, 3_000_000)


def test_a_limit_moves_the_cut_away_from_the_fastest_one() -> None:
    costs = [LayerCost("heavy", 0, 0, 1, 90), *(LayerCost(f"{i}", 1, 1, 1, 20) for i in range(4))]
    assert best_cut(costs, 2).bounds == (0, 3, 5)
    assert best_cut(costs, 2, 115).bounds == (0, 2, 5)


@pytest.mark.parametrize("bounds", [(0, 2), (1, 4), (0, 2, 2, 4), (0,), (0, 5)])
def test_bounds_that_do_not_cover_every_layer_once_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(StrategyError, match="do not cut 4 layers"):
        as_cut(layers(1, 1, 1, 1), bounds)

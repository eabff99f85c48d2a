"""Graphs, mixing matrices and their schedules: what is promised of gossip before any process starts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import networkx as nx
import numpy as np
import paths
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import ScheduleError, UsageError
from offbeat.protocols.checker import check_mixing
from offbeat.protocols.exchanges import steps
from offbeat.protocols.gossip.mixing import mix
from offbeat.protocols.gossip.topology import (
    GraphShape,
    Kind,
    Mixing,
    RandomRegular,
    distances,
    graph,
    metropolis,
    mixing,
)
from offbeat.protocols.schedule import Layout, Op, Round, Schedule, View
from offbeat.runtime.collectives.one_sided.compile import compile_one_sided
from offbeat.simulate import Link, Network, Ports, finish_times, gossip_step_time, local_step_time
from offbeat.simulate.values import play_values

LAYOUT = Layout(1000)
WIRE = Network(Link(50e-6, 1e-8, 2e-10), ports=Ports.RANK)
KINDS: list[Kind] = [*GraphShape, RandomRegular(2), RandomRegular(3, seed=5), RandomRegular(4)]


def possible(kind: Kind, size: int) -> Mixing | None:
    try:
        return mixing(kind, size)
    except UsageError:
        return None


# --- matrices


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_matrix_is_doubly_stochastic_and_its_schedule_does_it(kind: Kind) -> None:
    found = 0
    for size in range(1, 34):
        made = possible(kind, size)
        if made is None:
            continue
        found += 1
        assert made.size == size
        for matrix in made.matrices:
            np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-12)
            np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
            assert (matrix >= 0).all()
            report = check_mixing(mix(matrix), matrix, View.of(size), LAYOUT)
            assert report.hops == (1 if size > 1 else 0)
            neighbours = int((matrix > 0).sum(axis=1).max()) - 1
            assert report.port_bytes == neighbours * 4000
            in_memory = check_mixing(mix(matrix, in_memory=True), matrix, View.of(size), LAYOUT)
            assert (in_memory.hops, in_memory.port_bytes) == (report.hops, report.port_bytes)
            assert not in_memory.lingering
    assert found >= 14


@settings(max_examples=40)
@given(st.integers(2, 14), st.floats(0.1, 0.9), st.integers(0, 1000))
def test_metropolis_weights_fit_any_connected_graph(size: int, share: float, seed: int) -> None:
    drawn = nx.gnp_random_graph(size, share, seed=seed)
    drawn.add_edges_from((i, i + 1) for i in range(size - 1))
    matrix = metropolis(drawn)
    np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-12)
    assert (matrix >= -1e-15).all()
    assert (matrix == matrix.T).all()
    check_mixing(mix(matrix), matrix, View.of(size), LAYOUT)
    assert Mixing((matrix,)).rate < 1


def test_the_graphs_are_what_they_are_called() -> None:
    assert sorted(graph(GraphShape.RING, 5).edges()) == [(0, 1), (0, 4), (1, 2), (2, 3), (3, 4)]
    assert {degree for _, degree in graph(GraphShape.TORUS, 16).degree()} == {4}
    assert {degree for _, degree in graph(GraphShape.TORUS, 6).degree()} == {3}
    assert graph(GraphShape.COMPLETE, 6).number_of_edges() == 15
    assert distances(8) == [1, 2, 4]
    assert distances(9) == [1, 2, 4, 8]
    assert [mixing(GraphShape.EXPONENTIAL, 8).neighbours(0).tolist()] == [[4, 6, 7]]
    assert mixing(GraphShape.RING, 2).neighbours(1).tolist() == [0]
    for size in (1, 2):
        assert all(mixing(shape, size).rate == 0 for shape in GraphShape)


def test_a_random_graph_is_regular_connected_and_the_same_for_a_seed() -> None:
    for seed in range(5):
        drawn = graph(RandomRegular(3, seed), 12)
        assert {degree for _, degree in drawn.degree()} == {3}
        assert nx.is_connected(drawn)
    same = graph(RandomRegular(3, 4), 12)
    assert sorted(same.edges()) == sorted(drawn.edges())
    assert sorted(graph(RandomRegular(3, 0), 12).edges()) != sorted(drawn.edges())


@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [
        (GraphShape.TORUS, 7, "7 is a prime number"),
        (RandomRegular(3), 5, "no connected graph of 5 workers gives each 3 neighbours"),
        (RandomRegular(4), 4, "fewer than there are workers"),
        (RandomRegular(1), 6, "2 or more"),
    ],
)
def test_a_graph_that_cannot_be_is_refused_with_the_reason(kind: Kind, size: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        mixing(kind, size)


# --- rates


def test_rates_are_those_of_the_books() -> None:
    for size in (4, 5, 8, 13):
        # Eigenvalues of a circulant: 1/3 + 2/3 cos(2 pi k / p).
        values = [abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / size)) for k in range(1, size)]
        assert mixing(GraphShape.RING, size).rate == pytest.approx(max(values), abs=1e-12)
    assert mixing(GraphShape.COMPLETE, 7).gap == pytest.approx(1)
    # The one-peer exponential graph agrees exactly after one turn, if there are 2^k workers.
    for size in (2, 4, 8, 16):
        turn = mixing(GraphShape.EXPONENTIAL, size)
        assert turn.gap == 1
        np.testing.assert_allclose(turn.product(len(turn.matrices)), 1 / size, atol=1e-12)
    assert 0 < mixing(GraphShape.EXPONENTIAL, 6).rate < 1


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_distance_shrinks_slower_than_predicted(kind: Kind) -> None:
    made = mixing(kind, 12)
    turn = len(made.matrices)
    product = made.product(3 * turn)
    chance = np.random.default_rng(1)
    for _ in range(20):
        start = chance.normal(size=(12, 5))
        apart = np.linalg.norm(start - start.mean(axis=0))
        left = product @ start
        np.testing.assert_allclose(left.mean(axis=0), start.mean(axis=0), atol=1e-12)
        assert np.linalg.norm(left - left.mean(axis=0)) <= apart * made.rate ** (3 * turn) + 1e-9


def test_models_that_lie_apart_at_random_come_together_at_the_usual_rate() -> None:
    made = mixing(GraphShape.RING, 10)
    start = np.random.default_rng(2).normal(size=(10, 100_000))
    left = made.at(0) @ start
    found = np.linalg.norm(left - left.mean(axis=0)) / np.linalg.norm(start - start.mean(axis=0))
    assert found == pytest.approx(made.usual_rate, rel=0.01)


def test_the_page_tells_the_rates_of_the_graphs() -> None:
    page = (paths.ROOT / "docs/gossip.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z()0-9]+)` \| [^|]* \| (.*) \|$", page, re.MULTILINE))
    kinds = {**{shape.value: shape for shape in GraphShape}, "random(3)": RandomRegular(3)}
    assert set(rows) == set(kinds)
    for name, kind in kinds.items():
        assert rows[name].split(" | ") == [f"{mixing(kind, size).rate:.2f}" for size in (4, 8, 16, 32)], name


# --- schedules


def changed(schedule: Schedule, at: int, **what: object) -> Schedule:
    def rounds(view: View, layout: Layout) -> Iterator[Round]:
        for number, one in enumerate(schedule(view, layout)):
            yield replace(one, **what) if number == at else one  # pyright: ignore[reportArgumentType]

    return rounds


def test_a_wrong_line_in_the_schedule_is_found_out() -> None:
    matrix = mixing(GraphShape.RING, 5).at(0)
    right = mix(matrix)
    weights, ranks = np.full(5, 1 / 3), np.arange(5)
    check_mixing(changed(right, 4, weight=weights), matrix, View.of(5), LAYOUT)
    wrong = {
        "times the contribution": changed(right, 4, weight=weights * 0.99),
        "times the contribution of rank": changed(right, 3, weight=None),
        "in a race": changed(right, 2, after=()),
        "needs weights": changed(right, 2, weight=None),
        "one for each entry": changed(right, 4, weight=weights[:-1]),
        "never used": changed(right, 4, op=Op.SCALE, source=ranks, target=ranks),
    }
    for said, schedule in wrong.items():
        with pytest.raises(ScheduleError, match=said):
            check_mixing(schedule, matrix, View.of(5), LAYOUT)
    with pytest.raises(ScheduleError, match="instead of"):
        check_mixing(right, mixing(GraphShape.COMPLETE, 5).at(0), View.of(5), LAYOUT)


def test_a_wrong_line_of_mixing_in_memory_is_found_out() -> None:
    matrix, view = mixing(GraphShape.RING, 5).at(0), View.of(5)
    right = mix(matrix, in_memory=True)
    wrong = {
        "in a race": changed(right, 0, op=Op.COMPUTE),  # Nothing is published.
        "does not come after round 1": changed(right, 4, after=(0,)),
        "times the contribution": changed(right, 3, op=Op.COMPUTE, weight=None),
    }
    for said, schedule in wrong.items():
        with pytest.raises(ScheduleError, match=said):
            check_mixing(schedule, matrix, view, LAYOUT)
    with pytest.raises(ScheduleError, match="on another host"):
        check_mixing(right, matrix, View.of(5, [0, 0, 0, 1, 1]), LAYOUT)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mixing_in_memory_ends_with_the_right_numbers_in_any_order(kind: Kind) -> None:
    played = 0
    for size in range(1, 10):
        made = possible(kind, size)
        for matrix in made.matrices if made is not None else ():
            given = np.random.default_rng(size).normal(size=(size, 7))
            for seed in range(3):
                ends = play_values(mix(matrix, in_memory=True), View.of(size), Layout(7), list(given), seed)
                np.testing.assert_allclose(np.stack(ends), matrix @ given, atol=1e-12)
                played += 1
    assert played >= 12


def test_mixing_in_memory_is_compiled_to_one_pass_over_the_row() -> None:
    matrix = mixing(GraphShape.RING, 4).at(0)
    third = pytest.approx(1 / 3)
    (stage,) = compile_one_sided(mix(matrix, in_memory=True), View.of(4), 1, blocks=1)
    assert (stage.publish, stage.reduce, stage.copy) == ((0,), (), ())
    assert stage.weigh == ((0, ((1, third), (2, third), (0, third))),)
    (alone,) = compile_one_sided(mix(np.eye(2), in_memory=True), View.of(2), 0, blocks=1)
    assert (alone.publish, alone.weigh) == ((), ((0, ((0, 1.0),)),))
    for number, change in ((3, {"op": Op.COMPUTE, "weight": None}), (4, {"weight": None, "op": Op.COPY})):
        with pytest.raises(UsageError, match="otherwise than by a SCALE and then REDUCEs"):
            compile_one_sided(changed(mix(matrix, in_memory=True), number, **change), View.of(4), 1, blocks=1)
    with pytest.raises(UsageError, match="not one-sided"):
        compile_one_sided(mix(matrix), View.of(4), 1, blocks=1)


def test_a_local_period_takes_its_steps_and_one_sum() -> None:
    view, link = View.of(4, range(4)), WIRE.between
    for period in (1, 4, 16):
        # A ring of 2 (p - 1) hops, of which half reduce.
        ring = 6 * (link.alpha + link.beta * 1000) + 3 * link.gamma * 1000
        expected = 0.01 + ring / period
        assert local_step_time(view, LAYOUT, WIRE, 0.01, period, periods=2) == pytest.approx(expected, rel=1e-9)


def test_a_step_of_gossip_takes_one_hop() -> None:
    view, link = View.of(8, range(8)), WIRE.between
    both = link.alpha + 2 * link.beta * 4000 + 2 * link.gamma * 4000
    one = link.alpha + link.beta * 4000 + link.gamma * 4000
    assert gossip_step_time(view, LAYOUT, WIRE, 0.01, mixing(GraphShape.RING, 8), 6) == pytest.approx(
        0.01 + both, rel=1e-6
    )
    found = gossip_step_time(view, LAYOUT, WIRE, 0.01, mixing(GraphShape.EXPONENTIAL, 8), 6)
    assert found == pytest.approx(0.01 + one, rel=1e-6)
    seldom = gossip_step_time(view, LAYOUT, WIRE, 0.01, mixing(GraphShape.RING, 8), 8, period=4)
    assert seldom == pytest.approx(0.01 + both / 4, rel=1e-6)


def test_a_slow_worker_delays_its_neighbours_first() -> None:
    size = 16
    seconds = [[1.0 if rank == 0 and step == 0 else 0.1 for rank in range(size)] for step in range(2)]
    schedule = mix(mixing(GraphShape.RING, size).at(0))
    view = View.of(size, range(size))
    done = finish_times(steps(seconds, lambda _: schedule)(view, LAYOUT), view, LAYOUT, WIRE)
    on_time = [rank for rank in range(size) if done[rank] < 0.25]
    assert on_time == list(range(5, 12))
    assert done[0] > 1.1
    assert 2 * local_step_time(view, LAYOUT, WIRE, seconds, 1, 2) == pytest.approx(float(done[0]), rel=0.01)

"""The places of workers in a split replica, by the hosts that they are on."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.placement import chosen, crossings, placement


@st.composite
def worlds(draw: st.DrawFn, most: int = 40) -> tuple[list[int], int, int]:
    """The host of each worker, stages and ways."""
    stages, ways = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    replicas = draw(st.integers(1, max(1, most // (stages * ways))))
    size = stages * ways * replicas
    return draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)), stages, ways


@given(worlds())
def test_every_worker_has_one_place_and_as_few_ways_as_possible_cross_hosts(world: tuple[list[int], int, int]) -> None:
    hosts, stages, ways = world
    order = placement(hosts, stages, ways)
    assert sorted(order) == list(range(len(hosts)))
    inside = sum(count // ways for count in Counter(hosts).values())
    crossing = crossings(order, hosts, stages, ways)
    assert crossing.ways == len(hosts) // ways - inside
    assert crossing <= crossings(tuple(range(len(hosts))), hosts, stages, ways)


@given(worlds())
def test_replicas_that_fit_on_hosts_are_not_spread_over_several(world: tuple[list[int], int, int]) -> None:
    hosts, stages, ways = world
    hosts = [host for host in hosts for _ in range(stages * ways)]
    hosts = hosts[::2] + hosts[1::2]  # Not in the order of their hosts.
    assert crossings(placement(hosts, stages, ways), hosts, stages, ways) == (0, 0)


@pytest.mark.parametrize(
    "hosts", [[0, 1, 1, 0], [0, 1, 1, 2], [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [0, 1, 1, 1, 1, 2]]
)
def test_no_order_of_a_small_world_is_better(hosts: list[int]) -> None:
    for stages, ways in ((1, 2), (2, 1), (2, 2) if len(hosts) == 4 else (3, 2)):
        best = min(crossings(order, hosts, stages, ways) for order in permutations(range(len(hosts))))
        assert crossings(placement(hosts, stages, ways), hosts, stages, ways) == best


def test_workers_stay_in_order_where_hosts_divide_evenly() -> None:
    assert placement([0, 0, 0, 0, 1, 1, 1, 1], 2, 2) == tuple(range(8))
    assert placement([0, 0, 1, 1], 2, 2) == (0, 1, 2, 3)
    assert placement([0] * 6, 3, 2) == tuple(range(6))


def test_the_user_may_say_who_goes_where() -> None:
    hosts = [0, 1, 1, 0]
    assert chosen("auto", hosts, 1, 2) == (0, 3, 1, 2)
    assert chosen("ranks", hosts, 1, 2) == (0, 1, 2, 3)
    assert chosen("2, 0,1,3", hosts, 1, 2) == (2, 0, 1, 3)
    for wrong in ("0,1,2", "0,1,2,2", "0,1,2,4", "first", ""):
        with pytest.raises(UsageError, match="does not place every worker once"):
            chosen(wrong, hosts, 1, 2)
    with pytest.raises(UsageError, match="has worker 0 in another replica than the first"):
        chosen("2,3,0,1", hosts, 1, 2)


@given(worlds())
def test_worker_0_is_in_the_first_replica(world: tuple[list[int], int, int]) -> None:
    hosts, stages, ways = world
    assert 0 in placement(hosts, stages, ways)[: stages * ways]

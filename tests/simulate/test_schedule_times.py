"""Virtual time: hand-made cases, the closed forms, a slow reference, and that nothing late ever helps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from math import ceil, floor, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.collectives import ALGORITHMS, Collective, algorithm
from offbeat.protocols.schedule import Layout, Op, Round, Schedule, Stream, View, entries
from offbeat.simulate.algorithm_ranking import compare_collectives, curve, played
from offbeat.simulate.fit import CostTerms, cost_of, fit_link, fit_regimes
from offbeat.simulate.network import Link, Network, Ports
from offbeat.simulate.schedules import finish_by_scale, finish_times, trace

ALL_REDUCE = ALGORITHMS[Collective.ALL_REDUCE]
BYTES = Layout(1000, itemsize=1)
LINK = Link(alpha=5.0, beta=0.01, gamma=0.002, copy=0.001)
PLAIN = Network.uniform(LINK)


def apart(size: int) -> View:
    return View.of(size, range(size))


def send(source: object, target: object, length: int = 1000, after: tuple[int, ...] = (), op: Op = Op.SEND) -> Round:
    return entries(op, source, target, 0, length, after)  # pyright: ignore[reportArgumentType]


def times(rounds: Iterable[Round], size: int, arrivals: object = None, network: Network = PLAIN) -> list[float]:
    return finish_times(rounds, apart(size), BYTES, network, arrivals).tolist()  # pyright: ignore[reportArgumentType]


# --- by hand: a kilobyte is 10 s on the way after a latency of 5 s, 2 s to reduce and 1 s to copy


def test_a_message_takes_latency_and_bytes_of_both_sides() -> None:
    assert times([send(0, 1)], 3) == [15, 15, 0]


def test_the_later_of_two_sides_decides_when_a_message_starts() -> None:
    assert times([send(0, 1)], 2, [0.0, 7.0]) == times([send(0, 1)], 2, [7.0, 0.0]) == [22, 22]


def test_a_reader_waits_for_the_source_but_not_the_source_for_its_reader() -> None:
    assert times([send(0, 1, op=Op.FETCH)], 2, [0.0, 7.0]) == [0, 22]
    assert times([send(0, 1, op=Op.FETCH)], 2, [7.0, 0.0]) == [7, 22]


def test_messages_that_leave_one_port_queue_but_their_latencies_overlap() -> None:
    assert times([send(0, [1, 2, 3])], 4) == [35, 15, 25, 35]


def test_messages_that_reach_one_port_queue_in_the_order_of_the_schedule() -> None:
    assert times([send([1, 2, 3], 0)], 4) == [35, 15, 25, 35]
    assert times([send([1, 2, 3], 0)], 4, [0.0, 100.0, 0.0, 0.0]) == [135, 115, 125, 135]


def test_many_may_read_one_source_at_once() -> None:
    assert times([send(0, [1, 2, 3], op=Op.FETCH)], 4) == [0, 15, 15, 15]


def test_sending_and_receiving_go_on_at_once() -> None:
    assert times([send([0, 1, 2], [1, 2, 0])], 3) == [15, 15, 15]


def test_rounds_without_order_share_ports_and_rounds_in_order_pay_latency_each() -> None:
    assert times([send(0, 1), send(0, 2)], 3) == [25, 15, 25]
    assert times([send(0, 1), send(0, 2, after=(0,))], 3) == [30, 15, 30]


def test_one_without_a_part_passes_on_what_it_waited_for() -> None:
    rounds = [send(0, 1), send(2, 3, after=(0,)), send(0, 2, after=(1,))]
    assert times(rounds, 4) == [30, 15, 30, 15]


def test_reducing_and_copying_take_the_targets_processor_in_turn() -> None:
    use = send([0, 1], 2, after=(0,), op=Op.REDUCE)
    assert times([send([0, 1], 2), use], 3) == [15, 25, 29]
    assert times([send(0, 1), send(0, 1, after=(0,), op=Op.COPY)], 2) == [15, 16]
    assert times([send(1, 1, op=Op.COPY)], 2) == [0, 1]


def test_what_a_rank_brings_to_itself_is_copied_and_passes_no_port() -> None:
    assert times([send([0, 0], [0, 1])], 2) == [15, 15]
    assert times([send([0], [0])], 2) == [1, 0]


def test_computing_overlaps_with_communicating_unless_one_comes_after_the_other() -> None:
    rank = np.array([0])
    work = [Round(Op.COMPUTE, rank, rank, rank, rank, rank, after, Stream.COMPUTE, 12.0) for after in ((), (0,))]
    assert times([work[0], send(0, 1)], 2) == [15, 15]
    assert times([send(0, 1), work[1]], 2) == [27, 15]
    assert times([work[0], work[0]], 1) == [24]


def test_ranks_of_a_host_use_its_memory_and_may_share_its_card() -> None:
    network = Network(between=LINK, inside=Link(1.0, 0.001))
    view = View.of(4, [0, 0, 1, 1])
    inside, between = send([0, 2], [1, 3]), send([0, 1], [2, 3])
    assert finish_times([inside], view, BYTES, network).tolist() == [2, 2, 2, 2]
    assert finish_times([between], view, BYTES, network).tolist() == [15, 15, 15, 15]
    shared = Network(network.between, network.inside, Ports.HOST)
    assert finish_times([inside], view, BYTES, shared).tolist() == [2, 2, 2, 2]
    assert finish_times([between], view, BYTES, shared).tolist() == [15, 25, 15, 25]


def test_a_round_may_only_come_after_earlier_ones() -> None:
    with pytest.raises(UsageError, match="not all earlier"):
        times([send(0, 1, after=(0,))], 2)
    with pytest.raises(UsageError, match="3 arrival times were given for 2 ranks"):
        times([send(0, 1)], 2, [0.0, 0.0, 0.0])


def test_old_rounds_are_remembered_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [send(i, i + 1) for i in range(6)]
    last = send(0, 6, after=tuple(range(6)))
    arrivals = [0.0, 3.0, 50.0, 4.0, 9.0, 2.0, 1.0]
    expected = times([*rounds, last], 7, arrivals)
    monkeypatch.setattr("offbeat.simulate.schedules.REMEMBERED", 2 * 7)
    assert times([*rounds, last], 7, arrivals) == expected
    with pytest.raises(UsageError, match="comes after round 1, which is no longer remembered with 7 ranks"):
        times([*rounds, send(0, 6, after=(1, 5))], 7, arrivals)


# --- the closed forms, with everybody arriving together


def closed_form(name: str, p: int, n: int, link: Link) -> float:
    """mission.md's hops, busiest ports and what is reduced; surplus ranks fold in before and are answered after."""
    logarithm, power, share = ceil(log2(p)), floor(log2(p)), (p - 1) / p
    fold = p != 2**power
    kept = (2**power - 1) / 2**power
    hops, moved, reduced = {
        "naive": (1, p - 1, p - 1),
        "star": (2, 2 * (p - 1), p - 1),
        "tree": (2 * logarithm, 2 * logarithm, logarithm),
        "ring": (2 * (p - 1), 2 * share, share),
        "halving_doubling": (2 * power + 2 * fold, 2 * kept + 2 * fold, kept + fold),
        "recursive_doubling": (power + 2 * fold, power + 2 * fold, power + fold),
    }[name]
    return link.alpha * hops + link.beta * moved * n + link.gamma * reduced * n


@pytest.mark.parametrize("name", ["naive", "star", "tree", "ring", "halving_doubling", "recursive_doubling"])
@pytest.mark.parametrize("p", [2, 3, 4, 5, 7, 8, 13, 16, 32, 33])
def test_the_last_rank_is_done_when_the_formula_says(name: str, p: int) -> None:
    layout = Layout(p * 32 * 11, itemsize=4)  # Can be cut in p and in the powers of two below it.
    link = Link(50e-6, 8e-10, 1.25e-10)
    rounds = ALL_REDUCE[name].schedule(apart(p), layout)
    last = finish_times(rounds, apart(p), layout, Network.uniform(link)).max()
    assert last == pytest.approx(closed_form(name, p, layout.count * 4, link), rel=1e-9)


@pytest.mark.parametrize("p", [2, 3, 8])
def test_shared_memory_pays_a_hop_per_shot_and_zero_copy_no_copies(p: int) -> None:
    layout, view = Layout(p * 250, itemsize=4), View.of(p)
    n, link = p * 1000, Link(1e-6, 1e-10, 3e-11, 2e-11)

    def last(name: str) -> float:
        return float(finish_times(ALL_REDUCE[name].schedule(view, layout), view, layout, Network.uniform(link)).max())

    shots = 2 * link.alpha + 2 * link.beta * n * (p - 1) / p
    assert last("zero_copy") >= shots
    assert last("two_shot") - last("zero_copy") == pytest.approx(link.copy * n * (1 + 1 / p), rel=1e-6)
    assert last("one_shot") >= link.alpha + (p - 1) * link.beta * n + (p - 1) * link.gamma * n + link.copy * n


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "tree", "star", "naive", "recursive_doubling"])
def test_a_line_less_in_the_schedule_shows_in_the_time(name: str) -> None:
    view, layout = apart(8), Layout(8 * 100)
    link = Link(50e-6, 8e-10, 1e-6)
    rounds = list(ALL_REDUCE[name].schedule(view, layout))
    used = next(number for number, one in enumerate(rounds) if one.op is Op.REDUCE)
    nobody = np.array([], dtype=np.int64)
    rounds[used] = entries(Op.REDUCE, nobody, nobody, 0, 1, rounds[used].after)
    last = finish_times(rounds, view, layout, Network.uniform(link)).max()
    assert last < 0.99 * closed_form(name, 8, 3200, link)


@pytest.mark.slow
def test_a_ring_of_4096_ranks_is_played_to_its_end() -> None:
    view, layout = apart(4096), Layout(25_000_000)
    network = Network.parse("10Gbit,50us")
    even = Layout(4096 * 6000)
    last = finish_times(ALL_REDUCE["ring"].schedule(view, even), view, even, network).max()
    assert last == pytest.approx(closed_form("ring", 4096, even.count * 4, network.between), rel=1e-9)
    # The blocks differ by one element: each of 8,190 hops by at most 4 bytes.
    last = finish_times(ALL_REDUCE["ring"].schedule(view, layout), view, layout, network).max()
    exact = closed_form("ring", 4096, 10**8, network.between)
    assert 0 <= last - exact <= 8190 * 4 * network.between.beta


# --- a slow reference, entry by entry


def slowly(rounds: Iterable[Round], view: View, layout: Layout, network: Network, arrivals: list[float]) -> list[float]:
    """The semantics again, with no thought of speed."""
    free: dict[object, float] = defaultdict(float)
    done: list[list[float]] = []
    finish = list(arrivals)

    def serve(server: object, ready: float, duration: float) -> float:
        begin = max(ready, free[server])
        free[server] = begin + duration
        return begin

    for one in rounds:
        begun = [max((done[number][r] for number in one.after), default=arrivals[r]) for r in range(view.size)]
        ended = list(begun)
        for s, t, length in zip(one.source.tolist(), one.target.tolist(), one.lengths.tolist(), strict=True):
            here, there = view.members[s].host, view.members[t].host
            link = network.inside if here == there else network.between
            own = network.ports is Ports.RANK or here == there
            size = length * layout.itemsize
            if one.op in (Op.REDUCE, Op.COPY) or s == t:
                cost = link.gamma if one.op is Op.REDUCE else link.copy
                if cost:
                    ended[t] = max(ended[t], serve(("processor", t), begun[t], cost * size) + cost * size)
                continue
            left = max(begun[s], begun[t])
            if one.op is Op.SEND:
                left = serve(("out", s if own else -here - 1), left, link.beta * size)
            end = serve(("in", t if own else -there - 1), left + link.alpha, link.beta * size) + link.beta * size
            ended[t] = max(ended[t], end)
            if one.op is Op.SEND:
                ended[s] = max(ended[s], end)
        done.append(ended)
        finish = [max(pair) for pair in zip(finish, ended, strict=True)]
    return finish


costs = st.floats(0, 10)
links = st.builds(Link, alpha=costs, beta=costs, gamma=costs, copy=costs)
networks = st.builds(Network, between=links, inside=links, ports=st.sampled_from(Ports))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[View, list[Round], list[float]]:
    """Ranks on hosts, rounds in which anybody may come up any number of times, and arrivals."""
    size = draw(st.integers(1, 7))
    hosts = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    rank = st.integers(0, size - 1)
    rounds: list[Round] = []
    for number in range(draw(st.integers(1, 6))):
        count = draw(st.integers(0, 9))
        drawn = [draw(st.lists(rank, min_size=count, max_size=count)) for _ in range(2)]
        lengths = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
        after = draw(st.sets(st.integers(0, number - 1))) if number else set[int]()
        op = draw(st.sampled_from([Op.SEND, Op.FETCH, Op.REDUCE, Op.COPY]))
        rounds.append(entries(op, *drawn, np.zeros(count), lengths, tuple(sorted(after))))
    arrivals = draw(st.lists(st.floats(0, 20), min_size=size, max_size=size))
    return View.of(size, hosts), rounds, arrivals


def test_work_that_takes_no_time_holds_no_processor_up() -> None:
    """Where a round has work of both kinds: what is free must not make later work wait for its turn."""
    network = Network(between=Link(0, 0), inside=Link(0, 1, 1, 1))
    first = entries(Op.SEND, [0], [1], [0], [1], ())
    mixed = entries(Op.REDUCE, [2, 0], [1, 0], [0, 0], [1, 1], (0,))
    own = entries(Op.SEND, [1], [1], [0], [1], ())
    view, rounds = View.of(3, [0, 0, 1]), [first, mixed, own]
    expected = slowly(rounds, view, Layout(10), network, [0.0] * 3)
    assert finish_times(rounds, view, Layout(10), network).tolist() == expected == [8.0, 4.0, 0.0]


@given(worlds(), networks)
@settings(max_examples=120)
def test_all_ranks_at_once_end_as_entry_by_entry(
    world: tuple[View, list[Round], list[float]], network: Network
) -> None:
    view, rounds, arrivals = world
    layout = Layout(10)
    expected = slowly(rounds, view, layout, network, arrivals)
    assert finish_times(rounds, view, layout, network, arrivals).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    together = slowly(rounds, view, layout, network, [0.0] * view.size)
    assert finish_times(rounds, view, layout, network).tolist() == pytest.approx(together, rel=1e-9, abs=1e-9)
    seen = trace(rounds, view, layout, network, arrivals).finish
    took_part = ~np.isnan(seen)
    assert seen[took_part] == pytest.approx(np.array(expected)[took_part], rel=1e-9, abs=1e-9)
    scaled = finish_by_scale(rounds, view, layout, network, [1.0, 2.0])
    larger = Layout(10, itemsize=8)
    assert scaled[0] == pytest.approx(max(together), rel=1e-9, abs=1e-9)
    assert scaled[1] == pytest.approx(finish_times(rounds, view, larger, network).max(), rel=1e-9, abs=1e-9)


@given(worlds(), networks, st.integers(0, 6), st.floats(0, 30), st.sampled_from(["alpha", "beta", "gamma", "copy"]))
def test_nobody_is_done_earlier_because_someone_is_late_or_a_link_slow(
    world: tuple[View, list[Round], list[float]], network: Network, who: int, late: float, what: str
) -> None:
    view, rounds, arrivals = world
    layout = Layout(10)
    before = finish_times(rounds, view, layout, network, arrivals)
    later = list(arrivals)
    later[who % view.size] += late
    assert (finish_times(rounds, view, layout, network, later) >= before - 1e-9).all()
    values = {**vars(network.between), what: getattr(network.between, what) + late}
    slower = Network(Link(**values), network.inside, network.ports)
    assert (finish_times(rounds, view, layout, slower, arrivals) >= before - 1e-9).all()


# --- who is late, and who waits for whom


@pytest.mark.parametrize("name", [name for name, one in ALL_REDUCE.items() if not one.one_sided])
def test_the_last_to_arrive_decides_and_nobody_is_done_before(name: str) -> None:
    view, layout, network = apart(6), Layout(6 * 100), Network.parse("10Gbit,50us")
    together = finish_times(ALL_REDUCE[name].schedule(view, layout), view, layout, network).max()
    for late in range(6):
        arrivals = [0.0] * 6
        arrivals[late] = 1.0
        ends = finish_times(ALL_REDUCE[name].schedule(view, layout), view, layout, network, arrivals)
        assert 1.0 < ends.max() <= 1.0 + together + 1e-12
        assert ends.min() > 1.0, "somebody was done before all had come"


def test_a_trace_says_who_waited_for_the_late_one() -> None:
    rounds = [send([0, 1, 2], [1, 2, 0]), send([0, 1, 2], [1, 2, 0], after=(0,), op=Op.REDUCE)]
    seen = trace(rounds, apart(4), BYTES, PLAIN, [0.0, 0.0, 6.0, 0.0])
    assert seen.waited[0, :3].tolist() == [6, 6, 0]
    assert seen.begin[0, :3].tolist() == [0, 0, 6]
    assert seen.end[:, :3].tolist() == [[21, 21, 21], [23, 23, 23]]
    assert np.isnan(seen.end[:, 3]).all()
    assert seen.finish[:3].tolist() == times(rounds, 4, [0.0, 0.0, 6.0, 0.0])[:3]


# --- time against size


def stepped(view: View, layout: Layout) -> Iterator[Round]:
    """Latency decides small sizes, one chain; bytes decide large ones, another chain."""
    yield send(0, 1, layout.count // 10)
    yield send(0, 1, layout.count // 10, after=(0,))
    yield send(2, 3, layout.count)


def test_a_curve_has_its_corner_where_the_longest_chain_changes() -> None:
    network = Network.uniform(Link(1.0, 0.001))
    found = curve(stepped, apart(4), network, [100, 100_000])
    # 2 + 0.0002 n against 1 + 0.001 n: they meet at 1250.
    for size in (100, 1249, 1250, 1251, 50_000):
        assert float(found(size)) == pytest.approx(max(2 + 0.0002 * size, 1 + 0.001 * size), rel=1e-9)
    assert len(found.sizes) <= 6


def test_a_curve_of_few_bytes_is_not_rounded_up_to_whole_blocks() -> None:
    network = Network.uniform(Link(1.0, 1.0))
    found = curve(ALL_REDUCE["ring"].schedule, apart(3), network, [10])
    assert float(found(10)) == pytest.approx(closed_form("ring", 3, 10, network.between), rel=1e-9)


@pytest.mark.parametrize("hosts", [None, [0] * 12, [0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3]])
@pytest.mark.parametrize("ports", Ports)
def test_curves_equal_the_protocol(hosts: list[int] | None, ports: Ports) -> None:
    view = View.of(12, range(12) if hosts is None else hosts)
    network = Network.parse("1Gbit,20us,8GB/s,10GB/s", "40Gbit,1us,8GB/s,10GB/s", ports)
    slowest = network.between.beta + network.between.gamma + network.between.copy
    for one in ALL_REDUCE.values():
        if one.one_sided and hosts != [0] * 12 and "hierarchical" not in one.name:
            continue
        counts = (240, 2_400, 24_000 + 5, 240_000, 2_400_000)
        found = (
            played(one.schedule, view, network, [4 * count for count in counts])
            if one.pieced
            else curve(one.schedule, view, network, [960, 9_600_000])
        )
        for count in counts:
            layout = Layout(count)
            rounds = list(one.schedule(view, layout))
            exact = finish_times(rounds, view, layout, network).max()
            # Ranges that end at whole elements move each entry by one element at most.
            slack = 0 if count % 96 == 0 else 4 * slowest * sum(len(each.source) for each in rounds)
            assert float(found(4 * count)) == pytest.approx(exact, rel=1e-6, abs=slack), (one.name, count)


# --- comparing algorithms


def test_the_best_at_each_size_is_the_one_that_takes_least() -> None:
    found = compare_collectives(16, [10**8, 1000, 10**5], Network.parse("10Gbit,50us"))
    assert found.sizes == (1000, 10**5, 10**8)
    for column in range(3):
        least = min(times[column] for times in found.seconds.values())
        assert found.seconds[found.best(column)][column] == pytest.approx(least, rel=1e-9)
    assert found.hosts == 16
    assert found.seconds["ring"][2] == pytest.approx(closed_form("ring", 16, 10**8, Link(50e-6, 8e-10)), rel=1e-9)


def test_at_a_crossover_the_winner_changes() -> None:
    network = Network.parse("10Gbit,50us")
    found = compare_collectives(12, [1000, 10**8], network)
    assert [(one.before, one.after) for one in found.crossovers] == [
        ("naive", "recursive_doubling"),
        ("recursive_doubling", "halving_doubling"),
        ("halving_doubling", "ring"),
    ]
    link = network.between
    for one in found.crossovers:
        below = closed_form(one.before, 12, one.size - 2, link) - closed_form(one.after, 12, one.size - 2, link)
        above = closed_form(one.before, 12, one.size + 2, link) - closed_form(one.after, 12, one.size + 2, link)
        assert below < 0 < above


def test_shared_memory_is_left_out_where_there_is_none_and_wins_where_there_is() -> None:
    network = Network.parse("10Gbit,50us")
    between = compare_collectives(4, [10**6], network, [0, 0, 1, 1])
    assert {"one_shot", "two_shot", "zero_copy"} == set(between.left_out)
    assert all("share no memory" in why for why in between.left_out.values())
    inside = compare_collectives(4, [10**6], network, [0] * 4)
    assert inside.left_out == {}
    assert inside.best(0) in ("two_shot", "zero_copy")


@pytest.mark.parametrize("collective", Collective)
def test_every_collective_can_be_compared(collective: Collective) -> None:
    for hosts in (None, [0] * 6, [0, 0, 0, 1, 1, 1]):
        found = compare_collectives(6, [1000, 10**6], Network.parse("10Gbit,50us"), hosts, collective)
        assert found.sizes == ((4,) if collective is Collective.BARRIER else (1000, 10**6))
        assert set(found.seconds) | set(found.left_out) == set(ALGORITHMS[collective])
        assert all(time > 0 for times in found.seconds.values() for time in times)
        assert json.loads(json.dumps(found.plain()))["best"][0] == found.best(0)


def test_one_rank_alone_needs_no_time() -> None:
    found = compare_collectives(1, [1000], Network.parse("10Gbit,50us"))
    assert set(found.seconds.values()) == {(0.0,)}
    with pytest.raises(UsageError, match="at least one rank"):
        compare_collectives(0, [1000], Network.parse("10Gbit,50us"))


# --- fitting


def measured(schedule: Schedule, view: View, link_at: Callable[[int], Link], counts: list[int]) -> list[float]:
    layouts = [Layout(count) for count in counts]
    return [
        float(finish_times(schedule(view, one), view, one, Network.uniform(link_at(4 * one.count))).max())
        for one in layouts
    ]


def test_a_fit_on_three_sizes_predicts_the_others() -> None:
    view, schedule = View.of(4), algorithm(Collective.ALL_REDUCE, "two_shot").schedule
    truth = Link(3e-6, 2e-10, 1e-10, 5e-11)
    counts, held_out = [1000, 100_000, 5_000_000], [4000, 1_000_000]
    costs = [cost_of(schedule, view, Layout(count)) for count in counts]
    found = fit_link([4 * c for c in counts], measured(schedule, view, lambda _: truth, counts), costs)
    assert found.alpha == pytest.approx(truth.alpha, rel=1e-3)
    assert measured(schedule, view, lambda _: found, held_out) == pytest.approx(
        measured(schedule, view, lambda _: truth, held_out), rel=1e-3
    )


def test_several_schedules_tell_moving_reducing_and_copying_apart() -> None:
    truth = Link(3e-6, 2e-10, 1e-10, 5e-11)
    rows = [
        CostTerms(1, 3000, 3000, 1000),
        CostTerms(2, 1500, 750, 1250),
        CostTerms(2, 1500, 750, 0),
        CostTerms(6, 1500, 750, 750),
    ]
    rows = [CostTerms(row.hops, *(1000 * value for value in row[1:])) for row in rows]
    seconds = [float(np.dot(row, (truth.alpha, truth.beta, truth.gamma, truth.copy))) for row in rows]
    assert vars(fit_link([10**6] * 4, seconds, rows)) == pytest.approx(vars(truth), rel=1e-6)


def test_a_fit_is_never_negative_and_small_times_count_as_much_as_large_ones() -> None:
    rows = [CostTerms(1, size, 0, 0) for size in (10, 1000, 100_000)]
    steep = fit_link([10, 1000, 100_000], [1e-6, 2e-4, 3e-2], rows)  # A line through the large ones starts below 0.
    assert steep.alpha == 0
    assert steep.beta > 0
    noisy = fit_link([10, 1000, 100_000], [1.1e-6, 1.9e-6, 1.01e-4], rows)
    predicted = [noisy.alpha + noisy.beta * row.moved for row in rows]
    assert predicted == pytest.approx([1.1e-6, 1.9e-6, 1.01e-4], rel=0.1)


def test_a_knot_lets_bytes_cost_more_beyond_a_cache() -> None:
    sizes = [1000, 100_000, 10_000_000]

    def truth(size: int) -> float:
        return 2e-6 + 1e-10 * min(size, 100_000) + 4e-10 * max(size - 100_000, 0)

    found = fit_regimes(sizes, [truth(s) for s in sizes], [CostTerms(1, s, 0, 0) for s in sizes], knots=[100_000])
    assert found.betas == pytest.approx((1e-10, 4e-10), rel=1e-6)
    for size in (500, 50_000, 1_000_000, 50_000_000):
        link = found.link(size)
        assert link.alpha + link.beta * size == pytest.approx(truth(size), rel=1e-6)


def test_what_any_call_takes_is_told_apart_from_its_hops() -> None:
    sizes, hops = [1000, 100_000, 10_000_000], [1, 2, 2]
    costs = [CostTerms(count, size, 0, 0) for count, size in zip(hops, sizes, strict=True)]
    seconds = [5e-6 + 1e-10 * min(size, 100_000) + 4e-10 * max(size - 100_000, 0) for size in sizes]
    found = fit_regimes(sizes, seconds, costs, knots=[100_000], calls=True)
    assert (found.call, found.alpha) == (pytest.approx(5e-6, rel=1e-6), 0.0)
    assert found.betas == pytest.approx((1e-10, 4e-10), rel=1e-6)
    assert fit_regimes(sizes, seconds, costs, knots=[100_000]).call == 0.0


def test_a_fit_without_a_time_per_size_is_refused() -> None:
    with pytest.raises(UsageError, match="2 sizes, 1 times and 1 costs"):
        fit_link([1, 2], [1.0], [CostTerms(1, 1, 0, 0)])
    with pytest.raises(UsageError, match="above 0"):
        fit_link([1], [0.0], [CostTerms(1, 1, 0, 0)])

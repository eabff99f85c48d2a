"""Every collective's every algorithm: proved for 1 to 33 ranks, and costing what the formulas say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from offbeat.errors import UsageError
from offbeat.protocols.checker import check, cost
from offbeat.protocols.collectives import ALGORITHMS, Algorithm, Collective, algorithm
from offbeat.protocols.collectives.across_hosts import hierarchical_shared
from offbeat.protocols.schedule import Layout, Op, View, entries

C = Collective
ALL = [one for named in ALGORITHMS.values() for one in named.values()]
SIZES = range(1, 34)


def name_of(one: Algorithm) -> str:
    return f"{one.collective}-{one.name}"


def counts(one: Algorithm, size: int) -> list[int]:
    """Divisible and not, fewer than ranks, and none; the small ones need no proof for every large world."""
    if one.collective is C.ALL_TO_ALL:
        return [2 * size] if size > 9 else [0, size, 3 * size]
    if one.collective is C.BARRIER:
        return [1] if size > 9 else [1, size]
    return [2 * size + 1] if size > 9 else [0, 1, size - 1, size, 2 * size + 1]


def maps(one: Algorithm, size: int) -> list[list[int]]:
    """Hosts of one, uneven ones in any order, all on one."""
    if not one.name.startswith("hierarchical"):
        return [[0] * size]
    uneven = [(rank * rank) % 5 for rank in range(size)]
    if size > 9:
        return [uneven]
    return [[0] * size, [*range(size)], uneven, [rank // 4 for rank in range(size)][::-1]]


@pytest.mark.parametrize("one", ALL, ids=name_of)
def test_an_algorithm_keeps_its_promise_for_1_to_33_ranks(one: Algorithm) -> None:
    for size in SIZES:
        for hosts in maps(one, size):
            for count in counts(one, size):
                check(one, View.of(size, hosts), Layout(count, root=size * 3 // 4))


@pytest.mark.parametrize("one", ALL, ids=name_of)
def test_any_rank_can_be_the_root(one: Algorithm) -> None:
    for size in range(1, 7):
        for root in range(size):
            check(one, View.of(size), Layout(3 * size, root=root))


# -- bytes and hops ---------------------------------------------------------------------------------------------------


def logarithm(size: int) -> int:
    return (size - 1).bit_length()


def folded(size: int) -> tuple[int, int]:
    """The power of two that is left after the fold, and whether anybody folds."""
    left = 1 << size.bit_length() - 1
    return left, int(left != size)


def promised(name: str, n: int, p: int) -> tuple[float, int]:
    """Bytes through the busiest port and hops of an all-reduce of n bytes between p ranks."""
    q, fold = folded(p)
    blocks = n * (p - 1) / p
    return {
        "naive": ((p - 1) * n, 1),
        "star": ((p - 1) * n, 2),
        "tree": (logarithm(p) * n, 2 * logarithm(p)),
        "ring": (2 * blocks, 2 * (p - 1)),
        "halving_doubling": (2 * n * (q - 1) / q + fold * n, 2 * logarithm(q) + 2 * fold),
        "recursive_doubling": (n * logarithm(q) + fold * n, logarithm(q) + 2 * fold),
        "one_shot": ((p - 1) * n, 1),
        "two_shot": (2 * blocks, 2),
        "zero_copy": (2 * blocks, 2),
    }[name]


@pytest.mark.parametrize("name", [name for name in ALGORITHMS[C.ALL_REDUCE] if "hierarchical" not in name])
def test_an_all_reduce_costs_what_the_formulas_say(name: str) -> None:
    for size in range(2, 34):
        layout = Layout(32 * size, itemsize=8)
        report = cost(algorithm(C.ALL_REDUCE, name).schedule(View.of(size), layout), View.of(size), layout)
        assert (report.port_bytes, report.hops) == promised(name, 8 * layout.count, size), size


@pytest.mark.parametrize("between", ["halving_doubling", "ring"])
def test_a_hierarchy_costs_the_sum_of_inside_and_between(between: str) -> None:
    name = {"halving_doubling": "hierarchical", "ring": "hierarchical_ring"}[between]
    for hosts in (2, 3, 4, 7):
        for each in (1, 2, 5, 8):
            view = View.of(hosts * each, [rank // each for rank in range(hosts * each)])
            layout = Layout(840 * 8, itemsize=2)
            inside = promised("tree", 2 * layout.count, each)
            outside = promised(between, 2 * layout.count, hosts)
            found = check(algorithm(C.ALL_REDUCE, name), view, layout)
            assert found.port_bytes == inside[0] + outside[0]
            assert found.hops == inside[1] + outside[1]


def test_a_shared_hierarchy_takes_two_hops_inside_a_ring_between_and_one_back() -> None:
    view = View.of(12, [rank // 3 for rank in range(12)])
    found = check(algorithm(C.ALL_REDUCE, "hierarchical_shared"), view, Layout(72))
    assert found.hops == 2 + 6 + 1
    inside, back, between = 4 * 72 * 2 // 3, 2 * 4 * 72, 2 * 4 * 72 * 3 // 4
    assert found.bytes_sent[0] == inside + back + between
    assert found.bytes_sent[1] == inside + 4 * 72 // 3, "its contribution to the others' blocks, and its own block"


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 0, 2], [0, 1, 2], [0, 0, 0, 1]])
def test_pieces_of_a_shared_hierarchy_are_right_in_a_pipeline_too(hosts: list[int]) -> None:
    view, layout = View.of(len(hosts), hosts), Layout(72, itemsize=4)
    whole = check(algorithm(C.ALL_REDUCE, "hierarchical_shared"), view, layout)
    pieces = check((partial(hierarchical_shared, piece=48), C.ALL_REDUCE), view, layout)
    assert pieces.rounds > 4 * whole.rounds
    assert pieces.bytes_sent.sum() == whole.bytes_sent.sum()


def test_other_collectives_cost_what_they_are_known_to() -> None:
    for size in range(2, 34):
        n, p = 32 * size, size
        block, known = n // p, logarithm(size)
        promises = {
            (C.BROADCAST, "star"): ((p - 1) * n, 1),
            (C.BROADCAST, "tree"): (known * n, known),
            (C.BROADCAST, "doubling"): (known * n, known),
            (C.REDUCE, "star"): ((p - 1) * n, 1),
            (C.REDUCE, "tree"): (known * n, known),
            (C.REDUCE_SCATTER, "naive"): ((p - 1) * block, 1),
            (C.REDUCE_SCATTER, "ring"): ((p - 1) * block, p - 1),
            (C.ALL_GATHER, "naive"): ((p - 1) * block, 1),
            (C.ALL_GATHER, "ring"): ((p - 1) * block, p - 1),
            (C.GATHER, "star"): ((p - 1) * block, 1),
            (C.GATHER, "tree"): ((p - 1) * block, known),
            (C.SCATTER, "star"): ((p - 1) * block, 1),
            (C.SCATTER, "tree"): ((p - 1) * block, known),
            (C.ALL_TO_ALL, "naive"): ((p - 1) * block, 1),
            (C.ALL_TO_ALL, "pairwise"): ((p - 1) * block, p // 2),
            (C.BARRIER, "dissemination"): (known, known),
            (C.BARRIER, "tree"): (known, 2 * known),
        }
        for (collective, name), promise in promises.items():
            layout = Layout(n, itemsize=1)
            found = cost(algorithm(collective, name).schedule(View.of(size), layout), View.of(size), layout)
            assert (found.port_bytes, found.hops) == promise, (collective, name, size)


def test_halving_and_doubling_cost_a_fold_more_where_one_stands_for_two() -> None:
    for size in range(2, 34):
        block, layout, view = 32, Layout(32 * size, itemsize=1), View.of(size)
        q, fold = folded(size)
        steps = [1 << step for step in range(logarithm(q))]
        swapped = block * sum(step + min(step, size - q) for step in steps)
        for collective, name, more in (
            (C.REDUCE_SCATTER, "halving", layout.count),
            (C.ALL_GATHER, "doubling", layout.count - block),
        ):
            found = cost(algorithm(collective, name).schedule(view, layout), view, layout)
            assert (found.port_bytes, found.hops) == (swapped + fold * more, logarithm(q) + 2 * fold), (name, size)


def test_everything_reduced_is_counted_where_it_is_reduced() -> None:
    ring = algorithm(C.ALL_REDUCE, "ring").schedule(View.of(4), Layout(8, itemsize=2))
    assert cost(ring, View.of(4), Layout(8, itemsize=2)).reduced_bytes.tolist() == [12, 12, 12, 12]
    star = algorithm(C.REDUCE, "star").schedule(View.of(3), Layout(5, root=2))
    found = cost(star, View.of(3), Layout(5, root=2))
    assert found.reduced_bytes.tolist() == [0, 0, 40]
    assert found.bytes_sent.tolist() == [20, 20, 0]
    assert found.bytes_received.tolist() == [0, 0, 40]


def test_4096_ranks_are_nothing_special() -> None:
    view, layout = View.of(4096), Layout(4096 * 3)
    n = 4 * layout.count
    for name in ("ring", "halving_doubling", "recursive_doubling", "tree", "star"):
        found = cost(algorithm(C.ALL_REDUCE, name).schedule(view, layout), view, layout)
        assert (found.port_bytes, found.hops) == promised(name, n, 4096)


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_an_unknown_algorithm_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"Did you mean 'halving_doubling'\? Valid: halving_doubling, hier"):
        algorithm(C.ALL_REDUCE, "halving_doublin")


def test_only_those_that_fetch_or_publish_call_themselves_one_sided() -> None:
    for one in ALL:
        rounds = list(one.schedule(View.of(4), Layout(8)))
        own = any(each.op is Op.COPY and (each.source == each.target).any() for each in rounds)
        assert (own or any(each.op is Op.FETCH for each in rounds)) == one.one_sided, name_of(one)


@pytest.mark.parametrize("one", [one for one in ALL if one.name == "zero_copy"], ids=name_of)
def test_zero_copy_publishes_nothing_and_says_that_buffers_linger(one: Algorithm) -> None:
    view, layout = View.of(4), Layout(8)
    assert not any((each.source == each.target).any() for each in one.schedule(view, layout))
    assert check(one, view, layout).lingering


@pytest.mark.parametrize("one", [one for one in ALL if "shot" in one.name or not one.one_sided], ids=name_of)
def test_what_is_copied_or_sent_does_not_linger(one: Algorithm) -> None:
    assert not check(one, View.of(4), Layout(8)).lingering


def test_memory_is_not_shared_between_hosts() -> None:
    for one in ALL:
        if one.one_sided and not one.name.startswith("hierarchical"):
            with pytest.raises(UsageError, match="live on 2 hosts"):
                list(one.schedule(View.of(4, [0, 0, 1, 1]), Layout(8)))


def test_what_cannot_be_laid_out_is_refused() -> None:
    for one in ALGORITHMS[C.ALL_TO_ALL].values():
        with pytest.raises(UsageError, match="7 elements cannot be cut into 3 equal blocks"):
            list(one.schedule(View.of(3), Layout(7)))
    for one in ALGORITHMS[C.BARRIER].values():
        with pytest.raises(UsageError, match="at least one element"):
            list(one.schedule(View.of(3), Layout(0)))
    for collective in (C.BROADCAST, C.REDUCE, C.GATHER, C.SCATTER):
        for one in ALGORITHMS[collective].values():
            with pytest.raises(UsageError, match="root 3 is none of the 3 ranks"):
                list(one.schedule(View.of(3), Layout(6, root=3)))


def test_blocks_cover_the_buffer_evenly_the_longer_first() -> None:
    assert Layout(11).blocks(4).tolist() == [0, 3, 6, 9, 11]
    assert Layout(2).blocks(4).tolist() == [0, 1, 2, 2, 2]
    assert Layout(0).blocks(3).tolist() == [0, 0, 0, 0]


def test_entries_stretch_numbers_and_leave_out_what_is_empty() -> None:
    one = entries(Op.SEND, [0, 1, 2], 3, [0, 5, 5], [5, 5, 7], after=(1,))
    assert [field.tolist() for field in (one.source, one.target, one.start, one.stop, one.place)] == [
        *([0, 2], [3, 3], [0, 5], [5, 7], [0, 5]),
    ]
    assert one.lengths.tolist() == [5, 2]
    assert one.used(Op.REDUCE, (2,)).after == (2,)


def test_views_are_keys_and_know_their_hosts() -> None:
    view = View.of(3, [4, 4, 9])
    assert {view: 1}[View.of(3, [4, 4, 9])] == 1
    assert np.array_equal(view.hosts, [4, 4, 9])
    with pytest.raises(UsageError, match="2 hosts were given for 3 ranks"):
        View.of(3, [0, 1])
    with pytest.raises(UsageError, match="at least one member"):
        View(())


def test_the_order_of_a_sum_is_the_order_of_ranks_where_all_reduce_everything() -> None:
    """So that every rank gets the same bits: each begins with rank 0's and goes on with 1's, 2's and so on."""

    def order(name: str, rank: int) -> Iterator[int]:
        for one in algorithm(C.ALL_REDUCE, name).schedule(View.of(5), Layout(1)):
            if one.op is Op.REDUCE or (one.op is Op.COPY and (one.source != one.target).any()):
                yield from one.source[one.target == rank].tolist()

    for name in ("naive", "one_shot"):
        assert [[*order(name, rank)] for rank in range(1, 5)] == [[0, 1, 2, 3, 4]] * 4
        assert [*order(name, 0)] == [1, 2, 3, 4]

"""The checker refuses what is wrong: every algorithm is broken in every way that can be thought of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from offbeat.errors import ScheduleError
from offbeat.protocols.checker import check
from offbeat.protocols.collectives import ALGORITHMS, Algorithm, Collective, algorithm
from offbeat.protocols.schedule import Layout, Op, Round, View, entries

C = Collective
ALL = [one for named in ALGORITHMS.values() for one in named.values()]
SIZE = 7
"""Neither a power of two nor next to one, and such that no branch of a binomial tree is idle in any round."""
VIEW = View.of(SIZE)
LAYOUT = Layout(2 * SIZE, root=1)
BRINGS = (Op.SEND, Op.FETCH)

Rounds = list[Round]
Mutation = Callable[[Rounds, int, random.Random], Rounds | None]


def with_columns(one: Round, keep: np.ndarray | None = None, **columns: np.ndarray) -> Round:
    """A round with other columns, or only some of its entries."""
    changed = replace(one, **columns)
    if keep is None:
        return changed
    chosen = {name: getattr(changed, name)[keep] for name in ("source", "target", "start", "stop", "place")}
    return replace(changed, **chosen)


def changed_at(column: np.ndarray, entry: int, value: int) -> np.ndarray:
    copy = column.copy()
    copy[entry] = value
    return copy


def publishes(one: Round) -> bool:
    return one.op is Op.COPY and bool((one.source == one.target).any())


def user_of(rounds: Rounds, number: int, entry: int) -> tuple[int, int] | None:
    """Which entry of which later round uses an entry that brings something."""
    one = rounds[number]
    for later in range(number + 1, len(rounds)):
        other = rounds[later]
        if other.op in (Op.REDUCE, Op.COPY):
            names = ("source", "target", "start", "stop", "place")
            same = np.logical_and.reduce([getattr(other, name) == getattr(one, name)[entry] for name in names])
            if same.any():
                return later, int(np.flatnonzero(same)[0])
    return None


def without_an_entry(rounds: Rounds, number: int, chance: random.Random) -> Rounds | None:
    """Something is not brought, or is not used."""
    one = rounds[number]
    if publishes(one):
        return None  # Its live buffer is read then, which may well be right.
    keep = np.arange(len(one.source)) != chance.randrange(len(one.source))
    return [*rounds[:number], with_columns(one, keep), *rounds[number + 1 :]]


def without_a_transfer(rounds: Rounds, number: int, chance: random.Random) -> Rounds | None:
    """Something is neither brought nor used."""
    entry = chance.randrange(len(rounds[number].source))
    user = user_of(rounds, number, entry) if rounds[number].op in BRINGS else None
    if user is None:
        return None
    result = list(rounds)
    for at, gone in ((number, entry), user):
        result[at] = with_columns(rounds[at], np.arange(len(rounds[at].source)) != gone)
    return result


def to_another(rounds: Rounds, number: int, chance: random.Random) -> Rounds | None:
    """Something reaches another rank than the one that uses it."""
    one = rounds[number]
    if one.op not in BRINGS:
        return None
    entry = chance.randrange(len(one.source))
    wrong = changed_at(one.target, entry, int(one.target[entry] + 1) % SIZE)
    return [*rounds[:number], with_columns(one, target=wrong), *rounds[number + 1 :]]


def twice(rounds: Rounds, number: int, chance: random.Random) -> Rounds | None:
    """Something is brought twice and used twice."""
    entry = chance.randrange(len(rounds[number].source))
    user = user_of(rounds, number, entry) if rounds[number].op in BRINGS else None
    if user is None:
        return None
    result = list(rounds)
    for at, which in ((number, entry), user):
        result[at] = with_columns(rounds[at], np.append(np.arange(len(rounds[at].source)), which))
    return result


def a_shorter_range(rounds: Rounds, number: int, chance: random.Random) -> Rounds | None:
    """The last element of a range is forgotten, when it is brought and when it is used."""
    one = rounds[number]
    entry = chance.randrange(len(one.source))
    user = user_of(rounds, number, entry) if one.op in BRINGS else None
    if user is None or one.lengths[entry] < 2:
        return None
    result = list(rounds)
    for at, which in ((number, entry), user):
        result[at] = with_columns(rounds[at], stop=changed_at(rounds[at].stop, which, int(one.stop[entry]) - 1))
    return result


def the_other_use(rounds: Rounds, number: int, chance: random.Random) -> Rounds | None:
    """What should be added is put down, or the other way round."""
    one = rounds[number]
    if one.op in BRINGS or publishes(one):
        return None
    return [*rounds[:number], replace(one, op=Op.COPY if one.op is Op.REDUCE else Op.REDUCE), *rounds[number + 1 :]]


def after_nothing(rounds: Rounds, number: int, chance: random.Random) -> Rounds | None:
    """A round does not wait for those it needs."""
    one = rounds[number]
    return [*rounds[:number], replace(one, after=()), *rounds[number + 1 :]] if one.after else None


def after_itself(rounds: Rounds, number: int, chance: random.Random) -> Rounds | None:
    """A round waits for itself or a later one."""
    one = rounds[number]
    return [*rounds[:number], replace(one, after=(*one.after, number)), *rounds[number + 1 :]]


MUTATIONS: list[Mutation] = [
    *(without_an_entry, without_a_transfer, to_another, twice),
    *(a_shorter_range, the_other_use, after_nothing, after_itself),
]
HARMLESS = {
    ("broadcast", "ring", "without_a_transfer"): "the root is sent blocks that it has",
    ("broadcast", "ring", "a_shorter_range"): "the root is sent blocks that it has",
    ("all_to_all", "pairwise", "after_nothing"): "waiting only keeps the inbox small",
    ("barrier", "dissemination", "twice"): "a token may come twice",
    ("barrier", "tree", "twice"): "a token may come twice",
    ("barrier", "one_shot", "twice"): "a token may come twice",
    ("barrier", "tree", "the_other_use"): "the value of a token means nothing",
    ("barrier", "one_shot", "the_other_use"): "the value of a token means nothing",
}


def survives(rounds: Rounds, collective: Collective) -> bool:
    try:
        check((lambda _view, _layout: iter(rounds), collective), VIEW, LAYOUT)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("one", ALL, ids=lambda one: f"{one.collective}-{one.name}")
def test_no_change_of_an_algorithm_goes_unnoticed(one: Algorithm) -> None:
    rounds, chance = list(one.schedule(VIEW, LAYOUT)), random.Random(one.name)
    for mutation in MUTATIONS:
        if (one.collective.value, one.name, mutation.__name__) in HARMLESS:
            continue
        broken = [(number, mutation(rounds, number, chance)) for number in range(len(rounds))]
        possible = [(number, changed) for number, changed in broken if changed is not None]
        assert possible or mutation in (a_shorter_range, after_nothing), "a mutation that fits nowhere tests nothing"
        for number, changed in chance.sample(possible, min(4, len(possible))):
            assert not survives(changed, one.collective), f"{mutation.__name__} in round {number}"


def test_what_is_called_harmless_is() -> None:
    for collective, name, mutation in HARMLESS:
        rounds = list(algorithm(C(collective), name).schedule(VIEW, LAYOUT))
        function = next(one for one in MUTATIONS if one.__name__ == mutation)
        tries = (function(rounds, number, random.Random(seed)) for number in range(len(rounds)) for seed in range(9))
        assert any(survives(changed, C(collective)) for changed in tries if changed), (collective, name, mutation)


# -- what it says ------------------------------------------------------------------------------------------------------


def refusal(rounds: Rounds, collective: Collective, view: View | None = None, count: int = 4) -> str:
    with pytest.raises(ScheduleError) as caught:
        check((lambda _view, _layout: iter(rounds), collective), view or View.of(2), Layout(count))
    return str(caught.value)


def sent(source: int, target: int, use: Op, at: int = 0, start: int = 0, stop: int = 4) -> Iterator[Round]:
    one = entries(Op.SEND, source, target, start, stop, ())
    yield one
    yield one.used(use, (at,))


def test_a_missing_contribution_is_named() -> None:
    assert refusal([*sent(0, 1, Op.REDUCE)], C.ALL_REDUCE) == (
        "rank 0 ends with [0, 2) holding the contribution of rank 1 0 times instead of 1"
    )


def test_a_doubled_contribution_is_named() -> None:
    again = entries(Op.SEND, 0, 1, 0, 4, (1,))
    rounds = [*sent(0, 1, Op.REDUCE), again, again.used(Op.REDUCE, (2,))]
    answer = entries(Op.SEND, 1, 0, 0, 4, (3,))
    assert refusal([*rounds, answer, answer.used(Op.COPY, (4,))], C.ALL_REDUCE) == (
        "rank 0 ends with [0, 2) holding the contribution of rank 0 2 times instead of 1"
    )


def test_what_nobody_filled_must_not_be_added_to() -> None:
    assert refusal([*sent(0, 1, Op.REDUCE)], C.BROADCAST) == (
        "rank 1 ends with [0, 2) holding the contribution of nobody (it was never filled) 1 times instead of 0"
    )


def test_what_is_never_used_and_what_was_never_brought_are_named() -> None:
    brought, used = sent(0, 1, Op.COPY)
    assert refusal([brought], C.BROADCAST) == "[0, 4) from rank 0 reaches rank 1 in round 0 and is never used"
    assert "uses [0, 4) from rank 0 for place 0, which nobody has brought" in refusal(
        [replace(used, after=())], C.BROADCAST
    )
    assert "does not come after round 0, which brings it" in refusal([brought, replace(used, after=())], C.BROADCAST)


def test_waiting_for_a_later_round_is_waiting_for_ever() -> None:
    rounds = [*sent(0, 1, Op.COPY)]
    assert "round 0 (send) comes after round 1" in refusal([replace(rounds[0], after=(1,)), rounds[1]], C.BROADCAST)


def test_ranks_and_ranges_that_are_not_there_are_named() -> None:
    assert "names rank 5" in refusal([*sent(0, 5, Op.COPY)], C.BROADCAST)
    assert "moves [0, 9) to 0 at rank 1" in refusal([*sent(0, 1, Op.COPY, stop=9)], C.BROADCAST)


def test_a_memory_of_another_host_cannot_be_read() -> None:
    rounds = [entries(Op.FETCH, 0, 1, 0, 4, ()), entries(Op.COPY, 0, 1, 0, 4, (0,))]
    assert "lets rank 1 read the memory of rank 0 on another host" in refusal(rounds, C.BROADCAST, View.of(2, [0, 1]))
    assert check((lambda _view, _layout: iter(rounds), C.BROADCAST), View.of(2), Layout(4)).hops == 1


def test_a_copy_that_stays_by_chance_is_refused() -> None:
    rounds = [entries(Op.SEND, [0, 0], 1, 0, [4, 3], ()), entries(Op.COPY, [0, 0], 1, 0, [4, 3], (0,))]
    assert "rank 1 in round 1 gets [0, 2) twice" in refusal(rounds, C.BROADCAST)


def test_adding_to_another_range_is_refused() -> None:
    rounds = [entries(Op.SEND, 0, 1, 0, 2, (), place=2), entries(Op.REDUCE, 0, 1, 0, 2, (0,), place=2)]
    assert "adds what belongs to [0, 2) to [2, 4)" in refusal(rounds, C.ALL_REDUCE)


def test_a_block_in_the_wrong_place_is_refused() -> None:
    one = entries(Op.SEND, [0, 1], [1, 0], [0, 2], [2, 4], ())
    said = refusal([one, one.used(Op.COPY, (0,))], C.ALL_TO_ALL)
    assert said == "rank 0 ends with what belongs to [2, 4) in [2, 4), where that of [0, 2) should be"


# -- races -------------------------------------------------------------------------------------------------------------


def test_one_shot_on_live_buffers_would_race() -> None:
    """Without the copies somebody's sum would be read for somebody's contribution."""
    rounds = list(algorithm(C.ALL_REDUCE, "one_shot").schedule(View.of(3), Layout(4)))
    live = [replace(one, after=tuple(number - 1 for number in one.after if number)) for one in rounds[1:]]
    said = refusal(live, C.ALL_REDUCE, View.of(3))
    assert "in a race with" in said
    assert "neither comes after the other" in said


def test_zero_copy_is_free_of_races_only_because_owners_are_waited_for() -> None:
    rounds = list(algorithm(C.ALL_REDUCE, "zero_copy").schedule(View.of(3), Layout(6)))
    reduced = max(number for number, one in enumerate(rounds) if one.op is Op.REDUCE)
    for number in range(reduced + 1, len(rounds), 2):
        assert rounds[number].op is Op.FETCH
        assert rounds[number].after == (reduced,)
        early = [*rounds[:number], replace(rounds[number], after=(reduced - 2,)), *rounds[number + 1 :]]
        assert "in a race with" in refusal(early, C.ALL_REDUCE, View.of(3), 6)


def test_what_is_sent_must_not_be_written_at_the_same_time() -> None:
    exchange = [*sent(0, 1, Op.REDUCE), entries(Op.SEND, 1, 0, 0, 4, ()), entries(Op.REDUCE, 1, 0, 0, 4, (2,))]
    assert "rank 1 in round 2 reads [0, 2) of rank 1 in a race with rank 1 in round 1" in refusal(
        exchange, C.ALL_REDUCE
    )


def test_a_message_orders_what_comes_before_it() -> None:
    """Rank 1 may write what rank 0 has read of it as soon as it has heard from rank 0, and not before."""
    read = [entries(Op.FETCH, 1, 0, 0, 4, ()), entries(Op.REDUCE, 1, 0, 0, 4, (0,))]
    answer = [entries(Op.SEND, 0, 1, 0, 4, (1,)), entries(Op.COPY, 0, 1, 0, 4, (2,))]
    assert not check((lambda _view, _layout: iter([*read, *answer]), C.ALL_REDUCE), View.of(2), Layout(4)).lingering

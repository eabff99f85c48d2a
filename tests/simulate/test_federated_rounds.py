"""Rounds in virtual time: who counts, who is late or lost, how long it takes, and that they go on after a restart."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import DataError
from offbeat.protocols.federated.buffered_turns import staleness_factor
from offbeat.protocols.federated.plan import ClientSpeeds, RoundPlan
from offbeat.simulate.federated import RoundOutcome, RoundProgress, VirtualRounds

SPEEDS = ClientSpeeds(seconds=10, sigma=1.0, bandwidth=1000)


def rounds(count: int, sizes: list[int], start: RoundProgress | None = None, **fields: Any) -> list[RoundOutcome]:
    plan = RoundPlan(clients=len(sizes), **fields)
    return list(islice(VirtualRounds(plan, sizes, 400, 200, 7, start), count))


PLANS = st.fixed_dictionaries(
    {"fraction": st.floats(0.05, 1)},
    optional={"deadline": st.floats(1, 60), "dropout": st.floats(0, 0.9), "speeds": st.just(SPEEDS)},
)


@given(
    fields=PLANS,
    sizes=st.lists(st.integers(0, 30), min_size=2, max_size=40).filter(any),
    more=st.one_of(st.just({}), st.just({"poisson": True}), st.floats(1, 2).map(lambda over: {"over": over})),
)
def test_every_selected_client_counts_is_late_or_is_dropped(
    fields: dict[str, Any], sizes: list[int], more: dict[str, Any]
) -> None:
    now = version = 0
    for number, outcome in enumerate(rounds(5, sizes, **fields, **more), 1):
        came = [each.client for each in outcome.participants]
        lost = [*outcome.late, *outcome.dropped]
        assert len(set(outcome.cohort)) == len(outcome.cohort)
        if not outcome.failed:
            assert sorted(came + lost) == sorted(outcome.cohort)
        assert all(sizes[client] > 0 for client in outcome.cohort)
        assert outcome.number == number
        assert outcome.started == now
        assert outcome.ended >= outcome.started
        if fields.get("deadline"):
            assert outcome.ended <= outcome.started + fields["deadline"] + 1e-9
        version += not outcome.failed
        assert outcome.version == version
        assert outcome.bytes_down == 400 * len(outcome.cohort)
        assert 200 * len(came) <= outcome.bytes_up <= 200 * len(outcome.cohort)
        now = outcome.ended


def test_a_round_ends_with_the_last_update_that_it_needs() -> None:
    sizes = [10] * 20
    for outcome in rounds(10, sizes, fraction=0.25, over=2, speeds=SPEEDS):
        arrivals = sorted(each.uploaded for each in outcome.times)
        assert len(outcome.participants) == 5
        assert len(outcome.late) == 5
        assert outcome.ended == arrivals[4]
        order = [next(t.uploaded for t in outcome.times if t.client == p.client) for p in outcome.participants]
        assert order == arrivals[:5]


def test_a_client_with_more_examples_takes_longer_and_its_link_too() -> None:
    outcome = rounds(1, [1, 3], fraction=1, speeds=ClientSpeeds(seconds=10, bandwidth=100))[0]
    times = {each.client: each for each in outcome.times}
    assert times[0].downloaded == 4  # 400 bytes.
    assert times[0].trained - times[0].downloaded == pytest.approx(5)
    assert times[1].trained - times[1].downloaded == pytest.approx(15)
    assert times[0].uploaded - times[0].trained == pytest.approx(2)
    assert outcome.ended == times[1].uploaded


def test_a_deadline_fails_a_round_that_has_too_few_updates() -> None:
    few = rounds(1, [5] * 10, fraction=1, deadline=12, fewest=9, speeds=SPEEDS)[0]
    assert few.participants == ()
    assert "a round needs 9" in few.failed
    assert few.version == 0
    assert few.late
    assert few.ended == 12


def test_poisson_rounds_without_a_client_fail_and_the_next_goes_on() -> None:
    outcomes = rounds(300, [1] * 5, fraction=0.05, poisson=True)
    empty = [outcome for outcome in outcomes if not outcome.cohort]
    assert empty
    assert all(outcome.failed == "no client was selected" for outcome in empty)
    assert outcomes[-1].version == len(outcomes) - len(empty)


BUFFERED: dict[str, Any] = {"fraction": 0.5, "buffer": 3, "speeds": SPEEDS, "dropout": 0.2, "deadline": 40}


def test_an_asynchronous_server_steps_after_so_many_updates_and_weighs_them_by_staleness() -> None:
    outcomes = rounds(200, [4] * 12, **BUFFERED)
    factors = [each.factor for outcome in outcomes for each in outcome.participants]
    assert all(len(outcome.participants) == 3 for outcome in outcomes)
    for outcome in outcomes:
        assert all(each.factor == staleness_factor(outcome.version - 1 - each.version) for each in outcome.participants)
        assert len({each.client for each in outcome.participants}) == 3
    assert max(factors) == 1
    assert min(factors) < 0.6
    assert any(outcome.late for outcome in outcomes)
    assert any(outcome.dropped for outcome in outcomes)
    assert staleness_factor(3) == 1 / math.sqrt(4)


@pytest.mark.parametrize(
    "fields", [BUFFERED, {"fraction": 0.4, "over": 1.5, "speeds": SPEEDS, "dropout": 0.3}, {"poisson": True}]
)
def test_rounds_go_on_in_another_process_as_if_nothing_had_happened(fields: dict[str, Any]) -> None:
    sizes = [3, 0, 5, 8, 2, 2, 9, 1, 4, 6]
    whole = rounds(30, sizes, **fields)
    plan = RoundPlan(clients=10, **fields)
    first = VirtualRounds(plan, sizes, 400, 200, 7)
    before = list(islice(first, 11))
    kept = msgspec.msgpack.decode(msgspec.msgpack.encode(first.progress), type=RoundProgress)
    assert before + list(islice(VirtualRounds(plan, sizes, 400, 200, 7, kept), 19)) == whole


def test_what_happens_to_a_client_does_not_depend_on_who_else_was_selected() -> None:
    few = rounds(1, [2] * 40, fraction=0.5, dropout=0.5, speeds=SPEEDS)[0]
    many = rounds(1, [2] * 40, fraction=1, dropout=0.5, speeds=SPEEDS)[0]
    lost = {t.client for t in many.times if not math.isfinite(t.uploaded)}
    assert {t.client for t in few.times if not math.isfinite(t.uploaded)} == lost & set(few.cohort)


@pytest.mark.parametrize(
    ("sizes", "fields", "words"),
    [
        ([1, 0, 0], {"fraction": 1, "fewest": 2}, "only 1 of 3 clients have examples"),
        ([1, 1, 0], {"fraction": 1, "buffer": 3}, "buffer=3"),
        ([4] * 3, {"fraction": 1, "buffer": 2, "deadline": 1e-3, "speeds": SPEEDS}, "only 0 of 3 clients can send"),
        ([1, 900, 900], {"fraction": 1, "buffer": 2, "deadline": 1.0, "speeds": ClientSpeeds(1.0)}, "only 1 of 3"),
    ],
)
def test_rounds_that_could_never_count_are_refused(sizes: list[int], fields: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        rounds(1, sizes, **fields)
    with pytest.raises(DataError, match="there are 2 parts for 3 clients"):
        VirtualRounds(RoundPlan(clients=3), np.array([1, 1]), 1, 1, 0)

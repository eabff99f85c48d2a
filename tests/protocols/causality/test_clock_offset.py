"""How far clocks are apart: the truth is within the error, and no message comes before it was sent."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.protocols.causality.clock_offset import ClockOffset, OffsetEstimate, Transfer, offsets

SEEDS = st.integers(0, 2**32)


def exchange(random: Random, truth: list[float], messages: int, slowest: float = 0.1) -> list[Transfer]:
    """Messages between machines whose clocks are ahead by so much, with delays of their own."""
    transfers: list[Transfer] = []
    for number in range(messages):
        source, target = random.sample(range(len(truth)), 2)
        delay = 0.001 + random.expovariate(1 / slowest)
        transfers.append(Transfer(source, target, number + truth[source], number + delay + truth[target]))
    return transfers


@settings(max_examples=60)
@given(SEEDS)
def test_the_truth_is_within_the_error_and_no_message_comes_before_it_was_sent(seed: int) -> None:
    random = Random(seed)
    truth = [0.0, *(random.uniform(-1e4, 1e4) for _ in range(random.randint(1, 4)))]
    transfers = exchange(random, truth, random.randint(1, 60))
    estimated = offsets(len(truth), transfers)
    for clock, estimate in enumerate(estimated):
        assert estimate.error == float("inf") or abs(estimate.seconds - truth[clock]) <= estimate.error + 1e-6
    if all(estimate.error < float("inf") for estimate in estimated):
        assert all(
            sent.received - estimated[sent.target].seconds >= sent.sent - estimated[sent.source].seconds - 1e-6
            for sent in transfers
        )


def test_what_a_link_has_shown_narrows_what_messages_show() -> None:
    transfers = [Transfer(0, 1, 0.0, 5.4), Transfer(1, 0, 6.0, 1.5)]
    (_, wide), (_, narrow) = offsets(2, transfers), offsets(2, transfers, [ClockOffset(), ClockOffset(5.0, 0.1)])
    assert (wide.seconds, wide.error) == pytest.approx((4.95, 0.45))
    assert (narrow.seconds, narrow.error) == pytest.approx((5.0, 0.1))


def test_messages_that_contradict_each_other_are_made_sense_of_with_an_error() -> None:
    transfers = [Transfer(0, 1, 0.0, 1.0), Transfer(1, 0, 2.0, 0.0), Transfer(0, 1, 10.0, 10.5)]
    _, estimate = offsets(2, transfers)
    assert 0.5 <= estimate.seconds <= 2.0
    assert estimate.error >= 0.75


def test_clocks_without_messages_in_both_directions_have_no_known_offset() -> None:
    assert offsets(3, [Transfer(0, 1, 0.0, 5.0)])[1:] == [ClockOffset(5.0), ClockOffset()]
    assert str(ClockOffset()) == "unknown"
    assert str(ClockOffset(0.0123, 0.0002)) == "+12.3 ms ± 0.2 ms"
    assert str(ClockOffset(-1234.5, 0.0002)) == "-1,234.500 s ± 0.2 ms"
    with pytest.raises(UsageError, match="0 clocks"):
        offsets(0, [])


@settings(max_examples=60)
@given(SEEDS)
def test_an_estimate_follows_a_clock_that_drifts(seed: int) -> None:
    random, estimate = Random(seed), OffsetEstimate()
    start, drift = random.uniform(-1e3, 1e3), random.uniform(-1e-4, 1e-4)

    def other(time: float) -> float:
        return time + start + drift * time

    now = 0.0
    for _ in range(200):
        now += random.uniform(0.1, 20.0)
        delay = random.uniform(0.0005, 0.05)
        if random.random() < 0.5:
            estimate.received(other(now - delay), now)
        else:
            estimate.delivered(now, other(now + delay))
            now += delay
        known = estimate.at(now)
        assert known.error == float("inf") or abs(known.seconds - (other(now) - now)) <= known.error + 1e-6
    assert known.error < 0.06

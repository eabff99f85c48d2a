"""Iterations of Sandblaster in virtual time: who says what to whom, and what that costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.draw import Scenario, timeline_of
from offbeat.errors import StrategyError
from offbeat.simulate.network import Network
from offbeat.simulate.sandblaster.iterations import IterationSetting, PlayedIterations, full_cost
from offbeat.simulate.servers.stragglers import Stragglers


def setting(**changes: object) -> IterationSetting:
    usual = {"workers": 3, "shards": 2, "portions": 8, "history": 4, "nbytes": 4000, "seconds": [1.0] * 3}
    return IterationSetting(**{**usual, **changes})  # pyright: ignore[reportArgumentType]


def test_an_iteration_takes_two_rounds_for_each_step_remembered_and_three_for_each_tried() -> None:
    commands = [_batches(PlayedIterations(setting(), 7), number) for number in range(1, 8)]
    # Asking what shards know, copying and three for the first evaluation; then as in every iteration.
    assert commands == [5 + 6, 8, 10, 12, 14, 14, 14]
    tried = [_batches(PlayedIterations(setting(trials=count), 6), 6) for count in (1, 2, 3)]
    assert tried == [14, 18, 22]


def _batches(played: PlayedIterations, iteration: int) -> int:
    sent = [each for each in played.sent[iteration] if (each.sender, each.to) == ("server 2.0", "server 0.0")]
    return len(sent)


@pytest.mark.parametrize("nbytes", [4_000, 400_000_000])
def test_no_vector_goes_to_or_from_the_coordinator_whatever_the_size_of_the_model(nbytes: int) -> None:
    small, large = ({row[:2]: row for row in full_cost(setting(nbytes=size))} for size in (4_000, nbytes))
    for pair, row in large.items():
        assert row.headers == small[pair].headers
        assert (row.vectors == 0) == ("coordinator" in pair)
    # Parameters for the evaluation and after it, for every worker; a gradient for each portion, some of them twice.
    assert large["shard", "worker"].vectors == 6 * nbytes
    assert 8 <= large["worker", "shard"].vectors / nbytes <= 8 + 3


def test_more_shards_and_portions_cost_the_coordinator_more_messages() -> None:
    def messages(**changes: object) -> int:
        return sum(row.messages for row in full_cost(setting(**changes)) if "coordinator" in row[:2])

    usual = messages()
    assert messages(shards=4) - usual == 2 * 2 * 14  # Each batch of commands, and the answer to it.
    assert messages(portions=16) - usual == 2 * 8


def test_an_iteration_is_drawn() -> None:
    scenario = Scenario((0, 1, 2), Network.parse("10Gbit,50us", None), 10_000_000, None, Stragglers())
    timeline = timeline_of("sandblaster(shards=2, portions=8)", scenario)
    assert timeline.lanes == ("coordinator", "shard 0", "shard 1", "worker 0", "worker 1", "worker 2")
    assert {each.lane for each in timeline.intervals} == {3, 4, 5}
    assert all(message.nbytes < 1000 for message in timeline.messages if 0 in (message.source, message.target))
    assert any(message.label.startswith("program \\x d step. x + step * d") for message in timeline.messages)
    with pytest.raises(StrategyError, match="at most 1,000 portions"):
        timeline_of("sandblaster(portions=5000)", scenario)


def test_the_page_has_the_costs_that_the_machines_have() -> None:
    page = (Path(__file__).parents[2] / "docs/sandblaster.md").read_text()
    rows = {row[:2]: row for row in full_cost(setting(history=10, nbytes=10_000_000))}
    names = {"coordinator": "coordinator", "shard": "shards", "worker": "workers"}
    for (sender, receiver), row in rows.items():
        vectors = f"{row.vectors // 10**6} MB " if row.vectors else ""
        line = f"| {names[sender]} | {names[receiver]} | {row.messages} | {row.headers:,} | {vectors}|"
        assert line in page, line

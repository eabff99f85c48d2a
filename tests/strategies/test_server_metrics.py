"""What workers of a run with servers have seen: brought together, and told in lines."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from offbeat.errors import StrategyError
from offbeat.protocols.servers.messages import PushReply, Status, place_of, server_name
from offbeat.run.drive import Result
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.report import ages_in_words, served_in_words
from offbeat.strategies import parse
from offbeat.strategies.servers.link import OLDEST, PushRecord


class Meeting:
    """Stands in for a group: the others' rows come first, and all are padded with zeros to one length."""

    def __init__(self, rank: int, others: list[list[float]]) -> None:
        self.rank, self.rows = rank, others

    def gather(self, values: list[int], what: str) -> Tensor:
        self.rows.append([float(value) for value in values])
        width = max(map(len, self.rows))
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in self.rows])


def record(pushes: dict[Status, int], ages: dict[int, int]) -> PushRecord:
    seen = PushRecord()
    for status, count in pushes.items():
        for _ in range(count):
            seen.answered(0, PushReply(number=0, version=0, clock=0, epoch=0, status=status), counts=True)
    for age, count in ages.items():
        for _ in range(count):
            seen.read(age)
    return seen


def test_an_account_goes_to_a_meeting_as_a_row_of_numbers() -> None:
    rows: list[list[float]] = []
    links = {(0, 0): (80, 160), (1, 2): (8, 16)}
    record({"applied": 3, "refused": 1}, {0: 2, 2: 1}).accounts(cast("Group", Meeting(0, rows)), 1.5, links)
    other = record({"applied": 4, "late": 2}, {1: 5})
    assert other.accounts(cast("Group", Meeting(2, rows)), 0.25, {}) == {
        "pushes": {"applied": 7, "late": 2, "refused": 1},
        "staleness": {"0": 2, "1": 5, "2": 1},
        "waits": {"worker 0": 1.5, "worker 2": 0.25},
        "links": {
            "worker 0": {"server 0.0": {"sent": 80, "received": 160}, "server 1.2": {"sent": 8, "received": 16}},
            "worker 2": {},
        },
    }


def test_what_is_very_old_is_counted_together() -> None:
    seen = record({}, {OLDEST: 1, OLDEST + 7: 2, 10**9: 4})
    assert seen.accounts(cast("Group", Meeting(0, [])), 0.0, {})["staleness"] == {str(OLDEST): 7}
    whole = seen.staleness(cast("Group", Meeting(0, [])))
    assert whole == {str(OLDEST): 1, str(OLDEST + 7): 2, str(10**9): 4}


def test_servers_are_known_by_their_names() -> None:
    assert place_of(server_name(3, 12)) == (3, 12)
    assert place_of("worker 1") is place_of("coordinator") is None


def test_the_summary_says_who_was_refused_who_has_waited_and_what_went_over_links() -> None:
    links = {f"worker {rank}": {"received": 1000 * (rank + 1), "sent": 500_000, "lent": 0} for rank in range(3)}
    links["coordinator"] = {"received": 0, "sent": 0, "lent": 0}
    shard = {"served_by": "server 0.1", "pushes": {"applied": 9, "refused": 2}, "links": links}
    lines = dict(
        served_in_words(
            Result(
                strategy="server",
                workers=3,
                task="curve",
                run=Path("runs/latest"),
                servers=[shard, {**shard, "served_by": "server 1.0"}],
                refusals=["worker 1: 1 of 4 numbers are NaN or inf"],
                staleness={"0": 3, "1": 1},
                waits=[0.5, 0.25],
                died=["worker 0", "server 0.0"],
                joined=[],
            )
        )
    )
    assert lines["servers"] == "pushes 18 applied, 4 refused; reads 0.25 steps old (most 1)"
    assert lines["refused"].startswith("worker 1: 1 of 4 numbers are NaN or inf; 3 more")
    assert lines["reads by age"] == "0: 3, 1: 1"
    assert lines["waited"] == "worker 1 0.50 s, worker 2 0.25 s"
    assert lines["links"].startswith("worker 2 to server 0.1 3.0 kB, back 0.5 MB; worker 2 to server 1.0")
    assert lines["links"].endswith("2 more in run.json")


def test_old_reads_are_told_together() -> None:
    assert ages_in_words(dict.fromkeys(range(20), 1)).endswith("7: 1, older: 12")
    assert ages_in_words({0: 1000, 1: 0, 2: 1}) == "0: 1,000, 2: 1"


@pytest.mark.parametrize("tolerance", ["staleness_scaling=True", "delay_compensation=0.1"])
@pytest.mark.parametrize("consistency", ["bsp", "drop_slowest(1)", "deadline(0.5)"])
def test_tolerance_of_delays_is_refused_where_nothing_is_delayed(consistency: str, tolerance: str) -> None:
    with pytest.raises(StrategyError, match="no old gradient is applied: use ssp or asp"):
        parse(f"server(consistency={consistency}, {tolerance})")

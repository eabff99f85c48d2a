"""What workers of a run with servers have seen: brought together, and told in lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.errors import StrategyError
from offbeat.protocols.servers.messages import place_of, server_name
from offbeat.run.drive import Result
from offbeat.runtime.run.report import ages_in_words, served_in_words
from offbeat.strategies import parse
from offbeat.strategies.servers.link import OLDEST, WorkerStatistics, together

ONE = WorkerStatistics(0, 1.5, {"applied": 3, "refused": 1}, {0: 2, 2: 1}, {(0, 0): (80, 160), (1, 2): (8, 16)})
OTHER = WorkerStatistics(2, 0.25, {"applied": 4, "late": 2}, {1: 5})


def test_an_account_goes_to_a_meeting_as_a_row_of_numbers() -> None:
    rows = [ONE.row(), OTHER.row()]
    width = max(map(len, rows))
    told = together(WorkerStatistics.of([*row, *[0.0] * (width - len(row))]) for row in rows)
    assert told == {
        "pushes": {"applied": 7, "late": 2, "refused": 1},
        "staleness": {"0": 2, "1": 5, "2": 1},
        "waits": {"worker 0": 1.5, "worker 2": 0.25},
        "links": {
            "worker 0": {"server 0.0": {"sent": 80, "received": 160}, "server 1.2": {"sent": 8, "received": 16}},
            "worker 2": {},
        },
    }


def test_what_is_very_old_is_counted_together() -> None:
    row = WorkerStatistics(0, 0.0, {}, {OLDEST: 1, OLDEST + 7: 2, 10**9: 4}).row()
    assert together([WorkerStatistics.of(row)])["staleness"] == {str(OLDEST): 7}


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

"""A timeline as rows: the rounds or messages of it, and what passed each port."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from offbeat.simulate.timeline import Activity, RoundSummary, Timeline
from offbeat.simulate.units import seconds_in_words, size_in_words


class PortRow(NamedTuple):
    """What a participant sent, received, computed and waited."""

    name: str
    sent: int
    received: int
    sending: float
    """Seconds that its port out was held."""
    receiving: float
    computing: float
    waiting: float


def port_rows(timeline: Timeline) -> list[PortRow]:
    """A row for each participant."""
    rows: list[PortRow] = []
    for lane, name in enumerate(timeline.lanes):
        out = [one for one in timeline.messages if one.source == lane]
        into = [one for one in timeline.messages if one.target == lane and not math.isnan(one.arrives)]
        spent = {
            activity: sum(
                one.end - one.begin for one in timeline.intervals if (one.lane, one.activity) == (lane, activity)
            )
            for activity in Activity
        }
        rows.append(
            PortRow(
                name,
                sum(one.nbytes for one in out),
                sum(one.nbytes for one in into),
                sum(one.left - one.leaves for one in out),
                sum(one.came - one.comes for one in into),
                spent[Activity.COMPUTE],
                spent[Activity.WAIT],
            )
        )
    return rows


def round_rows(timeline: Timeline) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Names of columns, and the rows below: rounds of a schedule, or messages where there are no rounds."""
    if timeline.rounds:
        rows = [
            (
                str(one.number),
                one.op.value,
                _pairs(one),
                _bytes(one),
                seconds_in_words(one.begin),
                seconds_in_words(one.end),
            )
            for one in timeline.rounds
        ]
        return ("round", "op", "who", "bytes each", "begins", "ends"), rows
    lanes = timeline.lanes
    rows = [
        (
            seconds_in_words(one.leaves),
            f"{lanes[one.source]} → {lanes[one.target]}",
            one.label,
            size_in_words(one.nbytes) if one.nbytes else "",
            "lost" if math.isnan(one.arrives) else seconds_in_words(one.arrives),
        )
        for one in sorted(timeline.messages, key=lambda one: one.leaves)
    ]
    return ("leaves", "who", "what", "bytes", "arrives"), rows


def _pairs(one: RoundSummary, shown: int = 4) -> str:
    if all(source == target for source, target in one.pairs):
        ranks = [source for source, _ in one.pairs]
        together = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
        return f"{ranks[0]} to {ranks[-1]}" if together else _listed([str(rank) for rank in ranks], 2 * shown)
    return _listed([f"{source}→{target}" for source, target in one.pairs], shown)


def _listed(words: list[str], shown: int) -> str:
    more = f" … {len(words) - shown} more" if len(words) > shown else ""
    return ", ".join(words[:shown]) + more


def _bytes(one: RoundSummary) -> str:
    if not one.largest:
        return ""
    if size_in_words(one.smallest) == size_in_words(one.largest):
        return size_in_words(one.largest)
    return f"{size_in_words(one.smallest)} to {size_in_words(one.largest)}"


def plain(timeline: Timeline) -> dict[str, Any]:
    """All of it, as plain data for JSON."""
    return {
        "title": timeline.title,
        "seconds": timeline.end,
        "lanes": list(timeline.lanes),
        "hosts": list(timeline.hosts),
        "rounds": [
            {**one._asdict(), "op": one.op.value, "pairs": [list(pair) for pair in one.pairs]}
            for one in timeline.rounds
        ],
        "messages": [one._asdict() for one in timeline.messages],
        "intervals": [{**one._asdict(), "activity": one.activity.value} for one in timeline.intervals],
        "ports": [row._asdict() for row in port_rows(timeline)],
    }

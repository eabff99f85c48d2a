"""A timeline as rows: its rounds or messages, and the traffic of each port."""

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
    """Seconds that its outgoing port was busy."""
    receiving: float
    computing: float
    waiting: float


def port_rows(timeline: Timeline) -> list[PortRow]:
    """A row for each participant."""
    rows: list[PortRow] = []
    for lane, name in enumerate(timeline.lanes):
        out = [each for each in timeline.messages if each.source == lane]
        into = [each for each in timeline.messages if each.target == lane and not math.isnan(each.arrives)]
        busy = [each for each in timeline.intervals if each.lane == lane]
        computing = sum(each.end - each.begin for each in busy if each.activity.computes)
        waiting = sum(each.end - each.begin for each in busy if each.activity is Activity.WAIT)
        sent, received = (sum(each.nbytes for each in part) for part in (out, into))
        sending = sum(each.left - each.leaves for each in out)
        receiving = sum(each.came - each.comes for each in into)
        rows.append(PortRow(name, sent, received, sending, receiving, computing, waiting))
    return rows


def round_rows(timeline: Timeline) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Column names and rows: rounds of a schedule, or messages if there are no rounds."""
    if timeline.rounds:
        rows = [
            (
                str(each.number),
                each.op.value,
                _pairs(each),
                _bytes(each),
                *map(seconds_in_words, (each.begin, each.end)),
            )
            for each in timeline.rounds
        ]
        if any(each.what for each in timeline.rounds):  # Which also says what kind of round it is.
            columns = ("round", "what", "who", "bytes", "begins", "ends")
            whats = [each.what for each in timeline.rounds]
            return columns, [(row[0], what, *row[2:]) for row, what in zip(rows, whats, strict=True)]
        return ("round", "op", "who", "bytes each", "begins", "ends"), rows
    lanes = timeline.lanes
    rows = [
        (
            seconds_in_words(each.leaves),
            f"{lanes[each.source]} → {lanes[each.target]}",
            each.label,
            size_in_words(each.nbytes) if each.nbytes else "",
            "lost" if math.isnan(each.arrives) else seconds_in_words(each.arrives),
        )
        for each in sorted(timeline.messages, key=lambda each: each.leaves)
    ]
    return ("leaves", "who", "what", "bytes", "arrives"), rows


def _pairs(each: RoundSummary, shown: int = 4) -> str:
    if all(source == target for source, target in each.pairs):
        ranks = [source for source, _ in each.pairs]
        together = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
        return f"{ranks[0]} to {ranks[-1]}" if together else _listed([str(rank) for rank in ranks], 2 * shown)
    return _listed([f"{source}→{target}" for source, target in each.pairs], shown)


def _listed(words: list[str], shown: int) -> str:
    more = f" … {len(words) - shown} more" if len(words) > shown else ""
    return ", ".join(words[:shown]) + more


def _bytes(each: RoundSummary) -> str:
    if not each.largest:
        return ""
    if size_in_words(each.smallest) == size_in_words(each.largest):
        return size_in_words(each.largest)
    return f"{size_in_words(each.smallest)} to {size_in_words(each.largest)}"


def plain(timeline: Timeline) -> dict[str, Any]:
    """The whole timeline as plain data for JSON."""
    return {
        "title": timeline.title,
        "seconds": timeline.end,
        "lanes": list(timeline.lanes),
        "hosts": list(timeline.hosts),
        "rounds": [
            {**each._asdict(), "op": each.op.value, "pairs": [list(pair) for pair in each.pairs]}
            for each in timeline.rounds
        ],
        "messages": [each._asdict() for each in timeline.messages],
        "intervals": [{**each._asdict(), "activity": each.activity.value} for each in timeline.intervals],
        "ports": [row._asdict() for row in port_rows(timeline)],
        "notes": list(timeline.notes),
        "costs": [row._asdict() for row in timeline.costs],
    }

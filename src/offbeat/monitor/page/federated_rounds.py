"""The rounds of a federated run as the page draws them: a row each, with a line for each client and its phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

SHOWN: Final = 100
"""Rounds that are drawn, the last ones."""
CLIENTS: Final = 24
"""Clients that are drawn of a round: those that took longest."""
PHASES: Final = ("download", "training", "upload")
_MARKS: Final = ("asked", "downloaded", "trained", "uploaded")
_CLOSE: Final = 1e-3


def round_rows(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for the last rounds of a log; of a round that was repeated after a resume, the last counts."""
    latest = {line["number"]: line for line in lines if isinstance(line.get("number"), int)}
    return [_row(latest[number]) for number in sorted(latest)[-SHOWN:]]


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    started, ended = float(line.get("started") or 0.0), float(line.get("ended") or 0.0)
    came = {each["client"] for each in line.get("participants", ())}
    late, dropped = set(line.get("late", ())), set(line.get("dropped", ()))
    clients = [_client(times, ended, came, late, dropped) for times in line.get("times", ())]
    clients.sort(key=lambda client: (-client["until"], client["client"]))
    return {
        "number": line["number"],
        "seconds": ended - started,
        "from": min([started, *(client["asked"] for client in clients)]) - started,
        "clients": [_shifted(client, started) for client in clients[:CLIENTS]],
        "selected": len(line.get("cohort", ())),
        "updates": int(line.get("updates") or 0),
        "late": len(late),
        "dropped": len(dropped),
        "refused": int(line.get("refused") or 0),
        "failed": str(line.get("failed") or ""),
        "waited": _waited(clients, ended, line.get("deadline", ended)),
    }


def _client(
    times: Mapping[str, Any], ended: float, came: set[int], late: set[int], dropped: set[int]
) -> dict[str, Any]:
    """A client's line: pieces of known phases, or one of an unknown phase, until the round closed."""
    number = times["client"]
    fate = "late" if number in late else "dropped" if number in dropped else "came" if number in came else "refused"
    at = [times.get(mark) for mark in _MARKS]
    asked = float(at[0] or 0.0)
    lost, uploaded = times.get("lost"), at[3]
    until = min(ended, float(lost if lost is not None else uploaded if uploaded is not None else ended))
    pieces: list[tuple[str, float, float]] = []
    if at[1] is None:  # The server of real clients sees only when updates come.
        pieces.append(("at work", asked, until))
    else:
        reached = asked
        for phase, mark in zip(PHASES, at[1:], strict=True):
            stop = min(until, until if mark is None else float(mark))
            if stop > reached:
                pieces.append((phase, reached, stop))
            reached = max(reached, stop)
    return {"client": number, "fate": fate, "asked": asked, "until": until, "pieces": pieces}


def _shifted(client: Mapping[str, Any], started: float) -> dict[str, Any]:
    """With times counted from the start of its round."""
    pieces = [(phase, begin - started, stop - started) for phase, begin, stop in client["pieces"]]
    return {"client": client["client"], "fate": client["fate"], "pieces": pieces, "until": client["until"] - started}


def _waited(clients: Sequence[Mapping[str, Any]], ended: float, deadline: float | None) -> str:
    """Whom the round waited for: who came or was given up last, or the end of waiting."""
    open_until = ended - max(_CLOSE, _CLOSE * abs(ended))
    last = max((client for client in clients if client["fate"] != "late"), key=_until, default=None)
    if last is not None and last["until"] >= open_until:
        return f"client {last['client']}"
    if any(client["fate"] == "late" for client in clients):
        return "the end of patience" if deadline is None else "the deadline"
    silent = max((client for client in clients if client["fate"] == "dropped"), key=_until, default=None)
    return "" if silent is None else f"client {silent['client']}, silent"


def _until(client: Mapping[str, Any]) -> float:
    return client["until"]

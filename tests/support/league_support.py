"""Leagues without processes: entries as runs would leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offbeat.league import League
from offbeat.league._contestants import Contestant, EntryReason
from offbeat.league._records import Entry, Evaluation
from offbeat.league._settings import LeagueSettings

KINDS = {"input": 0.05, "compute": 0.5, "communicate": 0.3, "wait": 0.0, "evaluate": 0.1, "other": 0.05}


def contestants(*names: str) -> tuple[Contestant, ...]:
    """Stock DDP, its copy, these, and one worker alone."""
    return (
        Contestant("ddp", "ddp", 2, EntryReason.baseline),
        Contestant("ddp, again", "ddp", 2, EntryReason.again),
        *(Contestant(name, name, 2) for name in names),
        Contestant("single", "single", 1, EntryReason.single),
    )


def entry(name: str, seed: int, seconds: float | None, steps: int = 100, **more: Any) -> Entry:
    """A run that reached its target after so many seconds, or missed it."""
    spent = 5.0 if seconds is None else seconds
    curve = [
        Evaluation(
            step=steps * i // 4,
            samples=64 * steps * i // 4,
            seconds=spent * i / 4,
            bytes_sent=1000 * i,
            score=0.8 + (0.05 if seconds else 0.04) * i,
            evaluate_seconds=0.1 * spent * i / 4,
        )
        for i in (1, 2, 3, 4)
    ]
    known: dict[str, Any] = {
        "factor": 1.0,
        "tuning": False,
        "wall_seconds": spent + 0.3,
        "target": "score=0.97",
        "seconds_to_target": seconds,
        "steps_to_target": None if seconds is None else steps,
        "steps": steps,
        "samples": 64 * steps,
        "seconds": spent,
        "startup_seconds": 0.2,
        "core_seconds": 2 * spent,
        "bytes_sent": 4000,
        "seconds_by_kind": {kind: share * spent for kind, share in KINDS.items()},
        "score": 0.98,
        "best_score": 0.98,
        "test_score": 0.96,
        "curve": curve,
    }
    return Entry(name, seed, **(known | more))


def league(times: dict[str, list[float | None]], **more: Any) -> League:
    """A league of these seconds to the target, seed by seed."""
    names = [name for name in times if name not in ("ddp", "ddp, again", "single")]
    everybody = tuple(one for one in contestants(*names) if one.name in times)
    task = {"task": {"source": "offbeat.tasks.digits", "name": None, "arguments": {}}}
    count = len(next(iter(times.values())))
    asked = LeagueSettings(task, tuple(names), 2, seeds=count, tune=(1.0,), target="0.97")
    known = {"offbeat": "0", "torch": "2", "numpy": "2", "python": "3", "processor": "p", "cores": 2, "platform": "l"}
    facts = {
        "commit": "abc+",
        "environment": known | {"started": "now"},
        "data": {"hash": "12ab", "of": "the tensors"},
        "source": None,
        "crowded": None,
    }
    entries = [entry(name, seed, seconds) for name, own in times.items() for seed, seconds in enumerate(own)]
    held: dict[str, Any] = {"refused": {}, "entries": tuple(entries)} | more
    return League(Path("runs/league"), asked.plain(), facts, everybody, **held)

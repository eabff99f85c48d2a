"""`offbeat explain`: what the events of a run say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console

from offbeat.monitor import EXIT_CODES, Blame, Judge, Recorded, Verdict, blame, recorded
from offbeat.runtime.certificates import REFUSED, check
from offbeat.runtime.records import RunFolder


def explain_run(path: Path, as_json: bool) -> None:
    """Print the verdict on a run, who waited for whom at its end, and what each worker cost the others."""
    folder = RunFolder.open(path)
    events = recorded(folder.path)
    known = folder.read()
    judge = Judge()
    for rank, stamps in events.stamps.items():
        judge.feed(rank, stamps)
    verdict = _verdict(known, judge)
    waiting = [] if known.get("state", "").startswith("finished") else judge.waiting()
    blamed = blame(events.stamps)
    if as_json:
        print(json.dumps(_plain(folder, known, verdict, waiting, blamed, events)))
    else:
        _print(verdict, waiting, blamed, events)
    raise typer.Exit(0 if verdict is None else EXIT_CODES[verdict.kind])


def check_checkpoint(path: Path, as_json: bool) -> None:
    """Print whether a checkpoint is whole and true; ends with `REFUSED` if it is not."""
    found = check(path)
    if as_json:
        print(json.dumps({**msgspec.to_builtins(found), "good": not found.faults}))
    else:
        console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
        for fault in found.faults:
            console.print(f"refused: {fault}")
        if not found.faults:
            console.print(found.words)
    raise typer.Exit(REFUSED if found.faults else 0)


def _verdict(known: dict[str, Any], judge: Judge) -> Verdict | None:
    """What was found while the run went, which knew who had ended; otherwise what its events say by themselves."""
    found = known.get("verdict")
    if found is None:
        return judge.final()
    return Verdict(found["kind"], found["message"], stacks=found["stacks"])


def _plain(
    folder: RunFolder,
    known: dict[str, Any],
    verdict: Verdict | None,
    waiting: list[str],
    blamed: list[Blame],
    events: Recorded,
) -> dict[str, Any]:
    return {
        "run": str(folder.path),
        "state": known.get("state"),
        "verdict": None if verdict is None else verdict.plain(),
        "waiting": waiting,
        "stragglers": [one.worker for one in blamed if one.straggler],
        "blame": [one.plain() for one in blamed],
        "events": {f"worker {rank}": len(stamps) for rank, stamps in events.stamps.items()},
        "dropped": events.dropped,
    }


def _print(verdict: Verdict | None, waiting: list[str], blamed: list[Blame], events: Recorded) -> None:
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    console.print("healthy: nobody waited in vain." if verdict is None else str(verdict))
    if verdict is None and waiting:
        console.print("When it ended:")
        for line in waiting:
            console.print(f"  {line}")
    stragglers = [one for one in blamed if one.straggler]
    for one in stragglers:
        console.print(f"straggler: {one}")
    if blamed and not stragglers:
        console.print("No straggler. Last to arrive:")
        for one in blamed:
            console.print(f"  {one.worker}: in {one.last:,} of {one.collectives:,}; the others lost {one.lost:.3g} s")
    count = sum(map(len, events.stamps.values()))
    dropped = f"; {events.dropped:,} older ones were written over" if events.dropped else ""
    console.print(f"From {count:,} events of {len(events.stamps)} workers{dropped}.")

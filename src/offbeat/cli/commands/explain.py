"""`offbeat explain`: what the events of a run say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import typer

from offbeat.cli.output import PlainConsole, print_json
from offbeat.monitor import (
    EXIT_CODES,
    NAN,
    STRAGGLER,
    Blame,
    Held,
    Judge,
    RecordedRun,
    Staleness,
    Unfit,
    Verdict,
    blame,
    held_up,
    recorded,
    staleness,
    unfit,
)
from offbeat.runtime.run.folder import FINISHED, RunFolder, strategy_of
from offbeat.runtime.state.certificates import REFUSED, check

MOST: Final = 10
"""Of numbers that were not finite so many are told one by one."""


def explain_run(path: Path, as_json: bool, more: Mapping[str, Any] | None = None) -> None:
    """Print the verdict on a run, who waited for whom at its end, and what each worker cost the others.

    `more` is added to what is printed as JSON.
    """
    folder = RunFolder.open(path)
    events = recorded(folder.path)
    known = folder.read()
    judge = Judge()
    for stamps in events.servers.values():
        judge.feed_server(stamps)
    for rank, stamps in events.stamps.items():
        judge.feed(rank, stamps)
    sick = unfit(events.stamps, events.servers)
    blamed = blame(events.stamps, events.servers, events.queues)
    verdict = _verdict(known, judge, sick) or _slowed(blamed)
    waiting = [] if known.get("state") in FINISHED else judge.waiting()
    found = _Found(
        verdict,
        waiting,
        blamed,
        staleness(events.stamps),
        held_up(events.stamps),
        sick,
    )
    if as_json:
        print_json(_plain(folder, known, found, events) | dict(more or {}))
    else:
        _print(found, events)
    raise typer.Exit(0 if verdict is None else EXIT_CODES.get(verdict.kind, 1))


def check_checkpoint(path: Path, as_json: bool) -> None:
    """Print whether a checkpoint is whole and true; ends with `REFUSED` if it is not."""
    found = check(path)
    if as_json:
        print_json({**msgspec.to_builtins(found), "good": not found.faults})
    else:
        console = PlainConsole()
        for fault in found.faults:
            console.print(f"refused: {fault}")
        if not found.faults:
            console.print(found.words)
    raise typer.Exit(REFUSED if found.faults else 0)


def _verdict(known: dict[str, Any], judge: Judge, sick: list[Unfit]) -> Verdict | None:
    """What was found while the run went, which knew who had ended; otherwise what its events say by themselves."""
    found = known.get("verdict")
    if found is None:
        told = Verdict(NAN, f"{sick[0]}.") if sick else None
        return judge.final() or judge.served.deaths() or told
    return Verdict(found["kind"], found["message"], stacks=found.get("stacks", {}))


def _slowed(blamed: list[Blame]) -> Verdict | None:
    slow = [one for one in blamed if one.straggler]
    return Verdict(STRAGGLER, f"{'; '.join(map(str, slow))}.", who=tuple(one.worker for one in slow)) if slow else None


class _Found(NamedTuple):
    """What the events of a run say."""

    verdict: Verdict | None
    waiting: list[str]
    blamed: list[Blame]
    staleness: list[Staleness]
    held: list[Held]
    unfit: list[Unfit]


def _plain(folder: RunFolder, known: dict[str, Any], found: _Found, events: RecordedRun) -> dict[str, Any]:
    return {
        "run": str(folder.path),
        "state": known.get("state"),
        "strategy": strategy_of(known),
        "verdict": None if found.verdict is None else found.verdict.plain(),
        "waiting": found.waiting,
        "stragglers": [one.worker for one in found.blamed if one.straggler],
        "blame": [one.plain() for one in found.blamed],
        "staleness": {one.worker: {str(steps): count for steps, count in one.reads.items()} for one in found.staleness},
        "held_up": msgspec.to_builtins(found.held),
        "unfit": msgspec.to_builtins(found.unfit),
        "events": {f"worker {rank}": len(stamps) for rank, stamps in events.stamps.items()}
        | {name: len(stamps) for name, stamps in events.servers.items()},
        "dropped": events.dropped,
    }


def _print(found: _Found, events: RecordedRun) -> None:
    console = PlainConsole()
    console.print("healthy: nobody waited in vain." if found.verdict is None else str(found.verdict))
    if (found.verdict is None or found.verdict.kind == STRAGGLER) and found.waiting:
        console.print("When it ended:")
        for line in found.waiting:
            console.print(f"  {line}")
    for one in found.unfit[:MOST]:
        console.print(f"not finite: {one}.")
    if len(found.unfit) > MOST:
        console.print(f"not finite: {len(found.unfit) - MOST:,} times more.")
    _print_blame(found, console)
    for one in found.held:
        console.print(f"held up: {one}.")
    if found.staleness:
        console.print("Steps by which what was read was old:")
        for one in found.staleness:
            console.print(f"  {one}")
    count = sum(map(len, (*events.stamps.values(), *events.servers.values())))
    dropped = f"; {events.dropped:,} older ones were written over" if events.dropped else ""
    of_servers = f" and {len(events.servers)} servers" if events.servers else ""
    console.print(f"From {count:,} events of {len(events.stamps)} workers{of_servers}{dropped}.")


def _print_blame(found: _Found, console: PlainConsole) -> None:
    stragglers = [one for one in found.blamed if one.straggler]
    if found.verdict is not None and found.verdict.kind != STRAGGLER:
        for one in stragglers:
            console.print(f"straggler: {one}.")
    if found.blamed and not stragglers:
        console.print("No straggler. Last to arrive:")
        for one in found.blamed:
            console.print(f"  {one.worker}: in {one.last:,} of {one.steps:,}; {one.losses}")

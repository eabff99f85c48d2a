"""`offbeat explain`: the verdict on a recorded run, stragglers and staleness, in words or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import typer

from offbeat.cli.output import print_json, print_plain
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
"""How many NaN or infinite numbers are listed."""


def explain_run(path: Path, as_json: bool, more: Mapping[str, Any] | None = None) -> None:
    """Print the verdict on a run, who waited for whom at its end, and what each worker cost the others.

    `more` is added to what is printed as JSON.
    """
    folder = RunFolder.open(path)
    events = recorded(folder.path)
    record = folder.read()
    judge = Judge()
    for stamps in events.servers.values():
        judge.feed_server(stamps)
    for rank, stamps in events.stamps.items():
        judge.feed(rank, stamps)
    nonfinite = unfit(events.stamps, events.servers)
    blamed = blame(events.stamps, events.servers, events.queues)
    verdict = _verdict(record, judge, nonfinite) or _slowed(blamed)
    waiting = [] if record.get("state") in FINISHED else judge.waiting()
    findings = _Findings(verdict, waiting, blamed, staleness(events.stamps), held_up(events.stamps), nonfinite)
    if as_json:
        print_json(_plain(folder, record, findings, events) | dict(more or {}))
    else:
        _print(findings, events)
    raise typer.Exit(0 if verdict is None else EXIT_CODES.get(verdict.kind, 1))


def check_checkpoint(path: Path, as_json: bool) -> None:
    """Print whether a checkpoint is complete and consistent; the exit code is `REFUSED` if it is not."""
    result = check(path)
    if as_json:
        print_json({**msgspec.to_builtins(result), "good": not result.faults})
    else:
        for line in [f"refused: {fault}" for fault in result.faults] or [result.words]:
            print_plain(line)
    raise typer.Exit(REFUSED if result.faults else 0)


def _verdict(record: dict[str, Any], judge: Judge, nonfinite: list[Unfit]) -> Verdict | None:
    """The verdict reached during the run, which knew which workers had ended; otherwise what the events alone show."""
    verdict = record.get("verdict")
    if verdict is None:
        fallback = Verdict(NAN, f"{nonfinite[0]}.") if nonfinite else None
        return judge.final() or judge.served.deaths() or fallback
    return Verdict(verdict["kind"], verdict["message"], stacks=verdict.get("stacks", {}))


def _slowed(blamed: list[Blame]) -> Verdict | None:
    slow = [entry for entry in blamed if entry.straggler]
    who = tuple(entry.worker for entry in slow)
    return Verdict(STRAGGLER, f"{'; '.join(map(str, slow))}.", who=who) if slow else None


class _Findings(NamedTuple):
    """What the events of a run show."""

    verdict: Verdict | None
    waiting: list[str]
    blamed: list[Blame]
    staleness: list[Staleness]
    held: list[Held]
    unfit: list[Unfit]


def _plain(folder: RunFolder, record: dict[str, Any], findings: _Findings, events: RecordedRun) -> dict[str, Any]:
    return {
        "run": str(folder.path),
        "state": record.get("state"),
        "strategy": strategy_of(record),
        "verdict": None if findings.verdict is None else findings.verdict.plain(),
        "waiting": findings.waiting,
        "stragglers": [entry.worker for entry in findings.blamed if entry.straggler],
        "blame": [entry.plain() for entry in findings.blamed],
        "staleness": {
            entry.worker: {str(steps): count for steps, count in entry.reads.items()} for entry in findings.staleness
        },
        "held_up": msgspec.to_builtins(findings.held),
        "unfit": msgspec.to_builtins(findings.unfit),
        "events": {f"worker {rank}": len(stamps) for rank, stamps in events.stamps.items()}
        | {name: len(stamps) for name, stamps in events.servers.items()},
        "dropped": events.dropped,
    }


def _print(findings: _Findings, events: RecordedRun) -> None:
    print_plain("healthy: nobody waited in vain." if findings.verdict is None else str(findings.verdict))
    if (findings.verdict is None or findings.verdict.kind == STRAGGLER) and findings.waiting:
        print_plain("When it ended:")
        for line in findings.waiting:
            print_plain(f"  {line}")
    for entry in findings.unfit[:MOST]:
        print_plain(f"not finite: {entry}.")
    if len(findings.unfit) > MOST:
        print_plain(f"not finite: {len(findings.unfit) - MOST:,} times more.")
    _print_blame(findings)
    for entry in findings.held:
        print_plain(f"held up: {entry}.")
    if findings.staleness:
        print_plain("Staleness of reads, in steps:")
        for entry in findings.staleness:
            print_plain(f"  {entry}")
    count = sum(map(len, (*events.stamps.values(), *events.servers.values())))
    dropped = f"; {events.dropped:,} older ones were overwritten" if events.dropped else ""
    of_servers = f" and {len(events.servers)} servers" if events.servers else ""
    print_plain(f"From {count:,} events of {len(events.stamps)} workers{of_servers}{dropped}.")


def _print_blame(findings: _Findings) -> None:
    stragglers = [entry for entry in findings.blamed if entry.straggler]
    if findings.verdict is not None and findings.verdict.kind != STRAGGLER:
        for entry in stragglers:
            print_plain(f"straggler: {entry}.")
    if findings.blamed and not stragglers:
        print_plain("No straggler. Last to arrive:")
        for entry in findings.blamed:
            print_plain(f"  {entry.worker}: in {entry.last:,} of {entry.steps:,}; {entry.losses}")

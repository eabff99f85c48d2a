"""`offbeat explain`: the verdict on a recorded run or on any program's log with vector clocks, in words or as JSON."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import typer
from msgspec import to_builtins

from offbeat import monitor
from offbeat.cli.options import ExplainOptions, ExplainTarget, refuse
from offbeat.cli.output import print_json, print_plain
from offbeat.errors import UsageError
from offbeat.monitor import (
    NAN,
    STRAGGLER,
    Blame,
    Held,
    Judge,
    RecordedRun,
    Staleness,
    Unfit,
    Verdict,
    has_events,
    recorded,
)
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.cuts import moment, parse_cut, window
from offbeat.monitor.diagram.export import export, kind_of
from offbeat.monitor.diagram.svg import check_name, save
from offbeat.monitor.foreign_log import account
from offbeat.monitor.predicates import Possibilities, Predicate, predicate
from offbeat.monitor.replay import DELAY, check_rule, replay
from offbeat.protocols.causality.deadlock import deadlock, waits
from offbeat.protocols.causality.shiviz import parse_all
from offbeat.run.round_advice import explained_rounds
from offbeat.run.stage_advice import explained_stages
from offbeat.runtime.run.folder import FINISHED, RunFolder, strategy_of
from offbeat.runtime.run.untrusted_files import is_file
from offbeat.runtime.state.certificates import REFUSED, check

MOST: Final = 10
"""How many NaN or infinite numbers are listed."""
LARGEST: Final = 256 * 2**20
"""Largest log, in bytes."""
MATCHING: Final = 20.0
"""CPU seconds for finding the events in a log."""
INCONSISTENT: Final = 20
"""Exit code if a cut is not consistent, and nothing else is wrong."""


@dataclass
class ActionsDone:
    """Lines to print, JSON fields and exit code of what was done."""

    lines: list[str] = field(default_factory=list[str])
    plain: dict[str, Any] = field(default_factory=dict[str, Any])
    code: int = 0


@dataclass(frozen=True)
class ActionOptions(ExplainOptions):
    """The options, checked, and their execution."""

    def __post_init__(self) -> None:
        """Refuse wrong combinations before anything is read."""
        if self.draw is not None:
            check_name(self.draw)
        if self.window is not None and self.draw is None and not self.predicates:
            raise UsageError(
                f"--window {self.window!r} is for a picture or a predicate: add --picture FILE or --possibly "
                f"PREDICATE, or omit it."
            )
        if self.delay is not None and self.delivery is None:
            raise UsageError(f"--delay {self.delay} is for a replay: add --delivery RULE, or omit it.")
        if self.delivery is not None:
            check_rule(self.delivery)
            moment(self.delay or "0")
        if self.kind is not None and self.export is None:
            raise UsageError(f"--as {self.kind} is for an export: add --export FILE, or omit it.")
        if self.export is not None:
            kind_of(self.export, self.kind)

    @property
    def anything(self) -> bool:
        """Whether a picture, a cut or an export is requested."""
        return bool(self.draw or self.cuts or self.export)

    @property
    def predicates(self) -> list[tuple[str, Predicate]]:
        """The predicates, each with its quantifier over all possible orders of events."""
        return [("possibly", predicate(text)) for text in self.possibly] + [
            ("definitely", predicate(text)) for text in self.definitely
        ]

    def done(self, scene: Scene) -> ActionsDone:
        """Test the cuts, draw and export."""
        part = (scene.start, scene.stop) if self.window is None else window(self.window, scene.start, scene.stop)
        cuts = {text: parse_cut(scene.run, scene.times, text, part[1]) for text in self.cuts}
        lanes = scene.diagram(part, cuts)
        done = ActionsDone()
        for cut in lanes.cuts:
            counts = ", ".join(f"{name}:{count}" for name, count in zip(lanes.names, cut.counts, strict=True))
            done.lines.append(f"Cut {cut.label} ({counts}): {'consistent.' if cut.consistent else cut.words}")
            done.code = done.code if cut.consistent else INCONSISTENT
            stuck = deadlock(waits(scene.run, cuts[cut.label])) if cut.consistent else None
            if stuck is not None:
                done.lines.append(f"  Deadlocked there: {stuck}")
                done.plain.setdefault("deadlocked", {})[cut.label] = str(stuck)
        done.plain["cuts"] = to_builtins(lanes.cuts)
        if self.draw is not None:
            save(lanes, self.draw)
            done.lines += [f"Drawn: {self.draw}", *(f"  {note}" for note in lanes.notes)]
            done.plain["drawn"] = str(self.draw)
        if self.export is not None:
            kind = export(scene, self.export, self.kind)
            done.lines.append(f"Exported as {kind}: {self.export}")
            done.plain["exported"] = str(self.export)
        return done

    def answer(self, events: RecordedRun, done: ActionsDone) -> None:
        """Replay the run's events, and test the predicates."""
        if self.delivery is not None:
            delay = DELAY if self.delay is None else moment(self.delay)
            seen = replay(events.stamps, events.servers, self.delivery, delay)
            done.lines += seen.lines()
            done.plain["delivery"] = seen.plain()
        if self.predicates:
            part = None if self.window is None else self._part(events)
            ways = Possibilities(events.stamps, events.servers, part)
            answers = [ways.ask(*each) for each in self.predicates]
            done.lines += map(str, answers)
            done.plain["predicates"] = to_builtins(answers)

    def _part(self, events: RecordedRun) -> tuple[float, float]:
        """The window on the clock of the events."""
        histories = (*events.stamps.values(), *events.servers.values())
        times = [stamp.time for history in histories for stamp in history]
        start, stop = min(times, default=0.0), max(times, default=0.0)
        begin, end = window(self.window or "..", 0.0, stop - start)
        return start + begin, start + end


def explain(target: ExplainTarget, options: dict[str, Any]) -> None:
    """Explain a run by its folder, or a log of any program by its file; or verify a checkpoint."""
    path, actions = target.path, ActionOptions(**options)
    if target.check:
        _verify_checkpoint(path, target.as_json)
    elif is_file(path):
        why = f"is for runs recorded with `offbeat run --monitor`, and {path} is a log: give a run folder, or omit it"
        refuse(actions, ("delivery", "possibly", "definitely"), why)
        _explain_log(path, actions, target.as_json)
    else:
        why = f"is for logs of other programs, and {path} is not a file: give one, or omit it"
        refuse(actions, ("pattern", "execution", "delimiter"), why)
        explain_run(path, target.as_json, actions)


def explain_run(path: Path, as_json: bool, actions: ActionOptions | None = None) -> None:
    """Print the verdict on a run, who waited for whom at its end, and what each worker cost the others."""
    folder = RunFolder.open(path)
    record = folder.read()
    stages, rounds = explained_stages(record), explained_rounds(folder.path, record)
    needed = actions is not None and (actions.anything or actions.predicates or actions.delivery)
    known = {} if stages is None else {"stages": stages.plain()}
    known |= {} if rounds is None else {"rounds": rounds.plain()}
    lines = [*(() if stages is None else stages.lines), *(() if rounds is None else rounds.lines)]
    if known and not needed and not has_events(folder.path):
        _print_without_events(folder, record, known, lines, as_json)
        return
    events = recorded(folder.path)
    done = ActionsDone()
    if actions is not None and actions.anything:
        done = actions.done(scene_of(folder, events))
    if actions is not None:
        actions.answer(events, done)
    judge = Judge()
    for stamps in events.servers.values():
        judge.feed_server(stamps)
    for rank, stamps in events.stamps.items():
        judge.feed(rank, stamps)
    unfit = monitor.unfit(events.stamps, events.servers)
    blamed = monitor.blame(events.stamps, events.servers, events.queues)
    verdict = _verdict(record, judge, unfit) or _slowed(blamed)
    waiting = [] if record.get("state") in FINISHED else judge.waiting()
    stale, held = monitor.staleness(events.stamps), monitor.held_up(events.stamps)
    findings = _Findings(verdict, waiting, blamed, stale, held, unfit)
    if as_json:
        print_json(_plain(folder, record, findings, events) | known | done.plain)
    else:
        _print(findings, events)
        for line in (*lines, *(f"Machine {machine}." for machine in events.machines)):
            print_plain(line)
        for line in done.lines:
            typer.echo(line)
    raise typer.Exit((0 if verdict is None else monitor.EXIT_CODES.get(verdict.kind, 1)) or done.code)


def _print_without_events(
    folder: RunFolder, record: dict[str, Any], known: dict[str, Any], lines: list[str], as_json: bool
) -> None:
    """What is known of the stages or rounds of a run without events."""
    if as_json:
        print_json({"run": str(folder.path), "state": record.get("state"), "strategy": strategy_of(record), **known})
        return
    for line in lines:
        print_plain(line)
    print_plain("No events were recorded: `offbeat run --monitor` records who waits for whom.")


def scene_of(folder: RunFolder, events: RecordedRun) -> Scene:
    """The events of a run, to be drawn."""
    return Scene.of(events.stamps, folder.path.name, events.dropped, events.servers, events.machines)


def _explain_log(path: Path, actions: ActionOptions, as_json: bool) -> None:
    """Print what a log shows of each of its executions, with pictures, cuts and exports."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a log: {error}. Give a text file with vector clocks.") from error
    if len(raw) > LARGEST:
        raise UsageError(f"{path} has more than {LARGEST:,} bytes: cut it to the part that matters.")
    with _computing_at_most(MATCHING, f"finding the events of {path}"):
        logs = parse_all(text, actions.pattern, actions.delimiter, actions.execution)
    if len(logs) > 1 and actions.anything:
        raise UsageError(
            f"{path} holds several executions, and pictures, cuts and exports are of one: name it, e.g. --execution "
            f"'{next(iter(logs))}'. There are: {', '.join(logs)}."
        )
    code = 0
    results: list[dict[str, Any]] = []
    for name, log in logs.items():
        summary = account(log)
        title = " ".join([path.name, *([actions.execution] if actions.execution else [])])
        done = actions.done(Scene(log.computation, title)) if len(logs) == 1 else ActionsDone()
        results.append({**summary.plain(), **done.plain})
        for line in (
            () if as_json else (*([f"Execution {name}:"] if len(logs) > 1 else []), *summary.lines(), *done.lines)
        ):
            print_plain(line)
        code = code or done.code
    if as_json:
        several = {"executions": [{"execution": name, **result} for name, result in zip(logs, results, strict=True)]}
        print_json({"log": str(path), **(results[0] if len(results) == 1 else several)})
    raise typer.Exit(code)


@contextmanager
def _computing_at_most(seconds: float, what: str) -> Generator[None]:
    """Give up after these CPU seconds: a pattern from a stranger may backtrack forever."""

    def give_up(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise UsageError(
            f"{what} was given up after {seconds:g} s of computing: the pattern can match in too many ways. Let each "
            f"of its parts exclude what follows it: [^{{]* instead of .* before a clock."
        )

    if threading.current_thread() is not threading.main_thread():  # Only the main thread gets signals.
        yield
        return
    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _verify_checkpoint(path: Path, as_json: bool) -> None:
    """Print whether a checkpoint is complete and consistent; the exit code is `REFUSED` if it is not."""
    result = check(path)
    if as_json:
        print_json({**to_builtins(result), "good": not result.faults})
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
        "machines": to_builtins(events.machines),
        "held_up": to_builtins(findings.held),
        "unfit": to_builtins(findings.unfit),
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

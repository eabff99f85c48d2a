"""Options of `offbeat explain` that do more than print a verdict: picture, cuts, export, replay, predicates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import to_builtins

from offbeat.cli.options import ExplainOptions
from offbeat.errors import UsageError
from offbeat.monitor import RecordedRun
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.cuts import moment, parse_cut, window
from offbeat.monitor.diagram.export import export, kind_of
from offbeat.monitor.diagram.svg import check_name, save
from offbeat.monitor.predicates import Possibilities, Predicate, predicate
from offbeat.monitor.replay import DELAY, check_rule, replay
from offbeat.protocols.causality.deadlock import deadlock, waits

INCONSISTENT: Final = 20
"""Exit code of `offbeat explain` if a cut is not consistent, and nothing else is wrong."""


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

    @property
    def of_runs(self) -> str | None:
        """An option that applies only to runs of offbeat, if one is set."""
        options = {"--delivery": self.delivery, "--possibly": self.possibly, "--definitely": self.definitely}
        return next((name for name, value in options.items() if value), None)

    @property
    def of_logs(self) -> str | None:
        """An option that applies only to logs of other programs, if one is set."""
        options = {"--pattern": self.pattern, "--execution": self.execution, "--delimiter": self.delimiter}
        return next((name for name, value in options.items() if value is not None), None)

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

    def answers(self, events: RecordedRun) -> ActionsDone:
        """Replay the run's events, and test the predicates."""
        done = ActionsDone()
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
        return done

    def _part(self, events: RecordedRun) -> tuple[float, float]:
        """The window on the clock of the events."""
        histories = (*events.stamps.values(), *events.servers.values())
        times = [stamp.time for history in histories for stamp in history]
        start, stop = min(times, default=0.0), max(times, default=0.0)
        begin, end = window(self.window or "..", 0.0, stop - start)
        return start + begin, start + end


@dataclass
class ActionsDone:
    """Lines to print, JSON fields and exit code of what was done."""

    lines: list[str] = field(default_factory=list[str])
    plain: dict[str, Any] = field(default_factory=dict[str, Any])
    code: int = 0

"""What else `offbeat explain` is asked for: a picture, cuts, an export, a replay, predicates."""

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
"""What `offbeat explain` ends with if a cut that it was asked about is not consistent, and nothing else is wrong."""


@dataclass(frozen=True)
class ActionOptions(ExplainOptions):
    """The options that go beyond words, and what is done for them."""

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything is read."""
        if self.draw is not None:
            check_name(self.draw)
        if self.window is not None and self.draw is None and not self.predicates:
            raise UsageError(
                f"--window {self.window!r} is for a picture or a predicate: add --draw picture.svg or --possibly "
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
        """Whether there is more to do than to explain."""
        return bool(self.draw or self.cuts or self.export)

    @property
    def predicates(self) -> list[tuple[str, Predicate]]:
        """What is asked about all the ways that the run may have gone."""
        return [("possibly", predicate(one)) for one in self.possibly] + [
            ("definitely", predicate(one)) for one in self.definitely
        ]

    @property
    def of_runs(self) -> str | None:
        """An option that is only for runs of offbeat, if one was given."""
        given = {"--delivery": self.delivery, "--possibly": self.possibly, "--definitely": self.definitely}
        return next((name for name, value in given.items() if value), None)

    @property
    def of_logs(self) -> str | None:
        """An option that is only for logs of other programs, if one was given."""
        given = {"--pattern": self.pattern, "--execution": self.execution, "--delimiter": self.delimiter}
        return next((name for name, value in given.items() if value is not None), None)

    def done(self, scene: Scene) -> ActionsDone:
        """Do it, and tell what was done."""
        part = (scene.start, scene.stop) if self.window is None else window(self.window, scene.start, scene.stop)
        cuts = {text: parse_cut(scene.run, scene.times, text, part[1]) for text in self.cuts}
        lanes = scene.diagram(part, cuts)
        told = ActionsDone()
        for cut in lanes.cuts:
            counts = ", ".join(f"{name}:{count}" for name, count in zip(lanes.names, cut.counts, strict=True))
            told.lines.append(f"Cut {cut.label} ({counts}): {'consistent.' if cut.consistent else cut.words}")
            told.code = told.code if cut.consistent else INCONSISTENT
            stuck = deadlock(waits(scene.run, cuts[cut.label])) if cut.consistent else None
            if stuck is not None:
                told.lines.append(f"  Deadlocked there: {stuck}")
                told.plain.setdefault("deadlocked", {})[cut.label] = str(stuck)
        told.plain["cuts"] = to_builtins(lanes.cuts)
        if self.draw is not None:
            save(lanes, self.draw)
            told.lines += [f"Drawn: {self.draw}", *(f"  {note}" for note in lanes.notes)]
            told.plain["drawn"] = str(self.draw)
        if self.export is not None:
            kind = export(scene, self.export, self.kind)
            told.lines.append(f"Exported as {kind}: {self.export}")
            told.plain["exported"] = str(self.export)
        return told

    def asked_of(self, events: RecordedRun) -> ActionsDone:
        """What the run's events say to questions about their order."""
        told = ActionsDone()
        if self.delivery is not None:
            delay = DELAY if self.delay is None else moment(self.delay)
            seen = replay(events.stamps, events.servers, self.delivery, delay)
            told.lines += seen.lines()
            told.plain["delivery"] = seen.plain()
        if self.predicates:
            part = None if self.window is None else self._part(events)
            ways = Possibilities(events.stamps, events.servers, part)
            answers = [ways.ask(*one) for one in self.predicates]
            told.lines += [str(one) for one in answers]
            told.plain["predicates"] = to_builtins(answers)
        return told

    def _part(self, events: RecordedRun) -> tuple[float, float]:
        """The window, on the clock of the events."""
        times = [one.time for some in (*events.stamps.values(), *events.servers.values()) for one in some]
        start, stop = min(times, default=0.0), max(times, default=0.0)
        begin, end = window(self.window or "..", 0.0, stop - start)
        return start + begin, start + end


@dataclass
class ActionsDone:
    """What was done beyond words."""

    lines: list[str] = field(default_factory=list[str])
    plain: dict[str, Any] = field(default_factory=dict[str, Any])
    code: int = 0

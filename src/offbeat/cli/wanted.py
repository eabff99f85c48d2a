"""What else `offbeat explain` is asked for: a picture, cuts, an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins

from offbeat.errors import UsageError
from offbeat.monitor.diagram.cuts import asked, window
from offbeat.monitor.diagram.export import export, kind_of
from offbeat.monitor.diagram.picture import check_name, save
from offbeat.monitor.diagram.scene import Scene

INCONSISTENT: Final = 20
"""What `offbeat explain` ends with if a cut that it was asked about is not consistent, and nothing else is wrong."""


@dataclass(frozen=True)
class Wanted:
    """The options that go beyond words."""

    draw: Path | None = None
    window: str | None = None
    cuts: tuple[str, ...] = ()
    export: Path | None = None
    kind: str | None = None
    pattern: str | None = None
    """How the events of a log of another program are written."""
    execution: str | None = None
    """Which of several that such a log tells of."""
    delimiter: str | None = None
    """What stands between them."""

    def __post_init__(self) -> None:
        """Refuse what cannot be, before anything is read."""
        if self.draw is not None:
            check_name(self.draw)
        if self.window is not None and self.draw is None:
            raise UsageError(f"--window {self.window!r} is for a picture: add --draw picture.svg, or leave it away.")
        if self.kind is not None and self.export is None:
            raise UsageError(f"--as {self.kind} is for an export: add --export FILE, or leave it away.")
        if self.export is not None:
            kind_of(self.export, self.kind)

    @property
    def anything(self) -> bool:
        """Whether there is more to do than to explain."""
        return bool(self.draw or self.cuts or self.export)

    @property
    def of_logs(self) -> str | None:
        """An option that is only for logs of other programs, if one was given."""
        given = {"--pattern": self.pattern, "--execution": self.execution, "--delimiter": self.delimiter}
        return next((name for name, value in given.items() if value is not None), None)

    def done(self, scene: Scene) -> Done:
        """Do it, and tell what was done."""
        part = (scene.start, scene.stop) if self.window is None else window(self.window, scene.start, scene.stop)
        cuts = {text: asked(scene.run, scene.times, text, part[1]) for text in self.cuts}
        lanes = scene.diagram(part, cuts)
        told = Done()
        for cut in lanes.cuts:
            counts = ", ".join(f"{name}:{count}" for name, count in zip(lanes.names, cut.counts, strict=True))
            told.lines.append(f"Cut {cut.label} ({counts}): {'consistent.' if cut.consistent else cut.words}")
            told.code = told.code if cut.consistent else INCONSISTENT
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


@dataclass
class Done:
    """What was done beyond words."""

    lines: list[str] = field(default_factory=list[str])
    plain: dict[str, Any] = field(default_factory=dict[str, Any])
    code: int = 0

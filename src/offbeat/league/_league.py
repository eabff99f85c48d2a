"""A comparison: its settings, every finished run, the table and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import CheckpointError, OffbeatError
from offbeat.league._contestants import Contestant
from offbeat.league._records import LEAGUE_FILE, Entry, LeagueFolder
from offbeat.league._rows import LeagueRow, complete_seeds, rows_of
from offbeat.league._settings import LeagueSettings
from offbeat.league._words import LeagueVerdict, outcome, ranking
from offbeat.runtime.run.settings import Target

TAGS = {
    "time, relative, speedup, step_seconds, core_seconds, startup_seconds, seconds_by_kind": "measured",
    "reached, steps, samples, score, test_score": "measured",
    "kernel_bytes": "measured",
    "bytes_sent": "measured: read off the schedules that ran",
    "curve": "measured; bytes between evaluations are scaled from one worker's to all",
}
"""The origin of each figure; nothing in a comparison is simulated or extrapolated."""
_MOST = 1e18
"""Beyond any figure of a run."""


class _LeagueEnvironment(msgspec.Struct):
    offbeat: str
    torch: str
    numpy: str
    python: str
    processor: str
    cores: int
    platform: str
    started: str


class _Data(msgspec.Struct):
    hash: str | None
    of: str


class _Facts(msgspec.Struct):
    commit: str | None
    environment: _LeagueEnvironment
    data: _Data
    source: str | None = None
    crowded: str | None = None


class _LeagueFile(msgspec.Struct):
    """The required contents of league.json."""

    asked: dict[str, Any]
    facts: _Facts
    contestants: tuple[Contestant, ...]
    refused: dict[str, str]
    runs: tuple[Entry, ...]
    given_up: tuple[str, ...]
    undone: tuple[str, ...]
    said: tuple[str, ...] = ()


def _check(file: _LeagueFile) -> None:
    """Check what types do not: figures are finite and not huge, targets can be parsed, and names are unique."""
    names = [one.name for one in file.contestants]
    if not names:
        raise ValueError("it has no contestants")
    if len(set(names)) < len(names):
        raise ValueError(f"it has a contestant twice: {', '.join(names)[:200]}")
    for entry in file.runs:
        numbers = [getattr(entry, one.name) for one in fields(entry)] + list(entry.seconds_by_kind.values())
        numbers += [getattr(point, one.name) for point in entry.curve for one in fields(point)]
        wrong = [value for value in numbers if isinstance(value, int | float) and not -_MOST < value < _MOST]
        if wrong:
            raise ValueError(f"a run of {entry.name[:200]!r} has the figure {wrong[0]:g}"[:400])
        if entry.target is not None:
            Target.parse(entry.target)


@dataclass(frozen=True)
class League:
    """Strategies compared by their time to a target, over the same seeds; the result of `offbeat.compare`."""

    folder: Path
    """Its folder."""
    asked: Mapping[str, Any]
    """Its settings, as JSON data."""
    facts: Mapping[str, Any]
    """Commit, versions, data."""
    contestants: tuple[Contestant, ...]
    refused: Mapping[str, str]
    """Strategies that cannot be used here, and why."""
    entries: tuple[Entry, ...]
    """The finished runs."""
    given_up: tuple[str, ...] = ()
    """Contestants that only failed and were not run again."""
    undone: tuple[str, ...] = ()
    """What was skipped, and why."""
    said: tuple[str, ...] = ()
    """What changed before a comparison was resumed."""

    @classmethod
    def from_plain(cls, folder: Path, data: Mapping[str, Any]) -> League:
        """From the contents of league.json, which are checked."""
        try:
            file = msgspec.convert(dict(data), _LeagueFile)
            asked = LeagueSettings.from_plain(file.asked).plain()
            _check(file)
        except (ValueError, OffbeatError) as error:
            raise CheckpointError(
                f"{folder / LEAGUE_FILE} cannot be read: {error}. It may have been edited."
            ) from error
        rest = (file.contestants, file.refused, file.runs, file.given_up, file.undone, file.said)
        return cls(folder, asked, data["facts"], *rest)

    @classmethod
    def read(cls, path: str | Path) -> League:
        """An earlier comparison, from its folder."""
        folder = LeagueFolder.open(Path(path))
        return cls.from_plain(folder.path, folder.read())

    @cached_property
    def rows(self) -> tuple[LeagueRow, ...]:
        """The table: contestants that can win by their times, then the others."""
        rows = rows_of(self.contestants, self.entries, self.given_up)
        ranked = ranking(rows)
        return (*ranked, *(row for row in rows if row not in ranked))

    @cached_property
    def outcome(self) -> LeagueVerdict:
        """The verdict."""
        crowded = self.facts.get("crowded")
        return outcome(self.rows, [*([crowded] if crowded else []), *self.undone, *self.said])

    @property
    def winner(self) -> str | None:
        """First to the target; see `ties`."""
        return self.outcome.winner

    @property
    def ties(self) -> tuple[str, ...]:
        """Others that may as well be first."""
        return self.outcome.ties

    @property
    def seeds(self) -> list[int]:
        """Those that all contestants have run."""
        return complete_seeds(self.contestants, self.entries, self.given_up)

    @property
    def target(self) -> str | None:
        """The score to be reached."""
        return next((entry.target for entry in self.entries if entry.target), self.asked.get("target"))

    @property
    def subject(self) -> str:
        """The script, or the source of the task."""
        what = self.asked["what"]
        return what["script"] if "script" in what else what["task"]["source"]

    @property
    def tuning(self) -> dict[str, Any]:
        """The grid, the factor chosen for each contestant, and the cost of choosing."""
        tried = [entry for entry in self.entries if entry.tuning]
        return {
            "grid": list(self.asked["tune"]),
            "runs": len(tried),
            "seconds": sum(entry.wall_seconds for entry in tried),
            "chosen": {row.name: row.factor for row in self.rows},
        }

    def plain(self) -> dict[str, Any]:
        """As JSON data: the contents of league.json, and what follows from them."""
        return self.kept() | {
            "table": [row.plain() for row in self.rows],
            "winner": self.winner,
            "ties": list(self.ties),
            "words": list(self.outcome.words),
            "target": self.target,
            "seeds": self.seeds,
            "tuning": self.tuning,
            "tags": TAGS,
            "folder": str(self.folder),
        }

    def kept(self) -> dict[str, Any]:
        """The contents of league.json, which suffice to resume."""
        names = ("asked", "facts", "contestants", "refused", "given_up", "undone", "said")
        data = {name: getattr(self, name) for name in names} | {"runs": self.entries}
        return msgspec.to_builtins(data, enc_hook=str)  # A version of torch is not a plain string.

"""A comparison: its settings, every finished run, the table and the verdict; kept in `league.json` of its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import CheckpointError, OffbeatError
from offbeat.league._contestants import Contestant
from offbeat.league._records import Entry
from offbeat.league._rows import LeagueRow, complete_seeds, rows_of
from offbeat.league._settings import LeagueSettings
from offbeat.league._words import LeagueVerdict, outcome, ranking
from offbeat.runtime.run.folder import write_whole
from offbeat.runtime.run.settings import Target
from offbeat.runtime.run.untrusted_files import is_file, read_object

LEAGUE_FILE = "league.json"
HOSTS_FILE = "hosts.toml"
LATEST = "latest-league"
VERSION = 1
"""Version of the file format."""
_LARGEST = 256 * 2**20  # Maximum size of the file in bytes: it has every evaluation of every run.
TAGS = {
    "time, relative, speedup, step_seconds, core_seconds, startup_seconds, seconds_by_kind": "measured",
    "reached, steps, samples, score, test_score": "measured",
    "kernel_bytes": "measured",
    "bytes_sent": "measured: read off the schedules that ran; federated: what clients and server would send each other",
    "epsilon": "computed: from noise, sampling and rounds",
    "client_seconds": "simulated: federated clients' own time",
    "curve": "measured; bytes between evaluations are scaled from one worker's to all",
}
"""The origin of each figure; only clients of federated learning are simulated, and nothing is extrapolated."""
_MOST = 1e18  # Beyond any figure of a run.


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
    def read(cls, path: str | Path) -> League:
        """An earlier comparison, from its folder; its file is checked."""
        folder = Path(path).resolve()
        file = folder / LEAGUE_FILE
        if not is_file(file):
            raise CheckpointError(
                f"{path} is not a comparison: it has no {LEAGUE_FILE}. Give a folder that `offbeat compare` has made."
            )
        try:
            data = read_object(file, _LARGEST)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if data.get("version") != VERSION:
            raise CheckpointError(f"{file} is from another version of offbeat. Start a new one.")
        try:
            league = msgspec.convert({**data, "folder": folder, "entries": data.get("runs")}, cls)
            asked = LeagueSettings.from_plain(league.asked).plain()
            league._check()
        except (ValueError, OffbeatError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}. It may have been edited.") from error
        return dataclasses.replace(league, asked=asked)

    def _check(self) -> None:
        """Check what types do not: facts, names are unique, figures are finite and not huge, targets can be parsed."""
        msgspec.convert(self.facts, _Facts)
        names = [one.name for one in self.contestants]
        if not names:
            raise ValueError("it has no contestants")
        if len(set(names)) < len(names):
            raise ValueError(f"it has a contestant twice: {', '.join(names)[:200]}")
        for entry in self.entries:
            numbers = [getattr(entry, one.name) for one in fields(entry)] + list(entry.seconds_by_kind.values())
            numbers += [getattr(point, one.name) for point in entry.curve for one in fields(point)]
            wrong = [value for value in numbers if isinstance(value, int | float) and not -_MOST < value < _MOST]
            if wrong:
                raise ValueError(f"a run of {entry.name[:200]!r} has the figure {wrong[0]:g}"[:400])
            if entry.target is not None:
                Target.parse(entry.target)

    def write(self) -> None:
        """Replace its file, at once or not at all."""
        text = json.dumps({"version": VERSION, **self.kept()}, indent=1, default=str)
        write_whole(self.folder / LEAGUE_FILE, text + "\n")

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

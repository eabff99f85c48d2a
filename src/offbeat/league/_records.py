"""What a league leaves on disk as it goes: `league.json` with one entry for each run that has ended."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from offbeat.errors import CheckpointError
from offbeat.run.drive import Result
from offbeat.runtime.run.folder import METRICS_FILE, new_folder, write_whole
from offbeat.runtime.run.settings import Target
from offbeat.runtime.run.untrusted_files import is_file, read_object

LEAGUE_FILE = "league.json"
HOSTS_FILE = "hosts.toml"
LATEST = "latest-league"
VERSION = 1
"""Of the file's form."""
_LARGEST = 256 * 2**20
"""Bytes of a league's file: it has every evaluation of every run."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run."""

    step: int
    samples: int
    seconds: float
    bytes_sent: int
    """Payload of all workers, scaled from what the worker that writes the metrics had sent by then."""
    score: float
    evaluate_seconds: float = 0.0
    """How much of the time went to evaluations, this one included."""


@dataclass(frozen=True)
class Entry:
    """One run that has ended, well or not."""

    name: str
    """Whose run it was."""
    seed: int
    factor: float
    tuning: bool
    wall_seconds: float = 0.0
    """From its start to its end, start-up and all."""
    reason: str | None = None
    """Why it failed; None if it did not."""
    folder: str | None = None
    """Its run folder."""
    target: str | None = None
    """The score that was to be reached."""
    seconds_to_target: float | None = None
    """None if it was missed."""
    steps_to_target: int | None = None
    samples_to_target: int | None = None
    bytes_to_target: int | None = None
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    """Training time, evaluations included."""
    startup_seconds: float = 0.0
    core_seconds: float = 0.0
    bytes_sent: int = 0
    """Payload, by the formulas of the algorithms."""
    kernel_bytes: int | None = None
    """What the kernel counted on the hosts' links, headers and all; None on one machine, whose loopback counts all."""
    seconds_by_kind: dict[str, float] = field(default_factory=dict[str, float])
    score: float | None = None
    best_score: float | None = None
    test_score: float | None = None
    first_batch: str | None = None
    died: list[str] = field(default_factory=list[str])
    disturbances: dict[str, int] = field(default_factory=dict[str, int])
    curve: list[Evaluation] = field(default_factory=list[Evaluation])
    """Its evaluations."""

    @property
    def arrival(self) -> float:
        """Seconds to the target; a miss is infinite."""
        return math.inf if self.seconds_to_target is None else self.seconds_to_target

    @property
    def lower_is_better(self) -> bool:
        """Whether the score is a loss."""
        return self.target is not None and Target.parse(self.target).lower

    @property
    def key(self) -> tuple[str, int, float, bool]:
        """What makes it the same run."""
        return self.name, self.seed, self.factor, self.tuning

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Entry:
        """From JSON data; unknown entries are ignored."""
        return msgspec.convert(dict(data), cls)


def of_result(entry: Entry, result: Result) -> Entry:
    """The entry of a run that ended well."""
    target = None if result.target is None else Target.parse(result.target)
    curve = [] if target is None else _curve(result, target)
    reached = next((point for point in curve if target is not None and target.reached(point.score)), None)
    names = {f.name for f in dataclasses.fields(Entry)} & {f.name for f in dataclasses.fields(Result)}
    counted = [host.get("sent_bytes") for host in result.hosts]
    return dataclasses.replace(
        entry,
        **{name: getattr(result, name) for name in names},
        folder=str(result.run),
        steps_to_target=None if reached is None else reached.step,
        samples_to_target=None if reached is None else reached.samples,
        bytes_to_target=None if reached is None else reached.bytes_sent,
        kernel_bytes=None if not counted or None in counted else sum(cast("list[int]", counted)),
        curve=curve,
    )


def _curve(result: Result, target: Target) -> list[Evaluation]:
    try:
        lines = [json.loads(line) for line in (result.run / METRICS_FILE).read_text().splitlines()]
    except (OSError, ValueError):
        return []
    most = max((line.get("bytes_sent", 0) for line in lines), default=0)
    scale = result.bytes_sent / most if most else 0.0
    points: list[Evaluation] = []
    for line in lines:
        names = result.metrics if target.name is None else {target.name}
        metrics: dict[str, float] = {name: line[name] for name in names if name in line}
        judged = target.pick(metrics) if metrics else None
        if judged is not None:
            sent = round(line.get("bytes_sent", 0) * scale)
            evaluated = line["seconds_by_kind"]["evaluate"]
            points.append(Evaluation(line["step"], line["samples"], line["seconds"], sent, judged[1], evaluated))
    return points


class LeagueFolder:
    """One league's folder. Every write is whole or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path, name: str) -> LeagueFolder:
        """A new folder `<parent>/<time>-league-<name>`, and the link `latest-league` to it."""
        return cls(new_folder(parent, f"league-{name}", LATEST))

    @classmethod
    def open(cls, path: Path) -> LeagueFolder:
        """An earlier league's folder, to go on with it or to read it."""
        if not is_file(path / LEAGUE_FILE):
            raise CheckpointError(
                f"{path} is not a league: it has no {LEAGUE_FILE}. Give a folder that `offbeat compare` has made."
            )
        return cls(path.resolve())

    def read(self) -> dict[str, Any]:
        """What league.json says."""
        try:
            data = read_object(self.path / LEAGUE_FILE, _LARGEST)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / LEAGUE_FILE} cannot be read: {error}") from error
        if data.get("version") != VERSION:
            raise CheckpointError(f"{self.path / LEAGUE_FILE} is of another version of offbeat. Start a new league.")
        return data

    def write(self, data: Mapping[str, Any]) -> None:
        """Replace league.json."""
        text = json.dumps({"version": VERSION, **data}, indent=1, default=str)
        write_whole(self.path / LEAGUE_FILE, text + "\n")

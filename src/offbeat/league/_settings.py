"""The settings of a comparison: kept in its file, so that it can be resumed and repeated."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from offbeat import limits
from offbeat.errors import CheckpointError, UsageError
from offbeat.run.job import Job, target_from_plain
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.run.settings import Goal

GRID = (0.5, 1.0, 2.0)
"""Default factors of learning rates."""
SEEDS = 5


@dataclass(frozen=True)
class LeagueSettings:
    """The settings of a comparison."""

    what: dict[str, Any]
    """The script or task, as JSON data."""
    strategies: tuple[str, ...]
    """As the user wrote them; none: the default ones."""
    workers: int
    """Number of workers."""
    seeds: int = SEEDS
    """Number of runs of each strategy that count."""
    seed: int = 0
    """The first of the seeds; the others follow it."""
    tune: tuple[float, ...] = GRID
    """Factors of the learning rate that are tried for each strategy."""
    single: bool = True
    """Whether one worker alone takes part."""
    threads: int | None = None
    """Threads of each worker, including the single one."""
    hosts: dict[str, Any] | None = None
    """The workers' hosts, as JSON data."""
    target: str | None = None
    """The score to be reached."""
    goal: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """Further entries of the runs' goal."""

    def __post_init__(self) -> None:
        limits.whole("--workers", self.workers, limits.WORKERS, why="each is a process")
        limits.whole("--seeds", self.seeds, limits.SEEDS, why="each strategy is run once per seed")
        limits.seed("--seed", self.seed)
        limits.seed(f"--seed {self.seed} with --seeds {self.seeds}: the last seed", self.seed + self.seeds)
        limits.whole("the number of factors in --tune,", len(self.tune), limits.FACTORS, least=0)
        if not self.tune or not all(0 < factor < math.inf for factor in self.tune):
            raise UsageError(f"--tune {self.tune} makes no sense: give numbers above 0, such as 0.5,1,2, or none.")
        if len(set(self.tune)) < len(self.tune):
            raise UsageError(f"--tune {self.tune} has a number twice. Give each once.")

    def job(self, out: Path) -> Job:
        """The job that all runs share."""
        what = target_from_plain(self.what)
        goal = Goal.from_plain(self.goal | {"target": self.target})
        hosts = None if self.hosts is None else Hosts.from_plain(self.hosts)
        return Job(what, goal, self.workers, self.threads, out, hosts=hosts)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return dataclasses.asdict(self) | {"strategies": list(self.strategies), "tune": list(self.tune)}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> LeagueSettings:
        """From JSON data."""
        try:
            settings = msgspec.convert(dict(data), cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"these are not the settings of a comparison: {error}.") from error
        if unknown := settings.goal.keys() - {field.name for field in dataclasses.fields(Goal)}:
            raise CheckpointError(
                f"these are not the settings of a comparison: runs have no {', '.join(map(repr, sorted(unknown)))}."
            )
        target_from_plain(settings.what)
        Goal.from_plain(settings.goal)
        return settings

    def check_same(self, before: LeagueSettings) -> None:
        """Refuse to resume a comparison with other settings; the number of seeds may differ."""
        now, then = (json.loads(json.dumps(one.plain(), default=str)) for one in (self, before))
        other = [name for name in now if name != "seeds" and now[name] != then[name]]
        if other:
            differences = "; ".join(f"{name} was {then[name]}, not {now[name]}" for name in other)
            raise CheckpointError(
                f"that comparison had other settings: {differences}. Resume it with `offbeat compare --resume FOLDER` "
                f"alone, or start a new one."
            )

    def command(self, hosts_file: str = "hosts.toml") -> str:
        """The command that repeats the comparison; `hosts_file` describes its hosts."""
        subject = target_from_plain(self.what)
        arguments = subject.arguments
        if isinstance(arguments, dict):
            arguments = [f"--{name}={value}" for name, value in arguments.items()]
        words = ["offbeat", "compare", str(subject)]
        for text in self.strategies:
            words += ["--strategy", text]
        words += ["--workers", str(self.workers)] if self.hosts is None else ["--hosts", hosts_file]
        words += ["--seeds", str(self.seeds), "--seed", str(self.seed)]
        words += ["--target", self.target] if self.target else []
        words += ["--tune", "none" if self.tune == (1.0,) else ",".join(f"{factor:g}" for factor in self.tune)]
        words += [] if self.single else ["--no-single"]
        words += ["--threads", str(self.threads)] if self.threads else []
        for name, value in self.goal.items():
            if name == "disturb":
                words += [word for sentence in value for word in ("--disturb", sentence)]
            elif value != getattr(Goal(), name):
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join([*words, *(["--", *arguments] if arguments else [])])

"""The result of a run: what it came to and what it cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.errors import WorkerError


@dataclass(frozen=True)
class Result:
    """What a run came to; `offbeat run --format json` prints exactly these."""

    strategy: str
    """How it was distributed."""
    workers: int
    """How many processes trained."""
    task: str
    """What was learned: a task, or a script's path."""
    run: Path
    """The run's folder."""
    seed: int | None = None
    """What fixed its random choices."""
    steps: int = 0
    """Updates done."""
    epochs: int | None = None
    """Passes over the training data, the last one maybe not complete."""
    samples: int = 0
    """Training examples seen, over all workers."""
    score: float | None = None
    """The last reported score, on validation data for tasks."""
    best_score: float | None = None
    """The best reported score."""
    test_score: float | None = None
    """The score on test data, taken once, at the end; tasks only."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Everything in the last report."""
    target: str | None = None
    """The score that was to be reached."""
    reached_target: bool | None = None
    """Whether it was; None if there was none."""
    seconds_to_target: float | None = None
    """Training time until the report that reached it."""
    seconds: float = 0.0
    """Training time, evaluations included, start-up not; the mean over workers."""
    startup_seconds: float = 0.0
    """From the start of the launch until training began."""
    samples_per_second: float = 0.0
    """Examples per second of training time."""
    core_seconds: float = 0.0
    """Processor time of all workers together."""
    bytes_sent: int = 0
    """Payload bytes that the workers sent, read off the schedules that ran."""
    bytes_measuring: int = 0
    """The same of exchanges that were only made to measure links, or to compare; not part of `bytes_sent`."""
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    """Where the time went; sums to `seconds`. `communicate` is only the part that backward did not hide."""
    overlapped_seconds: float = 0.0
    """Time during which an exchange was under way beside backward; not part of the sum."""
    staleness: dict[str, int] = field(default_factory=dict)
    """How many steps old what a worker read was: how often each."""
    disturbances: dict[str, int] = field(default_factory=dict)
    """Faults: how many were asked for, how many have fired; each sentence's own count is in run.json."""
    choices: dict[str, Any] = field(default_factory=dict)
    """What the strategy chose by measuring, against which others, in seconds; see `allreduce(auto)`."""
    optimizer_bytes: list[int] = field(default_factory=list)
    """How much optimizer state each worker holds, where it is divided."""
    gossip: dict[str, Any] = field(default_factory=dict[str, Any])
    """How fast replicas should come together by their graph, and how fast they did; see `gossip`."""
    compression: dict[str, float] = field(default_factory=dict)
    """What compressing has cost and saved a worker, their mean: bytes before and after, seconds for both, and dense."""
    pays: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whether compression pays: both sides of time per step times steps to the target, and the verdict in words."""
    predicted: dict[str, Any] = field(default_factory=dict[str, Any])
    """What a step took, and what its schedules on these links predict; or why nobody can predict it."""

    waits: list[float] = field(default_factory=list[float])
    """Seconds that each worker that is there at the end has waited for others, in the order of their ranks."""
    refusals: list[str] = field(default_factory=list[str])
    """Why servers have refused pushes, and whose they were; the first ones."""
    servers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """What each shard has to say: pushes by what became of them, staleness of reads, bytes by link."""
    hosts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The hosts of the run: name, kind, address, rate, workers and server processes (`0.1`: shard 0, copy 1)."""
    died: list[str] = field(default_factory=list[str])
    """Workers and servers that died on the way, where the run went on without them."""
    joined: list[str] = field(default_factory=list[str])
    """Workers that joined on the way, in place of others, and servers that hold a copy in place of others."""
    first_batch: str | None = None
    """A fingerprint of the first training batch that the worker had who wrote this: the same data gives the same."""
    error: dict[str, Any] | None = None
    """Why it failed: `type`, `message`, and the `role` and `rank` of the process that did; None if it did not."""

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return dataclasses.asdict(self) | {"run": str(self.run)}

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Result:
        """From JSON data; unknown entries are ignored."""
        known: dict[str, Any] = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        known["run"] = Path(data["run"])
        return cls(**known)


def failure(error: BaseException) -> dict[str, Any]:
    """An error as JSON data: its type, what it says, and the process that it is from."""
    told: dict[str, Any] = {"type": type(error).__name__, "message": str(error) or "interrupted"}
    if isinstance(error, WorkerError):
        told |= {"role": error.role, "rank": error.rank, "traceback": error.remote_traceback}
    return told

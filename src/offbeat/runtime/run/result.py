"""The result of a run: score, time and cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.errors import WorkerError


@dataclass(frozen=True)
class Result:
    """The result of a run; `offbeat run --format json` prints exactly these fields."""

    strategy: str  # The strategy.
    workers: int  # Number of workers.
    task: str  # The task, or the path of the script.
    run: Path  # The run folder.
    seed: int | None = None  # The random seed.
    steps: int = 0  # Updates done.
    epochs: int | None = None  # Passes over the training data; the last may be incomplete.
    samples: int = 0  # Training examples seen, over all workers.
    skipped: int = 0  # Examples of bounded streams that came too fast and were left out.
    score: float | None = None  # The last reported score, on validation data for tasks.
    best_score: float | None = None  # The best reported score.
    test_score: float | None = None  # The score on test data, computed once at the end; tasks only.
    metrics: dict[str, float] = field(default_factory=dict)  # Everything in the last report.
    target: str | None = None  # The score to reach.
    reached_target: bool | None = None  # Whether it was reached; None without a target.
    seconds_to_target: float | None = None  # Training time until the report that reached it.
    seconds: float = 0.0  # Training time including evaluations but not start-up; the mean over workers.
    startup_seconds: float = 0.0  # From the start of the launch until training began.
    samples_per_second: float = 0.0  # Examples per second of training time.
    core_seconds: float = 0.0  # Processor time of all workers together.
    bytes_sent: int = 0
    """Payload bytes sent by the workers, according to the schedules that ran; federated: by clients and the server."""
    bytes_measuring: int = 0
    """The same for exchanges that only measured links or compared algorithms; not part of `bytes_sent`."""
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    """Where the time went; sums to `seconds`. `communicate` is only what backward did not hide."""
    overlapped_seconds: float = 0.0  # Time during which an exchange overlapped with backward; not part of the sum.
    staleness: dict[str, int] = field(default_factory=dict)  # How often reads were how many steps old.
    disturbances: dict[str, int] = field(default_factory=dict)
    """Injected faults: requested and fired; run.json has the count of each."""
    choices: dict[str, Any] = field(default_factory=dict)
    """What the strategy chose by measuring, with the seconds of each alternative; see `allreduce(auto)`."""
    parameter_bytes: list[int] = field(default_factory=list)  # Most parameters of each worker at once, where sharded.
    gradient_bytes: list[int] = field(default_factory=list)  # Most summed gradients of each worker, likewise.
    optimizer_bytes: list[int] = field(default_factory=list)  # Optimizer state of each worker, where it is sharded.
    split: dict[str, Any] = field(default_factory=dict[str, Any])
    """Stages of a pipeline: layers, seconds computing and idle, bytes; the slowest, and how even the cut is."""
    gossip: dict[str, Any] = field(default_factory=dict[str, Any])
    """Convergence rate of the replicas, predicted by their graph and measured; see `gossip`."""
    compression: dict[str, float] = field(default_factory=dict)
    """Cost and savings of compression, mean over workers: bytes before and after, seconds for both, and dense."""
    pays: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whether compression pays: time per step and steps to the target on both sides, and the verdict in words."""
    predicted: dict[str, Any] = field(default_factory=dict[str, Any])
    """Measured and predicted step time, or why it cannot be predicted."""
    waits: list[float] = field(default_factory=list[float])
    """Seconds that each worker present at the end waited for others, by rank."""
    refusals: list[str] = field(default_factory=list[str])
    """The first reasons why servers refused pushes, and whose they were."""
    update: dict[str, Any] = field(default_factory=dict[str, Any])
    """The program that servers ran on pushes in place of the optimizer, its hash and its cost; see `server`."""
    servers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Each shard: pushes by outcome, staleness of reads, bytes by link."""
    input: dict[str, Any] = field(default_factory=dict[str, Any])
    """What reading examples cost the workers, and in `advice` what would be better if that was much."""
    data_servers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Each data server: batches and examples prepared, seconds spent on them, bytes handed out."""
    hosts: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Each host: name, kind, address, rate, workers and server processes (`0.1`: shard 0, copy 1)."""
    died: list[str] = field(default_factory=list[str])  # Workers and servers that died while the run went on.
    joined: list[str] = field(default_factory=list[str])  # Workers and servers that joined later to replace others.
    placement: dict[str, Any] = field(default_factory=dict[str, Any])
    """Where replicas are split: the workers by replica, stage and way, their hosts, and what goes between hosts."""
    tensor: dict[str, Any] = field(default_factory=dict[str, Any])
    """Under tensor(ways): the share of the parameters that each way holds, which modules are split, and which not."""
    federated: dict[str, Any] = field(default_factory=dict[str, Any])
    """Under federated: rounds; updates that counted, were late, dropped or refused; what clients would send."""
    sandblaster: dict[str, Any] = field(default_factory=dict[str, Any])
    """Under sandblaster: iterations, evaluations, portions by worker, and the coordinator's bytes, headers included."""
    warnings: list[str] = field(default_factory=list[str])
    """What worker 0 warned of while it trained, each once."""
    first_batch: str | None = None
    """Fingerprint of the first training batch of the reporting worker: equal data gives equal fingerprints."""
    error: dict[str, Any] | None = None
    """Why it failed: `type`, `message`, and the `role` and `rank` of the process; None if it did not."""

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
    """An error as JSON data: its type, message and process."""
    data: dict[str, Any] = {"type": type(error).__name__, "message": str(error) or "interrupted"}
    if isinstance(error, WorkerError):
        data |= {"role": error.role, "rank": error.rank, "traceback": error.remote_traceback}
    return data

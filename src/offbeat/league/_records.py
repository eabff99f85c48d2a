"""The runs of a comparison: planned, finished, and as points of a curve."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import cast

from offbeat.run.drive import Result
from offbeat.runtime.run.folder import METRICS_FILE
from offbeat.runtime.run.settings import Target


@dataclass(frozen=True)
class Planned:
    """One run."""

    name: str
    """The contestant."""
    seed: int
    """Determines model, data and random numbers."""
    factor: float
    """Factor on its learning rates."""
    tuning: bool
    """Whether it only serves to choose that factor."""

    @property
    def key(self) -> tuple[str, int, float, bool]:
        """Identifies the run."""
        return self.name, self.seed, self.factor, self.tuning


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run."""

    step: int
    samples: int
    seconds: float
    bytes_sent: int
    """Payload of all workers, scaled from that of the worker that writes the metrics."""
    score: float
    evaluate_seconds: float = 0.0
    """Time spent on evaluations so far, including this one."""
    epsilon: float | None = None
    """Privacy spent so far; None if the strategy promises none."""
    client_seconds: float | None = None
    """Federated: seconds so far in the simulated time of the clients."""


@dataclass(frozen=True)
class Entry(Planned):
    """One finished run, successful or not."""

    wall_seconds: float = 0.0
    """From start to end, including start-up."""
    reason: str | None = None
    """Why it failed; None if it did not."""
    folder: str | None = None
    """Its run folder."""
    target: str | None = None
    """The target score."""
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
    """Payload, by the schedules that ran."""
    kernel_bytes: int | None = None
    """The kernel's count on the hosts' links, including headers; None on one machine, whose loopback counts all."""
    epsilon: float | None = None
    """Privacy spent until the target, or until the end of a run that missed it; None if it promises none."""
    client_seconds: float | None = None
    """Federated: simulated seconds of the clients, likewise."""
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


def of_result(entry: Entry, result: Result, target: Target) -> Entry:
    """The entry of a successful run."""
    curve = _curve(result, target)
    reached = next((point for point in curve if target.reached(point.score)), None)
    names = {f.name for f in dataclasses.fields(Entry)} & {f.name for f in dataclasses.fields(Result)}
    counted = [host.get("sent_bytes") for host in result.hosts]
    rounds = result.federated
    return dataclasses.replace(
        entry,
        **{name: getattr(result, name) for name in names},
        folder=str(result.run),
        steps_to_target=None if reached is None else reached.step,
        samples_to_target=None if reached is None else reached.samples,
        bytes_to_target=None if reached is None else reached.bytes_sent,
        kernel_bytes=None if not counted or None in counted else sum(cast("list[int]", counted)),
        epsilon=rounds.get("epsilon") if reached is None else reached.epsilon,
        client_seconds=rounds.get("simulated_seconds") if reached is None else reached.client_seconds,
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
    names = result.metrics if target.name is None else {target.name}
    for line in lines:
        metrics: dict[str, float] = {name: line[name] for name in names if name in line}
        score = target.pick(metrics) if metrics else None
        if score is not None:
            sent = round(line.get("bytes_sent", 0) * scale)
            evaluation = line["seconds_by_kind"]["evaluate"]
            own = (line.get("epsilon"), (line.get("rounds") or {}).get("simulated_seconds"))
            points.append(Evaluation(line["step"], line["samples"], line["seconds"], sent, score[1], evaluation, *own))
    return points

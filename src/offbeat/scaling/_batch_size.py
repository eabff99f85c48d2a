"""How large a batch may be before its examples count for less, measured in a short run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import limits
from offbeat.errors import TaskError, UsageError
from offbeat.run.job import Script
from offbeat.runtime.gradients.noise import read_gradients
from offbeat.runtime.launch import Launcher
from offbeat.scaling._noise import DELTA, Noise, by_samples, largest_batch, noise_of, worth
from offbeat.scaling._runs import Tell, check_budget, is_iterative, nobody, runs_of
from offbeat.statistics import Estimate, JsonData
from offbeat.task import AnyTask

STAGES = 5
"""How many stages a run is cut into, to show how noise changes."""
_PASSES = 4
"""Passes over single examples in each stage, where they are asked for."""
_STEPS_IN_A_STAGE = 10
"""Fewer steps than this tell too little."""


@dataclass(frozen=True)
class RunStage(JsonData):
    """Some consecutive steps of the run."""

    first: int
    """Its first step."""
    last: int
    """Its last step."""
    noise: Estimate
    """The noise scale: how many examples it takes until their mean says as much as it errs."""
    checked: float | None
    """The same by the gradients of single examples, where they were asked for."""


@dataclass(frozen=True)
class DiversityMethod(JsonData):
    """One way to raise diversity, at the end of the run, by the gradients of single examples."""

    name: str
    diversity: float
    """n times the gradient diversity: 1 + the noise scale."""
    cosine: float
    """Of the angle between its mean gradient and the plain one: how much of the direction is left."""


@dataclass(frozen=True)
class BatchSize(JsonData):
    """The noise in gradients over a short run, and what it means for the batch."""

    target: str
    """What was run."""
    workers: int
    """On how many workers."""
    steps: int
    """How many steps were measured."""
    batch: float
    """Examples in each of them."""
    usual: float
    """Examples in a step as the target has it."""
    examples: int | None
    """How many the training data has; None if only going through it would tell."""
    delta: float
    """How much less than all an example of the largest batch may count: 1 / (1 + delta)."""
    stages: tuple[RunStage, ...]
    """Noise in the order of the run."""
    ways: tuple[DiversityMethod, ...] = ()
    """Ways to raise diversity, where single examples were asked for."""
    warnings: tuple[str, ...] = ()
    """What is to be borne in mind."""

    def largest(self, stage: RunStage, delta: float | None = None) -> Estimate:
        """The largest batch that makes almost proportional progress in a stage, and no more than all data."""
        top = math.inf if self.examples is None else float(self.examples)
        chosen = self.delta if delta is None else delta
        return stage.noise.mapped(lambda noise: min(top, largest_batch(noise, chosen)))

    def diversity(self, stage: RunStage) -> Estimate | None:
        """Gradient diversity, (1 + noise scale) / n; None if n is not known."""
        count = self.examples
        return None if count is None else stage.noise.mapped(lambda noise: (1 + noise) / count)

    def useful_workers(self, stage: RunStage) -> Estimate:
        """How many workers that batch keeps busy, each with as many examples as a worker of this run would usually."""
        each = self.usual / self.workers
        return self.largest(stage).mapped(lambda batch: batch if math.isinf(batch) else max(1.0, batch // each))

    def worth(self, stage: RunStage) -> Estimate:
        """What an example of the usual batch counts for, of what one alone would."""
        return stage.noise.mapped(lambda noise: worth(self.usual, noise))

    def plain(self) -> dict[str, Any]:
        """For JSON; None stands for no limit."""
        stages: list[dict[str, Any]] = []
        for stage in self.stages:
            diversity = self.diversity(stage)
            stages.append(
                stage.plain()
                | {
                    "kind": "measured",
                    "diversity": None if diversity is None else diversity.plain(),
                    "largest_batch": self.largest(stage).plain(),
                    "useful_workers": self.useful_workers(stage).plain(),
                    "worth": self.worth(stage).plain(),
                }
            )
        return super().plain() | {"stages": stages}


def batch_size(
    target: AnyTask | str,
    *,
    workers: int = 2,
    arguments: Sequence[str] = (),
    seconds: float = 20.0,
    steps: int | None = None,
    times: int = 1,
    delta: float = DELTA,
    check: bool = False,
    threads: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    launcher: Launcher | None = None,
    tell: Tell = nobody,
) -> BatchSize:
    """Measure the noise in gradients over a short run, and say how large a batch still makes proportional progress.

    The run takes `steps` steps, or as many as fit into `seconds`, with all-reduce, each on `times` as many examples as
    usual: the larger, the more noise can be told. `check` also goes over the gradients of single examples now and then
    (tasks with small models only), and compares ways to raise diversity.
    """
    check_budget(steps, seconds)
    limits.whole("--workers", workers, limits.WORKERS, why="each is a process")
    limits.whole("--times", times, limits.MERGED)
    limits.whole("--threads", threads, limits.THREADS)
    limits.seed("--seed", seed)
    if workers < 2:
        raise UsageError(
            f"{workers} worker has one gradient for each step, and noise is told from how several differ. Give 2 or "
            f"more."
        )
    if not 0 < delta < math.inf:
        raise UsageError(f"--delta {delta:g} makes no sense: give a number above 0.")
    with runs_of(target, arguments, threads, seed, out, launcher) as runs:
        if is_iterative(runs.what):
            raise TaskError(f"{runs.what} is not gradient descent: it has no gradients, and no batch to choose.")
        if check and isinstance(runs.what, Script):
            raise UsageError(
                "--per-example needs the loss of a single example, which a script's loop does not reveal. Omit "
                "--per-example, or write the loop as a task."
            )
        if steps is None:
            tell(f"a first run of {runs.what}, to see how long a step takes")
        length = steps or runs.steps_for(seconds, workers, "allreduce", times)
        tell(f"{length:,} steps on {workers} workers")
        result = runs.once(workers, "allreduce", length, times, STAGES * _PASSES if check else 0)
        found = read_gradients(result.run)
    if found.get("trouble"):
        raise UsageError(f"the noise in the gradients of {runs.what} cannot be measured: {found['trouble']}")
    return _concluded(str(runs.what), workers, times, delta, found)


def _concluded(target: str, workers: int, times: int, delta: float, found: Mapping[str, Any]) -> BatchSize:
    noise = noise_of(found)
    if len(noise) < STAGES * _STEPS_IN_A_STAGE:
        raise UsageError(
            f"only {len(noise)} steps could be measured, and noise shows in many: it takes "
            f"{STAGES * _STEPS_IN_A_STAGE}. Give more --steps or --seconds, and more examples for each worker than one."
        )
    batch = median(found["batch"])
    stages = _stages(noise, found["checks"])
    return BatchSize(
        target,
        workers,
        len(noise),
        batch,
        batch / times,
        found["examples"],
        delta,
        stages,
        _ways(found["checks"]),
        tuple(_warnings(stages, batch, found["examples"])),
    )


def _stages(noise: Noise, checks: Sequence[Mapping[str, Any]]) -> tuple[RunStage, ...]:
    stages: list[RunStage] = []
    first = 1
    for part in noise.stages(STAGES):
        last = first + len(part) - 1
        inside = [one for one in checks if first <= one["step"] + 1 <= last]  # After a step: what the next one meets.
        checked = None
        if inside:
            spread, square = by_samples(inside)
            checked = spread / max(square, 1e-300)
        stages.append(RunStage(first, last, part.scale(), checked))
        first = last + 1
    return tuple(stages)


def _ways(checks: Sequence[Mapping[str, Any]]) -> tuple[DiversityMethod, ...]:
    compared: Mapping[str, Mapping[str, float]] = next((one["ways"] for one in reversed(checks) if "ways" in one), {})
    return tuple(
        DiversityMethod(name, one["examples"] * one["squares"] / max(one["joint"], 1e-300), one["cosine"])
        for name, one in compared.items()
    )


def _warnings(stages: Sequence[RunStage], batch: float, examples: int | None) -> list[str]:
    said: list[str] = []
    if any(math.isinf(stage.noise.high) for stage in stages):
        said.append(
            f"where there is no limit, the gradient of {batch:,.0f} examples is all noise: how large a batch may be "
            f"cannot be told from so few, only how large it may be at least. Give --times 8, or more --seconds."
        )
    if examples is not None and any(stage.noise.value > examples for stage in stages):
        said.append(f"noise beyond the {examples:,} examples that there are means that all of them may be one batch.")
    return said

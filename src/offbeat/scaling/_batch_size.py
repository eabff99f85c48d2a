"""How large a batch may be before its examples count for less: by the noise in the gradients of a short run.

A gradient of b examples drawn from n has the expected squared norm |G|^2 + S (1/b - 1/n), where G is the gradient of
all of them and S the trace of the covariance of single ones. A worker's slice and the whole batch are two such
sizes, so both unknowns follow from the two norms, without bias, and the noise scale is S / |G|^2. Single steps show
little: each of the two is averaged over many before one is divided by the other.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1, for n without end.
Diversity: Yin, Pananjady, Lam, Papailiopoulos, Ramchandran and Bartlett, "Gradient Diversity" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from offbeat import limits
from offbeat.errors import TaskError, UsageError
from offbeat.run.job import Script
from offbeat.runtime.gradients.noise import read_gradients
from offbeat.runtime.launch import Launcher
from offbeat.scaling._runs import Tell, check_options, runs_of
from offbeat.statistics import CONFIDENCE, Estimate, Floats, JsonData, student
from offbeat.task import AnyTask

DELTA = 0.25
"""An example of the largest batch counts for at least 1 / (1 + delta) of a single one, here 80 %."""
STAGES = 5
"""Number of stages that a run is cut into, to show how noise changes."""
_PASSES = 4  # Passes over single examples in each stage, if requested.
_STEPS_IN_A_STAGE = 10  # Minimum number of steps that show enough.


@dataclass(frozen=True)
class Noise:
    """Estimates of the noise from the steps of a stage."""

    spread: Floats
    """The estimate of S at each step."""
    square: Floats
    """The estimate of |G|^2 at each step."""

    def __len__(self) -> int:
        return len(self.spread)

    def stages(self, count: int) -> list[Noise]:
        """Cut into the given number of consecutive stages."""
        cuts = np.array_split(np.arange(len(self)), count)
        return [Noise(self.spread[cut], self.square[cut]) for cut in cuts]

    def scale(self, confidence: float = CONFIDENCE) -> Estimate:
        """The noise scale: a ratio of means, with the interval of Fieller's theorem.

        Where |G|^2 is not significantly above 0, there is no upper end, and the value may be infinite.
        """
        count = len(self)
        spread, square = float(self.spread.mean()), float(self.square.mean())
        value = max(0.0, spread / square) if square > 0 else math.inf
        if count < 3:
            return Estimate(value, 0.0, math.inf)
        table: Floats = np.cov(self.spread, self.square) / count
        t = student(confidence, count - 1) ** 2
        # All N for which the mean of S - N |G|^2 is within its error of 0.
        a = square**2 - t * float(table[1, 1])
        b = spread * square - t * float(table[0, 1])
        c = spread**2 - t * float(table[0, 0])
        root = b * b - a * c
        if root < 0:
            return Estimate(value, 0.0, math.inf)
        if a <= 0 or square <= 0:
            low = c / (b + math.sqrt(root)) if b + math.sqrt(root) > 0 else 0.0
            return Estimate(value, min(max(0.0, low), value), math.inf)
        low, high = (b - math.sqrt(root)) / a, (b + math.sqrt(root)) / a
        return Estimate(value, max(0.0, low), max(0.0, high))


def noise_of(gradients: Mapping[str, Any]) -> Noise:
    """The noise from a run's measurements: batches, their parts, and squared norms before and after the exchange."""
    batch, parts = np.asarray(gradients["batch"]), np.asarray(gradients["parts"])
    within, joint = np.asarray(gradients["within"]), np.asarray(gradients["joint"])
    usable = (parts > 1) & (batch > parts)
    batch, parts, within, joint = batch[usable], parts[usable], within[usable], joint[usable]
    spread = (within - joint) * batch / (parts - 1)
    examples = gradients.get("examples") or math.inf
    return Noise(spread, joint - spread / batch + spread / examples)


def by_samples(checks: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """S and |G|^2 by the gradients of single examples, each the mean over some passes."""
    spreads = [one["squares"] / one["examples"] - one["joint"] / one["examples"] ** 2 for one in checks]
    squares = [one["joint"] / one["examples"] ** 2 for one in checks]
    return float(np.mean(spreads)), float(np.mean(squares))


def largest_batch(noise: float, delta: float = DELTA) -> float:
    """The largest batch that makes almost proportional progress: 1 + delta n diversity, where n diversity = 1 + noise.

    Each of its examples counts for 1 / (1 + delta) of a single one.
    """
    return 1 + delta * (1 + noise)


def worth(batch: float, noise: float) -> float:
    """The worth of an example of such a batch, relative to a single one: (1 + noise) / (batch + noise)."""
    return 1.0 if math.isinf(noise) else (1 + noise) / (batch + noise)


@dataclass(frozen=True)
class RunStage(JsonData):
    """Some consecutive steps of the run."""

    first: int
    """Its first step."""
    last: int
    """Its last step."""
    noise: Estimate
    """The noise scale: the number of examples whose mean gradient is as large as its error."""
    checked: float | None
    """The same by the gradients of single examples, if requested."""


@dataclass(frozen=True)
class DiversityMethod(JsonData):
    """One way to raise gradient diversity, evaluated on single examples at the end of the run."""

    name: str
    diversity: float
    """n times the gradient diversity: 1 + the noise scale."""
    cosine: float
    """Cosine of the angle between its mean gradient and the plain one: how much of the direction is left."""


@dataclass(frozen=True)
class BatchSize(JsonData):
    """The noise in gradients over a short run, and what it means for the batch."""

    target: str
    """The script or task."""
    workers: int
    """Number of workers."""
    steps: int
    """Number of steps measured."""
    batch: float
    """Examples in each of them."""
    usual: float
    """Examples in a step of the unchanged target."""
    examples: int | None
    """Size of the training data; None if unknown without iterating over it."""
    delta: float
    """An example of the largest batch counts for at least 1 / (1 + delta) of a single one."""
    stages: tuple[RunStage, ...]
    """Noise in the order of the run."""
    ways: tuple[DiversityMethod, ...] = ()
    """Ways to raise diversity, if single examples were requested."""
    warnings: tuple[str, ...] = ()
    """Caveats."""

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
        """Number of workers that batch keeps busy, each with the usual number of examples per worker."""
        each = self.usual / self.workers
        return self.largest(stage).mapped(lambda batch: batch if math.isinf(batch) else max(1.0, batch // each))

    def worth(self, stage: RunStage) -> Estimate:
        """The worth of an example of the usual batch, relative to a single one."""
        return stage.noise.mapped(lambda noise: worth(self.usual, noise))

    def plain(self) -> dict[str, Any]:
        """As JSON data; None stands for no limit."""
        return super().plain() | {
            "stages": [
                stage.plain()
                | {
                    "kind": "measured",
                    "diversity": None if (diversity := self.diversity(stage)) is None else diversity.plain(),
                    "largest_batch": self.largest(stage).plain(),
                    "useful_workers": self.useful_workers(stage).plain(),
                    "worth": self.worth(stage).plain(),
                }
                for stage in self.stages
            ]
        }


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
    tell: Tell = lambda _: None,
) -> BatchSize:
    """Measure the noise in gradients over a short run, and how large a batch still makes proportional progress.

    The run takes `steps` steps, or as many as fit into `seconds`, with all-reduce, each on `times` as many examples as
    usual: the more, the larger the noise that can be measured. `check` also computes the gradients of single examples
    now and then (tasks with small models only), and compares ways to raise diversity.
    """
    check_options(steps, seconds, threads, seed)
    limits.whole("--workers", workers, limits.WORKERS, why="each is a process")
    limits.whole("--times", times, limits.MERGED)
    if workers < 2:
        raise UsageError(
            f"{workers} worker has one gradient for each step, and noise is measured by how several differ. Give 2 or "
            f"more."
        )
    if not 0 < delta < math.inf:
        raise UsageError(f"--delta {delta:g} makes no sense: give a number above 0.")
    with runs_of(target, arguments, threads, seed, out, launcher, tell) as runs:
        if runs.is_iterative:
            raise TaskError(f"{runs.what} is not gradient descent: it has no gradients, and no batch to choose.")
        if check and isinstance(runs.what, Script):
            raise UsageError(
                "--per-example needs gradients of single examples, and so the loss of one; a script's loop does not "
                "define it. Omit --per-example, or write the loop as a task."
            )
        length = runs.length(steps, seconds, workers, "allreduce", times)
        tell(f"{length:,} steps on {workers} workers")
        result = runs.once(workers, "allreduce", length, times, STAGES * _PASSES if check else 0)
        gradients = read_gradients(result.run)
    if gradients.get("trouble"):
        raise UsageError(f"the noise in the gradients of {runs.what} cannot be measured: {gradients['trouble']}")
    return _conclude(str(runs.what), workers, times, delta, gradients)


def _conclude(target: str, workers: int, times: int, delta: float, gradients: Mapping[str, Any]) -> BatchSize:
    noise = noise_of(gradients)
    if len(noise) < STAGES * _STEPS_IN_A_STAGE:
        raise UsageError(
            f"only {len(noise)} steps could be measured, and noise shows in many: it takes "
            f"{STAGES * _STEPS_IN_A_STAGE}. Give more --steps or --seconds, and more examples for each worker than one."
        )
    batch, examples, checks = median(gradients["batch"]), gradients["examples"], gradients["checks"]
    stages = _stages(noise, checks)
    warnings = tuple(_warnings(stages, batch, examples))
    methods = _methods(checks)
    return BatchSize(target, workers, len(noise), batch, batch / times, examples, delta, stages, methods, warnings)


def _stages(noise: Noise, checks: Sequence[Mapping[str, Any]]) -> tuple[RunStage, ...]:
    stages: list[RunStage] = []
    first = 1
    for part in noise.stages(STAGES):
        last = first + len(part) - 1
        inside = [check for check in checks if first <= check["step"] + 1 <= last]  # Made after a step, for the next.
        checked = None
        if inside:
            spread, square = by_samples(inside)
            checked = spread / max(square, 1e-300)
        stages.append(RunStage(first, last, part.scale(), checked))
        first = last + 1
    return tuple(stages)


def _methods(checks: Sequence[Mapping[str, Any]]) -> tuple[DiversityMethod, ...]:
    compared: Mapping[str, Mapping[str, float]] = next((one["ways"] for one in reversed(checks) if "ways" in one), {})
    return tuple(
        DiversityMethod(name, one["examples"] * one["squares"] / max(one["joint"], 1e-300), one["cosine"])
        for name, one in compared.items()
    )


def _warnings(stages: Sequence[RunStage], batch: float, examples: int | None) -> Iterator[str]:
    if any(math.isinf(stage.noise.high) for stage in stages):
        yield (
            f"where there is no limit, the gradient of {batch:,.0f} examples is all noise: so few show only how large "
            f"a batch may be at least, not at most. Give --times 8, or more --seconds."
        )
    if examples is not None and any(stage.noise.value > examples for stage in stages):
        yield f"noise beyond the {examples:,} examples that there are means that all of them may be one batch."

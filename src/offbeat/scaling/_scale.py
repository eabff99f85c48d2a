"""Measures the speed-up on several numbers of workers, and fits scaling laws to it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import limits
from offbeat.errors import StrategyError, UsageError
from offbeat.run.drive import Result
from offbeat.runtime.launch import Launcher
from offbeat.scaling._runs import Tell, busy_seconds, check_options, runs_of
from offbeat.simulate.laws import Amdahl, Gunther, fit_amdahl, fit_gunther
from offbeat.statistics import Estimate, JsonData, paired_ratio
from offbeat.strategies import Strategy, combined, parse
from offbeat.strategies._base import Combined
from offbeat.task import AnyTask

_DOUBLINGS = 2  # Speed-ups are predicted up to four times the largest measured number of workers.
_SAME = 0.02  # Relative difference up to which batches count as the same.


@dataclass(frozen=True)
class ScalePoint(JsonData):
    """One number of workers, measured."""

    workers: int
    rates: tuple[float, ...]
    """Examples per second of each run."""
    speedup: Estimate
    """Over one worker, by neighbouring runs."""
    crowded: bool
    """Whether there are fewer cores than its workers have threads."""

    @property
    def rate(self) -> float:
        """Examples per second: the median."""
        return median(self.rates)

    @property
    def efficiency(self) -> float:
        """Speed-up per worker."""
        return self.speedup.value / self.workers

    @property
    def superlinear(self) -> bool:
        """Whether the speed-up is larger than the number of workers, by more than its interval."""
        return self.workers > 1 and self.speedup.low > self.workers

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        more = {"rate": self.rate, "efficiency": self.efficiency, "superlinear": self.superlinear}
        return {"kind": "measured"} | super().plain() | more


@dataclass(frozen=True)
class Predicted(JsonData):
    """The speed-up on a number of workers that was not measured, by the fitted law."""

    workers: int
    speedup: Estimate

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {"kind": "extrapolated"} | super().plain()


@dataclass(frozen=True)
class Scaling(JsonData):
    """Measured speed-ups, the laws that they follow, and what those predict."""

    target: str
    """The script or task."""
    strategy: str
    """The strategy; one worker alone ran `baseline`."""
    baseline: str
    """The strategy of one worker."""
    weak: bool
    """Whether the batch grew with the workers, instead of being divided over them."""
    steps: int
    """Steps of each run."""
    threads: int
    """Threads of each worker."""
    cores: int
    """Number of available cores."""
    unit: str
    """What rates count: examples, or steps if examples are not counted."""
    points: tuple[ScalePoint, ...]
    """The measured points."""
    amdahl: Amdahl | None
    """The fit of Amdahl's law; None with fewer than two numbers of workers."""
    gunther: Gunther | None
    """The fit of Gunther's law; None with fewer than three."""
    predicted: tuple[Predicted, ...]
    """Predictions of the richer law for more workers."""
    warnings: tuple[str, ...] = field(default=())
    """Caveats."""

    @property
    def most(self) -> int:
        """The largest measured number of workers."""
        return max(point.workers for point in self.points)

    def kind(self, workers: float) -> str:
        """Whether a figure for this number of workers is `fitted` or `extrapolated`."""
        return "fitted" if workers <= self.most else "extrapolated"

    def plain(self) -> dict[str, Any]:
        """As JSON data; None stands for no limit."""
        laws: dict[str, Any] = {}
        if self.amdahl is not None:
            laws["amdahl"] = self.amdahl.plain() | {"half_is": self.kind(self.amdahl.half.value)}
        if self.gunther is not None:
            laws["gunther"] = self.gunther.plain() | {"peak_is": self.kind(self.gunther.peak.value)}
        fields = {name: value for name, value in super().plain().items() if name not in ("amdahl", "gunther")}
        listed = {name: [one.plain() for one in getattr(self, name)] for name in ("points", "predicted")}
        return fields | listed | laws


def scale(
    target: AnyTask | str,
    strategy: str | Strategy = "allreduce",
    workers: Sequence[int] = (1, 2, 4),
    *,
    arguments: Sequence[str] = (),
    weak: bool = False,
    repeats: int = 3,
    steps: int | None = None,
    seconds: float = 3.0,
    threads: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    launcher: Launcher | None = None,
    tell: Tell = lambda _: None,
) -> Scaling:
    """Measure the speed-up of a task or script on several numbers of workers, and fit Amdahl's and Gunther's laws.

    Runs are interleaved (1, 2, 4, 1, 2, 4 ...), `repeats` of each; one worker is always among them. Each makes `steps`
    steps, or as many as one worker makes in `seconds`. Only the time of steps counts: input, computing, exchanging and
    waiting. The batch is divided over the workers; with `weak` each worker has one as large as one worker alone.
    """
    counts = _counts(workers)
    check_options(steps, seconds, threads, seed)
    limits.whole("--repeats", repeats, limits.REPEATS)
    parsed = combined(parse(str(strategy)))
    for count in counts[1:]:
        parsed.check(count)
    with runs_of(target, arguments, threads, seed, out, launcher, tell) as runs:
        if weak and runs.is_iterative:
            raise UsageError(
                f"{runs.what} goes over all of its data in every step, so there is no batch that could grow with the "
                f"workers. Measure strong scaling: omit --weak."
            )
        alone = _alone(parsed)
        length = runs.length(steps, seconds, 1, alone)
        results: dict[int, list[Result]] = {count: [] for count in counts}
        for number, count in enumerate(counts * repeats, 1):
            words = f"{count} worker{'s' if count > 1 else ''}, {length:,} steps"
            tell(f"run {number} of {repeats * len(counts)}: {words}")
            chosen = alone if count == 1 else str(parsed)
            results[count].append(runs.once(count, chosen, length, count if weak else 1))
        return _conclude(str(runs.what), parsed, alone, weak, length, threads, results)


def _counts(workers: Sequence[int]) -> list[int]:
    if not workers:
        raise UsageError("--workers is empty: give several numbers, such as 1,2,4.")
    for count in workers:
        limits.whole("--workers", count, limits.WORKERS, why="each is a process")
    counts = sorted({1, *workers})
    if len(counts) < 2:
        raise UsageError("--workers 1 says nothing about more workers. Give several numbers: 1,2,4.")
    return counts


def _alone(strategy: Combined) -> str:
    """The plain loop of one worker, with the strategy's pacing where one worker can have it."""
    single = combined(parse("single"))
    try:
        paced = Combined(single.exchange, strategy.when)
        paced.check(1)
    except StrategyError:
        return str(single)
    return str(paced)


def _conclude(
    target: str, strategy: Combined, alone: str, weak: bool, steps: int, threads: int, results: dict[int, list[Result]]
) -> Scaling:
    cores = len(os.sched_getaffinity(0))
    counted = all(result.samples for own in results.values() for result in own)
    rates = {
        count: [(result.samples if counted else result.steps) / busy_seconds(result) for result in own]
        for count, own in results.items()
    }
    points = tuple(
        ScalePoint(count, tuple(own), paired_ratio(own, rates[1]), count > 1 and count * threads > cores)
        for count, own in rates.items()
    )
    counts = [count for count, own in rates.items() for _ in own]
    flat = [rate for own in rates.values() for rate in own]
    amdahl = fit_amdahl(counts, flat)
    gunther = fit_gunther(counts, flat) if len(rates) > 2 else None
    further = [max(rates) * 2**power for power in range(1, _DOUBLINGS + 1)]
    predicted = tuple(Predicted(count, (gunther or amdahl).speedup(count)) for count in further)
    unit = "examples" if counted else "steps"
    settings = (target, str(strategy), alone, weak, steps, threads, cores, unit)
    scaling = Scaling(*settings, points, amdahl, gunther, predicted)
    warnings = (*_of_points(scaling), *_of_laws(scaling), *_of_runs(scaling, results))
    return dataclasses.replace(scaling, warnings=warnings)


def _of_points(scaling: Scaling) -> Iterator[str]:
    crowded = [str(point.workers) for point in scaling.points if point.crowded]
    if crowded:
        yield (
            f"{' and '.join(crowded)} workers with {scaling.threads} thread(s) each have only {scaling.cores} cores: "
            f"their speed-up, and the laws fitted to it, show too few cores as well as the strategy."
        )
    above = [f"{point.workers} ({point.speedup})" for point in scaling.points if point.superlinear]
    if above:
        yield (
            f"superlinear: on {', '.join(above)} workers the speed-up exceeds the number of workers, as where each "
            f"one's share fits into a cache. No law allows that; the fits are the nearest that are allowed."
        )
    if any(math.isinf(point.speedup.high) for point in scaling.points if point.workers > 1):
        yield "a single run of each says nothing about its error. Ask for --repeats 3."


def _of_laws(scaling: Scaling) -> Iterator[str]:
    law = scaling.gunther or scaling.amdahl
    misses = [
        f"{law.speedup(one.workers).value:.2f} on {one.workers}" for one in scaling.points if law and _misses(law, one)
    ]
    if misses:
        yield (
            f"the law does not fit the measurements: it says {', '.join(misses)}. Trust the measured figures, and none "
            f"that are extrapolated."
        )
    if scaling.gunther is None:
        yield "two numbers of workers cannot tell contention from coherency: Gunther's law was not fitted."
    elif scaling.kind(scaling.gunther.peak.value) == "extrapolated":
        yield (
            f"the peak is extrapolated: no more than {scaling.most} workers were measured, and what slows down more of "
            f"them may not have shown yet."
        )
    if scaling.amdahl is not None and scaling.kind(scaling.amdahl.half.value) == "extrapolated":
        yield f"the half-performance point and the limit are extrapolated from {scaling.most} workers at most."


def _misses(law: Amdahl | Gunther, point: ScalePoint) -> bool:
    """Whether the intervals of the law and the measured point do not overlap."""
    fit = law.speedup(point.workers)
    return point.workers > 1 and not (fit.low <= point.speedup.high and point.speedup.low <= fit.high)


def _of_runs(scaling: Scaling, results: dict[int, list[Result]]) -> Iterator[str]:
    fewest = min(result.steps for own in results.values() for result in own)
    if fewest < scaling.steps:
        yield f"a run ended by itself after {fewest:,} of {scaling.steps:,} steps: its rate is over those."
    if scaling.unit == "examples":
        batches = {count: median(result.samples / result.steps for result in own) for count, own in results.items()}
        expected = {count: batches[1] * (count if scaling.weak else 1) for count in batches}
        if any(abs(batches[count] / expected[count] - 1) > _SAME for count in batches):
            listed = ", ".join(f"{batches[count]:,.0f} examples on {count}" for count in batches)
            yield f"a step is not the same work on all numbers of workers: {listed}."

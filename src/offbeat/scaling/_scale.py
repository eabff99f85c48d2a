"""Measured speed-up on several numbers of workers, and the laws that it follows."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import limits
from offbeat.errors import StrategyError, UsageError
from offbeat.run.drive import Result
from offbeat.runtime.launch import Launcher
from offbeat.scaling._runs import Runs, Tell, busy_seconds, check_budget, is_iterative, nobody, runs_of
from offbeat.simulate.laws import Amdahl, Gunther, fit_amdahl, fit_gunther
from offbeat.statistics import Estimate, JsonData, paired_ratio
from offbeat.strategies import Strategy, combined, parse
from offbeat.strategies._base import Combined
from offbeat.task import AnyTask

_DOUBLINGS = 2
"""How far beyond what was measured speed-ups are predicted: to four times as many workers."""
_SAME = 0.02
"""By how much batches may differ and still be called the same."""


@dataclass(frozen=True)
class ScalePoint(JsonData):
    """One number of workers, measured."""

    workers: int
    """How many."""
    rates: tuple[float, ...]
    """Examples per second of each run."""
    speedup: Estimate
    """Over one worker, by runs next to each other."""
    crowded: bool
    """Whether its workers and their threads have fewer cores than they could use."""

    @property
    def rate(self) -> float:
        """Examples per second: the median."""
        return median(self.rates)

    @property
    def efficiency(self) -> float:
        """Speed-up for each worker."""
        return self.speedup.value / self.workers

    @property
    def superlinear(self) -> bool:
        """Whether the speed-up is larger than the number of workers, by more than its interval."""
        return self.workers > 1 and self.speedup.low > self.workers

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        more = {"rate": self.rate, "efficiency": self.efficiency, "superlinear": self.superlinear}
        return {"kind": "measured"} | super().plain() | more


@dataclass(frozen=True)
class Predicted(JsonData):
    """A number of workers that was not measured, by the law that was fitted to others."""

    workers: int
    speedup: Estimate

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"kind": "extrapolated"} | super().plain()


@dataclass(frozen=True)
class Scaling(JsonData):
    """Measured speed-ups, the laws that they follow, and what those predict."""

    target: str
    """What was run."""
    strategy: str
    """How it was distributed; one worker alone ran `baseline`."""
    baseline: str
    """How one worker ran."""
    weak: bool
    """Whether the batch grew with the workers, instead of being divided over them."""
    steps: int
    """Steps of each run."""
    threads: int
    """Threads of each worker."""
    cores: int
    """Cores that there are."""
    unit: str
    """What rates count: examples, or steps where nobody counts examples."""
    points: tuple[ScalePoint, ...]
    """What was measured."""
    amdahl: Amdahl | None
    """The fit of Amdahl's law; None with fewer than two numbers of workers."""
    gunther: Gunther | None
    """The fit of Gunther's law; None with fewer than three."""
    predicted: tuple[Predicted, ...]
    """What the richer of the two says of more workers."""
    warnings: tuple[str, ...] = field(default=())
    """What is to be borne in mind."""

    @property
    def most(self) -> int:
        """The largest number of workers that was measured."""
        return max(point.workers for point in self.points)

    def kind(self, workers: float) -> str:
        """What a figure about so many workers is: fitted to what was measured around it, or extrapolated."""
        return "fitted" if workers <= self.most else "extrapolated"

    def plain(self) -> dict[str, Any]:
        """For JSON; None stands for no limit."""
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
    tell: Tell = nobody,
) -> Scaling:
    """Measure the speed-up of a task or script on several numbers of workers, and fit Amdahl's and Gunther's laws.

    Runs are interleaved (1, 2, 4, 1, 2, 4 ...), `repeats` of each; one worker is always among them. Each makes `steps`
    steps, or as many as one worker makes in `seconds`. Only what steps take counts: input, computing, exchanging and
    waiting. The batch is divided over the workers; with `weak` each worker has one as large as one worker alone.
    """
    counts = _counts(workers)
    check_budget(steps, seconds)
    limits.whole("--repeats", repeats, limits.REPEATS)
    limits.whole("--threads", threads, limits.THREADS)
    limits.seed("--seed", seed)
    asked = combined(parse(str(strategy)))
    for count in counts[1:]:
        asked.check(count)
    with runs_of(target, arguments, threads, seed, out, launcher) as runs:
        if weak and is_iterative(runs.what):
            raise UsageError(
                f"{runs.what} goes over all of its data in every step, so there is no batch that could grow with the "
                f"workers. Measure strong scaling: leave --weak out."
            )
        alone = _alone(asked)
        if steps is None:
            tell(f"a first run of {runs.what}, to see how long a step takes")
        length = steps or runs.steps_for(seconds, 1, alone)
        found = _measured(runs, counts, asked, alone, length, repeats, weak, tell)
        return _concluded(str(runs.what), asked, alone, weak, length, threads, found)


def _counts(workers: Sequence[int]) -> list[int]:
    if not workers:
        raise UsageError("--workers is empty: give several numbers, such as 1,2,4.")
    for count in workers:
        limits.whole("--workers", count, limits.WORKERS, why="each is a process")
    counts = sorted({1, *workers})
    if len(counts) < 2:
        raise UsageError("--workers 1 says nothing of more workers. Give several numbers: 1,2,4.")
    return counts


def _alone(strategy: Combined) -> str:
    """The plain loop of one worker, paced as the strategy paces where that makes sense alone."""
    single = combined(parse("single"))
    try:
        paced = Combined(single.exchange, strategy.when)
        paced.check(1)
    except StrategyError:
        return str(single)
    return str(paced)


def _measured(
    runs: Runs, counts: list[int], strategy: Combined, alone: str, steps: int, repeats: int, weak: bool, tell: Tell
) -> dict[int, list[Result]]:
    found: dict[int, list[Result]] = {count: [] for count in counts}
    for turn in range(repeats):
        for place, count in enumerate(counts):
            number = turn * len(counts) + place + 1
            tell(f"run {number} of {repeats * len(counts)}: {count} worker{'s' if count > 1 else ''}, {steps:,} steps")
            chosen = alone if count == 1 else str(strategy)
            found[count].append(runs.once(count, chosen, steps, count if weak else 1))
    return found


def _concluded(
    target: str, strategy: Combined, alone: str, weak: bool, steps: int, threads: int, found: dict[int, list[Result]]
) -> Scaling:
    cores = len(os.sched_getaffinity(0))
    counted = all(result.samples for results in found.values() for result in results)
    rates = {
        count: [(one.samples if counted else one.steps) / busy_seconds(one) for one in results]
        for count, results in found.items()
    }
    points = tuple(
        ScalePoint(count, tuple(each), paired_ratio(each, rates[1]), count > 1 and count * threads > cores)
        for count, each in rates.items()
    )
    listed = [(count, rate) for count, each in rates.items() for rate in each]
    counts, flat = [count for count, _ in listed], [rate for _, rate in listed]
    amdahl = fit_amdahl(counts, flat)
    gunther = fit_gunther(counts, flat) if len(rates) > 2 else None
    law = gunther or amdahl
    most = max(rates)
    further = [most * 2**power for power in range(1, _DOUBLINGS + 1)]
    predicted = tuple(Predicted(count, law.speedup(count)) for count in further)
    scaling = Scaling(
        target,
        str(strategy),
        alone,
        weak,
        steps,
        threads,
        cores,
        "examples" if counted else "steps",
        points,
        amdahl,
        gunther,
        predicted,
    )
    warnings = (*_of_points(scaling), *_of_laws(scaling), *_of_runs(scaling, found))
    return dataclasses.replace(scaling, warnings=warnings)


def _of_points(scaling: Scaling) -> list[str]:
    said: list[str] = []
    crowded = [str(point.workers) for point in scaling.points if point.crowded]
    if crowded:
        said.append(
            f"{' and '.join(crowded)} workers with {scaling.threads} thread(s) each have only {scaling.cores} cores: "
            f"their speed-up, and the laws fitted to it, tell of too few cores as well as of the strategy."
        )
    above = [f"{point.workers} ({point.speedup})" for point in scaling.points if point.superlinear]
    if above:
        said.append(
            f"superlinear: {', '.join(above)} workers are faster than so many times one, as where each one's share "
            f"fits into a cache. No law allows that; the fits are the nearest that are allowed."
        )
    if any(math.isinf(point.speedup.high) for point in scaling.points if point.workers > 1):
        said.append("one run of each says nothing of how far it can be trusted. Ask for --repeats 3.")
    return said


def _of_laws(scaling: Scaling) -> list[str]:
    said: list[str] = []
    law = scaling.gunther or scaling.amdahl
    missed = [point for point in scaling.points if law is not None and _misses(law, point)]
    if missed:
        listed = ", ".join(f"{law.speedup(one.workers).value:.2f} on {one.workers}" for one in missed if law)
        said.append(
            f"the law does not follow what was measured: it says {listed}. Trust the measured figures, and nothing "
            f"that is extrapolated."
        )
    if scaling.gunther is None:
        said.append("two numbers of workers cannot tell contention from coherency: Gunther's law was not fitted.")
    elif scaling.kind(scaling.gunther.peak.value) == "extrapolated":
        said.append(
            f"the peak is extrapolated: no more than {scaling.most} workers were measured, and what holds up more of "
            f"them may not have shown yet."
        )
    if scaling.amdahl is not None and scaling.kind(scaling.amdahl.half.value) == "extrapolated":
        said.append(f"the half-performance point and the limit are extrapolated from {scaling.most} workers at most.")
    return said


def _misses(law: Amdahl | Gunther, point: ScalePoint) -> bool:
    """Whether the law and the measured point have no value in common."""
    said = law.speedup(point.workers)
    return point.workers > 1 and not (said.low <= point.speedup.high and point.speedup.low <= said.high)


def _of_runs(scaling: Scaling, found: dict[int, list[Result]]) -> list[str]:
    said: list[str] = []
    fewest = min(one.steps for results in found.values() for one in results)
    if fewest < scaling.steps:
        said.append(f"a run ended by itself after {fewest:,} of {scaling.steps:,} steps: its rate is of those.")
    if scaling.unit == "examples":
        batches = {count: median(one.samples / one.steps for one in results) for count, results in found.items()}
        wanted = {count: batches[1] * (count if scaling.weak else 1) for count in batches}
        other = [count for count in batches if abs(batches[count] / wanted[count] - 1) > _SAME]
        if other:
            listed = ", ".join(f"{batches[count]:,.0f} examples on {count}" for count in batches)
            said.append(f"a step is not the same work on all numbers of workers: {listed}.")
    return said

"""From the runs of a comparison to its table: one row for each contestant, over the seeds that all have run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import numpy as np

from offbeat.league._contestants import AGAIN, BASELINE, SINGLE, Contestant, EntryReason
from offbeat.league._records import Entry
from offbeat.runtime.run.stopwatch import BUBBLE, KINDS
from offbeat.statistics import JsonData, Spread, ratios, spread

_MEDIANS = ("kernel_bytes", "core_seconds", "startup_seconds", "test_score", "epsilon", "client_seconds")


@dataclass(frozen=True)
class LeagueRow(JsonData):
    """A contestant's results. Figures without a spread are medians over its runs that did not fail."""

    name: str
    part: EntryReason
    strategy: str
    workers: int
    factor: float
    """Factor on its learning rates."""
    runs: int
    """Number of runs that counted: one for each seed that all have run."""
    reached: int
    """Number of them that reached the target."""
    time: Spread
    """Seconds to the target; infinite for a miss."""
    relative: Spread | None
    """Ratio to the baseline's seconds, seed by seed; None if the baseline missed one."""
    speedup: Spread | None
    """Speed-up over one worker, seed by seed; None if that missed one or was omitted."""
    steps: float | None = None
    """Updates until the target, or until the end of a run that missed it."""
    step_seconds: float | None = None
    """Training time of a step without evaluations."""
    samples: float | None = None
    """Examples, likewise."""
    bytes_sent: float | None = None
    """Payload of all workers, likewise; federated: of clients and server, in place of the workers' own."""
    kernel_bytes: float | None = None
    """As counted by the kernel on the hosts' links, over whole runs; None on one machine."""
    core_seconds: float | None = None
    """Processor time of all workers, over whole runs."""
    startup_seconds: float | None = None
    seconds_by_kind: dict[str, float] | None = None
    """Time by kind in a typical run: medians, kind by kind."""
    score: float | None = None
    """The best on validation data."""
    test_score: float | None = None
    """On test data, once, at the end; tasks only."""
    epsilon: float | None = None
    """Privacy spent until the target, or until the end of a run that missed it; None if it promises none."""
    client_seconds: float | None = None
    """Federated: simulated seconds of the clients, likewise."""
    resolution: tuple[float, float] | None = None
    """Steps and seconds between two evaluations: times to the target are no finer."""
    failures: tuple[str, ...] = ()
    """Why runs failed, each reason once."""
    left_out: tuple[str, ...] = ()
    """Disturbances of processes that it does not have."""

    @property
    def judged(self) -> Spread:
        """What it is ranked by: time relative to the baseline, or seconds where there is no baseline."""
        return self.time if self.relative is None else self.relative

    def share(self, *kinds: str) -> float:
        """The share of its time spent on these kinds."""
        spent = self.seconds_by_kind or {}
        return sum(spent.get(kind, 0.0) for kind in kinds) / (sum(spent.values()) or 1.0)


def complete_seeds(contestants: Sequence[Contestant], entries: Sequence[Entry], given_up: Sequence[str]) -> list[int]:
    """Seeds that all remaining contestants have run: only these count, so that all have the same ones."""
    names = {one.name for one in contestants} - set(given_up)
    ran: dict[int, set[str]] = {}
    for entry in entries:
        if not entry.tuning:
            ran.setdefault(entry.seed, set()).add(entry.name)
    return sorted(seed for seed, finished in ran.items() if names <= finished)


def rows_of(contestants: Sequence[Contestant], entries: Sequence[Entry], given_up: Sequence[str]) -> list[LeagueRow]:
    """The table, in the order of the contestants."""
    seeds = complete_seeds(contestants, entries, given_up)
    arrivals = {(e.name, e.seed): e.arrival for e in entries if not e.tuning}
    times = {one.name: [arrivals.get((one.name, seed), math.inf) for seed in seeds] for one in contestants}
    noise = ratios(times[AGAIN], times[BASELINE]) if AGAIN in times and BASELINE in times else None
    return [
        _row(one, [e for e in entries if e.name == one.name], seeds, times, None if noise is None else spread(noise))
        for one in contestants
    ]


def _row(
    one: Contestant, entries: list[Entry], seeds: list[int], times: dict[str, list[float]], noise: Spread | None
) -> LeagueRow:
    own, alone = times[one.name], times.get(SINGLE, [])
    ran = [e for e in entries if not e.tuning and e.seed in seeds]
    well = [e for e in ran if e.reason is None]
    speedups = [0.0 if math.isinf(t) else single / max(t, 1e-12) for t, single in zip(own, alone, strict=False)]

    def middle(value: Callable[[Entry], float | None]) -> float | None:
        known = [v for v in map(value, well) if v is not None]
        return float(np.median(known)) if known else None

    known = (*KINDS, BUBBLE) if any(BUBBLE in e.seconds_by_kind for e in well) else KINDS
    kinds = {k: middle(lambda e, k=k: e.seconds_by_kind.get(k, 0.0)) or 0.0 for k in known}
    return LeagueRow(
        name=one.name,
        part=one.part,
        strategy=one.strategy,
        workers=one.workers,
        factor=ran[0].factor if ran else 1.0,
        runs=len(seeds),
        reached=sum(math.isfinite(t) for t in own),
        time=spread(own),
        relative=_relative(one, own, times.get(BASELINE, []), noise),
        speedup=None if not alone or any(map(math.isinf, alone)) else spread(speedups),
        steps=middle(lambda e: e.steps if e.steps_to_target is None else e.steps_to_target),
        step_seconds=middle(_step_seconds),
        samples=middle(lambda e: e.samples if e.samples_to_target is None else e.samples_to_target),
        bytes_sent=middle(lambda e: e.bytes_sent if e.bytes_to_target is None else e.bytes_to_target),
        seconds_by_kind=kinds if well else None,
        score=middle(lambda e: e.best_score),
        **{name: middle(attrgetter(name)) for name in _MEDIANS},
        resolution=_resolution(well),
        failures=tuple(dict.fromkeys(e.reason for e in entries if e.reason is not None)),
        left_out=one.left_out,
    )


def _relative(one: Contestant, own: list[float], base: list[float], noise: Spread | None) -> Spread | None:
    if one.part is not EntryReason.baseline:
        pairs = ratios(own, base)
        return None if pairs is None else spread(pairs)
    if all(map(math.isinf, own)):
        return None
    if noise is None:
        return Spread(1.0, 1.0, 1.0)
    # Its own spread is its distance from its copy, in either direction; a miss is a miss.
    inverse = [math.inf if end == 0.0 else 1.0 / end for end in (noise.high, noise.low)]
    return Spread(1.0, min(1.0, noise.low, inverse[0]), max(1.0, noise.high, inverse[1]))


def _step_seconds(entry: Entry) -> float | None:
    """Training time of a step without evaluations, up to the last one that was needed."""
    reached = (point for point in entry.curve if point.step == entry.steps_to_target)
    point = next(reached, entry.curve[-1] if entry.curve else None)
    return None if point is None or not point.step else (point.seconds - point.evaluate_seconds) / point.step


def _resolution(entries: list[Entry]) -> tuple[float, float] | None:
    pairs = [pair for entry in entries for pair in pairwise(entry.curve)]
    gaps = [(after.step - before.step, after.seconds - before.seconds) for before, after in pairs]
    if not gaps:
        return None
    return float(np.median([gap[0] for gap in gaps])), float(np.median([gap[1] for gap in gaps]))

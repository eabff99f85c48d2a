"""The contestants of a comparison: the requested strategies, stock DDP twice, and one worker alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from offbeat import limits
from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.disturbances import check
from offbeat.run.job import Job, resolve
from offbeat.run.server_supervisor import role_counts
from offbeat.runtime.launch import threads_for
from offbeat.runtime.run.settings import Goal
from offbeat.strategies import Strategy, combined, expand

DEFAULT = ("allreduce", "local({4,16})", "gossip", "hogwild", "server(consistency=ssp(3))")
"""One or two of each family: in lockstep, exchanging rarely, with neighbours, without locks, with stale servers."""
BASELINE = "ddp"
AGAIN = "ddp, again"
SINGLE = "single"


class EntryReason(StrEnum):
    """Why a contestant takes part."""

    asked = "asked"
    """A strategy that may win."""
    baseline = "baseline"
    """The one that others are compared with; it may win, too."""
    again = "again"
    """The baseline once more: its difference from the baseline is the noise."""
    single = "single"
    """One worker, for the speed-up."""

    @property
    def eligible(self) -> bool:
        """Whether such a contestant can win."""
        return self in (EntryReason.asked, EntryReason.baseline)


@dataclass(frozen=True)
class Contestant:
    """One row of a comparison."""

    name: str
    """Its name in tables."""
    strategy: str
    """The strategy, as text."""
    workers: int
    """Number of workers."""
    part: EntryReason = EntryReason.asked
    """Why it takes part."""
    left_out: tuple[str, ...] = ()
    """Disturbances of processes that it does not have."""


def field_of(
    job: Job, strategies: Sequence[str | Strategy], single: bool
) -> tuple[tuple[Contestant, ...], dict[str, str]]:
    """The contestants of a comparison on this job, and the strategies that cannot be used here, each with the reason.

    A misspelled strategy is an error.
    """
    texts = {BASELINE: BASELINE}
    for strategy in (strategy for text in strategies or DEFAULT for strategy in expand(str(text))):
        texts.setdefault(str(combined(strategy)), str(strategy))  # Strategies that mean the same take part once.
        limits.whole("the number of strategies,", len(texts), limits.SWEEP, why="in one comparison")
    texts.pop(SINGLE, None)
    candidates = [
        Contestant(name, text, job.workers, EntryReason.baseline if text == BASELINE else EntryReason.asked)
        for text, name in texts.items()
    ]
    candidates.insert(1, Contestant(AGAIN, BASELINE, job.workers, EntryReason.again))
    if single:
        candidates.append(Contestant(SINGLE, SINGLE, 1, EntryReason.single))
    contestants: list[Contestant] = []
    refused: dict[str, str] = {}
    for candidate in candidates:
        try:
            contestants.append(dataclasses.replace(candidate, left_out=_misplaced(resolved(job, candidate))))
        except StrategyError as error:
            refused[candidate.name] = str(error)
    if not any(one.part.eligible for one in contestants):
        raise StrategyError(f"none of the strategies can be used here: {'; '.join(refused.values())}")
    return tuple(contestants), refused


def resolved(job: Job, one: Contestant, seed: int = 0, factor: float = 1.0) -> Job:
    """The job of one run of a contestant, filled in and checked; all runs of a seed have the same seed."""
    sentences = tuple(sentence for sentence in job.goal.disturb if sentence not in one.left_out)
    goal = dataclasses.replace(job.goal, strategy=one.strategy, seed=seed, rate_factor=factor, disturb=sentences)
    hosts = None if one.part is EntryReason.single else job.hosts
    threads = job.threads or threads_for(job.workers)  # One worker alone has as many as each of several.
    return resolve(dataclasses.replace(job, goal=goal, workers=one.workers, hosts=hosts, threads=threads))


def _misplaced(job: Job) -> tuple[str, ...]:
    """Disturbances of servers or workers that this run does not have."""
    cast = role_counts(job)
    misplaced: list[str] = []
    for sentence in job.goal.disturb:
        try:
            check(Goal(disturb=(sentence,)).disturbances, cast)
        except UsageError:
            misplaced.append(sentence)
    return tuple(misplaced)

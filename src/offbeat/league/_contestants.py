"""Who takes part in a league: the strategies that were asked for, stock DDP twice, and one worker alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from offbeat import limits
from offbeat.errors import StrategyError, UsageError
from offbeat.protocols.disturbances import check
from offbeat.run.job import Job, resolve
from offbeat.run.server_supervisor import servers_of
from offbeat.runtime.launch import threads_for
from offbeat.runtime.run.settings import Goal
from offbeat.strategies import Strategy, combined, expand

DEFAULT = ("allreduce", "local({4,16})", "gossip", "hogwild", "server(consistency=ssp(3))")
"""One or two of each family: in lockstep, exchanging rarely, with neighbours, without locks, with stale servers."""
BASELINE = "ddp"
AGAIN = "ddp, again"
SINGLE = "single"


class EntryReason(StrEnum):
    """Why somebody is in a league."""

    asked = "asked"
    """A strategy that may win."""
    baseline = "baseline"
    """What the others are compared with; it may win, too."""
    again = "again"
    """The baseline once more: how far it is from itself is the noise."""
    single = "single"
    """One worker, for the speed-up."""


@dataclass(frozen=True)
class Contestant:
    """One row of a league."""

    name: str
    """How the tables call it."""
    strategy: str
    """The strategy, as text."""
    workers: int
    """How many processes train."""
    part: EntryReason = EntryReason.asked
    """Why it takes part."""
    left_out: tuple[str, ...] = ()
    """Disturbances that are about processes which it does not have."""

    @property
    def eligible(self) -> bool:
        """Whether it can win."""
        return self.part in (EntryReason.asked, EntryReason.baseline)


@dataclass(frozen=True)
class Entrants:
    """All who take part, and all who refuse to."""

    contestants: tuple[Contestant, ...]
    refused: dict[str, str]
    """Strategies that cannot be used here, and why."""


def field_of(job: Job, strategies: Sequence[str | Strategy], single: bool) -> Entrants:
    """The contestants of a league over this job; what is misspelled is an error, what does not fit is listed."""
    wanted = {BASELINE: BASELINE}
    for one in (strategy for text in strategies or DEFAULT for strategy in expand(str(text))):
        wanted.setdefault(str(combined(one)), str(one))  # What means the same takes part once.
        limits.whole("the number of strategies,", len(wanted), limits.SWEEP, why="in one league")
    wanted.pop(SINGLE, None)
    named = [
        Contestant(name, text, job.workers, EntryReason.baseline if text == BASELINE else EntryReason.asked)
        for text, name in wanted.items()
    ]
    named.insert(1, Contestant(AGAIN, BASELINE, job.workers, EntryReason.again))
    if single:
        named.append(Contestant(SINGLE, SINGLE, 1, EntryReason.single))
    found: list[Contestant] = []
    refused: dict[str, str] = {}
    for plain in named:
        try:
            found.append(dataclasses.replace(plain, left_out=_misplaced(resolved(job, plain))))
        except StrategyError as error:
            refused[plain.name] = str(error)
    if not any(one.eligible for one in found):
        raise StrategyError(f"none of the strategies can be used here: {'; '.join(refused.values())}")
    return Entrants(tuple(found), refused)


def resolved(job: Job, one: Contestant, seed: int = 0, factor: float = 1.0) -> Job:
    """The job of one run of a contestant, filled in and checked; all runs of a seed have the same seed."""
    sentences = tuple(sentence for sentence in job.goal.disturb if sentence not in one.left_out)
    goal = dataclasses.replace(job.goal, strategy=one.strategy, seed=seed, rate_factor=factor, disturb=sentences)
    hosts = None if one.part is EntryReason.single else job.hosts
    threads = job.threads or threads_for(job.workers)  # One worker alone has as many as each of several.
    return resolve(dataclasses.replace(job, goal=goal, workers=one.workers, hosts=hosts, threads=threads))


def _misplaced(job: Job) -> tuple[str, ...]:
    """Sentences about servers or workers that this run does not have: nothing of it could be disturbed by them."""
    needs = servers_of(job)
    cast = {"worker": job.workers} | ({"server": needs[0]} if needs and needs[0] else {})
    return tuple(sentence for sentence in job.goal.disturb if not _fits(sentence, cast))


def _fits(sentence: str, cast: dict[str, int]) -> bool:
    try:
        check(Goal(disturb=(sentence,)).disturbances, cast)
    except UsageError:
        return False
    return True

"""The calls that workers are in: which have begun and not ended, and who has yet to come for that.

That a worker has entered a call is known by the highest number of its calls on the group, so that events that were
written over do no harm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from offbeat.monitor.server_state import ServerState
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.histories import Call
from offbeat.protocols.causality.matching import Matching, Mismatch
from offbeat.runtime.events.recorder import About, Mark, Stamp
from offbeat.runtime.events.servers import GROUP as SERVERS
from offbeat.runtime.events.servers import MEETINGS

SEND = "send to"
_TIDY = 256
"""Entries into collectives after which those that are long over are forgotten."""


class OpenCall(NamedTuple):
    """Something that a worker has begun and that has not ended."""

    about: About
    sequence: int
    since: float
    waited: bool
    """Whether the worker does nothing else until it ends."""
    failed: bool = False
    """Whether the wait has ended with an error, which the program may yet go on from."""
    step: int = 0

    def __str__(self) -> str:
        """What it is, unless it is a request to a server."""
        if self.about.group == MEETINGS:
            return f"the {self.about.operation} (#{self.sequence})"
        if self.about.peer is None:
            return str(call_of(self.about, self.sequence))
        who = worker_name(self.about.peer) if self.about.peer >= 0 else "anybody"
        where = f", called at {self.about.caller}" if self.about.caller else ""
        tag = f" with tag {self.about.tag}" if self.about.tag else ""
        return f"{self.about.operation} {who} #{self.sequence}{tag} of group {self.about.group}{where}"


def call_of(about: About, sequence: int) -> Call:
    """A collective as the protocols know it."""
    return Call(
        about.group,
        sequence,
        _names(about.members),
        about.operation,
        None if about.elements is None else (about.elements,),
        about.dtype,
        about.reduce,
        None if about.root is None else worker_name(about.root),
        about.caller,
    )


@lru_cache(maxsize=64)
def _names(members: tuple[int, ...] | int) -> tuple[str, ...]:
    """What workers are called: the same for thousands of calls of a group."""
    return tuple(map(worker_name, range(members) if isinstance(members, int) else members))


def members_of(about: About) -> tuple[int, ...]:
    """Ranks of the workers in a call's group."""
    return tuple(range(about.members)) if isinstance(about.members, int) else about.members


class OpenCalls:
    """What all workers of a run are in."""

    def __init__(self, served: ServerState) -> None:
        self._served = served
        self._open: dict[int, dict[tuple[str, str, int | None, int, int], OpenCall]] = defaultdict(dict)
        self._entered: dict[str, dict[int, int]] = defaultdict(dict)
        self._begun: dict[tuple[str, int, str, int | None, int], int] = defaultdict(int)
        self._matching = Matching()
        self._taken: dict[tuple[str, int, int, int], int] = defaultdict(int)
        self._untidy = 0
        self.mismatch: Mismatch | None = None
        """The first call that somebody made differently than the others, if there was one."""

    def all(self) -> Iterator[tuple[int, OpenCall]]:
        """Who is in what."""
        return ((rank, one) for rank, opened in self._open.items() for one in opened.values())

    def waits(self, rank: int) -> bool:
        """Whether a worker does nothing else until something ends."""
        return any(own.waited for own in self._open.get(rank, {}).values())

    @property
    def collectives(self) -> int:
        """How many collectives everybody has entered, in the busiest group."""
        return max((min(entered.values()) for entered in self._entered.values() if len(entered) > 1), default=0)

    def forget(self, rank: int) -> None:
        """Another process has taken a worker's place."""
        self._open.pop(rank, None)
        for entered in self._entered.values():
            entered.pop(rank, None)

    def note(self, rank: int, stamp: Stamp, about: About) -> None:
        """A worker begins, waits for, or ends something."""
        key = (about.group, about.operation, about.peer, about.tag, stamp.sequence)
        now = self._open[rank]
        if stamp.mark is Mark.EXIT:
            now.pop(key, None)
            if about.peer is not None and about.operation != SEND:
                source = stamp.value - 1 if about.peer < 0 else about.peer
                self._taken[about.group, rank, source, about.tag] += 1
        elif stamp.mark in (Mark.WAIT, Mark.FAIL):
            since = now[key].since if key in now else stamp.time
            now[key] = OpenCall(about, stamp.sequence, since, True, stamp.mark is Mark.FAIL, stamp.step)
        elif about.group != SERVERS:
            now[key] = OpenCall(about, stamp.sequence, stamp.time, stamp.mark is Mark.ENTER)
            self._begin(rank, stamp.sequence, about)

    def went_on(self, rank: int) -> None:
        """A worker that does something new has got over what failed."""
        opened = self._open[rank]
        for key in [key for key, one in opened.items() if one.failed]:
            del opened[key]

    def _begin(self, rank: int, sequence: int, about: About) -> None:
        if about.peer is not None:
            self._begun[about.group, rank, about.operation, about.peer, about.tag] = sequence
            return
        self._entered[about.group][rank] = sequence
        wrong = self._matching.enter(worker_name(rank), call_of(about, sequence))
        self.mismatch = self.mismatch or wrong
        self._untidy += 1
        if self._untidy >= _TIDY:
            self._tidy()

    def _tidy(self) -> None:
        """Forget calls that everybody has been in for long; the last few show whether only the order differs."""
        self._untidy = 0
        for group, entered in self._entered.items():
            going = [number for rank, number in entered.items() if self._counts(group, rank)]
            self._matching.forget(group, min(going, default=0) - 8)

    def is_out(self, rank: int) -> bool:
        """Whether nobody waits for a worker any more."""
        return self._served.exists and not self._served.takes_part(rank)

    def _counts(self, group: str, rank: int) -> bool:
        """Whether a member of a group is waited for there: the dead are not, in meetings."""
        return group != MEETINGS or not self.is_out(rank)

    def needed(self, rank: int, one: OpenCall) -> tuple[set[int], int]:
        """Who has yet to do something before this can end, and how many of them must."""
        about = one.about
        if about.group == SERVERS:
            return self._served.awaited(rank, about, one.step)
        if about.peer is None:
            entered = self._entered[about.group]
            needed = call_of(about, one.sequence).needs(worker_name(rank))
            missing = {
                other
                for other in members_of(about)
                if worker_name(other) in needed
                and entered.get(other, 0) < one.sequence
                and self._counts(about.group, other)
            }
            return missing, len(missing)
        if about.peer < 0:
            return self._anybody(rank, about)
        answer = "receive from" if about.operation == SEND else SEND
        done = self._begun.get((about.group, about.peer, answer, rank, about.tag), 0)
        anything = (about.group, about.peer, answer, -1, about.tag) in self._begun
        return (set(), 0) if done >= one.sequence or anything else ({about.peer}, 1)

    def _anybody(self, rank: int, about: About) -> tuple[set[int], int]:
        """Who could end a receipt from anybody; nobody need to, if a message is under way."""
        others = {other for other in members_of(about) if other != rank}
        for other in others:
            sent = self._begun.get((about.group, other, SEND, rank, about.tag), 0)
            if sent > self._taken[about.group, rank, other, about.tag]:
                return set(), 0
        return others, min(1, len(others))

    def in_words(self, rank: int, one: OpenCall) -> str:
        """What a worker is in."""
        if one.about.group == SERVERS:
            return self._served.in_words(one.about, one.step, self._served.awaited(rank, one.about, one.step)[0])
        return str(one)

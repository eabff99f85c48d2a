"""The calls that workers are in: which have begun and not ended, and which workers have yet to enter.

A worker's entry into a call is known by the highest number of its calls on the group, so overwritten events do no harm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from offbeat.monitor.server_state import ServerState, members_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.deadlock import Matching, Mismatch
from offbeat.protocols.causality.histories import Call
from offbeat.runtime.events.recorder import About, Mark, Stamp
from offbeat.runtime.events.servers import GROUP as SERVERS
from offbeat.runtime.events.servers import MEETINGS

SEND = "send to"
_TIDY = 256  # Entries into collectives after which finished calls are forgotten.


class OpenCall(NamedTuple):
    """A call that a worker has begun and that has not ended."""

    about: About
    sequence: int
    since: float
    waited: bool  # Whether the worker only waits for it.
    failed: bool = False  # Whether the wait has ended with an error, which the program may recover from.
    step: int = 0

    def __str__(self) -> str:
        """The call in words, unless it is a request to a server."""
        if self.about.group == MEETINGS:
            return f"the {self.about.operation} (#{self.sequence})"
        if self.about.peer is None:
            return str(call_of(self.about, self.sequence))
        peer = worker_name(self.about.peer) if self.about.peer >= 0 else "anybody"
        where = f", called at {self.about.caller}" if self.about.caller else ""
        tag = f" with tag {self.about.tag}" if self.about.tag else ""
        return f"{self.about.operation} {peer} #{self.sequence}{tag} of group {self.about.group}{where}"


def call_of(about: About, sequence: int) -> Call:
    """A collective as the protocols know it."""
    shape = None if about.elements is None else (about.elements,)
    root = None if about.root is None else worker_name(about.root)
    names = _names(about.members)
    return Call(about.group, sequence, names, about.operation, shape, about.dtype, about.reduce, root, about.caller)


@lru_cache(maxsize=64)
def _names(members: tuple[int, ...] | int) -> tuple[str, ...]:
    """Workers' names: the same for thousands of calls of a group."""
    return tuple(map(worker_name, range(members) if isinstance(members, int) else members))


class OpenCalls:
    """The open calls of all workers of a run."""

    def __init__(self, servers: ServerState) -> None:
        self._servers = servers
        self._open: dict[int, dict[tuple[str, str, int | None, int, int], OpenCall]] = defaultdict(dict)
        self._entered: dict[str, dict[int, int]] = defaultdict(dict)
        self._begun: dict[tuple[str, int, str, int | None, int], int] = defaultdict(int)
        self._matching = Matching()
        self._taken: dict[tuple[str, int, int, int], int] = defaultdict(int)
        self._untidy = 0
        self.mismatch: Mismatch | None = None  # The first call that a worker made differently than the others.

    def all(self) -> Iterator[tuple[int, OpenCall]]:
        """Rank and call of each."""
        return ((rank, call) for rank, calls in self._open.items() for call in calls.values())

    def waits(self, rank: int) -> bool:
        """Whether a worker only waits for something."""
        return any(call.waited for call in self._open.get(rank, {}).values())

    @property
    def collectives(self) -> int:
        """Number of collectives that all workers have entered, in the busiest group."""
        return max((min(entered.values()) for entered in self._entered.values() if len(entered) > 1), default=0)

    def forget(self, rank: int) -> None:
        """Another process has taken a worker's place."""
        self._open.pop(rank, None)
        for entered in self._entered.values():
            entered.pop(rank, None)

    def note(self, rank: int, stamp: Stamp, about: About) -> None:
        """A worker begins, waits for, or ends a call."""
        key = (about.group, about.operation, about.peer, about.tag, stamp.sequence)
        calls = self._open[rank]
        if stamp.mark is Mark.EXIT:
            calls.pop(key, None)
            if about.peer is not None and about.operation != SEND:
                source = stamp.value - 1 if about.peer < 0 else about.peer
                self._taken[about.group, rank, source, about.tag] += 1
        elif stamp.mark in (Mark.WAIT, Mark.FAIL):
            since = calls[key].since if key in calls else stamp.time
            calls[key] = OpenCall(about, stamp.sequence, since, True, stamp.mark is Mark.FAIL, stamp.step)
        elif about.group != SERVERS:
            calls[key] = OpenCall(about, stamp.sequence, stamp.time, stamp.mark is Mark.ENTER)
            self._begin(rank, stamp.sequence, about)

    def went_on(self, rank: int) -> None:
        """A worker that does something new has recovered from its failed calls."""
        calls = self._open[rank]
        for key in [key for key, call in calls.items() if call.failed]:
            del calls[key]

    def _begin(self, rank: int, sequence: int, about: About) -> None:
        if about.peer is not None:
            self._begun[about.group, rank, about.operation, about.peer, about.tag] = sequence
            return
        self._entered[about.group][rank] = sequence
        wrong = self._matching.enter(worker_name(rank), call_of(about, sequence))
        self.mismatch = self.mismatch or wrong
        self._untidy += 1
        if self._untidy >= _TIDY:
            self._untidy = 0
            for group, entered in self._entered.items():
                numbers = [number for rank, number in entered.items() if self._counts(group, rank)]
                # The last few are kept: they show whether only the order differs.
                self._matching.forget(group, min(numbers, default=0) - 8)

    def is_out(self, rank: int) -> bool:
        """Whether no worker waits for this one any more."""
        return self._servers.exists and not self._servers.takes_part(rank)

    def _counts(self, group: str, rank: int) -> bool:
        """Whether others wait for a member of a group: in meetings, not for the dead."""
        return group != MEETINGS or not self.is_out(rank)

    def needed(self, rank: int, call: OpenCall) -> tuple[set[int], int]:
        """Workers that have yet to act before this call can end, and how many of them must."""
        about = call.about
        if about.group == SERVERS:
            return self._servers.awaited(rank, about, call.step)
        if about.peer is None:
            entered = self._entered[about.group]
            needed = call_of(about, call.sequence).needs(worker_name(rank))
            missing = {
                other
                for other in members_of(about)
                if worker_name(other) in needed
                and entered.get(other, 0) < call.sequence
                and self._counts(about.group, other)
            }
            return missing, len(missing)
        if about.peer < 0:  # From anybody: nobody need send if a message is in flight.
            others = {other for other in members_of(about) if other != rank}
            for other in others:
                sent = self._begun.get((about.group, other, SEND, rank, about.tag), 0)
                if sent > self._taken[about.group, rank, other, about.tag]:
                    return set(), 0
            return others, min(1, len(others))
        answer = "receive from" if about.operation == SEND else SEND
        done = self._begun.get((about.group, about.peer, answer, rank, about.tag), 0)
        anything = (about.group, about.peer, answer, -1, about.tag) in self._begun
        return (set(), 0) if done >= call.sequence or anything else ({about.peer}, 1)

    def in_words(self, rank: int, call: OpenCall) -> str:
        """The call that a worker is in."""
        if call.about.group == SERVERS:
            behind = self._servers.awaited(rank, call.about, call.step)[0]
            return self._servers.in_words(call.about, call.step, behind)
        return str(call)

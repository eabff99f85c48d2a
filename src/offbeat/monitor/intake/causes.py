"""What each record of a process is a cause of, and what it depends on, by names that both sides know.

Groups, calls and messages are numbered by each side for itself, so nothing travels with them. A record that has come
can be named at once, without the records of others: `history` joins complete runs, this is for runs in progress.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Set
from typing import Final

from offbeat.monitor.calls import SEND, call_of
from offbeat.monitor.verdicts import worker_name
from offbeat.protocols.causality.clock_stamps import Cause, Occurrence
from offbeat.protocols.machine import Name
from offbeat.runtime.events.recorder import About, Mark, Stamp
from offbeat.runtime.events.servers import GROUP as SERVERS
from offbeat.runtime.events.servers import MEETINGS, PULL, PUSH

LOCAL: Final = frozenset({Mark.TURN, Mark.COMPUTED, Mark.PARKED})
"""Marks that concern their process alone, and no verdict: they need no place in the order."""
_USED: Final = frozenset({Mark.APPLIED, Mark.REFUSED, Mark.LATE})
_BEGUN: Final = frozenset({Mark.ENTER, Mark.START})
_Channel = tuple[Hashable, ...]


class WorkerCauses:
    """Names the causes and effects of one worker's records."""

    def __init__(self, rank: int, out: Set[Name] = frozenset()) -> None:
        self._rank, self._name = rank, worker_name(rank)
        self._out = out  # Workers that have left or ended, which meetings do not wait for.
        self._received = defaultdict[_Channel, int](int)
        self._complete = True  # Whether no record has been dropped: then the n-th received is the n-th sent.

    def dropped(self) -> None:
        """Some records of this worker are missing."""
        self._complete = False

    def of(self, stamp: Stamp) -> Occurrence:
        """A record, with its causes and what it is a cause of."""
        about = stamp.about
        if about is None:
            return Occurrence(time=stamp.time, event=stamp)
        gives, needs = self._joins(stamp, about)
        return Occurrence(gives, needs, stamp.time, stamp)

    def _joins(self, stamp: Stamp, about: About) -> tuple[tuple[Hashable, ...], tuple[Cause, ...]]:
        mark = stamp.mark
        if mark is Mark.SENT:
            return self._sent(stamp, about), ()
        if mark is Mark.RECEIVED:
            return (), self._receives(stamp, about, stamp.sequence)
        if about.group == SERVERS:
            return self._with_servers(stamp, about)
        if about.peer is not None:
            if mark in _BEGUN and about.operation == SEND:
                return self._sent(stamp, about), ()
            if mark is Mark.EXIT and about.operation != SEND:
                return (), self._receives(stamp, about, None)
            return (), ()
        if mark in _BEGUN:
            return ((about.group, stamp.sequence, self._name),), ()
        if mark is Mark.EXIT:
            needed = call_of(about, stamp.sequence).needs(self._name)
            needed = needed - self._out if about.group == MEETINGS else needed
            return (), tuple(Cause((about.group, stamp.sequence, other), other) for other in needed)
        return (), ()

    def _sent(self, stamp: Stamp, about: About) -> tuple[Hashable, ...]:
        return ((about.group, self._rank, about.peer, about.tag, stamp.sequence),)

    def _receives(self, stamp: Stamp, about: About, number: int | None) -> tuple[Cause, ...]:
        peer = stamp.value - 1 if about.peer is not None and about.peer < 0 else about.peer
        channel = (about.group, peer, self._rank, about.tag)
        self._received[channel] += 1
        if number is None:
            number = self._received[channel] if self._complete else stamp.sequence
        return (Cause((*channel, number), None if peer is None else worker_name(peer)),)

    def _with_servers(self, stamp: Stamp, about: About) -> tuple[tuple[Hashable, ...], tuple[Cause, ...]]:
        if stamp.mark is Mark.START and about.operation == PUSH:
            return ((PUSH, self._rank, stamp.sequence),), ()
        if stamp.mark is Mark.READ and stamp.sequence:
            return (), (Cause((PULL, about.shard, self._rank, stamp.sequence)),)
        return (), ()


def of_server(stamp: Stamp) -> Occurrence:
    """A server's record, with its causes and what it is a cause of. Pushes are numbered as on the first shard."""
    about = stamp.about
    if about is None:
        return Occurrence(time=stamp.time, event=stamp)
    gives: tuple[Hashable, ...] = ()
    needs: tuple[Cause, ...] = ()
    if stamp.mark in _USED and about.shard == 0 and about.peer is not None:
        needs = (Cause((PUSH, about.peer, stamp.sequence), worker_name(about.peer)),)
    elif stamp.mark is Mark.ANSWERED:
        gives = ((PULL, about.shard, about.peer, stamp.sequence),)
    return Occurrence(gives, needs, stamp.time, stamp)

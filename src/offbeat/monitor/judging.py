"""Judges a run by its events as they come: who waits for whom, and whether that can ever end.

A judgement is about a moment. Files are read one after the other, so what they say together need never have been true
together. While a run goes, a `Listener` puts them into the order of time. What a worker has begun it may note a moment
later, so that is not always the order of cause and effect. `moved` says whose events have changed since the last look:
if those who are said to be stuck have not moved between two looks, then there was a moment between them at which all
of it was true, which is a consistent cut; that somebody else had not arrived at the second look was true then, too.

That a worker has entered a call is known by the highest number of its calls on the group, so that events that were
written over do no harm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

from offbeat.monitor.serving import Served
from offbeat.monitor.verdicts import DEADLOCK, DESYNC, ENDED, SILENT, Verdict, worker_name
from offbeat.protocols.causality.deadlock import Deadlock, Wait, deadlock, natural
from offbeat.protocols.causality.histories import Call
from offbeat.protocols.causality.matching import Matching, Mismatch
from offbeat.runtime.servers.noting import GROUP as SERVERS
from offbeat.runtime.servers.noting import MEETINGS
from offbeat.runtime.stamps import About, Mark, Stamp

SEND = "send to"


class _Open(NamedTuple):
    """Something that a worker has begun and that has not ended."""

    about: About
    sequence: int
    since: float
    waited: bool
    """Whether the worker does nothing else until it ends."""
    failed: bool = False
    """Whether the wait has ended with an error, which the program may yet go on from."""
    step: int = 0


_TIDY = 256
"""Entries into collectives after which those that are long over are forgotten."""
UNJUDGED = frozenset({Mark.TURN, Mark.SENT, Mark.RECEIVED, Mark.APPLIED, Mark.ANSWERED, Mark.PARKED})
"""Marks that no verdict depends on."""
_OPERATIONS = frozenset({Mark.ENTER, Mark.START, Mark.WAIT, Mark.EXIT, Mark.FAIL})
_MUTE = frozenset({Mark.EXIT, Mark.FAIL, Mark.TURN, Mark.SENT, Mark.RECEIVED, Mark.VIEW})
"""Marks that do not say that a worker has got over what failed: they come from unwinding, or from another thread."""


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


class Judge:
    """What is known of a run."""

    def __init__(self) -> None:
        self._open: dict[int, dict[tuple[str, str, int | None, int, int], _Open]] = defaultdict(dict)
        self._entered: dict[str, dict[int, int]] = defaultdict(dict)
        self._begun: dict[tuple[str, int, str, int | None, int], int] = defaultdict(int)
        self._matching = Matching()
        self._taken: dict[tuple[str, int, int, int], int] = defaultdict(int)
        self._mismatch: Mismatch | None = None
        self._untidy = 0
        self.served = Served()
        """What is known of the run's servers."""
        self.ended: dict[int, str] = {}
        """Who has ended, and how."""
        self.steps: dict[int, int] = {}
        """How many steps each worker has made."""
        self.unfit = 0
        """How often numbers were given, or refused, that are not finite."""

    def feed(self, rank: int, stamps: Iterable[Stamp]) -> None:
        """What a worker has done since the last look."""
        for stamp in stamps:
            if stamp.mark not in _MUTE:
                self._went_on(rank)
            if stamp.mark is Mark.END:
                self.ended.setdefault(rank, "has ended its program")
            elif stamp.mark is Mark.STEP:
                self.steps[rank] = stamp.sequence
                self.served.note_step(rank, stamp.sequence)
            elif stamp.mark is Mark.NAN:
                self.unfit += 1
            elif stamp.mark is Mark.LEAVE:
                self.served.left.add(rank)
            elif stamp.mark is Mark.VIEW and stamp.about is not None:
                self.served.note_view(stamp, stamp.about)
            elif stamp.about is not None and stamp.mark in _OPERATIONS:
                self._note(rank, stamp, stamp.about)

    def feed_server(self, stamps: Iterable[Stamp]) -> None:
        """What a server has done since the last look."""
        for stamp in stamps:
            self.unfit += stamp.mark is Mark.REFUSED
            if stamp.mark is Mark.VIEW and stamp.about is not None:
                self.served.note_view(stamp, stamp.about)

    @property
    def progress(self) -> int:
        """How many steps everybody has made; if nobody makes any, how many collectives, in the busiest group."""
        if self.steps:
            return min(self.steps.values())
        return max((min(entered.values()) for entered in self._entered.values() if len(entered) > 1), default=0)

    def reborn(self, rank: int) -> None:
        """Another process has taken a worker's place: what was known of the first is void."""
        self._open.pop(rank, None)
        self.ended.pop(rank, None)
        for entered in self._entered.values():
            entered.pop(rank, None)
        self.served.reborn(rank)

    def _note(self, rank: int, stamp: Stamp, about: About) -> None:
        if about.group == SERVERS:
            self.served.note(rank, stamp, about)
        key = (about.group, about.operation, about.peer, about.tag, stamp.sequence)
        now = self._open[rank]
        if stamp.mark is Mark.EXIT:
            now.pop(key, None)
            if about.peer is not None and about.operation != SEND:
                source = stamp.value - 1 if about.peer < 0 else about.peer
                self._taken[about.group, rank, source, about.tag] += 1
        elif stamp.mark in (Mark.WAIT, Mark.FAIL):
            since = now[key].since if key in now else stamp.time
            now[key] = _Open(about, stamp.sequence, since, True, stamp.mark is Mark.FAIL, stamp.step)
        elif about.group != SERVERS:
            now[key] = _Open(about, stamp.sequence, stamp.time, stamp.mark is Mark.ENTER)
            self._begin(rank, stamp.sequence, about)

    def _went_on(self, rank: int) -> None:
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
        self._mismatch = self._mismatch or wrong
        self._untidy += 1
        if self._untidy >= _TIDY:
            self._tidy()

    def _tidy(self) -> None:
        """Forget calls that everybody has been in for long; the last few show whether only the order differs."""
        self._untidy = 0
        for group, entered in self._entered.items():
            going = [number for rank, number in entered.items() if self._counts(group, rank)]
            self._matching.forget(group, min(going, default=0) - 8)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def final(self, moved: Collection[int] = (), idle: Collection[int] = ()) -> Verdict | None:
        """What can never become better, judging only by those who have not moved since the last look.

        Those who are `idle` have not computed, either: in the midst of backward, they wait for what DDP has begun.
        """
        if self._mismatch is not None:
            return Verdict(DESYNC, str(self._mismatch))
        ended = {worker_name(rank) for rank in self.ended}
        found = deadlock(self._waits(ended, moved, idle), ended)
        return None if found is None else self._verdict(found)

    def _verdict(self, found: Deadlock) -> Verdict:
        gone = {name for knot in found.knots for name in knot.ended}
        how = {worker_name(rank): words for rank, words in self.ended.items()}
        message = str(found)
        for name in gone:
            message = message.replace(f"{name} has ended", f"{name} {how[name]}")
        stuck = () if gone else tuple(rank for rank in sorted(self._open) if worker_name(rank) in found.stuck)
        return Verdict(ENDED if gone else DEADLOCK, message, stuck)

    def waiting(self) -> list[str]:
        """Who waits for whom now, in words."""
        found = self._waits((), (), ())
        return [f"{wait.process} waits for {_whom(wait)} in {wait.what}" for wait in found]

    def in_backward(self) -> set[int]:
        """Who has begun something for DDP that has not ended."""
        return {rank for rank, opened in self._open.items() if any(one.about.backward for one in opened.values())}

    def awaited(self, now: float, patience: float) -> dict[int, tuple[float, int, str]]:
        """Who has been waited for longer than that and does not wait itself: for how long, by whom, in what."""
        late: dict[int, tuple[float, int, str]] = {}
        for rank, opened in self._open.items():
            for one in opened.values():
                if now - one.since <= patience or rank in self.ended or self._is_out(rank):
                    continue
                whom, needs = self._needed(rank, one)
                for other in whom if needs == len(whom) else ():
                    if other not in self.ended and not any(own.waited for own in self._open.get(other, {}).values()):
                        late.setdefault(other, (now - one.since, rank, self._in_words(rank, one)))
        return late

    def silent(self, now: float, patience: float) -> Verdict | None:
        """Who has been waited for longer than that, and does not wait itself, as far as is known."""
        late = self.awaited(now, patience)
        if not late:
            return None
        told = [
            f"{worker_name(rank)} has waited {seconds:.0f} s for {worker_name(other)} in {what}, which does something "
            f"else"
            for other, (seconds, rank, what) in sorted(late.items())
        ]
        return Verdict(SILENT, f"{'; '.join(told)}. It may still come.", tuple(sorted(late)))

    def _waits(self, ended: Collection[str], moved: Collection[int], idle: Collection[int]) -> list[Wait]:
        found: list[Wait] = []
        for rank, opened in self._open.items():
            still = rank not in moved and rank not in self.ended and not self._is_out(rank)
            for one in opened.values() if still else ():
                whom, needs = self._needed(rank, one)
                missing = frozenset(map(worker_name, whom))
                # Torch may wait inside for what nobody waits for here; if somebody has ended, it hangs for certain.
                waited = one.waited or (one.about.backward and rank in idle)
                if needs and (waited or missing & set(ended)):
                    found.append(Wait(worker_name(rank), needs, missing, self._in_words(rank, one)))
        return found

    def _is_out(self, rank: int) -> bool:
        return self.served.exists and not self.served.takes_part(rank)

    def _counts(self, group: str, rank: int) -> bool:
        """Whether a member of a group is waited for there: the dead are not, in meetings."""
        return group != MEETINGS or not self._is_out(rank)

    def _needed(self, rank: int, one: _Open) -> tuple[set[int], int]:
        """Who has yet to do something before this can end, and how many of them must."""
        about = one.about
        if about.group == SERVERS:
            return self.served.awaited(rank, about, one.step)
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

    def _in_words(self, rank: int, one: _Open) -> str:
        if one.about.group == SERVERS:
            return self.served.in_words(one.about, one.step, self.served.awaited(rank, one.about, one.step)[0])
        return _in_words(one)


def _whom(wait: Wait) -> str:
    names = natural(wait.of)
    return " and ".join(names) if wait.spare == 0 else f"{wait.needs} of {', '.join(names)}"


def _in_words(one: _Open) -> str:
    if one.about.group == MEETINGS:
        return f"the {one.about.operation} (#{one.sequence})"
    if one.about.peer is None:
        return str(call_of(one.about, one.sequence))
    who = worker_name(one.about.peer) if one.about.peer >= 0 else "anybody"
    where = f", called at {one.about.caller}" if one.about.caller else ""
    tag = f" with tag {one.about.tag}" if one.about.tag else ""
    return f"{one.about.operation} {who} #{one.sequence}{tag} of group {one.about.group}{where}"


def how_it_ended(exit_code: int | None, signal: int | None) -> str:
    """The end of a process in words."""
    if signal is not None:
        return f"was ended by signal {signal}"
    return "has ended its program" if exit_code == 0 else f"has ended with exit code {exit_code}"

"""Judges a run by its events as they come: who waits for whom, and whether that can ever end.

A judgement is about a moment. Files are read one after the other, so what they say together need never have been true
together. `moved` says whose events have changed since the last look: if those who are said to be stuck have not moved
between two looks, then there was a moment between them at which all of it was true, which is a consistent cut; that
somebody else had not arrived at the second look was true at that moment, too.

That a worker has entered a call is known by the highest number of its calls on the group, so that events that were
written over do no harm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from offbeat.monitor.verdicts import DEADLOCK, DESYNC, ENDED, SILENT, Verdict, worker_name
from offbeat.protocols.causality.deadlock import Deadlock, Wait, deadlock, natural
from offbeat.protocols.causality.histories import Call
from offbeat.protocols.causality.matching import Matching, Mismatch
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


def call_of(about: About, sequence: int) -> Call:
    """A collective as the protocols know it."""
    return Call(
        about.group,
        sequence,
        tuple(map(worker_name, members_of(about))),
        about.operation,
        None if about.elements is None else (about.elements,),
        about.dtype,
        about.reduce,
        None if about.root is None else worker_name(about.root),
        about.caller,
    )


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
        self._mismatch: Mismatch | None = None
        self.ended: dict[int, str] = {}
        """Who has ended, and how."""

    def feed(self, rank: int, stamps: Iterable[Stamp]) -> None:
        """What a worker has done since the last look."""
        for stamp in stamps:
            if stamp.mark not in (Mark.EXIT, Mark.FAIL):
                self._went_on(rank)
            if stamp.mark is Mark.END:
                self.ended.setdefault(rank, "has ended its program")
            elif stamp.about is not None:
                self._note(rank, stamp, stamp.about)
        self._tidy()

    def _note(self, rank: int, stamp: Stamp, about: About) -> None:
        key = (about.group, about.operation, about.peer, about.tag, stamp.sequence)
        now = self._open[rank]
        if stamp.mark is Mark.EXIT:
            now.pop(key, None)
        elif stamp.mark in (Mark.WAIT, Mark.FAIL):
            since = now[key].since if key in now else stamp.time
            now[key] = _Open(about, stamp.sequence, since, True, stamp.mark is Mark.FAIL)
        else:
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

    def _tidy(self) -> None:
        """Forget calls that everybody has been in for long; the last few show whether only the order differs."""
        for group, entered in self._entered.items():
            self._matching.forget(group, min(entered.values()) - 8)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def final(self, moved: Collection[int] = ()) -> Verdict | None:
        """What can never become better, judging only by those who have not moved since the last look."""
        if self._mismatch is not None:
            return Verdict(DESYNC, str(self._mismatch))
        ended = {worker_name(rank) for rank in self.ended}
        found = deadlock(self._waits(ended, moved), ended)
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
        found = self._waits((), ())
        return [f"{wait.process} waits for {' and '.join(natural(wait.of))} in {wait.what}" for wait in found]

    def silent(self, now: float, patience: float) -> Verdict | None:
        """Who has been waited for longer than that, and does not wait itself, as far as is known."""
        late: dict[int, tuple[float, int, str]] = {}
        for rank, opened in self._open.items():
            for one in opened.values():
                for other in self._needed(rank, one):
                    waits = other in self.ended or any(own.waited for own in self._open.get(other, {}).values())
                    if now - one.since > patience and not waits:
                        late.setdefault(other, (now - one.since, rank, _in_words(one)))
        if not late:
            return None
        told = [
            f"{worker_name(rank)} has waited {seconds:.0f} s for {worker_name(other)} in {what}, which does something "
            f"else"
            for other, (seconds, rank, what) in sorted(late.items())
        ]
        return Verdict(SILENT, f"{'; '.join(told)}. It may still come.", tuple(sorted(late)))

    def _waits(self, ended: Collection[str], moved: Collection[int]) -> list[Wait]:
        found: list[Wait] = []
        for rank, opened in self._open.items():
            for one in () if rank in moved or rank in self.ended else opened.values():
                missing = {worker_name(other) for other in self._needed(rank, one)}
                # Torch may wait inside for what nobody waits for here; if somebody has ended, it hangs for certain.
                if missing and (one.waited or missing & set(ended)):
                    found.append(Wait.on_all(worker_name(rank), missing, _in_words(one)))
        return found

    def _needed(self, rank: int, one: _Open) -> set[int]:
        """Who has yet to do something before this can end."""
        about = one.about
        if about.peer is None:
            entered = self._entered[about.group]
            needed = call_of(about, one.sequence).needs(worker_name(rank))
            return {
                other
                for other in members_of(about)
                if worker_name(other) in needed and entered.get(other, 0) < one.sequence
            }
        if about.peer < 0:
            return set()  # Who else is in the group is not written down with messages.
        answer = "receive from" if about.operation == SEND else SEND
        done = self._begun.get((about.group, about.peer, answer, rank, about.tag), 0)
        anything = (about.group, about.peer, answer, -1, about.tag) in self._begun
        return set() if done >= one.sequence or anything else {about.peer}


def _in_words(one: _Open) -> str:
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

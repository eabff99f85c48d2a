"""Judges a run by its events as they come: who waits for whom, and whether that can ever end.

A judgement is about a moment. Files are read one after the other, so what they say together need never have been true
together. While a run goes, a `Listener` puts them into the order of time. What a worker has begun it may note a moment
later, so that is not always the order of cause and effect. `moved` says whose events have changed since the last look:
if those who are said to be stuck have not moved between two looks, then there was a moment between them at which all
of it was true, which is a consistent cut; that somebody else had not arrived at the second look was true then, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from offbeat.monitor.calls import OpenCalls
from offbeat.monitor.server_state import ServerState
from offbeat.monitor.verdicts import DEADLOCK, DESYNC, ENDED, SILENT, Verdict, worker_name
from offbeat.protocols.causality.deadlock import Deadlock, Wait, deadlock, natural
from offbeat.runtime.events.recorder import Mark, Stamp
from offbeat.runtime.events.servers import GROUP as SERVERS

UNJUDGED = frozenset({Mark.TURN, Mark.SENT, Mark.RECEIVED, Mark.APPLIED, Mark.ANSWERED, Mark.PARKED})
"""Marks that no verdict depends on."""
_OPERATIONS = frozenset({Mark.ENTER, Mark.START, Mark.WAIT, Mark.EXIT, Mark.FAIL})
_MUTE = frozenset({Mark.EXIT, Mark.FAIL, Mark.TURN, Mark.SENT, Mark.RECEIVED, Mark.VIEW})
"""Marks that do not say that a worker has got over what failed: they come from unwinding, or from another thread."""


class Judge:
    """What is known of a run."""

    def __init__(self) -> None:
        self.served = ServerState()
        """What is known of the run's servers."""
        self._calls = OpenCalls(self.served)
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
                self._calls.went_on(rank)
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
                if stamp.about.group == SERVERS:
                    self.served.note(rank, stamp, stamp.about)
                self._calls.note(rank, stamp, stamp.about)

    def feed_server(self, stamps: Iterable[Stamp]) -> None:
        """What a server has done since the last look."""
        for stamp in stamps:
            self.unfit += stamp.mark is Mark.REFUSED
            if stamp.mark is Mark.VIEW and stamp.about is not None:
                self.served.note_view(stamp, stamp.about)

    @property
    def progress(self) -> int:
        """How many steps everybody has made; if nobody makes any, how many collectives, in the busiest group."""
        return min(self.steps.values()) if self.steps else self._calls.collectives

    def reborn(self, rank: int) -> None:
        """Another process has taken a worker's place: what was known of the first is void."""
        self._calls.forget(rank)
        self.ended.pop(rank, None)
        self.served.reborn(rank)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def final(self, moved: Collection[int] = (), idle: Collection[int] = ()) -> Verdict | None:
        """What can never become better, judging only by those who have not moved since the last look.

        Those who are `idle` have not computed, either: in the midst of backward, they wait for what DDP has begun.
        """
        if self._calls.mismatch is not None:
            return Verdict(DESYNC, str(self._calls.mismatch))
        ended = {worker_name(rank) for rank in self.ended}
        found = deadlock(self._waits(ended, moved, idle), ended)
        return None if found is None else self._verdict(found)

    def _verdict(self, found: Deadlock) -> Verdict:
        gone = {name for knot in found.knots for name in knot.ended}
        how = {worker_name(rank): words for rank, words in self.ended.items()}
        if gone:
            return Verdict(ENDED, found.told(how))
        stuck = sorted({rank for rank, _ in self._calls.all() if worker_name(rank) in found.stuck})
        return Verdict(DEADLOCK, str(found), tuple(stuck))

    def waiting(self) -> list[str]:
        """Who waits for whom now, in words."""
        found = self._waits((), (), ())
        return [f"{wait.process} waits for {_whom(wait)} in {wait.what}" for wait in found]

    def in_backward(self) -> set[int]:
        """Who has begun something for DDP that has not ended."""
        return {rank for rank, one in self._calls.all() if one.about.backward}

    def awaited(self, now: float, patience: float) -> dict[int, tuple[float, int, str]]:
        """Who has been waited for longer than that and does not wait itself: for how long, by whom, in what."""
        late: dict[int, tuple[float, int, str]] = {}
        for rank, one in self._calls.all():
            if now - one.since <= patience or rank in self.ended or self._calls.is_out(rank):
                continue
            whom, needs = self._calls.needed(rank, one)
            for other in whom if needs == len(whom) else ():
                if other not in self.ended and not self._calls.waits(other):
                    late.setdefault(other, (now - one.since, rank, self._calls.in_words(rank, one)))
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
        for rank, one in self._calls.all():
            if rank in moved or rank in self.ended or self._calls.is_out(rank):
                continue
            whom, needs = self._calls.needed(rank, one)
            missing = frozenset(map(worker_name, whom))
            # Torch may wait inside for what nobody waits for here; if somebody has ended, it hangs for certain.
            waited = one.waited or (one.about.backward and rank in idle)
            if needs and (waited or missing & set(ended)):
                found.append(Wait(worker_name(rank), needs, missing, self._calls.in_words(rank, one)))
        return found


def _whom(wait: Wait) -> str:
    names = natural(wait.of)
    return " and ".join(names) if wait.spare == 0 else f"{wait.needs} of {', '.join(names)}"


def how_it_ended(exit_code: int | None, signal: int | None) -> str:
    """The end of a process in words."""
    if signal is not None:
        return f"was ended by signal {signal}"
    return "has ended its program" if exit_code == 0 else f"has ended with exit code {exit_code}"

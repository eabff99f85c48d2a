"""Finds deadlocks in a run's events as they arrive: who waits for whom, and whether that wait can ever end.

A judgement is about one moment. Files are read one after the other, so what they say together need never have been true
together. During a run, a `Listener` puts events into the order of time. A worker may record what it has begun a moment
later, so that is not always the order of cause and effect. `moved` lists the workers whose events have changed since
the last look: if those found stuck have not moved between two looks, there was a moment between the looks at which all
of it was true, which is a consistent cut; that another worker had not arrived at the second look was true then, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from offbeat.monitor.calls import OpenCalls
from offbeat.monitor.server_state import ServerState
from offbeat.monitor.verdicts import DEADLOCK, DESYNC, ENDED, SILENT, Verdict, worker_name
from offbeat.protocols.causality.deadlock import Wait, deadlock, natural
from offbeat.runtime.events.recorder import Mark, Stamp
from offbeat.runtime.events.servers import GROUP as SERVERS

UNJUDGED = frozenset({Mark.TURN, Mark.SENT, Mark.RECEIVED, Mark.COMPUTED, Mark.APPLIED, Mark.ANSWERED, Mark.PARKED})
"""Marks that no verdict depends on."""
_OPERATIONS = frozenset({Mark.ENTER, Mark.START, Mark.WAIT, Mark.EXIT, Mark.FAIL})
_MUTE = frozenset({Mark.EXIT, Mark.FAIL, Mark.TURN, Mark.SENT, Mark.RECEIVED, Mark.VIEW})
"""Marks that do not show recovery from a failure: they come from unwinding, or from another thread."""


class Judge:
    """The state of a run by its events so far, and verdicts on it."""

    def __init__(self) -> None:
        self.served = ServerState()  # State of the run's servers.
        self._calls = OpenCalls(self.served)
        self.ended: dict[int, str] = {}  # Workers that have ended, and how.
        self.steps: dict[int, int] = {}  # Number of steps of each worker.
        self.unfit = 0  # Number of times that NaN or infinite numbers were sent or refused.

    def feed(self, rank: int, stamps: Iterable[Stamp]) -> None:
        """Take in new events of a worker."""
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
        """Take in new events of a server."""
        for stamp in stamps:
            self.unfit += stamp.mark is Mark.REFUSED
            if stamp.mark is Mark.VIEW and stamp.about is not None:
                self.served.note_view(stamp, stamp.about)

    @property
    def progress(self) -> int:
        """Steps that all workers have made; if none makes any, collectives in the busiest group."""
        return min(self.steps.values()) if self.steps else self._calls.collectives

    def reborn(self, rank: int) -> None:
        """Another process has taken a worker's place: the state of the first is void."""
        self._calls.forget(rank)
        self.ended.pop(rank, None)
        self.served.reborn(rank)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def final(self, moved: Collection[int] = (), idle: Collection[int] = ()) -> Verdict | None:
        """A verdict that can never change, judging only by workers that have not moved since the last look.

        Workers that are `idle` have not computed, either: in the middle of backward, they wait for what DDP has begun.
        """
        if self._calls.mismatch is not None:
            return Verdict(DESYNC, str(self._calls.mismatch))
        ended = {worker_name(rank): how for rank, how in self.ended.items()}
        knot = deadlock(self._waits(ended, moved, idle), set(ended))
        if knot is None:
            return None
        if any(part.ended for part in knot.knots):
            return Verdict(ENDED, knot.told(ended))
        stuck = {rank for rank, _ in self._calls.all() if worker_name(rank) in knot.stuck}
        return Verdict(DEADLOCK, str(knot), tuple(sorted(stuck)))

    def waiting(self) -> list[str]:
        """Who waits for whom now, in words."""
        return [f"{wait.process} waits for {_others(wait)} in {wait.what}" for wait in self._waits((), (), ())]

    def in_backward(self) -> set[int]:
        """Workers that have begun something for DDP that has not ended."""
        return {rank for rank, call in self._calls.all() if call.about.backward}

    def awaited(self, now: float, patience: float) -> dict[int, tuple[float, int, str]]:
        """Workers that others have awaited for longer than that and that do not wait: how long, by whom, in what."""
        late: dict[int, tuple[float, int, str]] = {}
        for rank, call in self._calls.all():
            if now - call.since <= patience or rank in self.ended or self._calls.is_out(rank):
                continue
            others, needs = self._calls.needed(rank, call)
            for other in others if needs == len(others) else ():
                if other not in self.ended and not self._calls.waits(other):
                    late.setdefault(other, (now - call.since, rank, self._calls.in_words(rank, call)))
        return late

    def silent(self, now: float, patience: float) -> Verdict | None:
        """A verdict on workers that others have awaited for longer than that, and that do not wait themselves."""
        late = self.awaited(now, patience)
        if not late:
            return None
        words = [
            f"{worker_name(rank)} has waited {seconds:.0f} s for {worker_name(other)} in {what}, which does something "
            f"else"
            for other, (seconds, rank, what) in sorted(late.items())
        ]
        return Verdict(SILENT, f"{'; '.join(words)}. It may still come.", tuple(sorted(late)))

    def _waits(self, ended: Collection[str], moved: Collection[int], idle: Collection[int]) -> list[Wait]:
        waits: list[Wait] = []
        for rank, call in self._calls.all():
            if rank in moved or rank in self.ended or self._calls.is_out(rank):
                continue
            others, needs = self._calls.needed(rank, call)
            missing = frozenset(map(worker_name, others))
            # Torch may wait internally for a call that nobody waits for here; if a member has ended, it hangs for sure.
            waited = call.waited or (call.about.backward and rank in idle)
            if needs and (waited or missing & set(ended)):
                waits.append(Wait(worker_name(rank), needs, missing, self._calls.in_words(rank, call)))
        return waits


def _others(wait: Wait) -> str:
    names = natural(wait.of)
    return " and ".join(names) if wait.spare == 0 else f"{wait.needs} of {', '.join(names)}"


def how_it_ended(exit_code: int | None, signal: int | None) -> str:
    """The end of a process in words."""
    if signal is not None:
        return f"was ended by signal {signal}"
    return "has ended its program" if exit_code == 0 else f"has ended with exit code {exit_code}"

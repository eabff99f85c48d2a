"""Predicates that held possibly or definitely, over all the orders in which a run may have gone.

Predicates that are a condition on each worker are decided exactly; others are searched for in the lattice of consistent
cuts, up to a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import Any, Final

import numpy as np
from msgspec import Struct

from offbeat.errors import UsageError, did_you_mean
from offbeat.monitor.history import ServerStamps, Stamps, trace_of
from offbeat.protocols.causality import cuts
from offbeat.protocols.causality.cuts import CAP, Answer, Cut, Finding, between, latest_consistent
from offbeat.protocols.causality.histories import EventKind
from offbeat.runtime.events.recorder import COMPUTING, UNKNOWN, Mark, Stamp

PREDICATES: Final = {
    "all-waiting": "every worker is in a collective, a receipt or a pull",
    "nobody-computing": "no worker computes: each waits, reads input, evaluates or has ended",
    "in-flight>N": "more than N messages were sent and had not been received",
    "steps-apart>N": "two workers were more than N steps apart",
}


class Predicate(Struct, frozen=True):
    """One of `PREDICATES`, with its number if it has one."""

    name: str
    limit: int = 0

    def __str__(self) -> str:
        return self.name.replace("N", str(self.limit))


def predicate(text: str) -> Predicate:
    """Parse a predicate such as `all-waiting` or `steps-apart>3`."""
    name, sign, number = (part.strip() for part in text.partition(">"))
    known = f"{name}>N" if sign else name
    if known not in PREDICATES:
        raise UsageError(f"there is no predicate {text!r}.{did_you_mean(known, PREDICATES)}")
    if sign and not number.isdecimal():
        raise UsageError(f"{text!r} needs a whole number after >, 0 or more: for example {name}>3.")
    return Predicate(known, int(number or 0))


class Answered(Struct, frozen=True):
    """Whether a predicate held, and where."""

    asked: str  # `possibly` or `definitely`.
    predicate: str
    answer: str
    cut: str | None  # A consistent cut on which it holds, in words.
    limit: int  # Number of cuts examined before the search was given up; 0: it was not.

    def __str__(self) -> str:
        """In words: `possibly steps-apart>3: yes, for example at worker 0:12 (step), worker 1:5 (enter …)`."""
        where = f", for example at {self.cut}" if self.cut else ""
        limit = f": the limit of {self.limit:,} cuts was reached; give a --window" if self.limit else ""
        return f"{self.asked} {self.predicate}: {self.answer}{where}{limit}."


class Possibilities:
    """A run, or a part of it, that predicates are evaluated on."""

    def __init__(
        self,
        stamps: Stamps,
        servers: ServerStamps | None = None,
        window: tuple[float, float] | None = None,
        cap: int = CAP,
    ) -> None:
        self._workers, self._cap = len(stamps), cap
        self._trace = trace_of(stamps, servers)
        run = self._trace.run
        self._low, self._high = (0,) * run.size, run.lengths
        if window is not None:
            times = [[event.time for event in history] for history in run.histories]
            self._low, self._high = (
                latest_consistent(run, [int(np.searchsorted(own, end, "right")) for own in times]) for end in window
            )
        self._part = between(run, self._low, self._high)
        self._states = [_states(own) for own in self._trace.stamps[: self._workers]]

    def ask(self, modality: str, which: Predicate) -> Answered:
        """Whether a predicate held `possibly` or `definitely`."""
        finding, searched = self._find(modality, which)
        if finding.cut is None and finding.answer is Answer.YES:  # Definitely implies possibly, which has an example.
            finding = self._find("possibly", which)[0]
        cut = None if finding.cut is None else self._trace.describe(tuple(map(add, finding.cut, self._low)))
        undecided = searched and finding.answer is Answer.UNDECIDED
        return Answered(modality, str(which), finding.answer.value, cut, self._cap if undecided else 0)

    def _find(self, modality: str, which: Predicate) -> tuple[Finding, bool]:
        """The finding, and whether it was searched for."""
        tables: Mapping[str, Callable[[_State], bool]] = {
            "all-waiting": lambda state: state.waiting,
            "nobody-computing": lambda state: not state.computing,
        }
        possibly = modality == "possibly"
        if which.name in tables:
            conjunction = {
                i: [tables[which.name](state) for state in states[self._low[i] : self._high[i] + 1]]
                for i, states in enumerate(self._states)
            }
            return (cuts.possibly if possibly else cuts.definitely)(self._part, conjunction), False
        search = cuts.search_possibly if possibly else cuts.search_definitely
        condition = self._in_flight if which.name == "in-flight>N" else self._apart
        return search(self._part, condition(which.limit), self._cap), True

    def _in_flight(self, limit: int) -> Callable[[Cut], bool]:
        signs = {EventKind.SEND: 1, EventKind.RECEIVE: -1}
        counts = [
            np.array([0, *accumulate(signs.get(event.kind, 0) for event in history)])
            for history in self._trace.run.histories
        ]
        return lambda cut: sum(int(own[low + k]) for own, low, k in zip(counts, self._low, cut, strict=True)) > limit

    def _apart(self, limit: int) -> Callable[[Cut], bool]:
        def holds(cut: Cut) -> bool:
            steps = [states[low + k].steps for states, low, k in zip(self._states, self._low, cut, strict=False)]
            return max(steps) - min(steps) > limit

        return holds


class _State(Struct, frozen=True):
    """The state of a worker after one of its events."""

    waiting: bool = False
    computing: bool = True
    steps: int = 0


def _states(stamps: Sequence[Stamp | None]) -> list[_State]:
    """The states of a worker, starting before its first event."""
    waits: set[Any] = set()
    kind, steps, ended = UNKNOWN, 0, False
    states = [_State()]
    for stamp in stamps:
        if stamp is None:
            states.append(states[-1])
            continue
        key = (stamp.about, stamp.sequence)
        if stamp.mark in (Mark.ENTER, Mark.WAIT):
            waits.add(key)
        elif stamp.mark in (Mark.EXIT, Mark.FAIL):
            waits.discard(key)
        elif stamp.mark is Mark.TURN:
            kind = stamp.sequence
        elif stamp.mark is Mark.STEP:
            steps = stamp.sequence
        ended = ended or stamp.mark is Mark.END
        states.append(_State(bool(waits), not waits and not ended and kind in (COMPUTING, UNKNOWN), steps))
    return states

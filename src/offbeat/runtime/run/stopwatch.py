"""Where a worker's time goes: mutually exclusive kinds that sum to the wall time."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from offbeat.runtime.events import recorder
from offbeat.runtime.events.recorder import RECORDER

Kind = Literal["input", "compute", "communicate", "wait", "evaluate", "other", "bubble"]
BUBBLE: Kind = "bubble"
KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != BUBBLE)
_EVENT_KINDS: dict[Kind, int] = {
    "input": recorder.INPUT,
    "compute": recorder.COMPUTING,
    "communicate": recorder.EXCHANGING,
    "wait": recorder.EXCHANGING,
    "evaluate": recorder.EVALUATING,
    "other": recorder.OTHER,
    "bubble": recorder.WAITING,
}


class Stopwatch:
    """A clock that always runs in exactly one kind.

    `communicate` is only the exposed part of communication: what overlaps with the backward pass is in `overlapped`,
    outside the sum. `wait` is the part of an exchange during which another worker had not yet arrived. Only a pipeline
    has `bubble`: the time that a stage waits for what other stages compute.
    """

    def __init__(self, bubbles: bool = False) -> None:
        self._kinds = (*KINDS, BUBBLE) if bubbles else KINDS
        self._kind: Kind = "other"
        self._recorder = RECORDER.get()
        self.restart()

    def restart(self) -> None:
        """Reset: training starts now."""
        self.seconds: dict[Kind, float] = dict.fromkeys(self._kinds, 0.0)
        self.overlapped = 0.0
        self._since = time.perf_counter()

    def switch(self, kind: Kind) -> Kind:
        """Switch to this kind; returns the previous one."""
        now = time.perf_counter()
        before = self._kind
        self.seconds[before] += now - self._since
        self._since = now
        self._kind = kind
        if self._recorder is not None:
            self._recorder.turn(_EVENT_KINDS[kind])
        return before

    @contextmanager
    def spent_on(self, kind: Kind) -> Generator[None]:
        """Count the time inside as this kind; afterwards the previous kind continues."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def move(self, amount: float, source: Kind, target: Kind) -> None:
        """Move seconds from one kind to another, once it is known which it was."""
        amount = min(max(amount, 0.0), self.seconds[source])
        self.seconds[source] -= amount
        self.seconds[target] += amount

    def total(self) -> float:
        """Wall time since the start: the sum of all kinds."""
        self.switch(self._kind)
        return sum(self.seconds.values())

    def state_dict(self) -> dict[str, Any]:
        """The measured times."""
        return {"seconds": dict(self.seconds), "overlapped": self.overlapped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from an earlier part of the same run."""
        self.restart()
        for kind in self._kinds:
            self.seconds[kind] = float(state["seconds"].get(kind, 0.0))
        self.overlapped = float(state["overlapped"])

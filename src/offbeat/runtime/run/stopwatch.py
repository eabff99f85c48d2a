"""Where a worker's time goes: exclusive kinds that always sum to the wall time."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from offbeat.runtime.events import recorder
from offbeat.runtime.events.recorder import RECORDER

Kind = Literal["input", "compute", "communicate", "wait", "evaluate", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_WRITTEN: dict[Kind, int] = {
    "input": recorder.INPUT,
    "compute": recorder.COMPUTING,
    "communicate": recorder.EXCHANGING,
    "wait": recorder.EXCHANGING,
    "evaluate": recorder.EVALUATING,
    "other": recorder.OTHER,
}
"""As events name them."""


class Stopwatch:
    """A clock that is always running in exactly one kind.

    `communicate` is only the exposed part of communication: what runs beside the backward pass is `overlapped`,
    apart from the sum. `wait` is the part of an exchange during which another worker had not yet arrived.
    """

    def __init__(self) -> None:
        self.seconds: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        self.overlapped = 0.0
        self._kind: Kind = "other"
        self._since = time.perf_counter()
        self._recorder = RECORDER.get()

    def restart(self) -> None:
        """Forget what was measured: training starts now."""
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.overlapped = 0.0
        self._since = time.perf_counter()

    def switch(self, kind: Kind) -> Kind:
        """From now on time is of this kind; answers the kind that was running."""
        now = time.perf_counter()
        before = self._kind
        self.seconds[before] += now - self._since
        self._since = now
        self._kind = kind
        if self._recorder is not None:
            self._recorder.turn(_WRITTEN[kind])
        return before

    @contextmanager
    def spent_on(self, kind: Kind) -> Generator[None]:
        """The time inside is of this kind; afterwards the former kind goes on."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    def move(self, amount: float, source: Kind, target: Kind) -> None:
        """Book seconds that were counted as one kind under another, once it is known which it was."""
        amount = min(max(amount, 0.0), self.seconds[source])
        self.seconds[source] -= amount
        self.seconds[target] += amount

    def total(self) -> float:
        """Wall time since the start: the sum of all kinds."""
        self.switch(self._kind)
        return sum(self.seconds.values())

    def state_dict(self) -> dict[str, Any]:
        """What was measured."""
        return {"seconds": dict(self.seconds), "overlapped": self.overlapped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start from what an earlier part of the same run had measured."""
        self.restart()
        for kind in KINDS:
            self.seconds[kind] = float(state["seconds"].get(kind, 0.0))
        self.overlapped = float(state["overlapped"])

"""What comes from workers for a shard's log: in the order of its numbers, and looked at before it is used."""

from __future__ import annotations

from typing import NamedTuple

from offbeat.protocols.machine import NOTHING, Effects, Payload
from offbeat.protocols.servers.messages import Load, Push, PushRefused
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import Inspect

_Who = tuple[int, int]
"""A worker, and which life it is in."""
_Numbered = tuple[Push | Load, Payload]
MOST_REFUSALS = 20
"""Refusals that are remembered; how many there were is counted by the shard."""


class Refusal(NamedTuple):
    """A push that was not fit to be used."""

    worker: int
    step: int
    """That the shard was in."""
    reason: str


class Admission:
    """Pushes that have come and are not in the log yet."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._expected: dict[_Who, int] = {}
        self._early: dict[tuple[int, int, int], _Numbered] = {}
        """Pushes that came before others with lower numbers."""
        self._inspected: dict[int, _Numbered] = {}
        self._tokens = 0
        self.refusals: list[Refusal] = []
        """Pushes that were not fit to be used, the first ones."""

    def forget(self) -> None:
        """Begin anew: pushes may go on under other numbers."""
        self._expected.clear()
        self._early.clear()
        self._inspected.clear()

    def admit(self, push: Push | Load, payload: Payload, out: Effects) -> bool:
        """Have a new push looked at when its turn has come, and those that waited for it; False if it is not new."""
        who = (push.worker, push.life)
        expected = self._expected.get(who)
        if expected is None:
            expected = self._shard.expected(*who)
        if push.number < expected:
            return False
        self._early[(*who, push.number)] = (push, payload)
        while (following := self._early.pop((*who, expected), None)) is not None:
            expected += 1
            self._tokens += 1
            self._inspected[self._tokens] = following
            entry, numbers = following
            look = Inspect(numbers, entry.worker)
            if isinstance(entry, Push):
                look = Inspect(numbers, entry.worker, entry.start, entry.stop, entry.absent)
            out.start(look, ("inspect", self._tokens))
        self._expected[who] = expected
        return True

    def inspected(self, token: int, reason: str, step: int) -> tuple[Push | Load | PushRefused, Payload] | None:
        """What goes to the log now that it was looked at; a reason says why its numbers cannot be used."""
        push, payload = self._inspected.pop(token, (None, NOTHING))
        if reason and isinstance(push, Push):
            if len(self.refusals) < MOST_REFUSALS:
                self.refusals.append(Refusal(push.worker, step, reason))
            return PushRefused(push, reason), NOTHING
        return None if push is None else (push, payload)

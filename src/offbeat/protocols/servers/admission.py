"""What comes from workers for a shard's log: in the order of its numbers, and looked at before it is used."""

from __future__ import annotations

from collections.abc import Iterator

from offbeat.protocols.machine import NOTHING, Effects, Payload
from offbeat.protocols.servers.messages import Load, Push, Refused
from offbeat.protocols.servers.shard import Shard
from offbeat.protocols.servers.works import Inspect

_Who = tuple[int, int]
"""A worker, and which life it is in."""
_Numbered = tuple[Push | Load, Payload]


class Admission:
    """Pushes that have come and are not in the log yet."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._expected: dict[_Who, int] = {}
        self._early: dict[tuple[int, int, int], _Numbered] = {}
        """Pushes that came before others with lower numbers."""
        self._inspected: dict[int, _Numbered] = {}
        self._tokens = 0

    def forget(self) -> None:
        """Begin anew: pushes may go on under other numbers."""
        self._expected.clear()
        self._early.clear()
        self._inspected.clear()

    def is_known(self, push: Push | Load) -> bool:
        """Whether a push was let in before."""
        return push.number < self._next(push)

    def in_order(self, push: Push | Load, payload: Payload) -> Iterator[_Numbered]:
        """Those whose turn has come with this new push."""
        who, expected = (push.worker, push.life), self._next(push)
        self._early[(*who, push.number)] = (push, payload)
        while (following := self._early.pop((*who, expected), None)) is not None:
            expected += 1
            self._expected[who] = expected
            yield following

    def _next(self, push: Push | Load) -> int:
        known = self._shard.expected(push.worker, push.life)
        return self._expected.setdefault((push.worker, push.life), known)

    def inspect(self, push: Push | Load, payload: Payload, out: Effects) -> None:
        """Have a payload looked at."""
        self._tokens += 1
        self._inspected[self._tokens] = (push, payload)
        look = Inspect(payload, push.worker)
        if isinstance(push, Push):
            look = Inspect(payload, push.worker, push.start, push.stop, push.absent)
        out.start(look, ("inspect", self._tokens))

    def inspected(self, token: int, reason: str) -> tuple[Push | Load | Refused, Payload] | None:
        """What goes to the log now that it was looked at; a reason says why its numbers cannot be used."""
        push, payload = self._inspected.pop(token, (None, NOTHING))
        if reason and isinstance(push, Push):
            return Refused(push, reason), NOTHING
        return None if push is None else (push, payload)

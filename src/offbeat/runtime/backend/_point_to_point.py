"""Messages that Gloo carries, and what to say when one of them does not arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from offbeat.runtime.backend._call_ids import CollectiveError, ranks_in_words, shapes
from offbeat.runtime.backend._checks import alike
from offbeat.runtime.backend._op_queue import may_be_waited_for_by_tensor
from offbeat.runtime.collectives.one_sided.arena import Room
from offbeat.runtime.events.calls import BareWork, handing_on

_LOOKS = 10
_BETWEEN = 0.02
"""Seconds between looks whether somebody has died: its connections are closed a moment before it is gone."""

Explained = Callable[[Exception], Exception]
"""Turns an error of Gloo's into one that says whose message it was."""


@handing_on
class Carried(BareWork):
    """A message under way."""

    def __init__(self, work: Any, explained: Explained) -> None:
        super().__init__()
        self._work, self._explained = work, explained

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done; raise what it failed of, in our words."""
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            raise self._explained(error) from error

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()


class Messages:
    """Point-to-point messages of one group."""

    def __init__(self, gloo: Any, stock: Any, rank: int, names: Sequence[int], room: Room | None) -> None:
        self._gloo, self._stock, self._rank, self._names, self._room = gloo, stock, rank, names, room
        self._count = 0

    def begin(self, what: str, tensors: list[Tensor], peer: int | None, act: Callable[[Any], Any]) -> Carried:
        """Begin to send or receive; what fails at once is told in our words, too. No peer: anybody."""
        size = len(self._names)
        if peer is not None and not 0 <= peer < size:
            # Gloo would reach for memory that is not there.
            raise ValueError(f"there is no rank {peer} in a group of {size}: ranks go from 0 to {size - 1}")
        self._count += 1
        explained = partial(self._undelivered, what, self._count, tensors, peer)
        # Behind torch's dispatcher a message becomes known by its tensors, too.
        gloo = self._gloo if alike(tensors) and not may_be_waited_for_by_tensor() else self._stock
        try:
            return Carried(act(gloo), explained)
        except RuntimeError as error:
            raise explained(error) from error

    def _undelivered(
        self, what: str, number: int, tensors: Sequence[Tensor], peer: int | None, error: Exception
    ) -> CollectiveError:
        """Which message could not be done, who of those it was to be exchanged with has died, and what Gloo says."""
        whom = "any rank" if peer is None else f"rank {self._names[peer]}"
        direction = "to" if what == "send" else "from"
        dead = self._dead(self._names if peer is None else (self._names[peer],))
        why = f"{ranks_in_words(dead)} died: " if dead else ""
        return CollectiveError(
            f"{why}rank {self._names[self._rank]} in {what} {direction} {whom} (message #{number} of this group) of "
            f"shape {shapes(tensors)} cannot be finished. Gloo says: {error}"
        )

    def _dead(self, peers: Sequence[int]) -> list[int]:
        room = self._room
        if room is None:
            return []
        for _ in range(_LOOKS):
            found = [room.names[rank] for rank in room.dead() if room.names[rank] in peers]
            if found:
                return found
            time.sleep(_BETWEEN)
        return []

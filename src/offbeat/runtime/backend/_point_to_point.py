"""Point-to-point messages over Gloo, with an error that explains why one did not arrive."""

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
from offbeat.runtime.collectives.one_sided.arena import Arena
from offbeat.runtime.events.calls import BareWork, handing_on

_CHECKS, _PAUSE = 10, 0.02
"""Checks for dead peers, and seconds between them: a process closes its connections a moment before it is gone."""


@handing_on
class Carried(BareWork):
    """The work of a message in flight."""

    def __init__(self, work: Any, explained: Callable[[Exception], Exception]) -> None:
        super().__init__()
        self._work, self._explained = work, explained

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            raise self._explained(error) from error

    def synchronize(self) -> None:
        self.wait()


class Messages:
    """Point-to-point messages of one group."""

    def __init__(self, gloo: Any, stock: Any, rank: int, names: Sequence[int], arena: Arena | None) -> None:
        self._gloo, self._stock, self._rank, self._names, self._arena = gloo, stock, rank, names, arena
        self._count = 0

    def begin(self, what: str, tensors: list[Tensor], peer: int | None, act: Callable[[Any], Any]) -> Carried:
        """Start a send or a receive; without a peer, from any rank."""
        size = len(self._names)
        if peer is not None and not 0 <= peer < size:
            # Gloo would read memory that is not there.
            raise ValueError(f"there is no rank {peer} in a group of {size}: ranks go from 0 to {size - 1}")
        self._count += 1
        explained = partial(self._undelivered, what, self._count, tensors, peer)
        # Only torch's dispatcher registers a message by its tensors.
        gloo = self._gloo if alike(tensors) and not may_be_waited_for_by_tensor() else self._stock
        try:
            return Carried(act(gloo), explained)
        except RuntimeError as error:
            raise explained(error) from error

    def _undelivered(
        self, what: str, number: int, tensors: Sequence[Tensor], peer: int | None, error: Exception
    ) -> CollectiveError:
        """An error with the message, which of its peers have died, and what Gloo says."""
        whom = "any rank" if peer is None else f"rank {self._names[peer]}"
        direction = "to" if what == "send" else "from"
        dead = self._dead(self._names if peer is None else (self._names[peer],))
        why = f"{ranks_in_words(dead)} died: " if dead else ""
        return CollectiveError(
            f"{why}rank {self._names[self._rank]} in {what} {direction} {whom} (message #{number} of this group) of "
            f"shape {shapes(tensors)} cannot be finished. Gloo says: {error}"
        )

    def _dead(self, peers: Sequence[int]) -> list[int]:
        arena = self._arena
        if arena is None:
            return []
        for _ in range(_CHECKS):
            if dead := [arena.names[rank] for rank in arena.dead() if arena.names[rank] in peers]:
                return dead
            time.sleep(_PAUSE)
        return []

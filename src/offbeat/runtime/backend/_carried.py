"""Messages that Gloo carries, and what to say when one of them does not arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from offbeat.runtime.backend._marks import CollectiveError, ranks_in_words, shapes
from offbeat.runtime.backend._works import BareWork, handing_on
from offbeat.runtime.shared.room import Room

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


def carried(begin: Callable[[], Any], explained: Explained) -> Carried:
    """Begin a message; what fails at once is told in our words, too."""
    try:
        return Carried(begin(), explained)
    except RuntimeError as error:
        raise explained(error) from error


def undelivered(
    what: str, room: Room | None, peers: Sequence[int], tensors: Sequence[Tensor], error: Exception
) -> CollectiveError:
    """Which message could not be done, who of those it was to be exchanged with has died, and what Gloo says."""
    dead = [] if room is None else _dead(room, peers)
    why = f"{ranks_in_words(dead)} died: " if dead else ""
    return CollectiveError(f"{why}{what} of shape {shapes(tensors)} cannot be finished. Gloo says: {error}")


def _dead(room: Room, peers: Sequence[int]) -> list[int]:
    for _ in range(_LOOKS):
        found = [room.names[rank] for rank in room.dead() if room.names[rank] in peers]
        if found:
            return found
        time.sleep(_BETWEEN)
    return []

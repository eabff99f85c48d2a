"""The colouring that cuts a run while it goes on, for snapshots of servers and of gossip alike.

Every message has a *colour*: the newest snapshot that its sender has been cut by. A process that hears a new colour is
cut before it handles the message (Lai and Yang 1987; Mattern 1993), so that nothing in the snapshot follows from
anything after it. A message sent before its sender's cut that comes after its receiver's was in flight: it is kept
beside the states. Messages are numbered, so a part is complete once all from before the senders' cuts have come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from offbeat.protocols.machine import Payload


class Record(Struct, frozen=True):
    """Work: keep a copy of the whole state, as it is after all work begun before."""

    colour: int  # 0: it is too late, and there is nothing to keep.


class Keep(Struct, frozen=True):
    """Work: keep a copy of a message that was in flight."""

    colour: int
    message: Any
    payload: Payload


class Write(Struct, frozen=True):
    """Work: everything in flight has come; write what was kept, and where this process was cut."""

    colour: int
    cut: Any


@dataclass(slots=True)
class Colour:
    """Which snapshots a process has been cut by, and which it has heard of."""

    own: int = 0
    heard: int = 0  # The newest colour received from others.
    announced: int = 0  # The newest snapshot announced, without being cut by it.
    missed: int = 0  # The newest snapshot that this process was too late for.

    @property
    def due(self) -> bool:
        """Whether the state must be recorded at this boundary."""
        return max(self.announced, self.heard) > self.own

    def act(self) -> int:
        """The colour of a message, sent now, that changes the state of others."""
        if self.heard > self.own:
            self.own = self.missed = self.heard
        return self.own


@dataclass(slots=True)
class Recording:
    """Messages in flight to a process when it was cut."""

    colour: int
    expected: dict[int, int] = field(default_factory=dict[int, int])
    """Number of each sender's messages from before its cut, once reported."""
    kept: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Sender and number of those that came after this process's cut."""

    def keep(self, sender: int, number: int, colour: int) -> bool:
        """Whether a message that has come was in flight."""
        if colour < self.colour:
            self.kept.append((sender, number))
        return colour < self.colour

    def is_complete(self, arrived: Mapping[int, int]) -> bool:
        """Whether all senders have reported how many to expect, and all of those have come."""
        return all(sender in self.expected and count >= self.expected[sender] for sender, count in arrived.items())

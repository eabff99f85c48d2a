"""The second shape of a protocol: a machine, for what is decided as it happens.

A machine does no I/O, reads no clock and draws no unseeded random numbers. It is told what happened (`Event`) and when,
and answers what to do (`Effect`), in order. Payloads are opaque handles. So the same text is driven by real sockets and
clocks (`runtime.messages.drive`) and in virtual time with delays, losses, kills, pauses and partitions
(`simulate.machines`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

Name = str  # A participant: `worker 3`, `server 1.0` (shard 1, replica 0), `coordinator`.


class Payload(Struct, frozen=True):
    """Numbers that travel with a message. Machines see only their size, and pass the handle on."""

    nbytes: int
    handle: Any = None


NOTHING = Payload(0)


class Received(Struct, frozen=True):
    """A message has come."""

    sender: Name
    message: Struct
    payload: Payload = NOTHING


class Timer(Struct, frozen=True):
    """A timer set by `SetTimer` has expired."""

    token: Any


class Done(Struct, frozen=True):
    """Work begun by `Start` is finished."""

    token: Any
    result: Any = None


class Ended(Struct, frozen=True):
    """A process has ended, as its parent saw: not a guess, unlike silence."""

    name: Name


Event = Received | Timer | Done | Ended


class Send(Struct, frozen=True):
    """Send a message. It may be lost, late, or come twice."""

    to: Name
    message: Struct
    payload: Payload = NOTHING


class SetTimer(Struct, frozen=True):
    """Send a `Timer` after this many seconds. Setting the same token again replaces the earlier timer."""

    after: float
    token: Any


class Start(Struct, frozen=True):
    """Do this work, after all work begun before it; `Done(token)` follows if there is a token."""

    work: Any
    token: Any = None


Effect = Send | SetTimer | Start


class Machine(Protocol):
    """A protocol from the view of one participant."""

    name: Name

    def begin(self, now: float) -> Sequence[Effect]:
        """Effects before anything has happened."""
        ...

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Effects of an event."""
        ...


@dataclass(slots=True)
class Effects:
    """Collects effects; a convenience for machines."""

    done: list[Effect] = field(default_factory=list[Effect])

    def send(self, to: Name, message: Struct, payload: Payload = NOTHING) -> None:
        """Send a message."""
        self.done.append(Send(to, message, payload))

    def start(self, work: Any, token: Any = None) -> None:
        """Begin work."""
        self.done.append(Start(work, token))

    def timer(self, after: float, token: Any) -> None:
        """Set a timer."""
        self.done.append(SetTimer(after, token))

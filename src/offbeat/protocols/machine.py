"""The second shape of a protocol: a machine, for what is decided as it happens.

A machine does no I/O, reads no clock and draws no random numbers of its own. It is told what happened (`Event`) and
when, and answers what is to be done (`Effect`), in order. Payloads are opaque to it: it passes handles on. So the same
text is driven by real sockets and clocks (`runtime.messages.drive`) and in virtual time with delays, losses, kills,
pauses and partitions (`simulate.machines`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

Name = str
"""Who takes part: `worker 3`, `server 1.0` (shard 1, replica 0), `coordinator`."""


class Payload(Struct, frozen=True):
    """Numbers that travel with a message. Machines see how many bytes they are, and pass the handle on."""

    nbytes: int
    handle: Any = None


NOTHING = Payload(0)


class Received(Struct, frozen=True):
    """A message has come."""

    sender: Name
    message: Struct
    payload: Payload = NOTHING


class Timer(Struct, frozen=True):
    """A time that was asked for by `SetTimer` has come."""

    token: Any


class Done(Struct, frozen=True):
    """Work that was begun by `Start` is finished."""

    token: Any
    result: Any = None


class Ended(Struct, frozen=True):
    """Whoever started this process has seen it end: no guess, unlike silence."""

    name: Name


Event = Received | Timer | Done | Ended


class Send(Struct, frozen=True):
    """Send a message. It may be lost, late, or come twice."""

    to: Name
    message: Struct
    payload: Payload = NOTHING


class SetTimer(Struct, frozen=True):
    """Tell me after so many seconds. Setting the same token again replaces the earlier time."""

    after: float
    token: Any


class Start(Struct, frozen=True):
    """Do this work, after all work begun before it; `Done(token)` follows if there is a token."""

    work: Any
    token: Any = None


Effect = Send | SetTimer | Start


class Machine(Protocol):
    """A protocol as one of those who take part in it lives it."""

    name: Name

    def begin(self, now: float) -> Sequence[Effect]:
        """What is to be done before anything has happened."""
        ...

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """What is to be done about this."""
        ...


@dataclass(slots=True)
class Effects:
    """Collects what is to be done; a convenience for machines."""

    done: list[Effect] = field(default_factory=list[Effect])

    def send(self, to: Name, message: Struct, payload: Payload = NOTHING) -> None:
        """Send a message."""
        self.done.append(Send(to, message, payload))

    def start(self, work: Any, token: Any = None) -> None:
        """Begin work."""
        self.done.append(Start(work, token))

    def timer(self, after: float, token: Any) -> None:
        """Ask for a time."""
        self.done.append(SetTimer(after, token))

"""What a server is asked to do beside its shard's own work, and what of its requests is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.messages import Load, Push, PushReply
from offbeat.protocols.servers.shard import Ask


@dataclass(frozen=True, slots=True)
class Inspect:
    """Look whether a payload is fit to be used. The result is why it is not, such as `NaN`, or empty."""

    payload: Payload
    worker: int
    start: int = 0
    stop: int = -1
    """It is to be for [start, stop) of the shard; -1: up to its end."""
    absent: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Hand out the values as they are after all work begun before, or the whole state. The result is a `Payload`.

    It is sent to several readers and must not change before they have copied it.
    """

    state: bool = False
    start: int = 0
    stop: int = -1
    """Of values: only [start, stop); -1: up to the end."""
    kept: bool = False
    """Of a state: with the values of earlier versions that are kept."""


@dataclass(frozen=True, slots=True)
class Release:
    """Whom a state was read for has it, or needs it no more: its memory may go."""

    payload: Payload


@dataclass(frozen=True, slots=True)
class Look:
    """Go over a payload as a push is gone over, and forget it: only the time it takes is of interest."""

    payload: Payload
    letter: bool


@dataclass(slots=True)
class Reading:
    """A read under way, and who gets it."""

    version: int
    clock: int
    asks: list[tuple[Ask, PushReply | None]]
    fresh: tuple[int, ...] = ()
    """Workers who have not asked, and get it all the same."""
    colour: int = 0


@dataclass(slots=True)
class Door:
    """What has come from workers and is not in the log yet."""

    expected: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """The number of the next push, by worker and life."""
    early: dict[tuple[int, int, int], tuple[Push | Load, Payload]] = field(
        default_factory=dict[tuple[int, int, int], tuple[Push | Load, Payload]]
    )
    """Pushes that came before others with lower numbers, by worker, life and number."""
    inspected: dict[int, tuple[Push | Load, Payload]] = field(default_factory=dict[int, tuple[Push | Load, Payload]])
    """Pushes that are being looked at, by token."""

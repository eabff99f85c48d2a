"""What a worker's client is asked for, and what it tells whoever drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.protocols.machine import Effect, Name, Payload
from offbeat.protocols.servers.coordinator import Changed
from offbeat.protocols.servers.messages import Fetched, Fresh, Lost, Met, PullReply, Reply


@dataclass(frozen=True, slots=True)
class Part:
    """What is pushed to one shard: numbers for [start, stop) of it; -1 is its end."""

    shard: int
    payload: Payload
    start: int = 0
    stop: int = -1
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges of it that have no gradient."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for of one shard: the values [start, stop), if they are newer than this version."""

    shard: int
    start: int
    stop: int
    newer_than: int = -1


@dataclass(frozen=True, slots=True)
class Asked:
    """A request under way: its token, that of the pull that follows it, and what is to be done for it."""

    token: int
    effects: Sequence[Effect]
    pull: int = 0


@dataclass(frozen=True, slots=True)
class Arrived:
    """Values or state of one shard have come, or the sum of a meeting; the payload is to be copied now."""

    token: int
    shard: int
    """-1: the coordinator."""
    reply: PullReply | Fetched | Met
    payload: Payload


@dataclass(frozen=True, slots=True)
class Completed:
    """All have answered."""

    token: int
    replies: tuple[tuple[int, Reply | Met], ...]
    """Each with its shard, or -1 for the coordinator."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The deadline has passed, and these have not answered."""

    token: int
    waited_for: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Refreshed:
    """A shard has sent fresh values unasked; who goes on from them says so (`took`)."""

    shard: int
    fresh: Fresh
    payload: Payload


@dataclass(frozen=True, slots=True)
class Departed:
    """The worker was declared dead: nothing it has asked for will be answered, and that memory is not reused."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker takes part, from this clock on."""

    clock: int
    told: tuple[float, ...] = ()
    """What was brought to the meeting that let it in."""


Notice = Arrived | Completed | Failed | Refreshed | Changed | Departed | Joined | Lost
"""Work of a client: what its driver is told."""

"""What a worker's client is asked for, and what it tells whoever drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.protocols.machine import NOTHING, Effect, Name, Payload
from offbeat.protocols.servers.coordination.coordinator import Changed
from offbeat.protocols.servers.messages import Fetched, Fresh, Lost, Met, PullReply, Push, Reply, Settings


@dataclass(frozen=True, slots=True)
class PushedRange:
    """What is pushed to one shard: numbers for [start, stop) of it; -1 is its end."""

    shard: int
    payload: Payload
    start: int = 0
    stop: int = -1
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges of it that have no gradient."""


class Buffer(Protocol):
    """Numbers in memory; only their size matters here."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        ...


def whole_shards(buffers: Sequence[Buffer], absent: Sequence[tuple[tuple[int, int], ...]] = ()) -> list[PushedRange]:
    """A part for each shard, which is all of it; an empty one only lets the clock tick."""
    lacking = absent or [()] * len(buffers)
    return [
        PushedRange(shard, Payload(buffer.nbytes, buffer), absent=none)
        if buffer.nbytes
        else PushedRange(shard, NOTHING, 0, 0)
        for shard, (buffer, none) in enumerate(zip(buffers, lacking, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class PulledRange:
    """What is asked for of one shard: the values [start, stop), if they are newer than this version."""

    shard: int
    start: int
    stop: int
    newer_than: int = -1


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Push parts of a step's gradient. With the `final` ones the step is done, on all shards.

    Under a rule that aggregates, earlier parts are answered along with the final ones, unless each `counts` by itself,
    with its own weight.
    """

    parts: Sequence[PushedRange]
    clock: int
    weight: float = 1.0
    settings: Settings = ()
    final: bool = True
    counts: bool = False
    then_pull: bool = False
    """With the final parts, ask every shard at once for the values of the next step, under a token of its own."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Ask for the values that a step from this clock on starts from, if newer than those that came before.

    They have in them all that this worker has pushed.
    """

    clock: int
    anew: bool = False
    """Send them even if they have not changed."""


@dataclass(frozen=True, slots=True)
class RangeRequest:
    """Ask for ranges of shards, as fresh as for a step from this clock on; each only if it is newer than known.

    What comes does not count among the whole values that a `PullRequest` compares with.
    """

    parts: Sequence[PulledRange]
    clock: int


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Ask for the whole state of all shards."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Put back the states of shards; one worker does, before the first step."""

    states: Sequence[PushedRange]
    versions: Sequence[int]
    clock: int
    took: Sequence[tuple[tuple[int, int, int], ...]] = ()
    """For each shard, of which workers how many pushes are in the state, and their clocks: they count on from there."""


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """Bring payloads to shards and have them looked at, without changing anything."""

    parts: Sequence[PushedRange]
    letter: bool
    """Whether they are compressed as pushes are."""


@dataclass(frozen=True, slots=True)
class MeetRequest:
    """Come to a meeting of all live workers; `what` must be new in this run.

    A row of numbers of this kind is summed over those who bring one; the sum comes as `Arrived`, of shard -1.
    """

    what: str
    values: tuple[float, ...] = ()
    admits: bool = False
    """When all have come, those who wait to join are let in."""
    kind: str = ""
    row: Payload = NOTHING


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Go on from a snapshot, in which so many pushes to each shard were sent: send again what was under way.

    Each goes to its shard under the number that it had, so that one that is in the values is not applied again.
    """

    pushes: Sequence[int]
    under_way: Sequence[tuple[int, Push, Payload]]


ClientRequest = (
    PushRequest | PullRequest | RangeRequest | FetchRequest | LoadRequest | TrialRequest | MeetRequest | ReplayRequest
)
"""What a worker's loop asks for."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
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

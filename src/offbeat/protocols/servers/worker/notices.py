"""Requests to a worker's client, and the notices it gives its driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Effect, Name, Payload
from offbeat.protocols.servers.coordinator import Changed
from offbeat.protocols.servers.messages import Fetched, Fresh, Lost, Met, PullReply, Push, Reply, Settings


class PushedRange(Struct, frozen=True):
    """Numbers for [start, stop) of one shard; -1 is its end."""

    shard: int
    payload: Payload
    start: int = 0
    stop: int = -1
    absent: tuple[tuple[int, int], ...] = ()  # Ranges of it that have no gradient.


def whole_shards(buffers: Sequence[Any], absent: Sequence[tuple[tuple[int, int], ...]] = ()) -> list[PushedRange]:
    """A range for each shard that covers all of it; an empty one only advances the clock."""
    return [
        PushedRange(shard, Payload(buffer.nbytes, buffer), absent=gaps)
        if buffer.nbytes
        else PushedRange(shard, NOTHING, 0, 0)
        for shard, (buffer, gaps) in enumerate(zip(buffers, absent or [()] * len(buffers), strict=True))
    ]


class PulledRange(Struct, frozen=True):
    """Request for the values [start, stop) of one shard, if they are newer than this version."""

    shard: int
    start: int
    stop: int
    newer_than: int = -1


class PushRequest(Struct, frozen=True):
    """Push parts of a step's gradient. With the `final` ones the step is done, on all shards.

    Under a rule that aggregates, earlier parts are answered along with the final ones, unless each `counts` alone,
    with its own weight.
    """

    parts: Sequence[PushedRange]
    clock: int
    weight: float = 1.0
    settings: Settings = ()
    final: bool = True
    counts: bool = False
    totals: tuple[float, ...] = ()  # Reductions over the whole gradient, for updates that take them.
    then_pull: bool = False  # With the final parts, ask for the values of the next step, under another token.


class PullRequest(Struct, frozen=True):
    """Ask for the values for a step from this clock on, if newer than those received before.

    They include everything that this worker has pushed.
    """

    clock: int
    anew: bool = False  # Send them even if they have not changed.


class RangeRequest(Struct, frozen=True):
    """Ask for ranges of shards, as fresh as for a step from this clock on; each only if newer than known.

    They do not count among the whole values that a `PullRequest` compares with.
    """

    parts: Sequence[PulledRange]
    clock: int


class FetchRequest(Struct, frozen=True):
    """Ask for the whole state of all shards."""


class LoadRequest(Struct, frozen=True):
    """Restore the states of shards; one worker does, before the first step."""

    states: Sequence[PushedRange]
    versions: Sequence[int]
    clock: int
    took: Sequence[tuple[tuple[int, int, int], ...]] = ()
    """For each shard, the workers whose numbering continues: each with its pushes in the state, and its clock."""


class TrialRequest(Struct, frozen=True):
    """Deliver payloads to shards for inspection, without changing anything."""

    parts: Sequence[PushedRange]
    compressed: bool  # Whether they are compressed as pushes are.


class MeetRequest(Struct, frozen=True):
    """Come to a meeting of all live workers; `what` must be new in this run.

    Rows of numbers of this kind are summed over those that bring one; the sum comes as `Arrived`, of shard -1.
    """

    what: str
    values: tuple[float, ...] = ()
    admits: bool = False  # When all have come, waiting workers are admitted.
    kind: str = ""
    row: Payload = NOTHING


class ReplayRequest(Struct, frozen=True):
    """Continue from a snapshot, given the number of pushes sent to each shard: resend those in flight.

    Each goes to its shard under its old number, so that one that is already in the values is not applied again.
    """

    pushes: Sequence[int]
    under_way: Sequence[tuple[int, Push, Payload]]


ClientRequest = (
    PushRequest | PullRequest | RangeRequest | FetchRequest | LoadRequest | TrialRequest | MeetRequest | ReplayRequest
)
"""What a worker's loop may request."""


class OpenRequest(Struct, frozen=True):
    """A request in flight: its token, the effects to carry out, and the token of the pull that follows it."""

    token: int
    effects: Sequence[Effect]
    pull: int = 0


class Arrived(Struct, frozen=True):
    """Values or state of one shard, or the sum of a meeting; the payload must be copied now."""

    token: int
    shard: int  # -1: the coordinator.
    reply: PullReply | Fetched | Met
    payload: Payload


class Completed(Struct, frozen=True):
    """All have answered."""

    token: int
    replies: tuple[tuple[int, Reply | Met], ...]  # Each with its shard, or -1 for the coordinator.


class Failed(Struct, frozen=True):
    """The deadline has passed, and these have not answered."""

    token: int
    waited_for: tuple[Name, ...]


class Refreshed(Struct, frozen=True):
    """A shard has sent fresh values unasked; a loop that continues from them calls `took`."""

    shard: int
    fresh: Fresh
    payload: Payload


class Departed(Struct, frozen=True):
    """The worker was declared dead: none of its requests will be answered, and their memory is not reused."""

    epoch: int


class Joined(Struct, frozen=True):
    """The worker is a member, from this clock on."""

    clock: int
    told: tuple[float, ...] = ()  # Values brought to the meeting that admitted it.


Notice = Arrived | Completed | Failed | Refreshed | Changed | Departed | Joined | Lost  # What its driver is told.

"""What a server is asked to do with its numbers, and what follows from an entry of its log."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.messages import Fetch, Load, Pull, Push, Settings, Status

Ask = Pull | Fetch
"""A read that a worker has asked for."""


@dataclass(frozen=True, slots=True)
class AccumulateGradient:
    """Add `weight` times a gradient, which covers [start, stop) of the shard, to the sum of this step."""

    payload: Payload
    weight: float
    start: int
    stop: int
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges of the shard, inside of that, that have no gradient."""


@dataclass(frozen=True, slots=True)
class Update:
    """Apply `scale` times a gradient to [start, stop) of the shard, and with it reach this version."""

    version: int
    scale: float
    settings: Settings
    start: int = 0
    stop: int = -1
    payload: Payload | None = None
    """The gradient; none: the sum of this step, which is then cleared."""
    missed: int = 0
    """Updates that have come since the values were read that the gradient was computed from."""
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges of the shard that the given gradient does not have."""
    oldest: int | None = None
    """Keep the values as they are before this update, and of earlier ones those from this version on; None: none."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Leave a gradient unused: its memory is about to be its sender's again."""

    payload: Payload


@dataclass(frozen=True, slots=True)
class Restore:
    """Put back a state, which has this version, and clear the sum."""

    payload: Payload
    version: int


Work = AccumulateGradient | Update | Discard | Restore


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """What a worker is told about what it sent."""

    worker: int
    life: int
    number: int
    status: Status
    reason: str = ""
    then_pull: int = 0
    """Number of the pull that is to follow; 0: none."""
    step: int = 0
    entered: int | None = None
    """The clock from which the worker is waited for, if that is what it asked for."""


@dataclass(slots=True)
class EntryOutcome:
    """What follows from an entry."""

    works: list[Work] = field(default_factory=list[Work])
    answers: list[PushAnswer] = field(default_factory=list[PushAnswer])
    due: list[Ask] = field(default_factory=list[Ask])
    """Reads that waited for this."""
    moved: bool = False
    """More steps are complete than before."""
    statuses: list[Status] = field(default_factory=list[Status])
    """What became of pushes."""

    def settle(self, push: Push | Load, payload: Payload, status: Status, reason: str = "") -> None:
        """Answer a push; unless it was applied, leave it unused."""
        then_pull, step = 0, 0
        if isinstance(push, Push):
            then_pull, step = push.then_pull, push.clock
            self.statuses.append(status)
        if status != "applied" and payload.nbytes:
            self.works.append(Discard(payload))
        self.answers.append(PushAnswer(push.worker, push.life, push.number, status, reason, then_pull, step))


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
class ReadShard:
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
class InspectPayload:
    """Go over a payload as a push is gone over, and forget it: only the time it takes is of interest."""

    payload: Payload
    letter: bool

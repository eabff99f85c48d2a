"""Work that a server does on its numbers, and the outcome of a log entry."""

from __future__ import annotations

from msgspec import Struct, structs

from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.messages import Fetch, Load, Pull, Push, Settings, Status

Ask = Pull | Fetch  # A read that a worker has requested.


class AccumulateGradient(Struct, frozen=True):
    """Add `weight` times a gradient, which covers [start, stop) of the shard, to the sum of this step."""

    payload: Payload
    weight: float
    start: int
    stop: int
    absent: tuple[tuple[int, int], ...] = ()  # Ranges of the shard, inside [start, stop), that have no gradient.


class ReduceGradients(Struct, frozen=True):
    """Compute the reductions of one level over the gradients of this step, which level 0 makes a mean before."""

    level: int
    scale: float
    settings: Settings
    workers: int
    totals: tuple[float, ...]  # Of the levels before.


class Update(Struct, frozen=True):
    """Apply `scale` times a gradient to [start, stop) of the shard, which then has this version."""

    version: int
    scale: float
    settings: Settings
    start: int = 0
    stop: int = -1
    payload: Payload | None = None  # The gradient; None: the sum of this step, which is then cleared.
    missed: int = 0  # Updates since the values that the gradient was computed from were read.
    absent: tuple[tuple[int, int], ...] = ()  # Ranges of the shard that the gradient does not have.
    oldest: int | None = None  # Keep values from before this update, from this version on; None: keep none.
    workers: int = 1  # Members whose pushes the shard waits for, or takes.
    totals: tuple[float, ...] = ()  # Reductions over the whole gradient, of all shards; empty: of this one alone.
    refused: str = ""  # Why the sum of this step must be dropped instead.


class UpdateProof(Struct, frozen=True):
    """Token of an update that may fail; its result is the reason why it changed nothing, or empty."""

    version: int
    step: int
    senders: tuple[int, ...]  # The worker of each push that is in it.

    def __str__(self) -> str:
        """Whose step it is: `step 3`, or `step 3 of workers 0, 1`."""
        workers = sorted(set(self.senders))
        return f"step {self.step}" + (f" of workers {', '.join(map(str, workers))}" if len(workers) > 1 else "")


class Discard(Struct, frozen=True):
    """Skip a gradient: its sender is about to reuse its memory."""

    payload: Payload


class Restore(Struct, frozen=True):
    """Restore a state, which has this version, and clear the sum."""

    payload: Payload
    version: int


Work = AccumulateGradient | ReduceGradients | Update | Discard | Restore


class PushAnswer(Struct, frozen=True):
    """What a worker is told about what it sent."""

    worker: int
    life: int
    number: int
    status: Status
    reason: str = ""
    then_pull: int = 0  # Number of the pull that follows; 0: none.
    step: int = 0
    entered: int | None = None  # The clock from which the worker is waited for, if it asked to enter.


class EntryOutcome(Struct):
    """What follows from an entry."""

    works: list[Work] = []
    answers: list[PushAnswer] = []
    due: list[Ask] = []  # Reads that waited for this.
    moved: bool = False  # More steps are complete than before.
    statuses: list[Status] = []  # Results of pushes.
    unproven: list[UpdateProof] = []  # Its updates that may fail; what they answer must wait for them.

    def settle(self, push: Push | Load, payload: Payload, status: Status, reason: str = "") -> None:
        """Answer a push; unless it was applied, discard it."""
        then_pull, step = 0, 0
        if isinstance(push, Push):
            then_pull, step = push.then_pull, push.clock
            self.statuses.append(status)
        if status != "applied" and payload.nbytes:
            self.works.append(Discard(payload))
        self.answers.append(PushAnswer(push.worker, push.life, push.number, status, reason, then_pull, step))

    def refuse(self, reason: str) -> None:
        """Answer that what was to be applied was refused."""
        self.answers = [
            structs.replace(answer, status="refused", reason=reason) if answer.status == "applied" else answer
            for answer in self.answers
        ]


class Inspect(Struct, frozen=True):
    """Check whether a payload is usable. The result is the reason why not, such as `NaN`, or empty."""

    payload: Payload
    worker: int
    start: int = 0
    stop: int = -1  # It is for [start, stop) of the shard; -1: up to its end.
    absent: tuple[tuple[int, int], ...] = ()


class ReadShard(Struct, frozen=True):
    """Read the values after all work begun before, or the whole state. The result is a `Payload`.

    It is sent to several readers and must not change before they have copied it.
    """

    state: bool = False
    start: int = 0
    stop: int = -1  # Of values: only [start, stop); -1: up to the end.
    kept: bool = False  # Of a state: include the values of earlier versions that are kept.


class Release(Struct, frozen=True):
    """The reader of a state has it, or no longer needs it: free its memory."""

    payload: Payload


class InspectState(Struct, frozen=True):
    """Check whether a state can be restored. The result is the reason why not, or empty."""

    payload: Payload


class InspectPayload(Struct, frozen=True):
    """Check a payload as a push is checked, and drop it: only the time it takes matters."""

    payload: Payload
    compressed: bool

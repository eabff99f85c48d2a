"""Everything that workers, servers and the coordinator say to each other.

Headers only: numbers travel as the payload beside them. A message may be lost, late, duplicated or overtaken, so every
request has a number, is resent under the same number until it is answered, and is carried out once.

A push's payload stays untouched in its sender's memory until the `PushReply`. If none ever comes because the sender
was declared dead, that memory is never written again: a new life pushes from new memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, structs

from offbeat.protocols.machine import Name

COORDINATOR: Name = "coordinator"
LIGHT = 64 * 1024**2  # Payloads up to this many bytes are handled so quickly that timeouts need no extra allowance.

Settings = tuple[dict[str, float | tuple[float, ...]], ...]
"""What a learning-rate schedule may change, for each parameter group; empty: unchanged."""

Status = Literal["applied", "duplicate", "late", "refused"]  # Used; seen before; complete without it; unusable.


def worker_name(worker: int) -> Name:
    """The name of a worker."""
    return f"worker {worker}"


def server_name(shard: int, replica: int) -> Name:
    """The name of a replica of a shard."""
    return f"server {shard}.{replica}"


def place_of(name: Name) -> tuple[int, int] | None:
    """Shard and replica of a server; None for any other name."""
    kind, _, place = name.partition(" ")
    shard, dot, replica = place.partition(".")
    return (int(shard), int(replica)) if kind == "server" and dot else None


class ClusterView(Struct, frozen=True):
    """The members in one epoch. Only the coordinator makes views, each with a higher epoch than the last."""

    epoch: int
    workers: tuple[int, ...]  # The live workers, in order.
    primaries: tuple[Name, ...]  # The primary of each shard; empty if no replica is left.
    backups: tuple[tuple[Name, ...], ...]  # Of each shard, in order: each holds all that the next one does.
    lives: tuple[int, ...] = ()  # How often each worker has rejoined, in the order of `workers`; empty: none ever has.
    novices: tuple[Name, ...] = ()  # By shard, the new copy that is being brought up to date; empty: none.
    # The part of the model that each worker has, by its number; each part has as many consecutive shards. Empty: every
    # worker has a whole model.
    parts: tuple[int, ...] = ()

    @classmethod
    def of(cls, workers: int, shards: int, replicas: int = 0, parts: tuple[int, ...] = ()) -> ClusterView:
        """The first view: all workers, and each shard with `replicas` backups."""
        return cls(
            epoch=0,
            workers=tuple(range(workers)),
            primaries=tuple(server_name(shard, 0) for shard in range(shards)),
            backups=tuple(tuple(server_name(shard, 1 + n) for n in range(replicas)) for shard in range(shards)),
            parts=parts,
        )

    def life(self, worker: int) -> int | None:
        """The life that the worker is in; None if it is not a member."""
        if worker not in self.workers:
            return None
        return self.lives[self.workers.index(worker)] if self.lives else 0

    @property
    def members(self) -> dict[int, int]:
        """The life of each live worker."""
        return dict(zip(self.workers, self.lives or (0,) * len(self.workers), strict=True))

    def shards_of(self, worker: int) -> range:
        """The shards that hold the worker's part of the model."""
        if not self.parts:
            return range(len(self.primaries))
        count = len(self.primaries) // (max(self.parts) + 1)
        first = self.parts[worker] * count
        return range(first, first + count)

    def members_of(self, shard: int) -> dict[int, int]:
        """The life of each live worker that has the shard's part of the model."""
        return {worker: life for worker, life in self.members.items() if shard in self.shards_of(worker)}

    def novice(self, shard: int) -> Name:
        """The server that is becoming a backup of a shard; empty: none."""
        return self.novices[shard] if self.novices else ""

    def replicas(self, shard: int) -> tuple[Name, ...]:
        """All replicas of a shard: primary, backups and novice."""
        return tuple(filter(None, (self.primaries[shard], *self.backups[shard], self.novice(shard))))

    @property
    def servers(self) -> tuple[Name, ...]:
        """All replicas of all shards."""
        return tuple(name for shard in range(len(self.primaries)) for name in self.replicas(shard))

    @property
    def names(self) -> tuple[Name, ...]:
        """All live workers and all servers."""
        return (*map(worker_name, self.workers), *self.servers)

    def with_novice(self, shard: int, name: Name) -> ClusterView:
        """The same view with another novice of a shard."""
        novices = (name if number == shard else self.novice(number) for number in range(len(self.primaries)))
        return structs.replace(self, novices=tuple(novices))

    def without(self, dead: Sequence[Name]) -> ClusterView:
        """The same view with dead servers replaced by the next in order; workers are unchanged."""
        left = [
            [name for name in (first, *rest) if name and name not in dead]
            for first, rest in zip(self.primaries, self.backups, strict=True)
        ]
        novices = [
            self.novice(shard) if names and self.novice(shard) not in dead else "" for shard, names in enumerate(left)
        ]
        return structs.replace(
            self,
            primaries=tuple(names[0] if names else "" for names in left),
            backups=tuple(tuple(names[1:]) for names in left),
            novices=tuple(novices),
        )


class _WorkerRequest(Struct, frozen=True, kw_only=True):
    worker: int
    life: int = 0
    number: int
    epoch: int = 0  # The newest epoch that the sender knows.


class _WorkerReply(Struct, frozen=True, kw_only=True):
    life: int = 0
    number: int  # Of the request.


class Push(_WorkerRequest, frozen=True, tag=True, kw_only=True):
    """A gradient, or the part [start, stop) of one, for the receiving shard. Payload: its numbers.

    Its number counts a worker's pushes to this shard, from 0 in each life: they are taken in order, none twice.
    """

    clock: int  # The step it belongs to: how many the worker had finished when it began.
    weight: float = 1.0  # Number of examples it is a mean over.
    start: int = 0
    stop: int = -1  # Where the part ends; -1: at the shard's end. An empty part only advances the clock.
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges of the shard, within the part, that have no gradient; the payload's values there mean nothing."""
    last: bool = True  # The step's last part for this shard: it advances the worker's clock.
    counts: bool = False  # It counts alone, by its own weight, whether other parts come or not: a microbatch.
    settings: Settings = ()
    version: int = 0  # Version of the values it was computed from.
    totals: tuple[float, ...] = ()
    """Reductions over the whole gradient, of which this shard's is a part, for updates that take them."""
    then_pull: int = 0  # Number of a pull, for the next step, to be answered right after this push; 0: none.
    colour: int = 0  # The newest snapshot that its sender has been cut by; see `snapshots`.


class _ShardReply(_WorkerReply, frozen=True, kw_only=True):
    version: int  # Number of updates the shard has made.
    clock: int  # Complete steps: all updates of those before it are in its values.
    epoch: int
    colour: int = 0


class PushReply(_ShardReply, frozen=True, tag=True, kw_only=True):
    """All live replicas hold the push: it will not be lost, and the sender may reuse its memory.

    A worker whose push was late continues from the shard's clock.
    """

    status: Status
    reason: str = ""


class Pull(_WorkerRequest, frozen=True, tag=True, kw_only=True):
    """Asks for the shard's values, as fresh as the rule demands for a reader at this clock."""

    clock: int
    newer_than: int = -1  # Version that the reader has: if there is no newer one, no values are sent.
    after: int = -1  # Number of the reader's own push that must be included (read-my-writes); -1: none.
    start: int = 0
    stop: int = -1  # Only the values [start, stop) of the shard are requested; -1: up to its end.
    colour: int = 0

    @property
    def whole(self) -> bool:
        """Whether the whole shard is requested."""
        return self.start == 0 and self.stop < 0


class PullReply(_ShardReply, frozen=True, tag=True, kw_only=True):
    """The shard's values, or the requested range of them, as payload."""

    unchanged: bool = False  # The reader has this version; there is no payload.
    pushed: PushReply | None = None  # Reply to the push that asked for this pull, if not sent before.


class Fresh(Struct, frozen=True, tag=True, kw_only=True):
    """Unrequested values as payload: under an eager rule, sent whenever the minimum clock moves."""

    version: int
    clock: int
    epoch: int
    colour: int = 0


class Trial(_WorkerRequest, frozen=True, tag=True, kw_only=True):
    """A payload to be delivered and inspected like a push, to time it: nothing changes."""

    compressed: bool = False  # Whether it is compressed as pushes are; else plain numbers.


class Tried(_WorkerReply, frozen=True, tag=True, kw_only=True):
    """The trial payload has been inspected; the sender may reuse its memory."""

    epoch: int


class Fetch(_WorkerRequest, frozen=True, tag=True, kw_only=True):
    """Asks for the whole state of the shard, optimizer included, for a checkpoint."""

    clock: int = 0  # Steps that must be complete.
    after: int = -1
    colour: int = 0


class Fetched(_ShardReply, frozen=True, tag=True, kw_only=True):
    """The state of the shard, as payload."""


class Load(_WorkerRequest, frozen=True, tag=True, kw_only=True):
    """Restores a fetched state (the payload). Numbered like a push, and answered as one."""

    version: int
    clock: int
    took: tuple[tuple[int, int, int], ...] = ()  # Workers whose numbering continues: pushes in the state, and clock.


class Enter(_WorkerRequest, frozen=True, tag=True, kw_only=True):
    """A worker that has joined asks to be waited for from this clock on, or from the shard's own if that is later.

    Number 0: in the log only, where the primary has learned it from the clock of a pull.
    """

    clock: int = 0


class Entered(_WorkerReply, frozen=True, tag=True, kw_only=True):
    """The shard waits for the worker from this clock on."""

    clock: int
    epoch: int


class StepDeadline(Struct, frozen=True, tag=True):
    """Complete a step with whatever has arrived."""

    step: int


class Members(Struct, frozen=True, tag=True):
    """From here on these workers are members."""

    view: ClusterView


class PushRefused(Struct, frozen=True, tag=True):
    """An unusable push, such as one with NaN: its sender's clock advances, its numbers are skipped."""

    push: Push
    reason: str


class LoadRefused(Struct, frozen=True, tag=True):
    """A state that cannot be restored: nothing changes."""

    load: Load
    reason: str


class ShardTotals(Struct, frozen=True, tag=True):
    """Reductions of one level over all shards' gradients of a step: the update may take them.

    An entry of the log; and a reply to a shard that still lacks them.
    """

    step: int
    level: int
    values: tuple[float, ...] = ()
    reason: str = ""  # Why there are none: the step is refused on all shards.


Entry = Push | PushRefused | Load | LoadRefused | Enter | StepDeadline | Members | ShardTotals
"""Entries of a shard's log. Replicas that have applied the same entries are equal."""


class Replicate(Struct, frozen=True, tag=True, kw_only=True):
    """A log entry for a backup, with its payload."""

    epoch: int
    index: int
    committed: int  # All replicas hold the entries up to this one.
    entry: Entry


class Replicated(Struct, frozen=True, tag=True):
    """A backup holds, and has applied, all entries up to this one."""

    epoch: int
    index: int


class ShardPartial(Struct, frozen=True, tag=True):
    """A shard's part of the reductions of one level over a step's gradient, for the other shards' primaries."""

    shard: int
    step: int
    level: int
    values: tuple[float, ...] = ()
    reason: str = ""  # Why there is none.


class ShardState(Struct, frozen=True, kw_only=True):
    """A shard between two steps, without its numbers."""

    version: int
    completed: int
    minimum: int
    workers: tuple[tuple[int, int, int, int], ...]
    """For each member: its number, its life, the number of its next push, and its clock; -1: not entered."""
    order: tuple[int, ...]  # Workers that have entered, in order of arrival.
    settings: Settings = ()
    overdue: bool = False
    counts: dict[str, int] = {}  # Pushes by status.
    origins: tuple[tuple[int, int], ...] = ()  # By worker, the version its last gradient was computed from.
    totals: tuple[ShardTotals, ...] = ()  # Of the last step, which another shard may still lack.


class Volunteer(Struct, frozen=True, tag=True):
    """A new server process offers to hold a copy of a shard that has lost one."""

    shard: int


class Install(Struct, frozen=True, tag=True, kw_only=True):
    """The state of a shard after `index` log entries, for its novice; its numbers are the payload."""

    epoch: int
    number: int
    index: int
    state: ShardState


class BackupReady(Struct, frozen=True, tag=True):
    """A shard's novice holds everything that was answered, and can become a backup."""

    shard: int
    name: Name


class Fenced(Struct, frozen=True, tag=True):
    """Your epoch is old, or I am not the primary: ask the coordinator for this epoch."""

    epoch: int


class Heartbeat(Struct, frozen=True, tag=True):
    """The sender is alive, and this is the newest epoch it knows."""

    epoch: int
    burden: int = 0  # Bytes of the largest payload that its sender handles, or is about to.


class JoinRequest(Struct, frozen=True, tag=True):
    """A worker wants to join, for the first time or again."""

    worker: int
    process: int  # Tells a process from the previous one under this worker number.
    patient: bool = False  # Wait until the others hold a meeting that admits; else join at once.


class Leave(Struct, frozen=True, tag=True):
    """A worker is done and must not be waited for."""

    worker: int
    life: int


class Gone(Struct, frozen=True, tag=True):
    """You were declared dead: in this epoch you are not a member."""

    epoch: int


class Viewed(Struct, frozen=True, tag=True):
    """The new view, or the current one on request."""

    view: ClusterView
    process: int = -1  # The process that it admits, if it answers a `JoinRequest`.
    told: tuple[float, ...] = ()  # Values brought to the meeting that admitted it.


class Lost(Struct, frozen=True, tag=True):
    """No replica of this shard is left: the run cannot continue, only be resumed from a checkpoint."""

    shard: int


class MeetingArrival(_WorkerRequest, frozen=True, tag=True, kw_only=True):
    """A worker has come to a meeting, with a few numbers for the others. Payload: a row to be summed, if any."""

    what: str  # Which meeting, such as `epoch 3`: never the same twice in a run.
    values: tuple[float, ...] = ()
    admits: bool = False  # When all have come, waiting workers are admitted.
    kind: str = ""  # Type of the numbers in this worker's row, such as `float32`; empty: no row.
    colour: int = 0


class Bring(_WorkerReply, frozen=True, tag=True, kw_only=True):
    """The row brought to a meeting was lost on the way: send it again."""


class Awaiting(_WorkerReply, frozen=True, tag=True, kw_only=True):
    """Reply to a resent arrival: these workers have not come to the meeting yet."""

    workers: tuple[int, ...]


class Met(_WorkerReply, frozen=True, tag=True, kw_only=True):
    """All live workers have come to the meeting. Payload: the sum of their rows, if any."""

    what: str
    ranks: tuple[int, ...]  # Workers that came, in order, including any that died afterwards.
    values: tuple[tuple[float, ...], ...]  # What each brought, in that order.
    waiting: tuple[int, ...] = ()  # Workers that waited to join when all had come: the same in every reply.
    colour: int = 0  # The newest colour of those that came.


class Want(Struct, frozen=True, tag=True):
    """A worker asks for a snapshot; if one is being taken, that is the one."""

    worker: int


class Announce(Struct, frozen=True, tag=True):
    """A snapshot is being taken: at your next boundary record your state, and continue in this colour."""

    colour: int


class Turned(_WorkerRequest, frozen=True, tag=True, kw_only=True):
    """A worker has recorded its state: this many of its pushes to this shard precede it."""

    colour: int
    pushes: int


class WorkerCut(Struct, frozen=True, kw_only=True):
    """Where a worker was cut."""

    worker: int
    life: int = 0
    clock: int  # Steps it had finished.
    pushes: tuple[int, ...]  # How many it had sent to each shard.
    seen: tuple[int, ...]  # The newest version of each shard that it had heard of; -1: none.
    meetings: int = 0  # How many meetings it had come from.


class ShardCut(Struct, frozen=True, kw_only=True):
    """Where a shard was cut, and the pushes in flight to it."""

    shard: int
    version: int
    taken: tuple[tuple[int, int, int, int], ...]
    """For each worker: its number, its life, how many of its pushes were in the values, its clock."""
    in_flight: tuple[tuple[int, int], ...] = ()
    """Pushes from before their worker's cut that came after the shard's, in order: worker and number."""


class SnapshotWritten(_WorkerRequest, frozen=True, tag=True, kw_only=True):
    """A worker has written its part of a snapshot; without a cut: it was too late, and the snapshot fails."""

    colour: int
    cut: WorkerCut | None = None


class ShardRecorded(Struct, frozen=True, tag=True, kw_only=True):
    """A shard has written its part, including everything in flight to it."""

    colour: int
    epoch: int
    cut: ShardCut


class Acknowledged(_WorkerReply, frozen=True, tag=True, kw_only=True):
    """Received; need not be resent. For a `ShardRecorded`, the number is its colour."""


Request = Push | Pull | Fetch | Load | Enter | Turned | Trial  # What a worker asks of a shard's primary.
Reply = PushReply | PullReply | Fetched | Entered | Acknowledged | Tried
_OfReplicas = ShardPartial | ShardTotals | Replicate | Replicated | Volunteer | Install | BackupReady | Fenced
_OfViews = Heartbeat | JoinRequest | Leave | Gone | Viewed | Lost
_OfMeetings = MeetingArrival | Bring | Awaiting | Met
_OfSnapshots = Want | Announce | SnapshotWritten | ShardRecorded
Message = Request | Reply | Fresh | _OfReplicas | _OfViews | _OfMeetings | _OfSnapshots
"""Every message between these processes: what the codec decodes."""


class Timeouts(Struct, frozen=True, kw_only=True):
    """All timeouts, in seconds."""

    heartbeat: float = 0.25  # Between two heartbeats; also how often unanswered requests are checked.
    silence: float = 1.5  # Without a heartbeat for this long, a process is declared dead.
    startup: float = 60.0  # The same for a process never heard of.
    resend: float = 0.5  # Until an unanswered request is resent; doubled each time after that.
    longest_resend: float = 2.0
    per_byte: float = 0.0
    """Extra allowance per byte of the largest payload: its transfer time on links, with everything that shares them."""
    handling: float = 5e-8  # The same for checking, copying and applying a large payload, without a heartbeat.
    deadline: float = 120.0  # Until a request is given up, naming the processes that did not answer.

    def patience(self, nbytes: int) -> float:
        """Until an unanswered request is resent, with payloads of `nbytes`."""
        return self.resend + self.per_byte * nbytes + self._busy(nbytes)

    def longest_patience(self, nbytes: int) -> float:
        """The same, after many times."""
        return self.longest_resend + 2 * (self.per_byte * nbytes + self._busy(nbytes))

    def longest_silence(self, burden: int) -> float:
        """Silence after which a process is declared dead, with payloads of `burden` bytes."""
        return self.silence + self._busy(burden)

    def _busy(self, nbytes: int) -> float:
        return self.handling * max(0, nbytes - LIGHT)

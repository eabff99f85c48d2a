"""Everything that workers, servers and the coordinator say to each other.

Headers only: numbers travel as the payload beside them. A message may be lost, late, doubled or overtaken; so every
request has a number, is sent again with the same one until it is answered, and is done once.

A push's payload stays untouched in its sender's memory until the `PushReply`. Where none ever comes, because the
sender was declared dead, it is never written again: a new life pushes from new memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, structs

from offbeat.protocols.machine import Name

COORDINATOR: Name = "coordinator"
LIGHT = 64 * 1024**2
"""Bytes of a payload that a process deals with so quickly that nobody need be patient."""

Settings = tuple[dict[str, float | tuple[float, ...]], ...]
"""What a learning-rate schedule may change, for each parameter group; empty: as before."""

Status = Literal["applied", "duplicate", "late", "refused"]
"""What became of a push: used; known already; its step was complete without it; not fit to be used."""


def worker_name(worker: int) -> Name:
    """What a worker is called."""
    return f"worker {worker}"


def server_name(shard: int, replica: int) -> Name:
    """What a replica of a shard is called."""
    return f"server {shard}.{replica}"


def place_of(name: Name) -> tuple[int, int] | None:
    """Shard and replica of a server; None if it is none."""
    kind, _, place = name.partition(" ")
    shard, dot, replica = place.partition(".")
    return (int(shard), int(replica)) if kind == "server" and dot else None


class ClusterView(Struct, frozen=True):
    """Who takes part, in one epoch. Only the coordinator makes them, each with a higher epoch than the last."""

    epoch: int
    workers: tuple[int, ...]
    """The live workers, in order."""
    primaries: tuple[Name, ...]
    """Who serves each shard; empty where no replica is left."""
    backups: tuple[tuple[Name, ...], ...]
    """Who else holds each shard, in the order in which they are told: each holds all that the next one does."""
    lives: tuple[int, ...] = ()
    """How often each worker has joined anew, in the order of `workers`; empty: none ever has."""
    novices: tuple[Name, ...] = ()
    """Of each shard, the new copy that is being brought up to date; empty: none. It cannot take over yet."""

    @classmethod
    def of(cls, workers: int, shards: int, replicas: int = 0) -> ClusterView:
        """The first view: all workers, and each shard with `replicas` backups."""
        return cls(
            epoch=0,
            workers=tuple(range(workers)),
            primaries=tuple(server_name(shard, 0) for shard in range(shards)),
            backups=tuple(tuple(server_name(shard, 1 + n) for n in range(replicas)) for shard in range(shards)),
        )

    def life(self, worker: int) -> int | None:
        """Which life the worker is in; none if it does not take part."""
        if worker not in self.workers:
            return None
        return self.lives[self.workers.index(worker)] if self.lives else 0

    @property
    def members(self) -> dict[int, int]:
        """The life of each live worker."""
        return dict(zip(self.workers, self.lives or (0,) * len(self.workers), strict=True))

    def novice(self, shard: int) -> Name:
        """Who is becoming a backup of a shard; empty: nobody."""
        return self.novices[shard] if self.novices else ""

    def replicas(self, shard: int) -> tuple[Name, ...]:
        """All who have a part in a shard: primary, backups, and who is becoming one."""
        names = (self.primaries[shard], *self.backups[shard], self.novice(shard))
        return tuple(name for name in names if name)

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
        """The same view with the next in order in the place of servers that are dead; workers are as they were."""
        left = [
            [name for name in (first, *rest) if name and name not in dead]
            for first, rest in zip(self.primaries, self.backups, strict=True)
        ]
        return structs.replace(
            self,
            primaries=tuple(names[0] if names else "" for names in left),
            backups=tuple(tuple(names[1:]) for names in left),
            novices=tuple(
                self.novice(shard) if names and self.novice(shard) not in dead else ""
                for shard, names in enumerate(left)
            ),
        )


class _Asked(Struct, frozen=True, kw_only=True):
    """What every request of a worker says."""

    worker: int
    life: int = 0
    number: int
    epoch: int = 0
    """The newest epoch that the sender knows."""


class _Answered(Struct, frozen=True, kw_only=True):
    """What every answer to a worker's request says."""

    life: int = 0
    number: int
    """Of the request."""


class Push(_Asked, frozen=True, tag=True, kw_only=True):
    """A gradient, or the part [start, stop) of one, for the shard that gets this. Payload: its numbers.

    Its number counts a worker's pushes to this shard, from 0 in each life: taken in order, and none of them twice.
    """

    clock: int
    """The step that it belongs to: how many the worker had finished when it began it."""
    weight: float = 1.0
    """Examples it is a mean over."""
    start: int = 0
    stop: int = -1
    """Where the part ends; -1: at the shard's end. An empty part only lets the clock tick."""
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges of the shard, within the part, that have no gradient: what lies there is nobody's."""
    last: bool = True
    """The step's last part for this shard: with it the worker's clock ticks."""
    counts: bool = False
    """It counts by itself, by its own weight, whether the step's other parts come or not: a microbatch."""
    settings: Settings = ()
    version: int = 0
    """Version of the values it was computed from."""
    then_pull: int = 0
    """Number of a pull, for the next step, that is to follow at once; 0: none."""
    colour: int = 0
    """The newest snapshot that its sender has been cut by; see `snapshots`."""


class _OfShard(_Answered, frozen=True, kw_only=True):
    """What every answer says of the shard."""

    version: int
    """Updates that it has made."""
    clock: int
    """Steps that are complete: all updates of those before it are in its values."""
    epoch: int
    colour: int = 0


class PushReply(_OfShard, frozen=True, tag=True, kw_only=True):
    """The push is held by all live replicas, and will not be lost; its memory is the sender's again.

    A worker whose push was late goes on from the shard's clock.
    """

    status: Status
    reason: str = ""


class Pull(_Asked, frozen=True, tag=True, kw_only=True):
    """Asks for the shard's values, as fresh as the rule says for a reader at this clock."""

    clock: int
    newer_than: int = -1
    """Version that the reader has: if there is no newer one, no values are sent."""
    after: int = -1
    """Number of the reader's own push that must be in it (read-my-writes); -1: none."""
    start: int = 0
    stop: int = -1
    """Only the values [start, stop) of the shard are wanted; -1: up to its end."""
    colour: int = 0

    @property
    def whole(self) -> bool:
        """Whether all of the shard is asked for."""
        return self.start == 0 and self.stop < 0


class PullReply(_OfShard, frozen=True, tag=True, kw_only=True):
    """The shard's values, or the range of them that was asked for, as payload."""

    unchanged: bool = False
    """The reader has this version; there is no payload."""
    pushed: PushReply | None = None
    """What became of the push that asked for this pull, where it was not yet said."""


class Fresh(Struct, frozen=True, tag=True, kw_only=True):
    """Values that nobody asked for, as payload: under an eager rule, whenever the minimum clock moves."""

    version: int
    clock: int
    epoch: int
    colour: int = 0


class Trial(_Asked, frozen=True, tag=True, kw_only=True):
    """A payload that is only to be brought here and looked at like a push, to see what that takes: nothing changes."""

    letter: bool = False
    """Whether it is compressed as pushes are; else numbers as they are."""


class Tried(_Answered, frozen=True, tag=True, kw_only=True):
    """The payload was here and has been looked at; its memory is the sender's again."""

    epoch: int


class Fetch(_Asked, frozen=True, tag=True, kw_only=True):
    """Asks for the whole state of the shard, optimizer and all, for a checkpoint."""

    clock: int = 0
    """Steps that must be complete."""
    after: int = -1
    colour: int = 0


class Fetched(_OfShard, frozen=True, tag=True, kw_only=True):
    """The state of the shard, as payload."""


class Load(_Asked, frozen=True, tag=True, kw_only=True):
    """Puts back a state that was fetched, as payload. Numbered like a push, and answered as one."""

    version: int
    clock: int
    took: tuple[tuple[int, int, int], ...] = ()
    """Workers whose pushes go on under the numbers they had: each with how many are in the state, and its clock."""


class Enter(_Asked, frozen=True, tag=True, kw_only=True):
    """A worker that has joined asks to be waited for from this clock on, or from the shard's own if that is later.

    Number 0: in the log only, where the primary has learned it from the clock of a pull.
    """

    clock: int = 0


class Entered(_Answered, frozen=True, tag=True, kw_only=True):
    """The shard waits for the worker from this clock on."""

    clock: int
    epoch: int


class StepDeadline(Struct, frozen=True, tag=True):
    """A step is to be completed with whatever has arrived."""

    step: int


class Members(Struct, frozen=True, tag=True):
    """From here on these workers take part."""

    view: ClusterView


class PushRefused(Struct, frozen=True, tag=True):
    """A push that is not fit to be used, such as one with NaN: its sender's clock ticks, its numbers are left out."""

    push: Push
    reason: str


Entry = Push | PushRefused | Load | Enter | StepDeadline | Members
"""What a shard's log is made of. Replicas that have applied the same entries are equal."""


class Replicate(Struct, frozen=True, tag=True, kw_only=True):
    """An entry for a backup; its payload is passed on."""

    epoch: int
    index: int
    committed: int
    """All replicas hold the entries up to this one."""
    entry: Entry


class Replicated(Struct, frozen=True, tag=True):
    """A backup holds, and has applied, all entries up to this one."""

    epoch: int
    index: int


class ShardState(Struct, frozen=True, kw_only=True):
    """A shard between two steps, without its numbers."""

    version: int
    completed: int
    minimum: int
    workers: tuple[tuple[int, int, int, int], ...]
    """Of each that takes part: its number, its life, the number of its next push, and its clock; -1: not entered."""
    order: tuple[int, ...]
    """Those who have entered, in the order of their coming."""
    settings: Settings = ()
    overdue: bool = False
    counts: dict[str, int] = {}
    """Pushes by what became of them."""
    origins: tuple[tuple[int, int], ...] = ()
    """Of workers, the version that their last gradient was computed from, where that is remembered."""


class Volunteer(Struct, frozen=True, tag=True):
    """A new server process offers to hold a copy of a shard that has lost one."""

    shard: int


class Install(Struct, frozen=True, tag=True, kw_only=True):
    """The state of a shard for its novice, after so many entries of the log; its numbers are the payload."""

    epoch: int
    number: int
    index: int
    state: ShardState


class BackupReady(Struct, frozen=True, tag=True):
    """A shard's novice holds all that is answered, and can be one of its backups."""

    shard: int
    name: Name


class Fenced(Struct, frozen=True, tag=True):
    """You speak from the past, or to the wrong one: ask the coordinator for this epoch."""

    epoch: int


class Heartbeat(Struct, frozen=True, tag=True):
    """I live, and this is the newest epoch I know."""

    epoch: int
    burden: int = 0
    """Bytes of the largest payload that its sender has, or is going to have, to deal with."""


class JoinRequest(Struct, frozen=True, tag=True):
    """A worker wants to join, for the first time or again."""

    worker: int
    process: int
    """Tells a process from the one that had this worker's number before."""
    patient: bool = False
    """It waits until the others hold a meeting that admits; else it is let in at once."""


class Leave(Struct, frozen=True, tag=True):
    """A worker has done its part and is not to be waited for."""

    worker: int
    life: int


class Gone(Struct, frozen=True, tag=True):
    """You were declared dead: in this epoch you do not take part."""

    epoch: int


class Viewed(Struct, frozen=True, tag=True):
    """The view has changed to this, or you have asked."""

    view: ClusterView
    process: int = -1
    """The process that it lets in, if it answers a `JoinRequest`."""
    told: tuple[float, ...] = ()
    """What was brought to the meeting that let it in."""


class Lost(Struct, frozen=True, tag=True):
    """No replica of this shard is left: the run cannot go on, only be resumed from a checkpoint."""

    shard: int


class MeetingArrival(_Asked, frozen=True, tag=True, kw_only=True):
    """A worker has come to a meeting, with a few numbers for the others. Payload: a row that is summed, if any."""

    what: str
    """Which meeting, such as `epoch 3`: never the same twice in a run."""
    values: tuple[float, ...] = ()
    admits: bool = False
    """When all have come, those who wait to join are let in."""
    kind: str = ""
    """Of the numbers in the row that this worker brings, such as `float32`; empty: it brings none."""
    colour: int = 0


class Bring(_Answered, frozen=True, tag=True, kw_only=True):
    """Who comes to a meeting with a row has come without it: it was lost, and is to be sent again."""


class Awaiting(_Answered, frozen=True, tag=True, kw_only=True):
    """Who has come to a meeting asks again: these have not come yet."""

    workers: tuple[int, ...]


class Met(_Answered, frozen=True, tag=True, kw_only=True):
    """All live workers have come to the meeting. Payload: the sum of the rows that they brought, if any did."""

    what: str
    ranks: tuple[int, ...]
    """Who came, in order; one who died after coming is among them."""
    values: tuple[tuple[float, ...], ...]
    """What each brought, in that order."""
    waiting: tuple[int, ...] = ()
    """Workers that waited to join when all had come: the same for all who hear of this meeting."""
    colour: int = 0
    """The newest of those who came."""


class Want(Struct, frozen=True, tag=True):
    """A worker asks for a snapshot; while one is being taken, that is the one."""

    worker: int


class Announce(Struct, frozen=True, tag=True):
    """A snapshot is being taken: at your next boundary record your state, and go on in this colour."""

    colour: int


class Turned(_Asked, frozen=True, tag=True, kw_only=True):
    """A worker has recorded its state: so many of its pushes to this shard belong to it."""

    colour: int
    pushes: int


class WorkerCut(Struct, frozen=True, kw_only=True):
    """Where a worker was cut."""

    worker: int
    life: int = 0
    clock: int
    """Steps it had finished."""
    pushes: tuple[int, ...]
    """How many it had sent to each shard."""
    seen: tuple[int, ...]
    """The newest version of each shard that it had heard of; -1: none."""
    meetings: int = 0
    """How many meetings it had come from."""


class ShardCut(Struct, frozen=True, kw_only=True):
    """Where a shard was cut, and what was under way to it."""

    shard: int
    version: int
    taken: tuple[tuple[int, int, int, int], ...]
    """Of each worker: its number, its life, how many of its pushes were in the values, its clock."""
    in_flight: tuple[tuple[int, int], ...] = ()
    """Pushes from before their worker's cut that came after the shard's, in order: worker and number."""


class SnapshotWritten(_Asked, frozen=True, tag=True, kw_only=True):
    """A worker has written its part of a snapshot; without a cut: it has missed its place, and there can be none."""

    colour: int
    cut: WorkerCut | None = None


class ShardRecorded(Struct, frozen=True, tag=True, kw_only=True):
    """A shard has written its part, with all that was under way to it."""

    colour: int
    epoch: int
    cut: ShardCut


class Acknowledged(_Answered, frozen=True, tag=True, kw_only=True):
    """It was heard, and need not be said again. What a shard has recorded goes by its colour, as number."""


Request = Push | Pull | Fetch | Load | Enter | Turned | Trial
"""What a worker asks of a shard's primary."""

Reply = PushReply | PullReply | Fetched | Entered | Acknowledged | Tried

_OfReplicas = Replicate | Replicated | Volunteer | Install | BackupReady | Fenced
_OfViews = Heartbeat | JoinRequest | Leave | Gone | Viewed | Lost
_OfMeetings = MeetingArrival | Bring | Awaiting | Met
_OfSnapshots = Want | Announce | SnapshotWritten | ShardRecorded
Message = Request | Reply | Fresh | _OfReplicas | _OfViews | _OfMeetings | _OfSnapshots
"""All that travels on this plane: what the codec decodes."""


class Timeouts(Struct, frozen=True, kw_only=True):
    """How long is waited for what, in seconds."""

    heartbeat: float = 0.25
    """Between two signs of life; also how often what is unanswered is looked through."""
    silence: float = 1.5
    """Without a sign of life for so long, one is declared dead."""
    startup: float = 60.0
    """The same for one who has never been heard of."""
    resend: float = 0.5
    """Until what is unanswered is sent again; twice as long each time after that."""
    longest_resend: float = 2.0
    per_byte: float = 0.0
    """More patience for every byte of the largest payload: how long links, with all that shares them, take for one."""
    handling: float = 5e-8
    """The same for what processes do with a large one: check, copy and apply it, without a sign of life meanwhile."""
    deadline: float = 120.0
    """Until a request is given up, naming who was waited for."""

    def patience(self, nbytes: int) -> float:
        """Until what is unanswered is sent again, where payloads have so many bytes."""
        return self.resend + self.per_byte * nbytes + self._busy(nbytes)

    def longest_patience(self, nbytes: int) -> float:
        """The same, after many times."""
        return self.longest_resend + 2 * (self.per_byte * nbytes + self._busy(nbytes))

    def longest_silence(self, burden: int) -> float:
        """Without a sign of life for so long one is declared dead, where payloads have so many bytes."""
        return self.silence + self._busy(burden)

    def _busy(self, nbytes: int) -> float:
        return self.handling * max(0, nbytes - LIGHT)

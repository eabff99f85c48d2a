"""Snapshots of a run whose workers do not wait for each other: a state that it can have been in, taken as it goes on.

The colours of messages (`protocols.colouring`) decide where each process is cut, and which pushes were in flight: a
shard that knows how many pushes a worker had sent knows when it has them all.

A worker can record its state only between two steps. A shard's answer of a new colour may reach it before that. Then
it is cut there: reading values up to the boundary leaves no trace in its state, because a resumed worker reads values
anew. If it pushes or meets the others before the boundary, it is too late. The snapshot is given up and retried, as it
is when any process dies or joins meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from offbeat.protocols.colouring import Colour, Keep, Record, Recording, Write
from offbeat.protocols.machine import NOTHING, Effects, Name, Payload
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.messages import ClusterView, Push, ShardCut, ShardRecorded, WorkerCut, worker_name
from offbeat.protocols.servers.replica.fencing import Fence
from offbeat.protocols.servers.replica.shard import Shard

PATIENCE = 30.0  # Seconds after which an incomplete snapshot is given up.
ATTEMPTS = 50  # Failed snapshots in a row after which the request is dropped.
_CHANGED = "who takes part has changed"


# -- a worker ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class WorkerColour(Colour):
    """Which snapshots a worker has been cut by, and what it had seen before."""

    _seen: dict[int, int] = field(default_factory=dict[int, int])
    """Versions of shards seen before the newest colour was heard."""

    def hear(self, colour: int, seen: Mapping[int, tuple[int, int]]) -> None:
        """A message of this colour is about to be handled; these versions of shards were seen before it."""
        if colour > max(self.own, self.heard):
            self._seen = {shard: version for shard, (version, _) in seen.items()}
            self.heard = colour

    def ask(self) -> int:
        """The colour of a read, which changes no state: a worker that has heard of a snapshot reads after its cut."""
        return max(self.own, self.heard)

    def turn(self, seen: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        """Take the new colour; returns the versions seen before the cut."""
        self.own = max(self.announced, self.heard)
        return self._seen if self.heard == self.own else {shard: version for shard, (version, _) in seen.items()}


# -- a shard -----------------------------------------------------------------------------------------------------------


class ShardColour:
    """Which snapshots a shard has been cut by, and what was in flight to it at the last."""

    def __init__(self, number: int, shard: Shard, fence: Fence) -> None:
        self.own = 0
        self._shard, self._fence = shard, fence
        self._cut = ShardCut(shard=number, version=0, taken=(), in_flight=())
        self.recording: Recording | None = None  # What was in flight to it, while it is still arriving.
        self._report: ShardRecorded | None = None

    def _taken(self) -> dict[int, tuple[int, int, int]]:
        return self._shard.taken(self._fence.view.members)

    def cut(self, colour: int, out: Effects) -> None:
        """Cut the shard before the first message of a new colour is handled."""
        if colour > self.own:
            taken = tuple((worker, *counts) for worker, counts in sorted(self._taken().items()))
            self.own, self._cut = colour, replace(self._cut, version=self._shard.version, taken=taken)
            self.recording, self._report = Recording(colour), None
            out.start(Record(colour))

    def told(self, turned: msg.Turned, out: Effects) -> None:
        """A worker has reported how many of its pushes are from before its cut."""
        if self.recording and turned.colour == self.own:
            self.recording.expected[turned.worker] = turned.pushes
        self._complete(out)

    def record(self, entry: msg.Entry, payload: Payload, out: Effects) -> None:
        """An entry was applied while a snapshot is being taken."""
        if isinstance(entry, msg.PushRefused):
            entry, payload = replace(entry.push, start=0, stop=0), NOTHING
        if isinstance(entry, Push):
            self.applied(entry, payload, out)
        self._complete(out)

    def applied(self, push: Push, payload: Payload, out: Effects) -> None:
        """A push was applied: if it is from before its worker's cut, it was in flight. Former lives do not count."""
        living = (push.worker, push.life) in (entry[:2] for entry in self._cut.taken)
        if self.recording and living and self.recording.keep(push.worker, push.number, push.colour):
            out.start(Keep(self.own, push, payload))

    def _complete(self, out: Effects) -> None:
        """Write it, if everything in flight has come from all members."""
        recording = self.recording
        if recording and recording.is_complete({who: pushes for who, (_, pushes, _) in self._taken().items()}):
            self.recording = None
            cut = replace(self._cut, in_flight=tuple(recording.kept))
            out.start(Write(self.own, cut), ("written", self.own, cut))

    def written(self, colour: int, cut: ShardCut) -> None:
        """It is on disk: report that until acknowledged."""
        if colour == self.own and not self.recording:
            self._report = ShardRecorded(colour=colour, epoch=self._fence.view.epoch, cut=cut)

    def report(self, to: Name, out: Effects) -> None:
        """Report what was recorded, unless acknowledged."""
        if self._report is not None:
            out.send(to, self._report)

    def heard(self, colour: int) -> None:
        """The coordinator has acknowledged the report."""
        if colour == self.own:
            self._report = None

    def give_up(self) -> None:
        """The members have changed: what is being recorded is useless."""
        self.recording = self._report = None


# -- the coordinator ---------------------------------------------------------------------------------------------------


class Snapshot(Struct, frozen=True):
    """All have recorded their parts; work of the coordinator: publish it."""

    colour: int
    epoch: int
    workers: tuple[WorkerCut, ...]
    shards: tuple[ShardCut, ...]


class GivenUp(Struct, frozen=True):
    """A snapshot has failed; work of the coordinator: remove what was written of it."""

    colour: int
    reason: str


class _OpenSnapshot(Struct):
    colour: int
    epoch: int
    since: float
    workers: dict[int, WorkerCut] = {}
    shards: dict[int, ShardCut] = {}


class Snapshots:
    """The coordinator's side: one snapshot at a time, announced to all workers until all parts are there."""

    def __init__(self) -> None:
        self.colour = 0  # The last one begun.
        self._wanted = False
        self._attempts = 0
        self._open: _OpenSnapshot | None = None

    @property
    def under_way(self) -> bool:
        """Whether a snapshot is being taken, or about to be."""
        return self._open is not None or self._wanted

    def want(self) -> None:
        """Take a snapshot, unless one is in progress."""
        if not self.under_way:
            self._wanted, self._attempts = True, 0

    def look(self, view: ClusterView, busy: bool, now: float, out: Effects) -> None:
        """Begin a requested snapshot, unless workers are about to meet; give up a stuck one; announce again."""
        taking = self._open
        if taking is not None and taking.epoch != view.epoch:
            self._give_up(_CHANGED, out)
        elif taking is not None and now - taking.since > PATIENCE:
            self._give_up(f"not all have recorded their part within {PATIENCE:g} s", out)
        elif taking is not None:
            self._announce(taking, view, out)
        if self._open is None and self._wanted and not busy and view.workers and all(view.primaries):
            self._wanted = False
            self.colour += 1
            self._open = _OpenSnapshot(self.colour, view.epoch, now)
            self._announce(self._open, view, out)

    def _announce(self, taking: _OpenSnapshot, view: ClusterView, out: Effects) -> None:
        for worker in view.workers:
            if worker not in taking.workers:
                out.send(worker_name(worker), msg.Announce(taking.colour))

    def recorded(self, message: msg.SnapshotWritten, view: ClusterView, out: Effects) -> None:
        """A worker has recorded its part, or was too late."""
        taking = self._open
        if taking is None or message.colour != taking.colour or view.life(message.worker) != message.life:
            return
        if message.cut is None:
            self._give_up(f"worker {message.worker} pushed or met others before it could record its state", out)
            return
        taking.workers[message.worker] = message.cut
        self._conclude(taking, view, out)

    def recorded_shard(self, sender: Name, message: ShardRecorded, view: ClusterView, out: Effects) -> None:
        """A shard has recorded its part."""
        taking = self._open
        if taking is None or (message.colour, message.epoch) != (taking.colour, taking.epoch):
            return
        if view.primaries[message.cut.shard] == sender:
            taking.shards[message.cut.shard] = message.cut
            self._conclude(taking, view, out)

    def _conclude(self, taking: _OpenSnapshot, view: ClusterView, out: Effects) -> None:
        if taking.epoch != view.epoch:
            self._give_up(_CHANGED, out)
        elif taking.workers.keys() == set(view.workers) and len(taking.shards) == len(view.primaries):
            self._open = None
            workers = tuple(taking.workers[worker] for worker in sorted(taking.workers))
            shards = tuple(taking.shards[shard] for shard in sorted(taking.shards))
            out.start(Snapshot(taking.colour, taking.epoch, workers, shards))

    def _give_up(self, reason: str, out: Effects) -> None:
        if self._open is not None:
            out.start(GivenUp(self._open.colour, reason))
        self._open = None
        self._attempts += 1
        self._wanted = self._attempts < ATTEMPTS


# -- consistency of cuts -----------------------------------------------------------------------------------------------


def faults(workers: Sequence[WorkerCut], shards: Sequence[ShardCut]) -> list[str]:
    """Why these cuts together are not a state that the run can have been in; empty: they are one.

    A consistent cut: no shard has a push that was not sent, no worker knows a version that was not reached, and none
    has come from a meeting that another had not come to. And balance: every push that was sent is in the values or was
    in flight, once.
    """
    problems: list[str] = []
    meetings = {cut.meetings for cut in workers}
    if len(meetings) > 1:
        problems.append(f"workers have come from different numbers of meetings: {sorted(meetings)}")
    for shard in shards:
        if len({worker for worker, *_ in shard.taken}) < len(shard.taken):
            problems.append(f"shard {shard.shard} names a worker twice")
        taken = {(worker, life): pushes for worker, life, pushes, _ in shard.taken}
        for cut in workers:
            problems += _between(cut, shard, taken.get((cut.worker, cut.life)))
        strangers = {worker for worker, _ in shard.in_flight} - {cut.worker for cut in workers}
        problems += [f"a push of worker {one}, not a member, was in flight to shard {shard.shard}" for one in strangers]
    return problems


def _between(cut: WorkerCut, shard: ShardCut, taken: int | None) -> list[str]:
    who = f"worker {cut.worker}"
    if shard.shard >= len(cut.pushes) or shard.shard >= len(cut.seen) or taken is None:
        return [f"{who} and shard {shard.shard} do not know of each other"]
    sent, seen = cut.pushes[shard.shard], cut.seen[shard.shard]
    problems: list[str] = []
    if seen > shard.version:
        problems.append(f"{who} had seen version {seen} of shard {shard.shard}, which was at {shard.version}")
    if taken > sent:
        problems.append(f"shard {shard.shard} had {taken} pushes of {who}, who had sent {sent}")
    in_flight = [number for worker, number in shard.in_flight if worker == cut.worker]
    if in_flight != list(range(taken, sent)) and taken <= sent:
        problems.append(
            f"{who} had sent {sent} pushes to shard {shard.shard}: {taken} were in the values, so that "
            f"{_numbers(range(taken, sent))} must have been in flight, and {_numbers(in_flight)} was kept"
        )
    return problems


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(f"#{number}" for number in numbers) or "none"

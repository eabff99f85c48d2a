"""A worker's messages: its loop's requests, as numbered messages to each shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from msgspec import structs

from offbeat.protocols.machine import NOTHING, Payload
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.snapshots import WorkerColour
from offbeat.protocols.servers.worker import notices
from offbeat.protocols.servers.worker.requests import Sent, WorkerMembership

Piece = tuple[int, Sent, Payload]
"""A message for a shard (-1: the coordinator), with its payload."""


class _Header(TypedDict):
    worker: int
    life: int
    number: int
    epoch: int


class Composer:
    """Writes messages: counts a worker's pushes to each shard, and knows the versions that it has read."""

    def __init__(self, membership: WorkerMembership, colour: WorkerColour) -> None:
        self.pushes = [0] * len(membership.shards)
        """Number of pushes to each shard in this life."""
        self.known: dict[int, tuple[int, int]] = {}
        """Version and clock of the newest values received, by shard."""
        self._membership, self._colour = membership, colour
        self._numbers = 0

    def restart(self) -> None:
        """Begin another life."""
        self.pushes = [0] * len(self._membership.shards)
        self.known.clear()

    def compose(self, request: notices.ClientRequest) -> Iterator[Piece]:
        """The messages for a request; a `Pull` among those of a push is only to be expected, not sent."""
        match request:
            case notices.PushRequest():
                yield from self._push(request)
            case notices.PullRequest():
                for shard in self._membership.shards:
                    newer_than = -1 if request.anew else self.known.get(shard, (-1, 0))[0]
                    yield shard, self._pull(shard, request.clock, newer_than), NOTHING
            case notices.RangeRequest():
                for part in request.parts:
                    pull = self._pull(part.shard, request.clock, part.newer_than, part.start, part.stop)
                    yield part.shard, pull, NOTHING
            case notices.FetchRequest():
                for shard in self._membership.shards:
                    after = self.pushes[shard] - 1
                    yield shard, msg.Fetch(**self.header(), after=after, colour=self._colour.ask()), NOTHING
            case notices.LoadRequest():
                for state in request.states:
                    shard, version = state.shard, request.versions[state.shard]
                    took = request.took[shard] if request.took else ()
                    load = msg.Load(**self._push_header(shard), version=version, clock=request.clock, took=took)
                    yield shard, load, state.payload
            case notices.TrialRequest():
                for part in request.parts:
                    yield part.shard, msg.Trial(**self.header(), compressed=request.compressed), part.payload
            case notices.MeetRequest(what, values, admits, kind, row):
                colour = self._colour.own
                arrival = msg.MeetingArrival(
                    **self.header(), what=what, values=values, admits=admits, kind=kind, colour=colour
                )
                yield -1, arrival, row
            case notices.ReplayRequest():
                self.pushes = list(request.pushes)
                own = {"worker": self._membership.worker, "life": self._membership.life}
                own |= {"epoch": self._membership.view.epoch, "colour": self._colour.own}
                for shard, push, payload in request.under_way:
                    yield shard, structs.replace(push, then_pull=0, **own), payload

    def header(self) -> _Header:
        """The fields of every request, under the next number."""
        member = self._membership
        self._numbers += 1
        return {"worker": member.worker, "life": member.life, "number": self._numbers, "epoch": member.view.epoch}

    def _push_header(self, shard: int) -> _Header:
        member, number = self._membership, self.pushes[shard]
        self.pushes[shard] += 1
        return {"worker": member.worker, "life": member.life, "number": number, "epoch": member.view.epoch}

    def _push(self, request: notices.PushRequest) -> Iterator[Piece]:
        by_shard: dict[int, list[notices.PushedRange]] = {}
        for part in request.parts:
            by_shard.setdefault(part.shard, []).append(part)
        for shard in self._membership.shards if request.final else by_shard:
            parts = by_shard.get(shard) or [notices.PushedRange(shard, NOTHING, 0, 0)]
            for place, part in enumerate(parts, 1):
                last, pull = request.final and place == len(parts), 0
                header = self._push_header(shard)
                if last and request.then_pull:
                    expected = self._pull(shard, request.clock + 1)
                    pull = expected.number
                    yield shard, expected, NOTHING
                push = msg.Push(
                    **header,
                    clock=request.clock,
                    weight=request.weight,
                    start=part.start,
                    stop=part.stop,
                    absent=part.absent,
                    last=last,
                    counts=request.counts,
                    settings=request.settings,
                    version=self.known.get(shard, (0, 0))[0],
                    then_pull=pull,
                    colour=self._colour.own,
                )
                yield shard, push, part.payload

    def _pull(self, shard: int, clock: int, newer_than: int = -1, start: int = 0, stop: int = -1) -> msg.Pull:
        after, colour = self.pushes[shard] - 1, self._colour.ask()
        place = {"newer_than": newer_than, "after": after, "start": start, "stop": stop, "colour": colour}
        return msg.Pull(**self.header(), clock=clock, **place)

    def newest(self, shard: int, reply: msg.PullReply) -> msg.PullReply:
        """A reply that was overtaken by a newer one counts as unchanged."""
        version, clock = self.known.get(shard, (-1, 0))
        if reply.version < version:
            return structs.replace(reply, version=version, clock=max(clock, reply.clock), unchanged=True)
        self.known[shard] = (reply.version, reply.clock)
        return reply

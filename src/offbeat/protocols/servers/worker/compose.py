"""A worker's messages: what its loop asks for, written for each shard under numbers that tell one from another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict

from msgspec import structs

from offbeat.protocols.machine import NOTHING, Payload
from offbeat.protocols.servers.messages import (
    Fetch,
    Load,
    MeetingArrival,
    Pull,
    PullReply,
    Push,
    Trial,
)
from offbeat.protocols.servers.snapshots import WorkerColour
from offbeat.protocols.servers.worker.membership import WorkerMembership
from offbeat.protocols.servers.worker.notices import (
    ClientRequest,
    FetchRequest,
    LoadRequest,
    MeetRequest,
    PulledRange,
    PullRequest,
    PushedRange,
    PushRequest,
    RangeRequest,
    ReplayRequest,
    TrialRequest,
)
from offbeat.protocols.servers.worker.requests import Sent

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
        """How many pushes there have been to each shard in this life."""
        self.known: dict[int, tuple[int, int]] = {}
        """Version and clock of the newest values that came, by shard."""
        self._membership, self._colour = membership, colour
        self._numbers = 0

    def restart(self) -> None:
        """Begin another life."""
        self.pushes = [0] * len(self._membership.shards)

    def compose(self, request: ClientRequest) -> Iterator[Piece]:
        """The messages that ask for this; a `Pull` among those of a push is only to be expected, not sent."""
        match request:
            case PushRequest():
                return self._push(request)
            case PullRequest():
                return self._pull(request)
            case RangeRequest():
                return self._ranges(request.parts, request.clock)
            case FetchRequest():
                return self._fetch()
            case LoadRequest():
                return self._load(request)
            case TrialRequest():
                return self._trial(request)
            case MeetRequest(what, values, admits, kind, row):
                colour = self._colour.own
                meet = MeetingArrival(
                    **self.header(), what=what, values=values, admits=admits, kind=kind, colour=colour
                )
                return iter([(-1, meet, row)])
            case ReplayRequest():
                return self._replay(request.pushes, request.under_way)

    def header(self) -> _Header:
        """What every request says, under the next number."""
        member = self._membership
        self._numbers += 1
        return {"worker": member.worker, "life": member.life, "number": self._numbers, "epoch": member.view.epoch}

    def _push_header(self, shard: int) -> _Header:
        member, number = self._membership, self.pushes[shard]
        self.pushes[shard] += 1
        return {"worker": member.worker, "life": member.life, "number": number, "epoch": member.view.epoch}

    def _push(self, request: PushRequest) -> Iterator[Piece]:
        by_shard: dict[int, list[PushedRange]] = {}
        for part in request.parts:
            by_shard.setdefault(part.shard, []).append(part)
        for shard in self._membership.shards if request.final else by_shard:
            parts = by_shard.get(shard) or [PushedRange(shard, NOTHING, 0, 0)]
            for place, part in enumerate(parts, 1):
                last, pull = request.final and place == len(parts), 0
                header = self._push_header(shard)
                if last and request.then_pull:
                    expected = self._pull_for(shard, request.clock + 1)
                    pull = expected.number
                    yield shard, expected, NOTHING
                push = Push(
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

    def _pull_for(self, shard: int, clock: int, newer_than: int = -1, start: int = 0, stop: int = -1) -> Pull:
        after, colour = self.pushes[shard] - 1, self._colour.ask()
        place = {"newer_than": newer_than, "after": after, "start": start, "stop": stop, "colour": colour}
        return Pull(**self.header(), clock=clock, **place)

    def _pull(self, request: PullRequest) -> Iterator[Piece]:
        for shard in self._membership.shards:
            newer_than = -1 if request.anew else self.known.get(shard, (-1, 0))[0]
            yield shard, self._pull_for(shard, request.clock, newer_than), NOTHING

    def _ranges(self, parts: Iterable[PulledRange], clock: int) -> Iterator[Piece]:
        for part in parts:
            yield part.shard, self._pull_for(part.shard, clock, part.newer_than, part.start, part.stop), NOTHING

    def _fetch(self) -> Iterator[Piece]:
        for shard in self._membership.shards:
            after = self.pushes[shard] - 1
            yield shard, Fetch(**self.header(), after=after, colour=self._colour.ask()), NOTHING

    def _load(self, request: LoadRequest) -> Iterator[Piece]:
        for state in request.states:
            shard, version = state.shard, request.versions[state.shard]
            took = request.took[shard] if request.took else ()
            load = Load(**self._push_header(shard), version=version, clock=request.clock, took=took)
            yield shard, load, state.payload

    def _trial(self, request: TrialRequest) -> Iterator[Piece]:
        for part in request.parts:
            yield part.shard, Trial(**self.header(), letter=request.letter), part.payload

    def _replay(self, pushes: Sequence[int], under_way: Iterable[tuple[int, Push, Payload]]) -> Iterator[Piece]:
        self.pushes = list(pushes)
        member = self._membership
        for shard, push, payload in under_way:
            message = structs.replace(
                push,
                worker=member.worker,
                life=member.life,
                epoch=member.view.epoch,
                then_pull=0,
                colour=self._colour.own,
            )
            yield shard, message, payload

    def newest(self, shard: int, reply: PullReply) -> PullReply:
        """What came counts as unchanged if something newer was overtaking it."""
        version, clock = self.known.get(shard, (-1, 0))
        if reply.version < version:
            return structs.replace(reply, version=version, clock=max(clock, reply.clock), unchanged=True)
        self.known[shard] = (reply.version, reply.clock)
        return reply

"""What a shard's primary tells workers: what became of their pushes, and the values that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offbeat.protocols.machine import Effects, Payload
from offbeat.protocols.servers.messages import Entered, Fetched, Fresh, Pull, PullReply, PushReply, worker_name
from offbeat.protocols.servers.replica.fencing import Fence
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import Ask, EntryOutcome, PushAnswer, ReadShard
from offbeat.protocols.servers.snapshots import ShardColour

_Due = tuple[Ask, PushReply | None]
"""A read that is due, and what became of the push that asked for it."""


@dataclass(slots=True)
class _Reading:
    """A read under way, and who gets it."""

    version: int
    clock: int
    colour: int
    asks: list[_Due] = field(default_factory=list[_Due])
    fresh: tuple[int, ...] = ()
    """Workers who have not asked, and get it all the same."""


class Answers:
    """Replies, and reads that are under way."""

    def __init__(self, shard: Shard, fence: Fence, colour: ShardColour) -> None:
        self._shard, self._fence, self._colour = shard, fence, colour
        self._readings: dict[int, _Reading] = {}
        self._tokens = 0

    def tell(self, outcome: EntryOutcome, out: Effects) -> None:
        """Answer what was applied, and the reads that have become due by it."""
        due: list[_Due] = [(ask, None) for ask in outcome.due]
        for answer in outcome.answers:
            following = None
            if answer.then_pull:
                clock, colour = answer.step + 1, self._colour.own
                following = Pull(
                    worker=answer.worker, life=answer.life, number=answer.then_pull, clock=clock, colour=colour
                )
            if following is not None and self._shard.ask(following):
                due.append((following, self._push_reply(answer)))
            else:
                self.reply(answer, out)
        fresh = outcome.moved and self._shard.rule.eager
        if due or fresh:
            self.read(due, out, fresh=fresh)

    def reply(self, answer: PushAnswer, out: Effects) -> None:
        """Say what became of what a worker sent."""
        if answer.entered is None:
            message = self._push_reply(answer)
        else:
            message = Entered(
                life=answer.life, number=answer.number, clock=answer.entered, epoch=self._fence.view.epoch
            )
        out.send(worker_name(answer.worker), message)

    def _push_reply(self, answer: PushAnswer) -> PushReply:
        return PushReply(
            life=answer.life,
            number=answer.number,
            status=answer.status,
            reason=answer.reason,
            version=self._shard.version,
            clock=self._shard.minimum,
            epoch=self._fence.view.epoch,
            colour=self._colour.own,
        )

    def read(self, asks: Sequence[_Due], out: Effects, *, fresh: bool = False) -> None:
        """Read once for all who are due, apart from those who have this version; if `fresh`, for all who have not."""
        readings: dict[ReadShard, _Reading] = {}
        for ask, pushed in asks:
            if isinstance(ask, Pull) and ask.newer_than >= self._shard.version:
                reply = self._pull_reply(ask, self._reading(), pushed, unchanged=True)
                out.send(worker_name(ask.worker), reply)
                continue
            what = ReadShard(start=ask.start, stop=ask.stop) if isinstance(ask, Pull) else ReadShard(state=True)
            readings.setdefault(what, self._reading()).asks.append((ask, pushed))
        if fresh:
            whole = readings.setdefault(ReadShard(), self._reading())
            asking = {ask.worker for ask, _ in whole.asks}
            whole.fresh = tuple(worker for worker in self._shard.members if worker not in asking)
        for what, reading in readings.items():
            self._tokens += 1
            self._readings[self._tokens] = reading
            out.start(what, ("read", self._tokens))

    def _reading(self) -> _Reading:
        return _Reading(self._shard.version, self._shard.minimum, self._colour.own)

    def hand_out(self, token: int, payload: Payload, out: Effects) -> None:
        """What was read goes to all who get it."""
        reading, epoch = self._readings.pop(token), self._fence.view.epoch
        told = {"version": reading.version, "clock": reading.clock, "epoch": epoch, "colour": reading.colour}
        for ask, pushed in reading.asks:
            if isinstance(ask, Pull):
                message = self._pull_reply(ask, reading, pushed)
            else:
                message = Fetched(life=ask.life, number=ask.number, **told)
            out.send(worker_name(ask.worker), message, payload)
        for worker in reading.fresh:
            out.send(worker_name(worker), Fresh(**told), payload)

    def _pull_reply(
        self, ask: Pull, reading: _Reading, pushed: PushReply | None, *, unchanged: bool = False
    ) -> PullReply:
        return PullReply(
            life=ask.life,
            number=ask.number,
            version=reading.version,
            clock=reading.clock,
            unchanged=unchanged,
            pushed=pushed,
            epoch=self._fence.view.epoch,
            colour=reading.colour,
        )

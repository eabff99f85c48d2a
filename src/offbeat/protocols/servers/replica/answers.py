"""A primary and its workers: pushes are admitted in order and inspected, and answered along with reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Effects, Payload
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.messages import Load, Pull, PullReply, Push, PushReply, worker_name
from offbeat.protocols.servers.replica.fencing import Fence
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import (
    Ask,
    EntryOutcome,
    Inspect,
    InspectState,
    PushAnswer,
    ReadShard,
    UpdateProof,
)
from offbeat.protocols.servers.snapshots import ShardColour

_Numbered = tuple[Push | Load, Payload]
_Due = tuple[Ask, PushReply | None]  # A read that is due, and the reply to the push that asked for it.
MOST_REFUSALS = 20  # Refusals that are remembered; the shard counts all of them.


class Refusal(NamedTuple):
    """An unusable push."""

    worker: int
    step: int  # That the shard was in.
    reason: str


class Admission:
    """Pushes that have come and are not in the log yet."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._expected: dict[tuple[int, int], int] = {}  # Number of the next push, by worker and life.
        self._early: dict[tuple[int, int, int], _Numbered] = {}  # Pushes that came before others with lower numbers.
        self._inspected: dict[int, _Numbered] = {}
        self._tokens = 0
        self.refusals: list[Refusal] = []  # The first unusable pushes.

    def forget(self) -> None:
        """Start over: pushes may continue under other numbers."""
        self._expected.clear()
        self._early.clear()
        self._inspected.clear()

    def admit(self, push: Push | Load, payload: Payload, out: Effects) -> bool:
        """Inspect a new push when its turn has come, and those that waited for it; False if it is not new."""
        sender = (push.worker, push.life)
        expected = self._expected.get(sender)
        if expected is None:
            expected = self._shard.expected(*sender)
        if push.number < expected:
            return False
        self._early[(*sender, push.number)] = (push, payload)
        while (following := self._early.pop((*sender, expected), None)) is not None:
            expected += 1
            self._tokens += 1
            self._inspected[self._tokens] = following
            entry, numbers = following
            look = InspectState(numbers)
            if isinstance(entry, Push):
                look = Inspect(numbers, entry.worker, entry.start, entry.stop, entry.absent)
            out.start(look, ("inspect", self._tokens))
        self._expected[sender] = expected
        return True

    def inspected(self, token: int, reason: str, step: int) -> tuple[msg.Entry, Payload] | None:
        """The log entry for an inspected push; a reason says why its numbers are unusable."""
        push, payload = self._inspected.pop(token, (None, NOTHING))
        if reason and isinstance(push, Push):
            self._note(push.worker, step, reason)
            return msg.PushRefused(push, reason), NOTHING
        if reason and isinstance(push, Load):
            return msg.LoadRefused(push, reason), NOTHING
        return None if push is None else (push, payload)

    def failed(self, proof: UpdateProof, reason: str) -> None:
        """An update has changed nothing: the pushes in it count as refused."""
        self._shard.counts["applied"] -= len(proof.senders)
        self._shard.counts["refused"] += len(proof.senders)
        for worker in dict.fromkeys(proof.senders):
            self._note(worker, proof.step, reason)

    def _note(self, worker: int, step: int, reason: str) -> None:
        if len(self.refusals) < MOST_REFUSALS:
            self.refusals.append(Refusal(worker, step, reason))


class _Reading(Struct):
    """A read in progress: the shard as it was read, and the receivers."""

    state: dict[str, int]
    asks: list[_Due] = []
    fresh: tuple[int, ...] = ()  # Workers that get it without asking.


class Answers:
    """Replies, and reads in progress."""

    def __init__(self, shard: Shard, fence: Fence, colour: ShardColour) -> None:
        self._shard, self._fence, self._colour = shard, fence, colour
        self._readings: dict[int, _Reading] = {}
        self._tokens = 0

    def tell(self, outcome: EntryOutcome, out: Effects) -> None:
        """Answer what was applied, and the reads that became due by it."""
        due: list[_Due] = [(ask, None) for ask in outcome.due]
        for answer in outcome.answers:
            following = None
            if answer.then_pull:
                sender = {"worker": answer.worker, "life": answer.life, "number": answer.then_pull}
                following = Pull(**sender, clock=answer.step + 1, colour=self._colour.own)
            if following is not None and self._shard.ask(following):
                due.append((following, self._push_reply(answer)))
            else:
                self.reply(answer, out)
        fresh = outcome.moved and self._shard.rule.eager
        if due or fresh:
            self.read(due, out, fresh=fresh)

    def reply(self, answer: PushAnswer, out: Effects) -> None:
        """Reply to a push, or to a worker that enters."""
        if answer.entered is None:
            message = self._push_reply(answer)
        else:
            epoch = self._fence.view.epoch
            message = msg.Entered(life=answer.life, number=answer.number, clock=answer.entered, epoch=epoch)
        out.send(worker_name(answer.worker), message)

    def _state(self) -> dict[str, int]:
        """What every reply says of the shard."""
        shard, epoch = self._shard, self._fence.view.epoch
        return {"version": shard.version, "clock": shard.minimum, "epoch": epoch, "colour": self._colour.own}

    def _push_reply(self, answer: PushAnswer) -> PushReply:
        header = {"life": answer.life, "number": answer.number, **self._state()}
        return PushReply(**header, status=answer.status, reason=answer.reason)

    def read(self, asks: Sequence[_Due], out: Effects, *, fresh: bool = False) -> None:
        """Read once for all due reads, except readers that have this version; if `fresh`, for all other workers too."""
        state = self._state()
        readings: dict[ReadShard, _Reading] = {}
        for ask, pushed in asks:
            if isinstance(ask, Pull) and ask.newer_than >= self._shard.version:
                reply = PullReply(life=ask.life, number=ask.number, unchanged=True, pushed=pushed, **state)
                out.send(worker_name(ask.worker), reply)
                continue
            what = ReadShard(start=ask.start, stop=ask.stop) if isinstance(ask, Pull) else ReadShard(state=True)
            readings.setdefault(what, _Reading(state)).asks.append((ask, pushed))
        if fresh:
            whole = readings.setdefault(ReadShard(), _Reading(state))
            asking = {ask.worker for ask, _ in whole.asks}
            whole.fresh = tuple(worker for worker in self._shard.members if worker not in asking)
        for what, reading in readings.items():
            self._tokens += 1
            self._readings[self._tokens] = reading
            out.start(what, ("read", self._tokens))

    def hand_out(self, token: int, payload: Payload, out: Effects) -> None:
        """Send what was read to all its receivers."""
        reading = self._readings.pop(token)
        state = reading.state | {"epoch": self._fence.view.epoch}
        for ask, pushed in reading.asks:
            header = {"life": ask.life, "number": ask.number, **state}
            message = (
                PullReply(**header, unchanged=False, pushed=pushed) if isinstance(ask, Pull) else msg.Fetched(**header)
            )
            out.send(worker_name(ask.worker), message, payload)
        for worker in reading.fresh:
            out.send(worker_name(worker), msg.Fresh(**state), payload)

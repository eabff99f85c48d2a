"""Requests that are sent until they are answered: the part of a client that knows nothing of what they are about."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import structs

from offbeat.protocols.machine import NOTHING, Effects, Name, Payload
from offbeat.protocols.servers.messages import (
    Awaiting,
    Bring,
    ClusterView,
    Fetch,
    Load,
    MeetingArrival,
    Met,
    Pull,
    Push,
    PushReply,
    Reply,
    Request,
    SnapshotWritten,
    Timeouts,
)
from offbeat.protocols.servers.snapshots import WorkerColour
from offbeat.protocols.servers.worker.membership import WorkerMembership
from offbeat.protocols.servers.worker.notices import Completed, Failed

Sent = Request | MeetingArrival | SnapshotWritten
"""What a worker sends again until it is answered."""
_Numbered = Push | Load | PushReply
ENTERING = 0
"""The token of a client's own requests, with which it enters."""
ASIDE = -1
"""The token of what is said until it is heard, and not waited for."""


@dataclass(slots=True)
class Open:
    """A request to one shard, or to the coordinator, that is not answered."""

    token: int
    shard: int
    """-1: the coordinator."""
    message: Sent
    payload: Payload
    since: float
    again_at: float
    patience: float
    missing: tuple[Name, ...] = ()
    """Who keeps it from being answered, as the coordinator says."""


@dataclass(slots=True)
class _Wait:
    """What a token waits for."""

    open: int = 0
    replies: list[tuple[int, Reply | Met]] = field(default_factory=list[tuple[int, Reply | Met]])


class Outstanding:
    """What a worker has asked for and not been answered yet."""

    def __init__(self, membership: WorkerMembership, colour: WorkerColour, coordinator: Name, timing: Timeouts) -> None:
        self.burden = 0
        """Bytes of the largest payload that is to be borne with."""
        self.open: dict[tuple[str, int, int], Open] = {}
        self._membership, self._colour = membership, colour
        self._coordinator, self._timing = coordinator, timing
        self._tokens = ENTERING
        self._waits: dict[int, _Wait] = {}

    def begin(self) -> int:
        """A token for requests that are waited for together."""
        self._tokens += 1
        self._waits[self._tokens] = _Wait()
        return self._tokens

    def expect(self, nbytes: int) -> None:
        """Payloads of so many bytes are to be borne with."""
        self.burden = max(self.burden, nbytes)

    def enlist(self, token: int, shard: int, message: Sent, payload: Payload, now: float, out: Effects | None) -> None:
        """Send a message until it is answered. Without effects it is only waited for, and sent if no answer comes."""
        self.expect(payload.nbytes)
        patience = self._timing.patience(self.burden)
        self.open[key_of(message, shard)] = Open(token, shard, message, payload, now, now + patience, patience)
        if token in self._waits:
            self._waits[token].open += 1
        if out is not None:
            self._send(shard, message, payload, out)

    def send_row(self, message: Bring, out: Effects) -> None:
        """The row that was brought to a meeting was lost: send it again."""
        request = self.open.get(key_of(message, -1))
        if request is not None:
            self._send(-1, request.message, request.payload, out)

    def _send(self, shard: int, message: Sent, payload: Payload, out: Effects) -> None:
        """Send to whoever serves the shard, if anyone does."""
        if addressee := self._addressee(shard):
            out.send(addressee, message, payload)

    def _addressee(self, shard: int) -> Name:
        return self._coordinator if shard < 0 else self._membership.view.primaries[shard]

    def waited_for(self) -> tuple[Name, ...]:
        """Who has not answered yet."""
        return tuple(sorted({self._addressee(request.shard) for request in self.open.values()}))

    def look(self, now: float, out: Effects) -> list[int]:
        """Send again what was not answered for long, and give up what is past its deadline: the tokens of that."""
        given_up = {
            request.token: None for request in self.open.values() if now - request.since >= self._timing.deadline
        }
        for token in given_up:
            self._give_up(token, out)
        for request in self.open.values():
            if now >= request.again_at:
                self._again(request, now, out)
        return list(given_up)

    def redirect(self, before: ClusterView, now: float, out: Effects) -> None:
        """What is unanswered by those who served in an earlier view goes to their successors at once."""
        primaries = self._membership.view.primaries
        for request in self.open.values():
            if request.shard >= 0 and primaries[request.shard] != before.primaries[request.shard]:
                request.patience = self._timing.patience(self.burden) / 2
                self._again(request, now, out)

    def _again(self, request: Open, now: float, out: Effects) -> None:
        request.patience = min(2 * request.patience, self._timing.longest_patience(self.burden))
        request.again_at = now + request.patience
        message, epoch = request.message, self._membership.view.epoch
        if isinstance(message, Push):
            message = structs.replace(message, epoch=epoch, then_pull=0)
        elif isinstance(message, Pull | Fetch):
            # It may not have been sent before, if a push was to ask for it.
            message = structs.replace(message, epoch=epoch, colour=self._colour.ask())
        else:
            message = structs.replace(message, epoch=epoch)
        # A meeting lasts until the last has come: the row that was brought is sent again only if it was lost.
        self._send(request.shard, message, NOTHING if isinstance(message, MeetingArrival) else request.payload, out)

    def _give_up(self, token: int, out: Effects) -> None:
        given_up = [request for request in self.open.values() if request.token == token]
        names = {name for request in given_up for name in request.missing or (self._addressee(request.shard),)}
        self.open = {key: request for key, request in self.open.items() if request.token != token}
        self._waits.pop(token, None)
        out.start(Failed(token, tuple(sorted(names))))

    def take(self, reply: Reply | Met, shard: int) -> Open | None:
        """The request that this answers, which is open no longer; None if there is none."""
        return self.open.pop(key_of(reply, shard), None)

    def finish(self, request: Open, reply: Reply | Met, out: Effects) -> None:
        """A request is answered; with the last of its token all are."""
        wait = self._waits.get(request.token)
        if wait is not None:
            wait.open -= 1
            wait.replies.append((request.shard, reply))
            self.conclude(request.token, out)

    def conclude(self, token: int, out: Effects) -> None:
        """Say so, if nothing of a token is open."""
        wait = self._waits[token]
        if not wait.open:
            del self._waits[token]
            out.start(Completed(token, tuple(wait.replies)))

    def forget(self) -> None:
        """Nothing that was asked for will be answered."""
        self.open.clear()
        self._waits.clear()


def key_of(message: Sent | Reply | Met | Bring | Awaiting, shard: int) -> tuple[str, int, int]:
    """Pushes are numbered for each shard, all else for each worker."""
    pushed = isinstance(message, _Numbered)
    return ("push", shard, message.number) if pushed else ("ask", -1, message.number)

"""Requests that are sent until they are answered: the part of a client that knows nothing of what they are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from offbeat.protocols.machine import NOTHING, Effect, Effects, Name, Payload, Send
from offbeat.protocols.servers.messages import (
    Awaiting,
    Bring,
    ClusterView,
    Fetch,
    Heartbeat,
    Load,
    Meet,
    Met,
    Pull,
    Push,
    PushReply,
    Recorded,
    Reply,
    Request,
    Timing,
)
from offbeat.protocols.servers.notices import Completed, Failed
from offbeat.protocols.servers.snapshots import WorkerColour

Sent = Request | Meet | Recorded
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


class Requests:
    """What a worker has asked for and not been answered yet."""

    def __init__(self, view: ClusterView, coordinator: Name, timing: Timing) -> None:
        self.view = view
        self.colour = WorkerColour()
        """Which snapshots it has been cut by."""
        self._coordinator = coordinator
        self._timing = timing
        self._tokens = ENTERING
        self._numbers = 0
        self._largest = 0
        self._open: dict[tuple[str, int, int], Open] = {}
        self._waits: dict[int, _Wait] = {}
        self._out = Effects()

    def waited_for(self) -> tuple[Name, ...]:
        """Who has not answered yet."""
        return tuple(sorted({self._addressee(request.shard) for request in self._open.values()}))

    def _new_token(self) -> int:
        self._tokens += 1
        self._waits[self._tokens] = _Wait()
        return self._tokens

    def expect(self, nbytes: int) -> None:
        """Payloads of so many bytes are to be borne with."""
        self._largest = max(self._largest, nbytes)

    def announce(self, nbytes: int) -> Sequence[Effect]:
        """The same, by everybody: whoever deals with them is silent for a while, and is not to be taken for dead."""
        self.expect(nbytes)
        return [Send(self._coordinator, Heartbeat(self.view.epoch, self._largest))]

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _enlist(self, token: int, shard: int, message: Sent, payload: Payload, now: float) -> None:
        self.expect(payload.nbytes)
        patience = self._timing.patience(self._largest)
        key = key_of(message, shard)
        self._open[key] = Open(token, shard, message, payload, now, now + patience, patience)
        if token in self._waits:
            self._waits[token].open += 1

    def _request(self, token: int, shard: int, message: Sent, payload: Payload, now: float) -> None:
        self._enlist(token, shard, message, payload, now)
        self._send(shard, message, payload)

    def _addressee(self, shard: int) -> Name:
        return self._coordinator if shard < 0 else self.view.primaries[shard]

    def _send(self, shard: int, message: Sent, payload: Payload) -> None:
        """Send to whoever serves the shard, if anyone does."""
        if addressee := self._addressee(shard):
            self._out.send(addressee, message, payload)

    def _again(self, request: Open, now: float) -> None:
        request.patience = min(2 * request.patience, self._timing.longest_patience(self._largest))
        request.again_at = now + request.patience
        message = request.message
        if isinstance(message, Push):
            message = structs.replace(message, epoch=self.view.epoch, then_pull=0)
        elif isinstance(message, Pull | Fetch):
            # It may not have been sent before, if a push was to ask for it.
            message = structs.replace(message, epoch=self.view.epoch, colour=self.colour.ask())
        elif not isinstance(message, Meet):
            message = structs.replace(message, epoch=self.view.epoch)
        # A meeting lasts until the last has come: the row that was brought is sent again only if it was lost.
        self._send(request.shard, message, NOTHING if isinstance(message, Meet) else request.payload)

    def _give_up(self, token: int) -> None:
        given_up = [request for request in self._open.values() if request.token == token]
        names = {name for request in given_up for name in request.missing or (self._addressee(request.shard),)}
        self._open = {key: request for key, request in self._open.items() if request.token != token}
        self._waits.pop(token, None)
        if token == ENTERING:
            self._given_up_entering()
        self._out.start(Failed(token, tuple(sorted(names))))

    def _given_up_entering(self) -> None:
        """Nobody has answered this worker's wish to be waited for."""

    def _finish(self, request: Open, reply: Reply | Met) -> None:
        token = request.token
        wait = self._waits.get(token)
        if wait is None:
            return
        wait.open -= 1
        wait.replies.append((request.shard, reply))
        if not wait.open:
            del self._waits[token]
            self._out.start(Completed(token, tuple(wait.replies)))


def key_of(message: Sent | Reply | Met | Bring | Awaiting, shard: int) -> tuple[str, int, int]:
    """Pushes are numbered for each shard, all else for each worker."""
    pushed = isinstance(message, _Numbered)
    return ("push", shard, message.number) if pushed else ("ask", -1, message.number)

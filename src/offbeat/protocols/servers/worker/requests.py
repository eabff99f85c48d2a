"""A worker's membership, and its requests that are resent until they are answered.

A worker that has joined asks all shards to wait for it. Their clocks may differ, so all are then told the latest one.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

from offbeat.protocols.machine import NOTHING, Effects, Name, Payload
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.snapshots import WorkerColour
from offbeat.protocols.servers.worker.notices import Completed, Failed

Sent = msg.Request | msg.MeetingArrival | msg.SnapshotWritten
"""What a worker resends until it is answered."""
_Numbered = msg.Push | msg.Load | msg.PushReply
ENTERING = 0
"""The token of a client's own requests to enter."""
ASIDE = -1
"""The token of messages that are resent until acknowledged, but not waited for."""


class WorkerMembership:
    """A worker's place in the newest view that it knows."""

    def __init__(self, worker: int, view: msg.ClusterView, process: int, coordinator: Name) -> None:
        self.worker = worker
        self.view = view
        self.life = view.life(worker) or 0
        """How often this worker has rejoined."""
        self.state: Literal["member", "gone", "joining", "entering", "leaving", "left"] = (
            "gone" if view.life(worker) is None else "member"
        )
        self.told: tuple[float, ...] = ()
        """Values brought to the meeting that admitted this worker."""
        self.clocks: dict[int, int] = {}
        """While entering, the clock from which each shard waits for this worker."""
        self._process, self._coordinator = process, coordinator
        self._patient = False

    @property
    def shards(self) -> range:
        """All shards."""
        return range(len(self.view.primaries))

    @property
    def present(self) -> bool:
        """Whether this worker is a member, or is about to be."""
        return self.state in ("member", "entering")

    def sign_of_life(self, burden: int, out: Effects) -> None:
        """Send a heartbeat, or whatever this worker needs from the coordinator: a newer view, to join, to leave."""
        if self.present:
            out.send(self._coordinator, msg.Heartbeat(self.view.epoch, burden))
        elif self.state == "joining":
            out.send(self._coordinator, msg.JoinRequest(self.worker, self._process, self._patient))
        elif self.state == "leaving":
            out.send(self._coordinator, msg.Leave(self.worker, self.life))

    def join(self, patient: bool) -> None:
        """Ask to join: at once, or when the others hold a meeting."""
        self.state, self._patient = "joining", patient

    def is_news(self, message: msg.Viewed) -> bool:
        """Whether a view is newer than the known one, or admits this process."""
        admitted = self.state == "joining" and message.process == self._process
        return message.view.epoch > self.view.epoch or (admitted and message.view.epoch == self.view.epoch)

    def follow(self, message: msg.Viewed) -> Literal["enters", "stays", "out", ""]:
        """Adopt a view; says whether it admits this worker, still has it, or has it no longer."""
        self.view = message.view
        life = self.view.life(self.worker)
        if self.state == "joining" and life is not None and message.process == self._process:
            self.state, self.life, self.told = "entering", life, message.told
            self.clocks.clear()
            return "enters"
        if self.present:
            return "stays" if life == self.life else "out"
        if self.state == "leaving" and life != self.life:
            self.state = "left"
        return ""

    def depart(self) -> bool:
        """Stop being a member; True if that is news to this worker."""
        if self.present or (self.state == "joining" and self._patient):
            self.state = "gone"
            return True
        if self.state == "leaving":
            self.state = "left"
        return False

    def agreed(self) -> tuple[int, list[int]]:
        """The latest clock from which any shard waits for this worker, and the shards that are behind it."""
        clock = max(self.clocks.values(), default=0)
        return clock, [shard for shard in self.shards if self.clocks.get(shard, 0) < clock]


class Open(Struct):
    """An unanswered request to one shard, or to the coordinator."""

    token: int
    shard: int
    """-1: the coordinator."""
    message: Sent
    payload: Payload
    since: float
    again_at: float
    patience: float
    missing: tuple[Name, ...] = ()
    """Workers that keep it from being answered, according to the coordinator."""


class _Wait(Struct):
    open: int = 0
    replies: list[tuple[int, msg.Reply | msg.Met]] = []


class Outstanding:
    """Unanswered requests of a worker; knows nothing of what they are about."""

    def __init__(
        self, membership: WorkerMembership, colour: WorkerColour, coordinator: Name, timing: msg.Timeouts
    ) -> None:
        self.burden = 0
        """Bytes of the largest payload to allow for."""
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
        """Allow for payloads of `nbytes`."""
        self.burden = max(self.burden, nbytes)

    def enlist(self, token: int, shard: int, message: Sent, payload: Payload, now: float, out: Effects | None) -> None:
        """Send a message until it is answered. Without effects it is sent only if no answer comes."""
        self.expect(payload.nbytes)
        patience = self._timing.patience(self.burden)
        self.open[key_of(message, shard)] = Open(token, shard, message, payload, now, now + patience, patience)
        if token in self._waits:
            self._waits[token].open += 1
        if out is not None:
            self._send(shard, message, payload, out)

    def send_row(self, message: msg.Bring, out: Effects) -> None:
        """Resend the row for a meeting, which was lost."""
        request = self.open.get(key_of(message, -1))
        if request is not None:
            self._send(-1, request.message, request.payload, out)

    def _send(self, shard: int, message: Sent, payload: Payload, out: Effects) -> None:
        if addressee := self._addressee(shard):
            out.send(addressee, message, payload)

    def _addressee(self, shard: int) -> Name:
        return self._coordinator if shard < 0 else self._membership.view.primaries[shard]

    def waited_for(self) -> tuple[Name, ...]:
        """Processes that have not answered yet."""
        return tuple(sorted({self._addressee(request.shard) for request in self.open.values()}))

    def look(self, now: float, out: Effects) -> list[int]:
        """Resend what has been unanswered for long, and give up what is past its deadline: returns those tokens."""
        expired = {
            request.token: None for request in self.open.values() if now - request.since >= self._timing.deadline
        }
        for token in expired:
            self._give_up(token, out)
        for request in self.open.values():
            if now >= request.again_at:
                self._again(request, now, out)
        return list(expired)

    def redirect(self, before: msg.ClusterView, now: float, out: Effects) -> None:
        """Resend at once what the primaries of an earlier view left unanswered, to their successors."""
        primaries = self._membership.view.primaries
        for request in self.open.values():
            if request.shard >= 0 and primaries[request.shard] != before.primaries[request.shard]:
                request.patience = self._timing.patience(self.burden) / 2
                self._again(request, now, out)

    def _again(self, request: Open, now: float, out: Effects) -> None:
        request.patience = min(2 * request.patience, self._timing.longest_patience(self.burden))
        request.again_at = now + request.patience
        message, epoch = request.message, self._membership.view.epoch
        if isinstance(message, msg.Push):
            message = structs.replace(message, epoch=epoch, then_pull=0)
        elif isinstance(message, msg.Pull | msg.Fetch):
            # It may not have been sent before, if a push was to ask for it.
            message = structs.replace(message, epoch=epoch, colour=self._colour.ask())
        else:
            message = structs.replace(message, epoch=epoch)
        # A meeting lasts until the last worker has come: the row is resent only if it was lost.
        self._send(request.shard, message, NOTHING if isinstance(message, msg.MeetingArrival) else request.payload, out)

    def _give_up(self, token: int, out: Effects) -> None:
        expired = [request for request in self.open.values() if request.token == token]
        names = {name for request in expired for name in request.missing or (self._addressee(request.shard),)}
        self.open = {key: request for key, request in self.open.items() if request.token != token}
        self._waits.pop(token, None)
        out.start(Failed(token, tuple(sorted(names))))

    def take(self, reply: msg.Reply | msg.Met, shard: int) -> Open | None:
        """Remove and return the request that this answers; None if there is none."""
        return self.open.pop(key_of(reply, shard), None)

    def finish(self, request: Open, reply: msg.Reply | msg.Met, out: Effects) -> None:
        """A request is answered; with the last of its token, the token is completed."""
        wait = self._waits.get(request.token)
        if wait is not None:
            wait.open -= 1
            wait.replies.append((request.shard, reply))
            self.conclude(request.token, out)

    def conclude(self, token: int, out: Effects) -> None:
        """Report completion, if nothing of a token is open."""
        wait = self._waits[token]
        if not wait.open:
            del self._waits[token]
            out.start(Completed(token, tuple(wait.replies)))

    def forget(self) -> None:
        """Drop everything: nothing will be answered."""
        self.open.clear()
        self._waits.clear()


def key_of(message: Sent | msg.Reply | msg.Met | msg.Bring | msg.Awaiting, shard: int) -> tuple[str, int, int]:
    """Pushes are numbered per shard, everything else per worker."""
    pushed = isinstance(message, _Numbered)
    return ("push", shard, message.number) if pushed else ("ask", -1, message.number)

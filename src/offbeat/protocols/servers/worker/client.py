"""The worker's side: pushes, pulls and meetings that are asked for until they are answered.

Whoever drives it calls `ask` with a request (`notices.ClientRequest`), and gets a token and effects to carry out. What
became of it comes as the work of a `Start` effect: `Arrived` for each shard's values, `Completed` once all shards have
answered, `Failed` if the deadline has passed. Nothing is asked under a new number when it is asked again, so it is done
once; and when another replica has taken over a shard, what is unanswered goes to that one.

One who was declared dead hears of it (`Departed`): all it has asked for is void. It may `join` again, in a new life,
and goes on from the clock that `Joined` names.

The parts, each without I/O: `membership` (views, joining and leaving), `compose` (messages and their numbers),
`requests` (what is not answered yet) and `worker_snapshots`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offbeat.protocols.machine import NOTHING, Effect, Effects, Event, Name, Payload, Received, Send, Timer
from offbeat.protocols.servers.coordination.coordinator import Changed
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    Acknowledged,
    Announce,
    Awaiting,
    Bring,
    ClusterView,
    Enter,
    Entered,
    Fenced,
    Fetched,
    Fresh,
    Gone,
    Heartbeat,
    Lost,
    Met,
    Pull,
    PullReply,
    PushReply,
    Timeouts,
    Tried,
    Viewed,
    worker_name,
)
from offbeat.protocols.servers.snapshots import WorkerColour
from offbeat.protocols.servers.worker.compose import Composer
from offbeat.protocols.servers.worker.membership import WorkerMembership
from offbeat.protocols.servers.worker.notices import (
    Arrived,
    ClientRequest,
    Departed,
    Joined,
    MeetRequest,
    OpenRequest,
    PushRequest,
    Refreshed,
    ReplayRequest,
)
from offbeat.protocols.servers.worker.requests import ASIDE, ENTERING, Outstanding, key_of
from offbeat.protocols.servers.worker.snapshots import WorkerSnapshots

TICK = "tick"
_Answer = PushReply | PullReply | Fetched | Entered | Tried
_Act = PushRequest | MeetRequest | ReplayRequest
"""What changes others."""


class ClientMachine:
    """What a worker asks of servers and coordinator, and how it is one of many."""

    def __init__(
        self,
        worker: int,
        view: ClusterView,
        *,
        process: int = 0,
        coordinator: Name = COORDINATOR,
        timing: Timeouts | None = None,
    ) -> None:
        self.worker = worker
        self.name = worker_name(worker)
        self.colour = WorkerColour()
        """Which snapshots it has been cut by."""
        self.membership = WorkerMembership(worker, view, process, coordinator)
        self.composer = Composer(self.membership, self.colour)
        self.known = self.composer.known
        """Version and clock of the newest values that came, by shard."""
        self.timing = timing or Timeouts()
        self.outstanding = Outstanding(self.membership, self.colour, coordinator, self.timing)
        self.snapshots = WorkerSnapshots(self.membership, self.colour, self.composer, self.outstanding, coordinator)
        self._coordinator = coordinator
        self._out = Effects()

    @property
    def view(self) -> ClusterView:
        """Who takes part, as far as is known here."""
        return self.membership.view

    @property
    def life(self) -> int:
        """How often this worker has joined anew."""
        return self.membership.life

    @property
    def member(self) -> bool:
        """Whether this worker takes part, as far as it knows."""
        return self.membership.state == "member"

    @property
    def left(self) -> bool:
        """Whether the coordinator knows that this worker has left."""
        return self.membership.state == "left"

    # What a driver asks for.

    def ask(self, request: ClientRequest, now: float) -> OpenRequest:
        """Ask for something: the token under which it is answered, and what is to be done for it."""
        out = self._out = Effects()
        if not self.member:
            out.start(Departed(self.view.epoch))
            return OpenRequest(ASIDE, out.done)
        token = self.outstanding.begin()
        pull = 0
        if isinstance(request, PushRequest) and request.final and request.then_pull:
            pull = self.outstanding.begin()
        if isinstance(request, _Act):
            self.snapshots.act(now, out)
        for shard, message, payload in self.composer.compose(request):
            if pull and isinstance(message, Pull):
                self.outstanding.enlist(pull, shard, message, payload, now, None)
            else:
                self.outstanding.enlist(token, shard, message, payload, now, out)
        self.outstanding.conclude(token, out)
        return OpenRequest(token, out.done, pull)

    def announce(self, nbytes: int) -> Sequence[Effect]:
        """Payloads of so many bytes are going to come: who deals with them is silent, and not to be taken for dead."""
        self.outstanding.expect(nbytes)
        return [Send(self._coordinator, Heartbeat(self.view.epoch, self.outstanding.burden))] if self.member else ()

    def took(self, shard: int, fresh: Fresh) -> None:
        """The loop goes on from values that were sent unasked: its gradients are computed from them from now on."""
        if fresh.version > self.known.get(shard, (-1, 0))[0]:
            self.known[shard] = (fresh.version, fresh.clock)

    def join(self, patient: bool = False) -> Sequence[Effect]:
        """Ask to take part, as a new process or again after `Departed`: at once, or when the others hold a meeting."""
        out = self._out = Effects()
        self.membership.join(patient)
        self.membership.sign_of_life(self.outstanding.burden, out)
        return out.done

    def leave(self) -> Sequence[Effect]:
        """Say that this worker has done its part and is not to be waited for. It asks for nothing after that."""
        out = self._out = Effects()
        self.membership.state = "leaving"
        self.membership.sign_of_life(self.outstanding.burden, out)
        return out.done

    # What happens.

    def begin(self, now: float) -> Sequence[Effect]:
        """Give the first sign of life."""
        return self.on(Timer(TICK), now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Take a message or a timer."""
        out = self._out = Effects()
        if isinstance(event, Received):
            self._received(event, now)
        elif isinstance(event, Timer) and not self.left:
            out.timer(self.timing.heartbeat, TICK)
            self.membership.sign_of_life(self.outstanding.burden, out)
            if ENTERING in self.outstanding.look(now, out):
                self.membership.state = "gone"
        return out.done

    def _received(self, event: Received, now: float) -> None:
        message, payload = event.message, event.payload
        match message:
            case Acknowledged():
                self.outstanding.take(message, -1)
            case Announce() if event.sender == self._coordinator:
                self.colour.announced = max(self.colour.announced, message.colour)
            case PushReply() | PullReply() | Fetched() | Entered() | Tried():
                if message.life == self.life and event.sender in self.view.primaries:
                    self._answered(self.view.primaries.index(event.sender), message, payload, now)
            case Met() if message.life == self.life:
                self._met(message, payload, now)
            case Bring() if message.life == self.life:
                self.outstanding.send_row(message, self._out)
            case Awaiting() if message.life == self.life:
                request = self.outstanding.open.get(key_of(message, -1))
                if request is not None:
                    request.missing = tuple(map(worker_name, message.workers))
            case Fresh() if event.sender in self.view.primaries and message.colour <= self.colour.own:
                # What is from after a cut that is still to come here, who needs it asks for.
                shard = self.view.primaries.index(event.sender)
                if message.version > self.known.get(shard, (-1, 0))[0]:
                    self._out.start(Refreshed(shard, message, payload))
            case Fenced() if message.epoch > self.view.epoch:
                self.membership.sign_of_life(self.outstanding.burden, self._out)
            case Gone() if message.epoch > self.view.epoch:
                self._depart(message.epoch)
            case Viewed() if event.sender == self._coordinator and self.membership.is_news(message):
                self._viewed(message, now)
            case Lost():
                self._out.start(message)
            case _:
                pass

    def _answered(self, shard: int, reply: _Answer, payload: Payload, now: float) -> None:
        if isinstance(reply, PullReply) and reply.pushed is not None:
            self._answered(shard, reply.pushed, NOTHING, now)
        request = self.outstanding.take(reply, shard)
        if request is None:
            return
        if isinstance(reply, Entered):
            self.membership.enter(shard, reply.clock)
            self._enter(now)
            return
        if not isinstance(reply, Tried):
            self.colour.hear(reply.colour, self.known)
        if isinstance(reply, PullReply) and isinstance(request.message, Pull) and request.message.whole:
            reply = self.composer.newest(shard, reply)
            payload = NOTHING if reply.unchanged else payload
        if isinstance(reply, PullReply | Fetched):
            self.outstanding.expect(payload.nbytes)
            self._out.start(Arrived(request.token, shard, reply, payload))
        self.outstanding.finish(request, reply, self._out)

    def _met(self, message: Met, total: Payload, now: float) -> None:
        request = self.outstanding.take(message, -1)
        if request is not None:
            if total.nbytes:
                self._out.start(Arrived(request.token, -1, message, total))
            self.colour.hear(message.colour, self.known)
            self.snapshots.act(now, self._out)
            self.outstanding.finish(request, message, self._out)

    # Views, leaving and joining.

    def _viewed(self, message: Viewed, now: float) -> None:
        before = self.view
        change = self.membership.follow(message)
        self._out.start(Changed(self.view))
        if change == "enters":
            self._forget()
            self.composer.restart()
            self._ask_to_enter(self.membership.shards, 0, now)
            self._enter(now)
        elif change == "out":
            self._depart(self.view.epoch)
        elif change == "stays":
            self.outstanding.redirect(before, now, self._out)

    def _depart(self, epoch: int) -> None:
        if self.membership.depart():
            self._forget()
            self._out.start(Departed(epoch))

    def _forget(self) -> None:
        self.outstanding.forget()
        self.known.clear()

    def _ask_to_enter(self, shards: Iterable[int], clock: int, now: float) -> None:
        for shard in shards:
            enter = Enter(**self.composer.header(), clock=clock)
            self.outstanding.enlist(ENTERING, shard, enter, NOTHING, now, self._out)

    def _enter(self, now: float) -> None:
        """Once all shards wait for this worker from the same clock on, it is one of the others."""
        if self.outstanding.open:
            return
        clock, behind = self.membership.agreed()
        self._ask_to_enter(behind, clock, now)
        if not behind:
            self.membership.state = "member"
            self._out.start(Joined(clock, self.membership.told))

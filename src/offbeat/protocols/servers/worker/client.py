"""The worker's side: pushes, pulls and meetings, each requested until it is answered.

The driver calls `ask` with a request (`notices.ClientRequest`), and gets a token and effects to carry out. The outcome
comes as the work of a `Start` effect: `Arrived` for each shard's values, `Completed` once all shards have answered,
`Failed` if the deadline has passed. A resent request keeps its number, so it is carried out once; when another replica
takes over a shard, unanswered requests go to that one.

A worker that was declared dead hears of it (`Departed`): all its requests are void. It may `join` again, in a new
life, and continues from the clock that `Joined` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offbeat.protocols.machine import NOTHING, Effect, Effects, Event, Payload, Received, Send, Timer
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.coordinator import Changed
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, Timeouts, worker_name
from offbeat.protocols.servers.snapshots import WorkerColour
from offbeat.protocols.servers.worker import notices
from offbeat.protocols.servers.worker.requests import ASIDE, ENTERING, Composer, Outstanding, WorkerMembership, key_of

TICK = "tick"
_Answer = msg.PushReply | msg.PullReply | msg.Fetched | msg.Entered | msg.Tried
_Act = notices.PushRequest | notices.MeetRequest | notices.ReplayRequest  # Requests that change the state of others.


class WorkerSnapshots:
    """A worker's side of snapshots: it is cut between two steps, and reports what it recorded until acknowledged."""

    def __init__(self, colour: WorkerColour, composer: Composer, outstanding: Outstanding) -> None:
        self._colour, self._composer, self._outstanding = colour, composer, outstanding
        self._membership = composer.membership

    def want(self) -> Sequence[Effect]:
        """Ask for a snapshot of the run."""
        return [Send(COORDINATOR, msg.Want(self._membership.worker))]

    def turn(self, now: float, *, clock: int, meetings: int) -> tuple[msg.WorkerCut, Sequence[Effect]]:
        """At a boundary where a snapshot is due (`colour.due`): be cut here. The state must be recorded now."""
        out, member, pushes = Effects(), self._membership, self._composer.pushes
        seen = self._colour.turn(self._composer.known)
        cut = msg.WorkerCut(
            worker=member.worker,
            life=member.life,
            clock=clock,
            pushes=tuple(pushes),
            seen=tuple(seen.get(shard, -1) for shard in member.shards),
            meetings=meetings,
        )
        for shard in member.shards:
            turned = msg.Turned(**self._composer.header(), colour=self._colour.own, pushes=pushes[shard])
            self._outstanding.enlist(ASIDE, shard, turned, NOTHING, now, out)
        return cut, out.done

    def recorded(
        self, colour: int, cut: msg.WorkerCut | None, now: float, out: Effects | None = None
    ) -> Sequence[Effect]:
        """The state of that cut is on disk; or, without a cut, there is none."""
        out = Effects() if out is None else out
        message = msg.SnapshotWritten(**self._composer.header(), colour=colour, cut=cut)
        self._outstanding.enlist(ASIDE, -1, message, NOTHING, now, out)
        return out.done

    def act(self, now: float, out: Effects) -> None:
        """Something that changes others is about to be sent; report it if that is too early for a snapshot."""
        missed = self._colour.missed
        self._colour.act()
        if self._colour.missed > missed:
            self.recorded(self._colour.missed, None, now, out)


class ClientMachine:
    """A worker's requests to servers and coordinator, and its membership."""

    def __init__(self, worker: int, view: ClusterView, *, process: int = 0, timing: Timeouts | None = None) -> None:
        self.worker = worker
        self.name = worker_name(worker)
        self.colour = WorkerColour()  # Which snapshots it has been cut by.
        self.membership = WorkerMembership(worker, view, process)
        self.composer = Composer(self.membership, self.colour)
        self.known = self.composer.known  # Version and clock of the newest values received, by shard.
        self.timing = timing or Timeouts()
        self.outstanding = Outstanding(self.membership, self.colour, self.timing)
        self.snapshots = WorkerSnapshots(self.colour, self.composer, self.outstanding)
        self._out = Effects()

    @property
    def view(self) -> ClusterView:
        """The newest view known here."""
        return self.membership.view

    @property
    def life(self) -> int:
        """How often this worker has rejoined."""
        return self.membership.life

    @property
    def member(self) -> bool:
        """Whether this worker is a member, as far as it knows."""
        return self.membership.state == "member"

    @property
    def left(self) -> bool:
        """Whether the coordinator knows that this worker has left."""
        return self.membership.state == "left"

    # Requests of the driver.

    def ask(self, request: notices.ClientRequest, now: float) -> notices.OpenRequest:
        """Start a request: returns the token of its answer, and the effects to carry out."""
        out = self._out = Effects()
        if not self.member:
            out.start(notices.Departed(self.view.epoch))
            return notices.OpenRequest(ASIDE, out.done)
        token = self.outstanding.begin()
        pull = 0
        if isinstance(request, notices.PushRequest) and request.final and request.then_pull:
            pull = self.outstanding.begin()
        if isinstance(request, _Act):
            self.snapshots.act(now, out)
        for shard, message, payload in self.composer.compose(request):
            if pull and isinstance(message, msg.Pull):
                self.outstanding.enlist(pull, shard, message, payload, now, None)
            else:
                self.outstanding.enlist(token, shard, message, payload, now, out)
        self.outstanding.conclude(token, out)
        return notices.OpenRequest(token, out.done, pull)

    def announce(self, nbytes: int) -> Sequence[Effect]:
        """Payloads of `nbytes` will come: a process that handles one is silent, but not dead."""
        self.outstanding.expect(nbytes)
        heartbeat = msg.Heartbeat(self.view.epoch, self.outstanding.burden)
        return [Send(COORDINATOR, heartbeat)] if self.member else ()

    def took(self, shard: int, fresh: msg.Fresh) -> None:
        """The loop continues from unrequested values: its gradients are computed from them from now on."""
        if fresh.version > self.known.get(shard, (-1, 0))[0]:
            self.known[shard] = (fresh.version, fresh.clock)

    def join(self, patient: bool = False) -> Sequence[Effect]:
        """Ask to join, as a new process or again after `Departed`: at once, or when the others hold a meeting."""
        self.membership.join(patient)
        return self._sign_of_life()

    def leave(self) -> Sequence[Effect]:
        """Say that this worker is done and must not be waited for. It requests nothing after that."""
        self.membership.state = "leaving"
        return self._sign_of_life()

    def _sign_of_life(self) -> Sequence[Effect]:
        out = self._out = Effects()
        self.membership.sign_of_life(self.outstanding.burden, out)
        return out.done

    # Events.

    def begin(self, now: float) -> Sequence[Effect]:
        """Send the first heartbeat."""
        return self.on(Timer(TICK), now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle a message or a timer."""
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
            case msg.Acknowledged():
                self.outstanding.take(message, -1)
            case msg.Announce() if event.sender == COORDINATOR:
                self.colour.announced = max(self.colour.announced, message.colour)
            case msg.PushReply() | msg.PullReply() | msg.Fetched() | msg.Entered() | msg.Tried():
                shard = self.membership.shard_of(event.sender)
                if message.life == self.life and shard is not None:
                    self._answered(shard, message, payload, now)
            case msg.Met() if message.life == self.life:
                self._met(message, payload, now)
            case msg.Bring() if message.life == self.life:
                self.outstanding.send_row(message, self._out)
            case msg.Awaiting() if message.life == self.life:
                request = self.outstanding.open.get(key_of(message, -1))
                if request is not None:
                    request.missing = tuple(map(worker_name, message.workers))
            case msg.Fresh() if message.colour <= self.colour.own:
                # Values from after a cut that is still to come here must be requested.
                shard = self.membership.shard_of(event.sender)
                if shard is not None and message.version > self.known.get(shard, (-1, 0))[0]:
                    self._out.start(notices.Refreshed(shard, message, payload))
            case msg.Fenced() if message.epoch > self.view.epoch:
                self.membership.sign_of_life(self.outstanding.burden, self._out)
            case msg.Gone() if message.epoch > self.view.epoch:
                self._depart(message.epoch)
            case msg.Viewed() if event.sender == COORDINATOR and self.membership.is_news(message):
                self._viewed(message, now)
            case msg.Lost():
                self._out.start(message)
            case _:
                pass

    def _answered(self, shard: int, reply: _Answer, payload: Payload, now: float) -> None:
        if isinstance(reply, msg.PullReply) and reply.pushed is not None:
            self._answered(shard, reply.pushed, NOTHING, now)
        request = self.outstanding.take(reply, shard)
        if request is None:
            return
        if isinstance(reply, msg.Entered):
            self.membership.clocks[shard] = reply.clock
            self._enter(now)
            return
        if not isinstance(reply, msg.Tried):
            self.colour.hear(reply.colour, self.known)
        if isinstance(reply, msg.PullReply) and isinstance(request.message, msg.Pull) and request.message.whole:
            reply = self.composer.newest(shard, reply)
            payload = NOTHING if reply.unchanged else payload
        if isinstance(reply, msg.PullReply | msg.Fetched):
            self.outstanding.expect(payload.nbytes)
            self._out.start(notices.Arrived(request.token, shard, reply, payload))
        self.outstanding.finish(request, reply, self._out)

    def _met(self, message: msg.Met, total: Payload, now: float) -> None:
        request = self.outstanding.take(message, -1)
        if request is not None:
            if total.nbytes:
                self._out.start(notices.Arrived(request.token, -1, message, total))
            self.colour.hear(message.colour, self.known)
            self.snapshots.act(now, self._out)
            self.outstanding.finish(request, message, self._out)

    # Views, leaving and joining.

    def _viewed(self, message: msg.Viewed, now: float) -> None:
        before = self.view
        change = self.membership.follow(message)
        self._out.start(Changed(self.view))
        if change == "enters":
            self.outstanding.forget()
            self.composer.restart()
            self._ask_to_enter(self.membership.shards, 0, now)
            self._enter(now)
        elif change == "out":
            self._depart(self.view.epoch)
        elif change == "stays":
            self.outstanding.redirect(before, now, self._out)

    def _depart(self, epoch: int) -> None:
        if self.membership.depart():
            self.outstanding.forget()
            self.known.clear()
            self._out.start(notices.Departed(epoch))

    def _ask_to_enter(self, shards: Iterable[int], clock: int, now: float) -> None:
        for shard in shards:
            enter = msg.Enter(**self.composer.header(), clock=clock)
            self.outstanding.enlist(ENTERING, shard, enter, NOTHING, now, self._out)

    def _enter(self, now: float) -> None:
        """Become a member once all shards wait for this worker from the same clock on."""
        if self.outstanding.open:
            return
        clock, behind = self.membership.agreed()
        self._ask_to_enter(behind, clock, now)
        if not behind:
            self.membership.state = "member"
            self._out.start(notices.Joined(clock, self.membership.told))

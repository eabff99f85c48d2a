"""A worker's membership, its requests as numbered messages to each shard, and those that are unanswered.

A worker that has joined asks all shards to wait for it. Their clocks may differ, so all are then told the latest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct, structs

from offbeat.protocols.machine import NOTHING, Effects, Name, Payload
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.snapshots import WorkerColour
from offbeat.protocols.servers.worker import notices

Sent = msg.Request | msg.MeetingArrival | msg.SnapshotWritten  # What a worker resends until it is answered.
Piece = tuple[int, Sent, Payload]  # A message for a shard (-1: the coordinator), with its payload.
_Numbered = msg.Push | msg.Load | msg.PushReply
ENTERING = 0  # The token of a client's own requests to enter.
ASIDE = -1  # The token of messages that are resent until acknowledged, but not waited for.


class WorkerMembership:
    """A worker's place in the newest view that it knows."""

    def __init__(self, worker: int, view: msg.ClusterView, process: int) -> None:
        self.worker = worker
        self.view = view
        self.life = view.life(worker) or 0  # How often this worker has rejoined.
        self.state: Literal["member", "gone", "joining", "entering", "leaving", "left"] = (
            "gone" if view.life(worker) is None else "member"
        )
        self.told: tuple[float, ...] = ()  # Values brought to the meeting that admitted this worker.
        self.clocks: dict[int, int] = {}  # While entering, the clock from which each shard waits for this worker.
        self._process, self._patient = process, False

    @property
    def shards(self) -> range:
        """The shards of this worker's part of the model, counted from 0."""
        return range(len(self.view.shards_of(self.worker)))

    def primary(self, shard: int, view: msg.ClusterView | None = None) -> Name:
        """The primary of one of them."""
        view = view or self.view
        return view.primaries[view.shards_of(self.worker)[shard]]

    def shard_of(self, sender: Name) -> int | None:
        """Which of them the sender is the primary of; None if of none."""
        return next((shard for shard in self.shards if self.primary(shard) == sender), None)

    @property
    def present(self) -> bool:
        """Whether this worker is a member, or is about to be."""
        return self.state in ("member", "entering")

    def sign_of_life(self, burden: int, out: Effects) -> None:
        """Send a heartbeat, or whatever this worker needs from the coordinator: a newer view, to join, to leave."""
        if self.present:
            out.send(msg.COORDINATOR, msg.Heartbeat(self.view.epoch, burden))
        elif self.state == "joining":
            out.send(msg.COORDINATOR, msg.JoinRequest(self.worker, self._process, self._patient))
        elif self.state == "leaving":
            out.send(msg.COORDINATOR, msg.Leave(self.worker, self.life))

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


class Composer:
    """Writes messages: counts a worker's pushes to each shard, and knows the versions that it has read."""

    def __init__(self, membership: WorkerMembership, colour: WorkerColour) -> None:
        self.pushes = [0] * len(membership.shards)  # Number of pushes to each shard in this life.
        self.known: dict[int, tuple[int, int]] = {}  # Version and clock of the newest values received, by shard.
        self.membership, self._colour = membership, colour
        self._numbers = 0

    def restart(self) -> None:
        """Begin another life."""
        self.pushes = [0] * len(self.membership.shards)
        self.known.clear()

    def compose(self, request: notices.ClientRequest) -> Iterator[Piece]:
        """The messages for a request; a `Pull` among those of a push is only to be expected, not sent."""
        match request:
            case notices.PushRequest():
                yield from self._push(request)
            case notices.PullRequest():
                for shard in self.membership.shards:
                    newer_than = -1 if request.anew else self.known.get(shard, (-1, 0))[0]
                    yield shard, self._pull(shard, request.clock, newer_than), NOTHING
            case notices.RangeRequest():
                for part in request.parts:
                    pull = self._pull(part.shard, request.clock, part.newer_than, part.start, part.stop)
                    yield part.shard, pull, NOTHING
            case notices.FetchRequest():
                for shard in self.membership.shards:
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
                own = {"worker": self.membership.worker, "life": self.membership.life}
                own |= {"epoch": self.membership.view.epoch, "colour": self._colour.own}
                for shard, push, payload in request.under_way:
                    yield shard, structs.replace(push, then_pull=0, **own), payload

    def header(self, number: int | None = None) -> dict[str, int]:
        """The fields of every request, under the next number unless one is given."""
        member = self.membership
        if number is None:
            number = self._numbers = self._numbers + 1
        return {"worker": member.worker, "life": member.life, "number": number, "epoch": member.view.epoch}

    def _push_header(self, shard: int) -> dict[str, int]:
        self.pushes[shard] += 1
        return self.header(self.pushes[shard] - 1)

    def _push(self, request: notices.PushRequest) -> Iterator[Piece]:
        by_shard: dict[int, list[notices.PushedRange]] = {}
        for part in request.parts:
            by_shard.setdefault(part.shard, []).append(part)
        for shard in self.membership.shards if request.final else by_shard:
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
                    totals=request.totals,
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


class Open(Struct):
    """An unanswered request to one shard, or to the coordinator."""

    token: int
    shard: int  # -1: the coordinator.
    message: Sent
    payload: Payload
    since: float
    again_at: float
    patience: float
    missing: tuple[Name, ...] = ()  # Workers that keep it from being answered, according to the coordinator.


class _Wait(Struct):
    open: int = 0
    replies: list[tuple[int, msg.Reply | msg.Met]] = []


class Outstanding:
    """Unanswered requests of a worker; knows nothing of what they are about."""

    def __init__(self, membership: WorkerMembership, colour: WorkerColour, timing: msg.Timeouts) -> None:
        self.burden = 0  # Bytes of the largest payload to allow for.
        self.open: dict[tuple[str, int, int], Open] = {}
        self._membership, self._colour, self._timing = membership, colour, timing
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
        return msg.COORDINATOR if shard < 0 else self._membership.primary(shard)

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
        primary = self._membership.primary
        for request in self.open.values():
            if request.shard >= 0 and primary(request.shard) != primary(request.shard, before):
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
        out.start(notices.Failed(token, tuple(sorted(names))))

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
            out.start(notices.Completed(token, tuple(wait.replies)))

    def forget(self) -> None:
        """Drop everything: nothing will be answered."""
        self.open.clear()
        self._waits.clear()


def key_of(message: Sent | msg.Reply | msg.Met | msg.Bring | msg.Awaiting, shard: int) -> tuple[str, int, int]:
    """Pushes are numbered per shard, everything else per worker."""
    pushed = isinstance(message, _Numbered)
    return ("push", shard, message.number) if pushed else ("ask", -1, message.number)

"""The worker's side: pushes, pulls and meetings that are asked for until they are answered.

Whoever drives it calls `push`, `pull`, `fetch`, `load`, `meet`, and gets a token and effects to carry out. What became
of it comes as the work of a `Start` effect: `Arrived` for each shard's values, `Completed` once all shards have
answered, `Failed` if the deadline has passed. Nothing is asked under a new number when it is asked again, so it is done
once; and when another replica has taken over a shard, what is unanswered goes to that one.

One who was declared dead hears of it (`Departed`): all it has asked for is void. It may `join` again, in a new life,
and goes on from the clock that `Joined` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import structs

from offbeat.protocols.machine import NOTHING, Effect, Effects, Event, Name, Payload, Received, Timer
from offbeat.protocols.servers.coordinator import Changed
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    Announce,
    Awaiting,
    Bring,
    ClusterView,
    Enter,
    Entered,
    Fenced,
    Fetch,
    Fetched,
    Fresh,
    Gone,
    Heartbeat,
    Hello,
    Leave,
    Load,
    Lost,
    Meet,
    Met,
    Noted,
    Pull,
    PullReply,
    Push,
    PushReply,
    Recorded,
    Settings,
    Timing,
    Trial,
    Tried,
    Turned,
    Viewed,
    Want,
    WorkerCut,
    worker_name,
)
from offbeat.protocols.servers.notices import (
    Arrived,
    Asked,
    Completed,
    Departed,
    Joined,
    Part,
    Refreshed,
    Wanted,
)
from offbeat.protocols.servers.requests import ASIDE, ENTERING, Requests, key_of

TICK = "tick"


_Answer = PushReply | PullReply | Fetched | Entered | Tried
_Brought = PullReply | Fetched
_State = Literal["member", "gone", "joining", "entering", "leaving", "left"]


class ClientMachine(Requests):
    """What a worker asks of servers and coordinator, and how it is one of many."""

    def __init__(
        self,
        worker: int,
        view: ClusterView,
        *,
        process: int = 0,
        coordinator: Name = COORDINATOR,
        timing: Timing | None = None,
    ) -> None:
        super().__init__(view, coordinator, timing or Timing())
        self.worker = worker
        self.name = worker_name(worker)
        self.known: dict[int, tuple[int, int]] = {}
        """Version and clock of the newest values that came, by shard."""
        self._process = process
        self._life = view.life(worker) or 0
        self._state: _State = "gone" if view.life(worker) is None else "member"
        self._entered: dict[int, int] = {}
        self._patient = False
        self._told: tuple[float, ...] = ()
        self._pushes = [0] * len(view.primaries)

    @property
    def member(self) -> bool:
        """Whether this worker takes part, as far as it knows."""
        return self._state == "member"

    @property
    def left(self) -> bool:
        """Whether the coordinator knows that this worker has left."""
        return self._state == "left"

    @property
    def life(self) -> int:
        """How often this worker has joined anew."""
        return self._life

    @property
    def pushes(self) -> int:
        """How many pushes to the first shard there have been in this life."""
        return self._pushes[0] if self._pushes else 0

    @property
    def shards(self) -> range:
        """All shards."""
        return range(len(self.view.primaries))

    # What a driver asks for.

    def push(
        self,
        parts: Iterable[Part],
        now: float,
        *,
        clock: int,
        weight: float = 1.0,
        settings: Settings = (),
        final: bool = True,
        counts: bool = False,
        then_pull: bool = False,
    ) -> Asked:
        """Push parts of a step's gradient. With the `final` ones the step is done, on all shards.

        Under a rule that aggregates, earlier parts are answered along with the final ones, unless each `counts` by
        itself, with its own weight. `then_pull`, with the final
        ones, asks every shard at once for the values of the next step, under a token of its own.
        """
        token, pull = self._begin(), self._new_token() if final and then_pull else 0
        colour = self._act(now)
        by_shard: dict[int, list[Part]] = {}
        for part in parts:
            by_shard.setdefault(part.shard, []).append(part)
        for shard in self.shards if final else by_shard:
            given = by_shard.get(shard) or [Part(shard, NOTHING, 0, 0)]
            for place, part in enumerate(given):
                last = final and place == len(given) - 1
                message = Push(
                    worker=self.worker,
                    life=self._life,
                    number=self._next_push(shard),
                    epoch=self.view.epoch,
                    clock=clock,
                    weight=weight,
                    start=part.start,
                    stop=part.stop,
                    absent=part.absent,
                    last=last,
                    counts=counts,
                    settings=settings,
                    version=self.known.get(shard, (0, 0))[0],
                    then_pull=self._expect_pull(pull, shard, clock + 1, now) if last and pull else 0,
                    colour=colour,
                )
                self._request(token, shard, message, part.payload, now)
        return self._asked(token, pull)

    def pull(self, now: float, *, clock: int, shards: Iterable[int] | None = None, anew: bool = False) -> Asked:
        """Ask for the values that a step from this clock on is to start from, if newer than those that came before.

        They have in them all that this worker has pushed. `anew`: send them even if they have not changed.
        """
        token = self._begin()
        for shard in self.shards if shards is None else shards:
            newer_than = -1 if anew else self.known.get(shard, (-1, 0))[0]
            self._request(token, shard, self._pull_for(shard, clock, newer_than), NOTHING, now)
        return self._asked(token)

    def pull_parts(self, parts: Iterable[Wanted], now: float, *, clock: int) -> Asked:
        """Ask for ranges of shards, as fresh as for a step from this clock on; each only if it is newer than known.

        What comes does not count among the whole values that `pull` compares with.
        """
        token = self._begin()
        for part in parts:
            message = self._pull_for(part.shard, clock, part.newer_than)
            message = structs.replace(message, start=part.start, stop=part.stop)
            self._request(token, part.shard, message, NOTHING, now)
        return self._asked(token)

    def fetch(self, now: float, *, clock: int = 0, shards: Iterable[int] | None = None) -> Asked:
        """Ask for the whole state of shards, once so many steps are complete."""
        token = self._begin()
        for shard in self.shards if shards is None else shards:
            message = Fetch(
                worker=self.worker,
                life=self._life,
                number=self._next_number(),
                epoch=self.view.epoch,
                clock=clock,
                after=self._pushes[shard] - 1,
                colour=self.colour.ask(),
            )
            self._request(token, shard, message, NOTHING, now)
        return self._asked(token)

    def load(
        self,
        states: Iterable[Part],
        now: float,
        *,
        versions: Sequence[int],
        clock: int,
        took: Sequence[tuple[tuple[int, int, int], ...]] = (),
    ) -> Asked:
        """Put back the states of shards; one worker does, before the first step.

        `took` has for each shard of which workers how many pushes are in the state, and their clocks: they go on
        counting from there (`go_on_from`).
        """
        token = self._begin()
        for state in states:
            message = Load(
                worker=self.worker,
                life=self._life,
                number=self._next_push(state.shard),
                epoch=self.view.epoch,
                version=versions[state.shard],
                clock=clock,
                took=took[state.shard] if took else (),
            )
            self._request(token, state.shard, message, state.payload, now)
        return self._asked(token)

    def trial(self, parts: Iterable[Part], now: float, *, letter: bool) -> Asked:
        """Bring payloads to shards and have them looked at, without changing anything."""
        token = self._begin()
        for part in parts:
            message = Trial(
                worker=self.worker,
                life=self._life,
                number=self._next_number(),
                epoch=self.view.epoch,
                letter=letter,
            )
            self._request(token, part.shard, message, part.payload, now)
        return self._asked(token)

    def meet(
        self,
        what: str,
        values: tuple[float, ...],
        now: float,
        admits: bool = False,
        kind: str = "",
        row: Payload = NOTHING,
    ) -> Asked:
        """Come to a meeting of all live workers; `what` must be new in this run. It may let in those who wait.

        A row of numbers of this kind is summed over those who bring one; the sum comes as `Arrived`, of shard -1.
        """
        token = self._begin()
        message = Meet(
            worker=self.worker,
            life=self._life,
            number=self._next_number(),
            what=what,
            values=values,
            admits=admits,
            kind=kind,
            colour=self._act(now),
        )
        self._request(token, -1, message, row, now)
        return self._asked(token)

    # Snapshots.

    def want_snapshot(self) -> Sequence[Effect]:
        """Ask for a snapshot of the run."""
        self._out = Effects()
        self._out.send(self._coordinator, Want(self.worker))
        return self._out.done

    def turn(self, now: float, *, clock: int, meetings: int) -> tuple[WorkerCut, Sequence[Effect]]:
        """At a boundary where a snapshot is due (`colour.due`): be cut here. The state is to be recorded now."""
        self._out = Effects()
        seen = self.colour.turn(self.known)
        cut = WorkerCut(
            worker=self.worker,
            life=self._life,
            clock=clock,
            pushes=tuple(self._pushes),
            seen=tuple(seen.get(shard, -1) for shard in self.shards),
            meetings=meetings,
        )
        for shard in self.shards:
            message = Turned(
                worker=self.worker,
                life=self._life,
                number=self._next_number(),
                epoch=self.view.epoch,
                colour=self.colour.own,
                pushes=self._pushes[shard],
            )
            self._request(ASIDE, shard, message, NOTHING, now)
        return cut, self._out.done

    def recorded(self, colour: int, cut: WorkerCut | None, now: float) -> Sequence[Effect]:
        """The state of that cut is written down; or, without a cut, there is none."""
        self._out = Effects()
        self._say_recorded(colour, cut, now)
        return self._out.done

    def _say_recorded(self, colour: int, cut: WorkerCut | None, now: float) -> None:
        message = Recorded(worker=self.worker, life=self._life, number=self._next_number(), colour=colour, cut=cut)
        self._request(ASIDE, -1, message, NOTHING, now)

    def _act(self, now: float) -> int:
        """The colour of what is sent now and changes others; if that is too early for a snapshot, it is said."""
        missed = self.colour.missed
        colour = self.colour.act()
        if self.colour.missed > missed:
            self._say_recorded(self.colour.missed, None, now)
        return colour

    def replay(self, pushes: Sequence[int], under_way: Iterable[tuple[int, Push, Payload]], now: float) -> Asked:
        """Go on from a snapshot, in which so many pushes to each shard were sent: send again what was under way.

        Each goes to its shard under the number that it had, so that one that is in the values is not applied again.
        """
        token = self._begin()
        self._pushes = list(pushes)
        for shard, push, payload in under_way:
            message = structs.replace(
                push,
                worker=self.worker,
                life=self._life,
                epoch=self.view.epoch,
                then_pull=0,
                colour=self._act(now),
            )
            self._request(token, shard, message, payload, now)
        return self._asked(token)

    def join(self, patient: bool = False) -> Sequence[Effect]:
        """Ask to take part, as a new process or again after `Departed`: at once, or when the others hold a meeting."""
        self._out = Effects()
        self._state, self._patient = "joining", patient
        self._sign_of_life()
        return self._out.done

    def leave(self) -> Sequence[Effect]:
        """Say that this worker has done its part and is not to be waited for. It asks for nothing after that."""
        self._out = Effects()
        self._state = "leaving"
        self._sign_of_life()
        return self._out.done

    # What happens.

    def begin(self, now: float) -> Sequence[Effect]:
        """Give the first sign of life."""
        return self.on(Timer(TICK), now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Take a message or a timer."""
        self._out = Effects()
        if isinstance(event, Timer):
            self._tick(now)
        elif isinstance(event, Received):
            self._received(event, now)
        return self._out.done

    def _received(self, event: Received, now: float) -> None:
        message, payload = event.message, event.payload
        match message:
            case Noted():
                self._open.pop(key_of(message, -1), None)
            case Announce() if event.sender == self._coordinator:
                self.colour.announced = max(self.colour.announced, message.colour)
            case PushReply() | PullReply() | Fetched() | Entered() | Tried():
                if message.life == self._life:
                    self._answered(event.sender, message, payload, now)
            case Met():
                self._met(message, payload, now)
            case Bring() if message.life == self._life:
                request = self._open.get(key_of(message, -1))
                if request is not None:
                    self._send(-1, request.message, request.payload)
            case Awaiting() if message.life == self._life:
                request = self._open.get(key_of(message, -1))
                if request is not None:
                    request.missing = tuple(map(worker_name, message.workers))
            case Fresh():
                self._fresh(event.sender, message, payload)
            case Fenced() if message.epoch > self.view.epoch:
                self._sign_of_life()
            case Gone() if message.epoch > self.view.epoch:
                self._depart(message.epoch)
            case Viewed() if event.sender == self._coordinator and self._is_news(message):
                self._viewed(message, now)
            case Lost():
                self._out.start(message)
            case _:
                pass

    def _tick(self, now: float) -> None:
        if self._state == "left":
            return
        self._out.timer(self._timing.heartbeat, TICK)
        self._sign_of_life()
        for key, request in list(self._open.items()):
            if key not in self._open:
                continue
            if now - request.since >= self._timing.deadline:
                self._give_up(request.token)
            elif now >= request.again_at:
                self._again(request, now)

    def _sign_of_life(self) -> None:
        """Also asks for what this worker needs of the coordinator: a newer view, to be let in, to be let go."""
        if self._state in ("member", "entering"):
            self._out.send(self._coordinator, Heartbeat(self.view.epoch, self._largest))
        elif self._state == "joining":
            self._out.send(self._coordinator, Hello(self.worker, self._process, self._patient))
        elif self._state == "leaving":
            self._out.send(self._coordinator, Leave(self.worker, self._life))

    # Requests.

    def _begin(self) -> int:
        self._out = Effects()
        return self._new_token()

    def _asked(self, token: int, pull: int = 0) -> Asked:
        if not self.member:
            self._forget_all()
            self._out = Effects()
            self._out.start(Departed(self.view.epoch))
        elif token in self._waits and not self._waits[token].open:
            del self._waits[token]
            self._out.start(Completed(token, ()))
        return Asked(token, self._out.done, pull)

    def _next_push(self, shard: int) -> int:
        self._pushes[shard] += 1
        return self._pushes[shard] - 1

    def _pull_for(self, shard: int, clock: int, newer_than: int = -1) -> Pull:
        return Pull(
            worker=self.worker,
            life=self._life,
            number=self._next_number(),
            epoch=self.view.epoch,
            clock=clock,
            newer_than=newer_than,
            after=self._pushes[shard] - 1,
            colour=self.colour.ask(),
        )

    def _expect_pull(self, token: int, shard: int, clock: int, now: float) -> int:
        """Wait for a pull that a push asks for; it is sent by itself only if no answer comes."""
        message = self._pull_for(shard, clock)
        self._enlist(token, shard, message, NOTHING, now)
        return message.number

    def _answered(self, sender: Name, reply: _Answer, payload: Payload, now: float) -> None:
        if sender not in self.view.primaries:
            return
        shard = self.view.primaries.index(sender)
        if isinstance(reply, PullReply) and reply.pushed is not None:
            self._answered(sender, reply.pushed, NOTHING, now)
        request = self._open.pop(key_of(reply, shard), None)
        if request is None:
            return
        if isinstance(reply, Entered):
            self._enter_on(shard, reply, now)
            return
        if isinstance(reply, Tried):
            self._finish(request, reply)
            return
        self.colour.hear(reply.colour, self.known)
        if isinstance(reply, PullReply) and isinstance(request.message, Pull) and request.message.whole:
            reply = self._newest(shard, reply)
            payload = NOTHING if reply.unchanged else payload
        if isinstance(reply, _Brought):
            self.expect(payload.nbytes)
            self._out.start(Arrived(request.token, shard, reply, payload))
        self._finish(request, reply)

    def _newest(self, shard: int, reply: PullReply) -> PullReply:
        """What came counts as unchanged if something newer was overtaking it."""
        version, clock = self.known.get(shard, (-1, 0))
        if reply.version < version:
            return structs.replace(reply, version=version, clock=max(clock, reply.clock), unchanged=True)
        self.known[shard] = (reply.version, reply.clock)
        return reply

    def _met(self, message: Met, total: Payload, now: float) -> None:
        request = self._open.pop(key_of(message, -1), None) if message.life == self._life else None
        if request is not None:
            if total.nbytes:
                self._out.start(Arrived(request.token, -1, message, total))
            self.colour.hear(message.colour, self.known)
            self._act(now)
            self._finish(request, message)

    def _fresh(self, sender: Name, fresh: Fresh, payload: Payload) -> None:
        if sender not in self.view.primaries:
            return
        shard = self.view.primaries.index(sender)
        if fresh.colour > self.colour.own:
            return  # From after a cut that is still to come here: who needs values asks for them.
        if fresh.version > self.known.get(shard, (-1, 0))[0]:
            self._out.start(Refreshed(shard, fresh, payload))

    def took(self, shard: int, fresh: Fresh) -> None:
        """The loop goes on from values that were sent unasked: its gradients are computed from them from now on."""
        if fresh.version > self.known.get(shard, (-1, 0))[0]:
            self.known[shard] = (fresh.version, fresh.clock)

    # Views, leaving and joining.

    def _viewed(self, message: Viewed, now: float) -> None:
        before, self.view = self.view, message.view
        life = self.view.life(self.worker)
        self._out.start(Changed(self.view))
        if self._state == "joining":
            if life is not None and message.process == self._process:
                self._told = message.told
                self._enter(life, now)
        elif self._state == "leaving" and life != self._life:
            self._state = "left"
        elif self._state in ("member", "entering"):
            if life != self._life:
                self._depart(self.view.epoch)
                return
            for request in self._open.values():
                if request.shard >= 0 and self.view.primaries[request.shard] != before.primaries[request.shard]:
                    request.patience = self._timing.patience(self._largest) / 2
                    self._again(request, now)

    def _is_news(self, message: Viewed) -> bool:
        admitted = self._state == "joining" and message.process == self._process
        return message.view.epoch > self.view.epoch or (admitted and message.view.epoch == self.view.epoch)

    def _given_up_entering(self) -> None:
        self._state = "gone"

    def _forget_all(self) -> None:
        self._open.clear()
        self._waits.clear()
        self.known.clear()

    def _depart(self, epoch: int) -> None:
        if self._state in ("member", "entering") or (self._state == "joining" and self._patient):
            self._state = "gone"
            self._forget_all()
            self._out.start(Departed(epoch))
        elif self._state == "leaving":
            self._state = "left"

    def _enter(self, life: int, now: float) -> None:
        """Ask all shards to be waited for: their clocks may differ, so the latest of them is then told to all."""
        self._state, self._life = "entering", life
        self._forget_all()
        self._pushes = [0] * len(self.view.primaries)
        self._entered.clear()
        for shard in self.shards:
            self._ask_to_enter(shard, 0, now)
        if not self.shards:
            self._state = "member"
            self._out.start(Joined(0, self._told))

    def _ask_to_enter(self, shard: int, clock: int, now: float) -> None:
        message = Enter(
            worker=self.worker, life=self._life, number=self._next_number(), epoch=self.view.epoch, clock=clock
        )
        self._request(ENTERING, shard, message, NOTHING, now)

    def _enter_on(self, shard: int, reply: Entered, now: float) -> None:
        self._entered[shard] = reply.clock
        if self._open or len(self._entered) < len(self.shards):
            return
        clock = max(self._entered.values())
        behind = [shard for shard, entered in self._entered.items() if entered < clock]
        for other in behind:
            self._ask_to_enter(other, clock, now)
        if not behind:
            self._state = "member"
            self._out.start(Joined(clock, self._told))

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
from dataclasses import dataclass, field
from typing import Literal

from msgspec import structs

from offbeat.protocols.machine import NOTHING, Effect, Effects, Event, Name, Payload, Received, Timer
from offbeat.protocols.servers.coordinator import Changed
from offbeat.protocols.servers.messages import (
    COORDINATOR,
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
    Pull,
    PullReply,
    Push,
    PushReply,
    Reply,
    Request,
    Settings,
    Timing,
    Viewed,
    worker_name,
)

TICK = "tick"


@dataclass(frozen=True, slots=True)
class Part:
    """What is pushed to one shard: numbers for [start, stop) of it; -1 is its end."""

    shard: int
    payload: Payload
    start: int = 0
    stop: int = -1


@dataclass(frozen=True, slots=True)
class Asked:
    """A request under way: its token, that of the pull that follows it, and what is to be done for it."""

    token: int
    effects: Sequence[Effect]
    pull: int = 0


@dataclass(frozen=True, slots=True)
class Arrived:
    """Values or state of one shard have come; the payload is to be copied now."""

    token: int
    shard: int
    reply: PullReply | Fetched
    payload: Payload


@dataclass(frozen=True, slots=True)
class Completed:
    """All have answered."""

    token: int
    replies: tuple[tuple[int, Reply | Met], ...]
    """Each with its shard, or -1 for the coordinator."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The deadline has passed, and these have not answered."""

    token: int
    waited_for: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Refreshed:
    """A shard has sent fresh values unasked; the payload is to be copied now."""

    shard: int
    fresh: Fresh
    payload: Payload


@dataclass(frozen=True, slots=True)
class Departed:
    """The worker was declared dead: nothing it has asked for will be answered, and that memory is not reused."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The worker takes part, from this clock on."""

    clock: int
    told: tuple[float, ...] = ()
    """What was brought to the meeting that let it in."""


Notice = Arrived | Completed | Failed | Refreshed | Changed | Departed | Joined | Lost
"""Work of a client: what its driver is told."""


@dataclass(slots=True)
class _Open:
    """A request to one shard, or to the coordinator, that is not answered."""

    token: int
    shard: int
    """-1: the coordinator."""
    message: Request | Meet
    payload: Payload
    since: float
    again_at: float
    patience: float


@dataclass(slots=True)
class _Wait:
    """What a token waits for."""

    open: int = 0
    replies: list[tuple[int, Reply | Met]] = field(default_factory=list[tuple[int, Reply | Met]])


_State = Literal["member", "gone", "joining", "entering", "leaving", "left"]
_ENTERING = 0
"""The token of a client's own requests, with which it enters."""


class ClientMachine:
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
        self.worker = worker
        self.name = worker_name(worker)
        self.view = view
        self.known: dict[int, tuple[int, int]] = {}
        """Version and clock of the newest values that came, by shard."""
        self._process = process
        self._coordinator = coordinator
        self._timing = timing or Timing()
        self._life = view.life(worker) or 0
        self._state: _State = "gone" if view.life(worker) is None else "member"
        self._entered: dict[int, int] = {}
        self._patient = False
        self._told: tuple[float, ...] = ()
        self._tokens = _ENTERING
        self._numbers = 0
        self._largest = 0
        self._pushes = [0] * len(view.primaries)
        self._open: dict[tuple[str, int, int], _Open] = {}
        self._waits: dict[int, _Wait] = {}
        self._out = Effects()

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
        return self._pushes[0]

    @property
    def shards(self) -> range:
        """All shards."""
        return range(len(self.view.primaries))

    def waited_for(self) -> tuple[Name, ...]:
        """Who has not answered yet."""
        return tuple(sorted({self._addressee(request.shard) for request in self._open.values()}))

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
                    last=last,
                    counts=counts,
                    settings=settings,
                    version=self.known.get(shard, (0, 0))[0],
                    then_pull=self._expect_pull(pull, shard, clock + 1, now) if last and pull else 0,
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
            )
            self._request(token, shard, message, NOTHING, now)
        return self._asked(token)

    def load(self, states: Iterable[Part], now: float, *, version: int, clock: int) -> Asked:
        """Put back the states of shards; one worker does, before the first step."""
        token = self._begin()
        for state in states:
            message = Load(
                worker=self.worker,
                life=self._life,
                number=self._next_push(state.shard),
                epoch=self.view.epoch,
                version=version,
                clock=clock,
            )
            self._request(token, state.shard, message, state.payload, now)
        return self._asked(token)

    def meet(self, what: str, values: tuple[float, ...], now: float, admits: bool = False) -> Asked:
        """Come to a meeting of all live workers; `what` must be new in this run. It may let in those who wait."""
        token = self._begin()
        message = Meet(
            worker=self.worker, life=self._life, number=self._next_number(), what=what, values=values, admits=admits
        )
        self._request(token, -1, message, NOTHING, now)
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
            case PushReply() | PullReply() | Fetched() | Entered():
                if message.life == self._life:
                    self._answered(event.sender, message, payload, now)
            case Met():
                self._met(message)
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
            self._out.send(self._coordinator, Heartbeat(self.view.epoch))
        elif self._state == "joining":
            self._out.send(self._coordinator, Hello(self.worker, self._process, self._patient))
        elif self._state == "leaving":
            self._out.send(self._coordinator, Leave(self.worker, self._life))

    # Requests.

    def _new_token(self) -> int:
        self._tokens += 1
        self._waits[self._tokens] = _Wait()
        return self._tokens

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

    def expect(self, nbytes: int) -> None:
        """Payloads of so many bytes are to be borne with."""
        self._largest = max(self._largest, nbytes)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _pull_for(self, shard: int, clock: int, newer_than: int = -1) -> Pull:
        return Pull(
            worker=self.worker,
            life=self._life,
            number=self._next_number(),
            epoch=self.view.epoch,
            clock=clock,
            newer_than=newer_than,
            after=self._pushes[shard] - 1,
        )

    def _expect_pull(self, token: int, shard: int, clock: int, now: float) -> int:
        """Wait for a pull that a push asks for; it is sent by itself only if no answer comes."""
        message = self._pull_for(shard, clock)
        self._enlist(token, shard, message, NOTHING, now)
        return message.number

    def _enlist(self, token: int, shard: int, message: Request | Meet, payload: Payload, now: float) -> None:
        self.expect(payload.nbytes)
        patience = self._timing.patience(self._largest)
        key = _key(message, shard)
        self._open[key] = _Open(token, shard, message, payload, now, now + patience, patience)
        if token in self._waits:
            self._waits[token].open += 1

    def _request(self, token: int, shard: int, message: Request | Meet, payload: Payload, now: float) -> None:
        self._enlist(token, shard, message, payload, now)
        self._send(shard, message, payload)

    def _addressee(self, shard: int) -> Name:
        return self._coordinator if shard < 0 else self.view.primaries[shard]

    def _send(self, shard: int, message: Request | Meet, payload: Payload) -> None:
        """Send to whoever serves the shard, if anyone does."""
        if addressee := self._addressee(shard):
            self._out.send(addressee, message, payload)

    def _again(self, request: _Open, now: float) -> None:
        request.patience = min(2 * request.patience, self._timing.longest_patience(self._largest))
        request.again_at = now + request.patience
        message = request.message
        if isinstance(message, Push):
            message = structs.replace(message, epoch=self.view.epoch, then_pull=0)
        elif not isinstance(message, Meet):
            message = structs.replace(message, epoch=self.view.epoch)
        self._send(request.shard, message, request.payload)

    def _give_up(self, token: int) -> None:
        names = {self._addressee(request.shard) for request in self._open.values() if request.token == token}
        self._open = {key: request for key, request in self._open.items() if request.token != token}
        self._waits.pop(token, None)
        if token == _ENTERING:
            self._state = "gone"
        self._out.start(Failed(token, tuple(sorted(names))))

    def _answered(self, sender: Name, reply: Reply, payload: Payload, now: float) -> None:
        if sender not in self.view.primaries:
            return
        shard = self.view.primaries.index(sender)
        if isinstance(reply, PullReply) and reply.pushed is not None:
            self._answered(sender, reply.pushed, NOTHING, now)
        request = self._open.pop(_key(reply, shard), None)
        if request is None:
            return
        if isinstance(reply, Entered):
            self._enter_on(shard, reply, now)
            return
        if isinstance(reply, PullReply):
            reply = self._newest(shard, reply)
        if isinstance(reply, PullReply | Fetched):
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

    def _finish(self, request: _Open, reply: Reply | Met) -> None:
        token = request.token
        wait = self._waits.get(token)
        if wait is None:
            return
        wait.open -= 1
        wait.replies.append((request.shard, reply))
        if not wait.open:
            del self._waits[token]
            self._out.start(Completed(token, tuple(wait.replies)))

    def _met(self, message: Met) -> None:
        request = self._open.pop(_key(message, -1), None) if message.life == self._life else None
        if request is not None:
            self._finish(request, message)

    def _fresh(self, sender: Name, fresh: Fresh, payload: Payload) -> None:
        if sender not in self.view.primaries:
            return
        shard = self.view.primaries.index(sender)
        if fresh.version > self.known.get(shard, (-1, 0))[0]:
            self.known[shard] = (fresh.version, fresh.clock)
            self._out.start(Refreshed(shard, fresh, payload))

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

    def _ask_to_enter(self, shard: int, clock: int, now: float) -> None:
        message = Enter(
            worker=self.worker, life=self._life, number=self._next_number(), epoch=self.view.epoch, clock=clock
        )
        self._request(_ENTERING, shard, message, NOTHING, now)

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


def _key(message: Request | Meet | Reply | Met, shard: int) -> tuple[str, int, int]:
    """Pushes are numbered for each shard, all else for each worker."""
    pushed = isinstance(message, Push | Load | PushReply)
    return ("push", shard, message.number) if pushed else ("ask", -1, message.number)

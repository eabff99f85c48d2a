"""One replica of one shard: orders what comes into a log, sees to it that all replicas hold it, and then answers.

The primary puts every push at the end of its log and sends it to its backups; once all of them hold it, it is applied
and answered. So an answered push is held by all live replicas, and the backup that takes over knows it, applies it not
again, and says so to one who asks again.

Epochs keep two primaries apart. A backup answers only its primary, and only in the epoch it is in; what comes from an
earlier one is answered `Fenced`. So a primary that was stopped, declared dead and continued finds nobody who helps it
to acknowledge a push, unless its successor held that push before it took over. Told of a later epoch it serves nothing
until it knows that epoch's view, and if it is not in it, never again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from offbeat.protocols.machine import NOTHING, Done, Effect, Effects, Event, Name, Payload, Received, Timer
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    ClusterView,
    Deadline,
    Enter,
    Entered,
    Entry,
    Fenced,
    Fetch,
    Fetched,
    Fresh,
    Gone,
    Heartbeat,
    Load,
    Members,
    Noted,
    Pull,
    PullReply,
    Push,
    PushReply,
    Refused,
    Replicate,
    Replicated,
    Request,
    Timing,
    Trial,
    Tried,
    Turned,
    Viewed,
    worker_name,
)
from offbeat.protocols.servers.replication import Feed, Log
from offbeat.protocols.servers.shard import Answer, Ask, Outcome, Shard
from offbeat.protocols.servers.snapshots import ShardColour

STASH = 1024
"""Messages from an epoch to come that are kept until it has come; more are dropped, and will be sent again."""

TICK = "tick"


@dataclass(frozen=True, slots=True)
class Inspect:
    """Look whether a payload is fit to be used. The result is why it is not, such as `NaN`, or empty."""

    payload: Payload
    worker: int


@dataclass(frozen=True, slots=True)
class Read:
    """Hand out the values as they are after all work begun before, or the whole state. The result is a `Payload`.

    It is sent to several readers and must not change before they have copied it.
    """

    state: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """Go over a payload as a push is gone over, and forget it: only the time it takes is of interest."""

    payload: Payload
    letter: bool


@dataclass(slots=True)
class _Reading:
    """A read under way, and who gets it."""

    version: int
    clock: int
    asks: list[tuple[Ask, PushReply | None]]
    fresh: tuple[int, ...] = ()
    """Workers who have not asked, and get it all the same."""
    colour: int = 0


@dataclass(slots=True)
class _Door:
    """What has come from workers and is not in the log yet."""

    expected: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """The number of the next push, by worker and life."""
    early: dict[tuple[int, int, int], tuple[Push | Load, Payload]] = field(
        default_factory=dict[tuple[int, int, int], tuple[Push | Load, Payload]]
    )
    """Pushes that came before others with lower numbers, by worker, life and number."""
    inspected: dict[int, tuple[Push | Load, Payload]] = field(default_factory=dict[int, tuple[Push | Load, Payload]])
    """Pushes that are being looked at, by token."""


class ServerMachine:
    """A replica of a shard, as primary or as backup: the view says which."""

    def __init__(
        self,
        name: Name,
        shard: int,
        rule: Rule,
        view: ClusterView,
        *,
        coordinator: Name = COORDINATOR,
        timing: Timing | None = None,
        inspect: bool = True,
    ) -> None:
        self.name = name
        self.number = shard
        """Which shard this is a replica of."""
        self.shard = Shard(rule, view)
        """What this replica holds; for looking at."""
        self.view = view
        self.colour = ShardColour(shard)
        """Which snapshots it has been cut by."""
        self._coordinator = coordinator
        self._timing = timing or Timing()
        self._inspect = inspect
        self._fence = view.epoch
        self._retired = False
        self._log = Log()
        self._applied = 0
        self._known_committed = 0
        self._feed = Feed(view.backups[shard])
        self._ahead: dict[int, tuple[Entry, Payload]] = {}
        self._enrolled = view.members
        self._settled_at = 0
        self._door = _Door()
        self._stash: list[Received] = []
        self._readings: dict[int, _Reading] = {}
        self._tokens = 0
        self._largest = 0
        self._timed_step = -1
        self._out = Effects()

    @property
    def serving(self) -> bool:
        """Whether this is the primary, as far as it knows."""
        return not self._retired and self._fence <= self.view.epoch and self.view.primaries[self.number] == self.name

    @property
    def retired(self) -> bool:
        """Whether this was declared dead, and serves nothing any more."""
        return self._retired

    @property
    def held(self) -> int:
        """How many entries of the log this replica holds."""
        return self._log.end

    def begin(self, now: float) -> Sequence[Effect]:
        """Give the first sign of life."""
        self._out = Effects()
        self._tick(now)
        return self._out.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Take a message, a timer or the end of a work."""
        self._out = Effects()
        if not self._retired:
            self._happen(event, now)
        return self._out.done

    def _happen(self, event: Event, now: float) -> None:
        match event:
            case Received():
                self._received(event, now)
            case Timer(token=("deadline", int(step))):
                if self.serving and step == self.shard.minimum:
                    self._append(Deadline(step), NOTHING, now)
            case Timer():
                self._tick(now)
            case Done(token=("read", int(token))):
                self._hand_out(self._readings.pop(token), event.result)
            case Done(token=("look", Trial() as trial)):
                tried = Tried(life=trial.life, number=trial.number, epoch=self.view.epoch)
                self._out.send(worker_name(trial.worker), tried)
            case Done(token=("inspect", int(token))):
                self._inspected(token, event.result, now)
            case Done(token=("written", int(colour), cut)) if event.result:
                self.colour.written(colour, cut, self.view.epoch)
                self.colour.report(self._coordinator, self._out)
            case _:
                pass

    def _received(self, event: Received, now: float) -> None:
        message = event.message
        match message:
            case Push() | Pull() | Fetch() | Load() | Enter() | Turned() | Trial():
                self._request(event, message, now)
            case Replicate():
                self._replicate(event, message)
            case Replicated() if self.serving and message.epoch == self.view.epoch:
                self._feed.answered(event.sender, message.index + 1, now)
                self._advance(now)
            case Fenced() | Gone():
                self._fenced(message)
            case Noted() if event.sender == self._coordinator:
                self.colour.heard(message.number)
            case Viewed() if event.sender == self._coordinator and message.view.epoch > self.view.epoch:
                self._change(message.view, now)
            case _:
                pass

    # Signs of life, epochs and views.

    def _tick(self, now: float) -> None:
        self._out.timer(self._timing.heartbeat, TICK)
        self._sign_of_life()
        self.colour.report(self._coordinator, self._out)
        if self.serving:
            for backup, index in self._feed.overdue(self._timing.patience(self._largest), now):
                self._send_entry(backup, index)

    def _sign_of_life(self) -> None:
        """Also asks for the view, if there is a newer one."""
        self._out.send(self._coordinator, Heartbeat(self.view.epoch))

    def _fenced(self, message: Fenced | Gone) -> None:
        """Step down: until the view of that epoch is known, or for good if it has no place for this replica."""
        if message.epoch <= self.view.epoch:
            return
        self._fence = max(self._fence, message.epoch)
        self._retired = isinstance(message, Gone)
        if not self._retired:
            self._sign_of_life()

    def _change(self, view: ClusterView, now: float) -> None:
        before, was_primary = self.view, self.view.primaries[self.number] == self.name
        self.view = view
        self._fence = max(self._fence, view.epoch)
        self._ahead.clear()
        self.colour.give_up()
        if self.name not in (view.primaries[self.number], *view.backups[self.number]):
            self._retired = True
            return
        if view.primaries[self.number] == self.name:
            if was_primary:
                kept = [name for name in view.backups[self.number] if name in before.backups[self.number]]
                self._feed = self._feed.changed(kept, now)
            else:
                self._take_over(now)
            if self._enrolled != view.members:
                self._append(Members(view), NOTHING, now)
            self._advance(now)
            self._watch_the_time()
        self._open_stash(now)

    def _take_over(self, now: float) -> None:
        """What this replica holds is what the shard is from now on; it serves once all other backups hold it, too."""
        self._feed = Feed(self.view.backups[self.number], self._known_committed, now)
        self._settled_at = self._log.end
        self._enrolled = dict(self.shard.members)
        self._door = _Door()

    def _keep_for_later(self, event: Received) -> None:
        if len(self._stash) < STASH:
            self._stash.append(event)

    def _open_stash(self, now: float) -> None:
        kept, self._stash = self._stash, []
        for event in kept:
            self._received(event, now)

    # The log and its replicas.

    def _append(self, entry: Entry, payload: Payload, now: float) -> None:
        if isinstance(entry, Members):
            self._enrolled = entry.view.members
        self._largest = max(self._largest, payload.nbytes)
        self._log.append(entry, payload)
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Send on what is to be sent, and apply and answer what all replicas hold."""
        for backup, index in self._feed.due(self._log.end, now):
            self._send_entry(backup, index)
        committed = self._feed.committed(self._log.end)
        unsettled = self._known_committed < self._settled_at
        self._known_committed = max(self._known_committed, committed)
        while self._applied < self._known_committed:
            entry, payload = self._log[self._applied]
            self._applied += 1
            outcome = self._apply(entry, payload)
            self._after(entry, payload)
            self._tell(outcome)
        self._log.forget(self._known_committed)
        if unsettled and self._known_committed >= self._settled_at:
            self._open_stash(now)

    def _send_entry(self, backup: Name, index: int) -> None:
        entry, payload = self._log[index]
        message = Replicate(epoch=self.view.epoch, index=index, committed=self._known_committed - 1, entry=entry)
        self._out.send(backup, message, payload)

    def _apply(self, entry: Entry, payload: Payload) -> Outcome:
        outcome = self.shard.apply(entry, payload)
        for work in outcome.works:
            self._out.start(work)
        return outcome

    def _after(self, entry: Entry, payload: Payload) -> None:
        """What the primary does beside applying an entry, before anybody is told."""
        if isinstance(entry, Load):
            self._door = _Door()  # Pushes may go on under other numbers.
        elif isinstance(entry, Refused):
            self.colour.applied(structs.replace(entry.push, start=0, stop=0), NOTHING, self._out)
        elif isinstance(entry, Push):
            self.colour.applied(entry, payload, self._out)
        self.colour.complete(self._taken(), self._out)

    def _taken(self) -> dict[int, tuple[int, int, int]]:
        """Of each worker that takes part: its life, how many of its pushes are in the values, and its clock."""
        shard, known = self.shard, self.shard.members
        return {
            who: (life, shard.expected(who), shard.clock(who)) if known.get(who) == life else (life, 0, 0)
            for who, life in self.view.members.items()
        }

    def _replicate(self, event: Received, message: Replicate) -> None:
        if message.epoch < self._fence:
            self._out.send(event.sender, Fenced(self._fence))
        elif message.epoch > self.view.epoch:
            self._keep_for_later(event)
            self._sign_of_life()
        elif event.sender == self.view.primaries[self.number]:
            self._hold(message, event.payload)
            self._out.send(event.sender, Replicated(self.view.epoch, self._log.end - 1))

    def _hold(self, message: Replicate, payload: Payload) -> None:
        """Take an entry, and all that came before it was their turn. What is applied here was never answered yet."""
        if message.index >= self._log.end:
            self._ahead[message.index] = (message.entry, payload)
        while self._log.end in self._ahead:
            entry, numbers = self._ahead.pop(self._log.end)
            self._log.append(entry, numbers)
            self._applied += 1
            self._apply(entry, numbers)
        self._known_committed = max(self._known_committed, message.committed + 1)
        self._log.forget(self._known_committed)

    # What workers ask for.

    def _request(self, event: Received, message: Request, now: float) -> None:
        if event.sender != worker_name(message.worker):
            return
        if message.epoch > self.view.epoch:
            self._keep_for_later(event)
            self._sign_of_life()
        elif not self.serving:
            self._out.send(event.sender, Fenced(self._fence))
        elif self.view.life(message.worker) != message.life:
            self._out.send(event.sender, Gone(self.view.epoch))
        elif self._known_committed < self._settled_at:
            self._keep_for_later(event)
        elif isinstance(message, Enter):
            self._append(message, NOTHING, now)
        elif isinstance(message, Trial):
            self._out.start(Look(event.payload, message.letter), ("look", message))
        elif isinstance(message, Turned):
            self._turn(message.colour)
            self.colour.told(message)
            self._out.send(event.sender, Noted(life=message.life, number=message.number))
            self.colour.complete(self._taken(), self._out)
        elif isinstance(message, Push | Load):
            self._at_the_door(message, event.payload, now)
        else:
            self._turn(message.colour)
            self._ask(message, now)

    def _turn(self, colour: int) -> None:
        """Be cut before the first message of a new colour is handled."""
        if colour > self.colour.own:
            self.colour.turn(colour, self.shard.version, self._taken(), self._out)

    def _ask(self, ask: Ask, now: float) -> None:
        if self.shard.skips(ask):
            self._append(Enter(worker=ask.worker, life=ask.life, number=0, clock=ask.clock), NOTHING, now)
        if self.shard.ask(ask):
            self._read([(ask, None)])

    def _at_the_door(self, push: Push | Load, payload: Payload, now: float) -> None:
        if isinstance(push, Push):
            self._turn(push.colour)
        who = (push.worker, push.life)
        expected = self._expected(*who)
        if push.number < expected:
            self._again(push)
            return
        self._door.early[(*who, push.number)] = (push, payload)
        while (following := self._door.early.pop((*who, expected), None)) is not None:
            expected += 1
            self._door.expected[who] = expected
            self._let_in(*following, now)

    def _expected(self, worker: int, life: int) -> int:
        known = self.shard.expected(worker) if self.shard.members.get(worker) == life else 0
        return self._door.expected.setdefault((worker, life), known)

    def _again(self, push: Push | Load) -> None:
        """A push that was let in before: its sender is told so, unless it will be once the push is dealt with."""
        if self.shard.knows(push.worker, push.life, push.number) and not self.shard.holds(push.worker, push.number):
            self.shard.counts["duplicate"] += 1
            self._reply(Answer(push.worker, push.life, push.number, "duplicate"))

    def _let_in(self, push: Push | Load, payload: Payload, now: float) -> None:
        if not self._inspect:
            self._append(push, payload, now)
            return
        self._tokens += 1
        self._door.inspected[self._tokens] = (push, payload)
        self._out.start(Inspect(payload, push.worker), ("inspect", self._tokens))

    def _inspected(self, token: int, reason: str, now: float) -> None:
        push, payload = self._door.inspected.pop(token, (None, NOTHING))
        if push is None or not self.serving:
            return
        entry = Refused(push, reason) if reason and isinstance(push, Push) else push
        self._append(entry, NOTHING if isinstance(entry, Refused) else payload, now)

    def _tell(self, outcome: Outcome) -> None:
        """Answer what was applied, and the reads that have become due by it."""
        due: list[tuple[Ask, PushReply | None]] = [(ask, None) for ask in outcome.due]
        for answer in outcome.answers:
            following = self._following(answer)
            if following is not None and self.shard.ask(following):
                due.append((following, self._push_reply(answer)))
            else:
                self._reply(answer)
        fresh = outcome.moved and self.shard.rule.eager
        if due or fresh:
            self._read(due, fresh=fresh)
        self._watch_the_time()

    def _following(self, answer: Answer) -> Pull | None:
        """The pull that a push asked for along with it."""
        if not answer.then_pull:
            return None
        number, colour = answer.then_pull, self.colour.own
        return Pull(worker=answer.worker, life=answer.life, number=number, clock=answer.step + 1, colour=colour)

    def _push_reply(self, answer: Answer) -> PushReply:
        return PushReply(
            life=answer.life,
            number=answer.number,
            status=answer.status,
            reason=answer.reason,
            version=self.shard.version,
            clock=self.shard.minimum,
            epoch=self.view.epoch,
            colour=self.colour.own,
        )

    def _reply(self, answer: Answer) -> None:
        if answer.entered is None:
            message = self._push_reply(answer)
        else:
            message = Entered(life=answer.life, number=answer.number, clock=answer.entered, epoch=self.view.epoch)
        self._out.send(worker_name(answer.worker), message)

    def _read(self, asks: list[tuple[Ask, PushReply | None]], *, fresh: bool = False) -> None:
        """Read once for all who are due, apart from those who have this version."""
        version, clock, colour = self.shard.version, self.shard.minimum, self.colour.own
        values, states = (_Reading(version, clock, [], colour=colour) for _ in range(2))
        for ask, pushed in asks:
            if isinstance(ask, Fetch):
                states.asks.append((ask, pushed))
            elif ask.newer_than < version:
                values.asks.append((ask, pushed))
            else:
                self._out.send(worker_name(ask.worker), self._pull_reply(ask, values, pushed, unchanged=True))
        if fresh:
            asking = {ask.worker for ask, _ in values.asks}
            values.fresh = tuple(worker for worker in self.shard.members if worker not in asking)
        if values.asks or values.fresh:
            self._begin_reading(values, state=False)
        if states.asks:
            self._begin_reading(states, state=True)

    def _begin_reading(self, reading: _Reading, *, state: bool) -> None:
        self._tokens += 1
        self._readings[self._tokens] = reading
        self._out.start(Read(state), ("read", self._tokens))

    def _hand_out(self, reading: _Reading, payload: Payload) -> None:
        told = {"version": reading.version, "clock": reading.clock, "epoch": self.view.epoch, "colour": reading.colour}
        for ask, pushed in reading.asks:
            if isinstance(ask, Pull):
                message = self._pull_reply(ask, reading, pushed)
            else:
                message = Fetched(life=ask.life, number=ask.number, **told)
            self._out.send(worker_name(ask.worker), message, payload)
        for worker in reading.fresh:
            self._out.send(worker_name(worker), Fresh(**told), payload)

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
            epoch=self.view.epoch,
            colour=reading.colour,
        )

    def _watch_the_time(self) -> None:
        """Under a deadline: it counts from when the step was opened, the first one from when something has come."""
        step, seconds = self.shard.minimum, self.shard.rule.deadline
        if seconds is not None and step != self._timed_step and (step > 0 or self.shard.begun):
            self._timed_step = step
            self._out.timer(seconds, ("deadline", step))

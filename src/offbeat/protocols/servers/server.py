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
from typing import Any

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
    Fetched,
    Fresh,
    Gone,
    Heartbeat,
    Install,
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
    Volunteer,
    worker_name,
)
from offbeat.protocols.servers.renewal import Renewal
from offbeat.protocols.servers.replication import Feed, Log
from offbeat.protocols.servers.shard import Answer, Ask, Outcome, Restore, Shard
from offbeat.protocols.servers.snapshots import ShardColour
from offbeat.protocols.servers.works import Door, Inspect, Look, Read, Reading

STASH = 1024
"""Messages from an epoch to come that are kept until it has come; more are dropped, and will be sent again."""

TICK = "tick"
_Numbered = Push | Load


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
        joins: bool = False,
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
        self._joining = joins
        self._installed: tuple[Name, int] | None = None
        self._renewal: Renewal | None = None
        self._log = Log()
        self._applied = 0
        self._known_committed = 0
        self._feed = Feed(view.backups[shard])
        self._ahead: dict[int, tuple[Entry, Payload]] = {}
        self._enrolled = view.members
        self._settled_at = 0
        self._door = Door()
        self._stash: list[Received] = []
        self._readings: dict[int, Reading] = {}
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
        if isinstance(event, Received):
            self._received(event, now)
        elif isinstance(event, Done):
            self._done(event.token, event.result, now)
        elif isinstance(event, Timer):
            match event.token:
                case ("deadline", int(step)):
                    if self.serving and step == self.shard.minimum:
                        self._append(Deadline(step), NOTHING, now)
                case _:
                    self._tick(now)

    def _done(self, token: tuple[Any, ...], result: Any, now: float) -> None:
        """Work is finished: by what it was begun for."""
        what, number = token[0], token[1]
        if what == "read":
            self._hand_out(self._readings.pop(number), result)
        elif what == "inspect":
            self._inspected(number, result, now)
        elif what == "renewal":
            if self._renewal is not None and self._renewal.number == number:
                self._largest = max(self._largest, result.nbytes)
                self._renewal.read(result, self.view.epoch, now, self._out)
        elif what == "look":
            trial: Trial = number
            tried = Tried(life=trial.life, number=trial.number, epoch=self.view.epoch)
            self._out.send(worker_name(trial.worker), tried)
        elif result:
            self.colour.written(number, token[2], self.view.epoch)
            self.colour.report(self._coordinator, self._out)

    def _received(self, event: Received, now: float) -> None:
        message = event.message
        if isinstance(message, Request):
            self._request(event, message, now)
            return
        match message:
            case Replicate():
                self._replicate(event, message)
            case Install():
                self._install(event, message)
            case Replicated() if self.serving and message.epoch == self.view.epoch:
                self._held_by(event.sender, message.index + 1, now)
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
            self._look_after_novice(now)

    def _sign_of_life(self) -> None:
        """Also asks for the view, if there is a newer one; or, of one who is in none yet, to be in the next."""
        known = Volunteer(self.number) if self._joining else Heartbeat(self.view.epoch, self._largest)
        self._out.send(self._coordinator, known)

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
        if before.primaries[self.number] != view.primaries[self.number] and view.novice(self.number) == self.name:
            self._installed = None  # What it was given was another's; the next one gives it anew.
        self._fence = max(self._fence, view.epoch)
        self._ahead.clear()
        self.colour.give_up()
        if self.name not in view.replicas(self.number):
            self._retired = not self._joining
            return
        self._joining = False
        if view.primaries[self.number] == self.name:
            if was_primary:
                self._feed = self._feed.changed((*view.backups[self.number], view.novice(self.number)), now)
            else:
                self._take_over(now)
            self._renew(view.novice(self.number))
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
        self._door = Door()

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
        self._take_state(now)
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
            self._door = Door()  # Pushes may go on under other numbers.
        elif isinstance(entry, Refused):
            self.colour.applied(structs.replace(entry.push, start=0, stop=0), NOTHING, self._out)
        elif isinstance(entry, Push):
            self.colour.applied(entry, payload, self._out)
        self._complete_colour()

    def _complete_colour(self) -> None:
        if self.colour.recording:
            self.colour.complete(self._taken(), self._out)

    def _taken(self) -> dict[int, tuple[int, int, int]]:
        """Of each worker that takes part: its life, how many of its pushes are in the values, and its clock."""
        shard, known = self.shard, self.shard.members
        return {
            who: (life, shard.expected(who), shard.clock(who)) if known.get(who) == life else (life, 0, 0)
            for who, life in self.view.members.items()
        }

    def _replicate(self, event: Received, message: Replicate) -> None:
        if not self._is_of_primary(event, message.epoch):
            return
        if self.view.novice(self.number) == self.name and self._installed is None:
            self._ahead[message.index] = (message.entry, event.payload)  # It has overtaken the state.
            return
        self._hold(message, event.payload)
        self._out.send(event.sender, Replicated(self.view.epoch, self._log.end - 1))

    def _is_of_primary(self, event: Received, epoch: int) -> bool:
        """Whether this is from whom this replica follows; who is of the past is told so, who is ahead is kept."""
        if epoch < self._fence:
            self._out.send(event.sender, Fenced(self._fence))
        elif epoch > self.view.epoch:
            self._keep_for_later(event)
            self._sign_of_life()
        else:
            return event.sender == self.view.primaries[self.number]
        return False

    def _hold(self, message: Replicate, payload: Payload) -> None:
        """Take an entry, and all that came before it was their turn. What is applied here was never answered yet."""
        if message.index >= self._log.end:
            self._ahead[message.index] = (message.entry, payload)
        self._take_entries()
        self._known_committed = max(self._known_committed, message.committed + 1)
        self._log.forget(self._known_committed)

    def _take_entries(self) -> None:
        while self._log.end in self._ahead:
            entry, numbers = self._ahead.pop(self._log.end)
            self._log.append(entry, numbers)
            self._applied += 1
            self._apply(entry, numbers)

    # New copies.

    def _renew(self, novice: Name) -> None:
        """Bring the view's novice up to date, unless that is under way."""
        if self._renewal is not None and self._renewal.name != novice:
            self._renewal.release(self._out)
            self._renewal = None
        if novice and self._renewal is None:
            self._tokens += 1
            self._renewal = Renewal(novice, self._tokens)

    def _take_state(self, now: float) -> None:
        """Between two steps, when all backups hold what is applied: this is what the novice is given."""
        renewal = self._renewal
        if renewal is None or renewal.begun or not self.serving:
            return
        if self._applied == self._known_committed and self.shard.between_steps:
            renewal.take(self._applied, self.shard.state())
            self._feed.add(renewal.name, self._applied, now)
            self._out.start(Read(state=True, kept=True), ("renewal", renewal.number))

    def _held_by(self, name: Name, held: int, now: float) -> None:
        """A backup, or who is becoming one, holds so many entries."""
        self._feed.answered(name, held, now)
        renewal = self._renewal
        if renewal is not None and name == renewal.name and renewal.begun and not renewal.installed:
            renewal.answered(self.number, self._coordinator, self._out)
        self._advance(now)

    def _look_after_novice(self, now: float) -> None:
        if self._renewal is not None:
            self._renewal.look(self.view.epoch, self._timing.patience(self._largest), now, self._out)
            self._renewal.report(self.number, self._coordinator, self._out)
        self._advance(now)

    def _install(self, event: Received, message: Install) -> None:
        """Be what the primary is; once, however often it is said."""
        if not self._is_of_primary(event, message.epoch):
            return
        given = (event.sender, message.number)
        if self.view.novice(self.number) == self.name and self._installed != given:
            self._installed = given
            self.shard.adopt(message.state)
            self._out.start(Restore(event.payload, message.state.version))
            self._log = Log(message.index)
            self._applied = self._known_committed = message.index
            self._take_entries()
        self._out.send(event.sender, Replicated(self.view.epoch, self._log.end - 1))

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
            self._complete_colour()
        elif isinstance(message, _Numbered):
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
        if isinstance(push, Push):
            look = Inspect(payload, push.worker, push.start, push.stop, push.absent)
        else:
            look = Inspect(payload, push.worker)
        self._out.start(look, ("inspect", self._tokens))

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
        version = self.shard.version
        readings: dict[Read, Reading] = {}
        for ask, pushed in asks:
            if isinstance(ask, Pull) and ask.newer_than >= version:
                self._out.send(worker_name(ask.worker), self._pull_reply(ask, self._reading(), pushed, unchanged=True))
                continue
            what = Read(start=ask.start, stop=ask.stop) if isinstance(ask, Pull) else Read(state=True)
            readings.setdefault(what, self._reading()).asks.append((ask, pushed))
        if fresh:
            whole = readings.setdefault(Read(), self._reading())
            asking = {ask.worker for ask, _ in whole.asks}
            whole.fresh = tuple(worker for worker in self.shard.members if worker not in asking)
        for what, reading in readings.items():
            self._tokens += 1
            self._readings[self._tokens] = reading
            self._out.start(what, ("read", self._tokens))

    def _reading(self) -> Reading:
        return Reading(self.shard.version, self.shard.minimum, [], colour=self.colour.own)

    def _hand_out(self, reading: Reading, payload: Payload) -> None:
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
        self, ask: Pull, reading: Reading, pushed: PushReply | None, *, unchanged: bool = False
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
        """Set the timer of the open step's deadline, once it runs."""
        step, seconds = self.shard.pacing.timed, self.shard.rule.deadline
        if step is not None and seconds is not None and step != self._timed_step:
            self._timed_step = step
            self._out.timer(seconds, ("deadline", step))

"""One replica of one shard: orders requests into a log, makes sure that all replicas hold it, and then answers.

The primary appends every push to its log and sends it to its backups; once all of them hold it, it is applied and
answered. So an answered push is held by all live replicas, and the backup that takes over knows it, does not apply it
again, and answers a resent one.

The parts, each without I/O: `fencing` (epochs and views), `answers` (admission of pushes and replies to workers),
`replication` (the log, its backups, and new copies), `shard` (what entries do) and `snapshots`. Here is what connects
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.protocols.machine import NOTHING, Done, Effect, Effects, Event, Name, Payload, Received, Timer
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, Fetch, Load, Pull, Push, worker_name
from offbeat.protocols.servers.replica.answers import Admission, Answers
from offbeat.protocols.servers.replica.fencing import Fence
from offbeat.protocols.servers.replica.replication import Follower, Renewal, Replication
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.totals import ReductionToken, TotalsExchange
from offbeat.protocols.servers.replica.works import EntryOutcome, InspectPayload, PushAnswer, UpdateProof
from offbeat.protocols.servers.snapshots import ShardColour

TICK = "tick"


class ServerMachine:
    """A replica of a shard, as primary or as backup: the view says which."""

    def __init__(
        self,
        name: Name,
        shard: int,
        rule: Rule,
        view: ClusterView,
        *,
        timing: msg.Timeouts | None = None,
        joins: bool = False,
    ) -> None:
        self.name = name
        self.number = shard  # Which shard this is a replica of.
        self.shard = Shard(rule, view, shard)  # What this replica holds.
        self.fence = Fence(name, shard, view, joins)
        self.replication: Replication[msg.Entry] = Replication(view.backups[shard], msg.Replicate)
        self._timing = timing or msg.Timeouts()
        self._colour = ShardColour(shard, self.shard, self.fence)
        self._follower = Follower(self.shard, self.fence, self.replication)
        self.admission = Admission(self.shard)
        self._answers = Answers(self.shard, self.fence, self._colour)
        self._renewal = Renewal(shard)
        self._exchange = TotalsExchange(shard, self.shard.totals)
        self._enrolled = view.members_of(shard)
        self._timed_step = -1
        self._unproven: dict[int, EntryOutcome] = {}  # Outcomes with updates that may still fail, by their versions.
        self._out = Effects()

    @property
    def view(self) -> ClusterView:
        """The newest view known here."""
        return self.fence.view

    @property
    def serving(self) -> bool:
        """Whether this is the primary, as far as it knows."""
        return self.fence.serving

    @property
    def retired(self) -> bool:
        """Whether this was declared dead, and no longer serves."""
        return self.fence.retired

    def begin(self, now: float) -> Sequence[Effect]:
        """Send the first heartbeat."""
        return self.on(Timer(TICK), now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle a message, a timer or finished work."""
        out = self._out = Effects()
        if self.fence.retired:
            return out.done
        match event:
            case Received(message=message) if isinstance(message, msg.Request):
                self._request(event, message, now)
            case Received():
                self._received(event, now)
            case Done(("inspect", int(number)), reason):
                entry = self.admission.inspected(number, reason, self.shard.minimum)
                if entry is not None and self.serving:
                    self._append(*entry, now)
            case Done(UpdateProof() as proof, reason):
                self._proved(proof, reason)
            case Done(ReductionToken() as token, values):
                self._exchange.reduced(token, values)
                self._gather(now, tell=True)
            case Done(("read", int(number)), payload):
                self._answers.hand_out(number, payload, out)
            case Done(("look", msg.Trial() as trial)):
                tried = msg.Tried(life=trial.life, number=trial.number, epoch=self.view.epoch)
                out.send(worker_name(trial.worker), tried)
            case Done(("renewal", int(number)), payload):
                self.fence.burden = max(self.fence.burden, payload.nbytes)
                self._renewal.read(number, payload, self.view.epoch, now, out)
            case Done(("written", int(colour), msg.ShardCut() as cut), True):
                self._colour.written(colour, cut)
                self._colour.report(COORDINATOR, out)
            case Timer(("deadline", int(step))):
                if self.serving and step == self.shard.minimum:
                    self._append(msg.StepDeadline(step), NOTHING, now)
            case Timer():
                self._tick(now)
            case _:
                pass
        return out.done

    def _received(self, event: Received, now: float) -> None:
        """A message from another replica or from the coordinator."""
        message = event.message
        match message:
            case msg.Replicate():
                self._follower.replicate(event, message, self._out)
            case msg.Install():
                self._follower.install(event, message, self._out)
            case msg.Replicated() if self.serving and message.epoch == self.view.epoch:
                self.replication.feed.answered(event.sender, message.index + 1, now)
                self._renewal.answered(event.sender, self._out)
                self._advance(now)
            case msg.Fenced() | msg.Gone():
                self.fence.step_down(message, self._out)
            case msg.Acknowledged() if event.sender == COORDINATOR:
                self._colour.heard(message.number)
            case msg.ShardPartial() if self.serving:
                self._exchange.heard(event.sender, message, self.shard.pacing.completed, self._out)
                self._gather(now)
            case msg.ShardTotals() if self.serving:
                self._propose(self._exchange.learned(message), now)
            case msg.Viewed() if event.sender == COORDINATOR and message.view.epoch > self.view.epoch:
                self._change(message.view, now)
            case _:
                pass

    # Time and views.

    def _tick(self, now: float) -> None:
        self._out.timer(self._timing.heartbeat, TICK)
        self.fence.sign_of_life(self._out)
        self._colour.report(COORDINATOR, self._out)
        if self.serving:
            patience = self._timing.patience(self.fence.burden)
            self.replication.send(self.view.epoch, now, self._out, patience)
            self._renewal.look(self.view.epoch, patience, now, self._out)
            self._gather(now, tell=True)
            self._advance(now)

    def _change(self, view: ClusterView, now: float) -> None:
        """Adopt a new view, perhaps as the primary."""
        before, backups, novice = self.view.primaries[self.number], view.backups[self.number], view.novice(self.number)
        if before != view.primaries[self.number] and novice == self.name:
            self._follower.installed = None  # Its state came from another; the new primary sends one.
        self.replication.ahead.clear()  # The new primary resends what came early.
        self._colour.give_up()
        if not self.fence.enter(view):
            return
        if view.primaries[self.number] == self.name:
            if before == self.name:
                self.replication.feed = self.replication.feed.changed((*backups, novice), now)
            else:
                self.replication.take_over(backups, now)
                self._exchange.forget_proposal()
                self._enrolled = dict(self.shard.members)
                self.admission.forget()
            self._renewal.follow(novice, self._out)
            if self._enrolled != view.members_of(self.number):
                self._append(msg.Members(view), NOTHING, now)
            self._advance(now)
            self._watch_the_time()
        self._open_stash(now)

    def _open_stash(self, now: float) -> None:
        """Handle what was kept for later."""
        kept, self.fence.later = self.fence.later, []
        for event in kept:
            if isinstance(event.message, msg.Request):
                self._request(event, event.message, now)
            else:
                self._received(event, now)

    def _watch_the_time(self) -> None:
        """Set the timer of the open step's deadline, once it runs."""
        step, seconds = self.shard.pacing.timed, self.shard.rule.deadline
        if step is not None and seconds is not None and step != self._timed_step:
            self._timed_step = step
            self._out.timer(seconds, ("deadline", step))

    # The primary's log.

    def _append(self, entry: msg.Entry, payload: Payload, now: float) -> None:
        if isinstance(entry, msg.Members):
            self._enrolled = entry.view.members_of(self.number)
        self.fence.burden = max(self.fence.burden, payload.nbytes)
        self.replication.log.append(entry, payload)
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Send what is due to backups, and apply and answer what all replicas hold."""
        unsettled = not self.replication.settled
        self.replication.send(self.view.epoch, now, self._out)
        for entry, payload in self.replication.to_apply():
            outcome = self.shard.apply(entry, payload, self._out)
            if isinstance(entry, Load):
                self.admission.forget()  # Pushes may continue under other numbers.
            if self._colour.recording:
                self._colour.record(entry, payload, self._out)
            self._unproven |= {proof.version: outcome for proof in outcome.unproven}
            if not outcome.unproven:
                self._answers.tell(outcome, self._out)
            self._watch_the_time()
        self._take_state(now)
        if unsettled and self.replication.settled:
            self._open_stash(now)

    def _gather(self, now: float, tell: bool = False) -> None:
        """Where an update takes sums over all shards: send this shard's part, and go on once all have come."""
        if not self.serving or not self.shard.rule.reductions:
            return
        if tell:
            self._exchange.send(self.view, self._out)
        self._propose(self._exchange.due(range(len(self.view.primaries)), self.shard.pacing.completed), now)

    def _propose(self, totals: msg.ShardTotals | None, now: float) -> None:
        if totals is not None:
            self._append(totals, NOTHING, now)

    def _proved(self, proof: UpdateProof, reason: str) -> None:
        """An update was made, or has failed for a reason: answer what waits for it, if this is its last one."""
        outcome = self._unproven.pop(proof.version, None)
        if reason:
            self.admission.failed(proof, reason)
        if outcome is None:
            return  # A backup's.
        if reason:
            outcome.refuse(f"{proof}: {reason}")
        if proof == outcome.unproven[-1]:
            self._answers.tell(outcome, self._out)

    def _take_state(self, now: float) -> None:
        """Between two steps, when all backups hold what is applied, take the state for the novice."""
        renewal, applied = self._renewal, self.replication.applied
        if not renewal.novice or renewal.begun or not self.serving:
            return
        if applied == self.replication.committed and self.shard.between_steps:
            renewal.take(applied, self.shard.state(), self._out)
            self.replication.feed.add(renewal.novice, applied, now)

    # Requests of workers.

    def _request(self, event: Received, message: msg.Request, now: float) -> None:
        if event.sender != worker_name(message.worker) or not self.fence.admits(event, message, self._out):
            return
        if not self.replication.settled:
            self.fence.keep(event)
            return
        if isinstance(message, Push | Pull | Fetch | msg.Turned):
            self._colour.cut(message.colour, self._out)
        if isinstance(message, Push | Load):
            # One that was admitted before is answered, unless it still will be.
            if not self.admission.admit(message, event.payload, self._out) and self.shard.has_answered(message):
                self.shard.counts["duplicate"] += 1
                self._answers.reply(PushAnswer(message.worker, message.life, message.number, "duplicate"), self._out)
        elif isinstance(message, msg.Enter):
            self._append(message, NOTHING, now)
        elif isinstance(message, msg.Trial):
            self._out.start(InspectPayload(event.payload, message.compressed), ("look", message))
        elif isinstance(message, msg.Turned):
            self._out.send(event.sender, msg.Acknowledged(life=message.life, number=message.number))
            self._colour.told(message, self._out)
        else:
            if self.shard.skips(message):
                enter = msg.Enter(worker=message.worker, life=message.life, number=0, clock=message.clock)
                self._append(enter, NOTHING, now)
            if self.shard.ask(message):
                self._answers.read([(message, None)], self._out)

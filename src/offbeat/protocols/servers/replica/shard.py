"""One shard of the parameters, as what it does with the entries of its log: the same entries, the same shard.

It knows nothing of replicas, networks and time. Given an entry it answers which work must be done on the numbers, what
the senders are told, and which reads have become due. Every replica of a shard runs this on the same log.

Under a rule that aggregates (`bsp`, `drop_slowest`, `deadline`, codes) a step's gradients are summed, each weighted by
its examples, and applied once, over the total weight received. A worker's step counts whole or not at all: parts of it
are held, unanswered, until the last one has come, unless they count alone, as microbatches do whose worker may not
finish in time. Coded answers are held until they suffice for the sum of all workers' gradients; then each is used by
its coefficient in that sum, and the rest are discarded.

Under `ssp` and `asp` every push is applied as it comes, with weight 1/p, so that p of them move the model as far as one
synchronous step. The staleness of a read at clock c is how far the slowest clock fully included is behind: c - minimum,
at least 0. A read is due once minimum >= c - s, so it sees all updates of clocks up to c - s (exclusive, as clocks
count finished steps), and its staleness is at most s.

Correcting a late gradient by how far the values have moved since takes the values it was computed from, also after a
failover. Reads are not in the log. But replicas have the same values at the same version, and no worker computes from
an older version than it has before: so each replica keeps all versions from the oldest of those on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from offbeat.protocols.machine import NOTHING, Effects, Payload, Start
from offbeat.protocols.servers import messages as msg
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import Load, Pull, Push, ShardState
from offbeat.protocols.servers.pacing import Pacing
from offbeat.protocols.servers.replica.totals import ReductionToken, StepTotals
from offbeat.protocols.servers.replica.works import (
    AccumulateGradient,
    Ask,
    EntryOutcome,
    PushAnswer,
    ReduceGradients,
    Restore,
    Update,
    UpdateProof,
)


class PushedGradient(NamedTuple):
    """A push with its numbers, and the reason why they are unusable; empty: usable."""

    push: Push
    payload: Payload
    unfit: str


class StepSum:
    """The open step, under a rule that aggregates: what is held of it, and its weight."""

    def __init__(self, rule: Rule, pacing: Pacing[Ask], totals: StepTotals) -> None:
        self.settings: msg.Settings = ()  # The latest settings of the optimizer's groups.
        self._rule, self._pacing, self._totals = rule, pacing, totals
        self._held: dict[int, list[PushedGradient]] = {}
        self._weight = 0.0
        self._senders: tuple[int, ...] = ()

    @property
    def weight(self) -> float:
        """Weight of what is summed."""
        return self._weight

    @property
    def empty(self) -> bool:
        """Whether nothing is held or summed."""
        return not self._held and not self._weight

    def clear(self, held: bool) -> None:
        """Drop the sum, and what is held too if `held`."""
        self._weight, self._senders = 0.0, ()
        if held:
            self._held.clear()

    def holds(self, worker: int, number: int) -> bool:
        """Whether this push is an unanswered part that waits for the step's last one."""
        return any(part.push.number == number for part in self._held.get(worker, ()))

    def collect(self, part: PushedGradient, outcome: EntryOutcome) -> None:
        """Take a push for the open step; one for another step is answered and discarded."""
        push, step = part.push, self._pacing.completed
        if push.clock < step:
            outcome.settle(push, part.payload, "late")
        elif push.clock > step:
            reason = f"it is for step {push.clock} while step {step} is open: pull before pushing on"
            outcome.settle(push, part.payload, "refused", reason)
        elif self._totals.sealed is not None:
            self._held.setdefault(push.worker, []).append(part)  # Answered when the step is closed.
        elif push.counts and not push.last:
            self._add([part], outcome)
        else:
            self._held.setdefault(push.worker, []).append(part)
            if push.last:
                self._finish(push, outcome)

    def _finish(self, last: Push, outcome: EntryOutcome) -> None:
        """A worker's step is whole. Coded parts are held until there are enough; anything else joins the sum."""
        if not self._rule.coded:
            self._add(self._held.pop(last.worker), outcome)
        elif not _unfit(self._held[last.worker]):
            self._pacing.contribute(last.worker)
        self._pacing.finish(last.worker, last.clock + 1)

    def _add(self, parts: list[PushedGradient], outcome: EntryOutcome, factor: float = 1.0) -> None:
        """Parts that belong together join the sum; if any of them is unusable, none is used."""
        last, unfit = parts[-1].push, _unfit(parts)
        weight = factor * last.weight
        for part in parts:
            push = part.push
            if part.payload.nbytes and not unfit:
                outcome.works.append(AccumulateGradient(part.payload, weight, push.start, push.stop, push.absent))
            outcome.settle(push, part.payload, "refused" if unfit else "applied", unfit)
        if not unfit:
            self._weight += weight
            self._senders += (last.worker,) * len(parts)
            self._pacing.contribute(last.worker)
        self.settings = last.settings or self.settings  # Sent once, maybe with numbers that are unusable.

    def close(self, outcome: EntryOutcome) -> tuple[float, tuple[int, ...]]:
        """Complete the open step and go on to the next; returns the weight of its sum, and each push's sender."""
        if self._rule.coded:
            self._combine(outcome)
            if self._rule.cyclic and self._weight:
                self._weight = 1.0  # Answers are shares of the mean over all examples; coefficients are not.
        weight, senders = self._weight, self._senders
        self._weight, self._senders = 0.0, ()
        self._pacing.close()
        return weight, senders

    def give_up_on_the_slow(self, outcome: EntryOutcome) -> None:
        """Answer parts held for steps that were completed without them as late."""
        late = [who for who, parts in self._held.items() if parts[0].push.clock < self._pacing.completed]
        for part in [part for worker in late for part in self._held.pop(worker)]:
            outcome.settle(part.push, part.payload, "late")

    def _combine(self, outcome: EntryOutcome) -> None:
        """A coded step is complete: use the answers, each by its coefficient."""
        coefficients = self._pacing.coefficients()
        for worker, parts in [entry for entry in self._held.items() if entry[1][-1].push.last]:
            del self._held[worker]
            factor = 1.0 if coefficients is None else float(coefficients[worker])
            if _unfit(parts) or (coefficients is not None and factor):
                self._add(parts, outcome, factor)
                continue
            for part in parts:
                if coefficients is None:
                    outcome.settle(part.push, part.payload, "refused", "too many workers are gone for its code")
                else:
                    outcome.settle(part.push, part.payload, "late")

    def leave(self, worker: int, outcome: EntryOutcome) -> None:
        """A worker is no longer a member: discard what is held of it."""
        for part in self._held.pop(worker, []):
            outcome.settle(part.push, part.payload, "refused", "its sender does not take part")


def _unfit(parts: list[PushedGradient]) -> str:
    """Why a step in these parts is unusable; empty if it is usable."""
    return next((part.unfit for part in parts if part.unfit), "")


class Shard:
    """The deterministic core of one shard."""

    def __init__(self, rule: Rule, view: msg.ClusterView, number: int = 0) -> None:
        self.rule, self._number = rule, number
        self.version = 0  # Updates that were applied.
        self.counts: Counter[str] = Counter()  # Pushes by status: applied, duplicate, late, refused.
        self.staleness: Counter[int] = Counter()  # Reads by how stale they were.
        self._members = view.members_of(number)
        self.pacing: Pacing[Ask] = Pacing(rule, self._members)  # Who may start a step.
        self.totals = StepTotals(rule.reductions, number)  # Of the step that waits for other shards.
        self._sum = StepSum(rule, self.pacing, self.totals)
        self._next = dict.fromkeys(self._members, 0)  # Each worker's next push: taken in order, so that `last` is last.
        self._asked: set[tuple[int, int, int]] = set()
        self._unwritten: dict[int, list[Ask]] = {}  # They wait for a push of their own.
        self._origins: dict[int, int] = {}  # For each worker, the version that its last gradient was computed from.

    @property
    def minimum(self) -> int:
        """Steps that are complete: all their updates are in the values."""
        return self.pacing.minimum

    @property
    def members(self) -> Mapping[int, int]:
        """The members, and the life that each is in."""
        return self._members

    @property
    def between_steps(self) -> bool:
        """Whether nothing of a step is held or summed: every push taken is in the values."""
        return self._sum.empty and self.totals.sealed is None

    def expected(self, worker: int, life: int) -> int:
        """The number of the next push of a worker in this life."""
        return self._next[worker] if self._members.get(worker) == life else 0

    def knows(self, worker: int, life: int, number: int) -> bool:
        """Whether this push was seen before."""
        return number < self.expected(worker, life)

    def has_answered(self, push: Push | Load) -> bool:
        """Whether this push was seen before, and is not a part that waits for its step's last one."""
        return self.knows(push.worker, push.life, push.number) and not self._sum.holds(push.worker, push.number)

    def skips(self, ask: Ask) -> bool:
        """Whether the reader continues from a later step than the shard awaits from it.

        It was late elsewhere, and another shard's clock is ahead of this one's. Unless the log says so (`Enter`), this
        shard may wait for a step that nobody does any more.
        """
        awaited = self.pacing.clocks.get(ask.worker)
        if awaited is None or not self.rule.closes or not isinstance(ask, Pull):
            return False
        return ask.clock > awaited and self.knows(ask.worker, ask.life, ask.after)

    # State.

    def taken(self, members: Mapping[int, int]) -> dict[int, tuple[int, int, int]]:
        """For each of these workers: its life, how many of its pushes are in the values, and its clock."""
        return {
            worker: (life, self._next[worker], self.pacing.clocks.get(worker) or 0)
            if self._members.get(worker) == life
            else (life, 0, 0)
            for worker, life in members.items()
        }

    def state(self) -> ShardState:
        """The state without its numbers; only between two steps."""
        clocks = self.pacing.clocks
        return ShardState(
            version=self.version,
            completed=self.pacing.completed,
            minimum=clocks.minimum,
            workers=tuple(
                (who, life, self._next[who], -1 if (clock := clocks.get(who)) is None else clock)
                for who, life in self._members.items()
            ),
            order=tuple(clocks.workers),
            settings=self._sum.settings,
            overdue=self.pacing.overdue,
            counts=dict(self.counts),
            origins=tuple(self._origins.items()) if self.rule.remembers else (),
            totals=self.totals.last,
        )

    def adopt(self, state: ShardState) -> None:
        """Take over another replica's state."""
        self.version, self.counts = state.version, Counter(state.counts)
        self._members = {who: life for who, life, _, _ in state.workers}
        self._next = {who: number for who, _, number, _ in state.workers}
        clocks = {who: clock for who, _, _, clock in state.workers}
        order = [(worker, clocks[worker]) for worker in state.order]
        self.pacing.restart(state.completed, state.minimum, order, state.overdue)
        self.pacing.forget()
        self._sum.clear(held=True)
        self._sum.settings = state.settings
        self.totals.restart(state.totals)
        self._asked, self._unwritten = set(), {}
        self._origins = dict(state.origins)

    # Entries and reads.

    def apply(self, entry: msg.Entry, payload: Payload = NOTHING, out: Effects | None = None) -> EntryOutcome:
        """Apply the next entry of the log, and begin the resulting work on the numbers."""
        outcome = EntryOutcome()
        before = self.minimum
        match entry:
            case Push() | msg.PushRefused():
                push, unfit = (entry, "") if isinstance(entry, Push) else (entry.push, entry.reason)
                if self._is_new(push, payload, outcome):
                    take = self._sum.collect if self.rule.aggregated else self._apply_alone
                    take(PushedGradient(push, payload, unfit), outcome)
            case msg.LoadRefused():
                if self._is_new(entry.load, payload, outcome):
                    outcome.settle(entry.load, payload, "refused", entry.reason)
            case Load():
                self._load(entry, payload, outcome)
            case msg.Enter():
                self._enter(entry, outcome)
            case msg.StepDeadline():
                self.pacing.expire(entry.step)
            case msg.Members():
                self._change(entry.view, outcome)
            case msg.ShardTotals():
                self.totals.take(entry)
        while self.totals.may_close(self.pacing, self._sum.weight, self._sum.settings, outcome):
            step = self.pacing.completed
            weight, senders = self._sum.close(outcome)
            if weight > 0:
                self.version += 1
                workers = len(self.pacing.clocks)
                update = Update(self.version, 1 / weight, self._sum.settings, workers=workers)
                outcome.works.append(self.totals.given_to(update))
                outcome.unproven += [UpdateProof(self.version, step, senders)] if self.rule.proves else []
            self.totals.close()
            self._sum.give_up_on_the_slow(outcome)
        outcome.moved = self.minimum > before
        self.counts.update(outcome.statuses)
        if out is not None:
            proofs = {proof.version: proof for proof in outcome.unproven}
            for work in outcome.works:
                token = proofs.get(work.version) if isinstance(work, Update) else None
                if isinstance(work, ReduceGradients):
                    token = ReductionToken(self.pacing.completed, work.level)
                out.done.append(Start(work, token))
        self._release(outcome)
        return outcome

    def ask(self, ask: Ask) -> bool:
        """Whether a read is due now; if not, it waits, and an `EntryOutcome` will name it."""
        if self._members.get(ask.worker) != ask.life:
            return False
        key = (ask.worker, ask.life, ask.number)
        if key in self._asked:
            return False
        if ask.after >= 0 and not self.knows(ask.worker, ask.life, ask.after):
            self._asked.add(key)
            self._unwritten.setdefault(ask.worker, []).append(ask)
            return False
        needed = self.rule.needed(ask.clock) if isinstance(ask, Pull) else ask.clock
        if not self.pacing.admits(needed, ask):
            self._asked.add(key)
            return False
        if isinstance(ask, Pull):
            self.staleness[max(0, ask.clock - self.minimum)] += 1
        return True

    def _is_new(self, push: Push | Load, payload: Payload, outcome: EntryOutcome) -> bool:
        """Whether a push is new and from a member; else it is answered and discarded."""
        if self._members.get(push.worker) != push.life or push.worker not in self.pacing.clocks:
            outcome.settle(push, payload, "refused", "its sender does not take part")
            return False
        if self.knows(push.worker, push.life, push.number):
            outcome.settle(push, payload, "duplicate")
            return False
        self._next[push.worker] = push.number + 1
        return True

    def _apply_alone(self, gradient: PushedGradient, outcome: EntryOutcome) -> None:
        push, payload, unfit = gradient.push, gradient.payload, gradient.unfit
        if payload.nbytes and not unfit:
            missed = max(0, self.version - push.version)
            oldest = self._oldest() if self.rule.remembers else None
            self._origins[push.worker] = min(push.version, self.version)
            self.version += 1
            workers = len(self.pacing.clocks)
            gradient_of = (push.start, push.stop, payload, missed, push.absent, oldest, workers, push.totals)
            outcome.works.append(Update(self.version, 1 / workers, push.settings, *gradient_of))
            outcome.unproven += [UpdateProof(self.version, push.clock, (push.worker,))] if self.rule.proves else []
        outcome.settle(push, payload, "refused" if unfit else "applied", unfit)
        if push.last:
            self.pacing.finish(push.worker, push.clock + 1)

    def _oldest(self) -> int:
        """The oldest version that a coming gradient may be computed from; 0 for workers that have not pushed yet."""
        return min((self._origins.get(worker, 0) for worker in self.pacing.clocks.workers), default=0)

    def _load(self, load: Load, payload: Payload, outcome: EntryOutcome) -> None:
        if not self._is_new(load, payload, outcome):
            return
        self.version = load.version
        outcome.works.append(Restore(payload, load.version))
        outcome.settle(load, payload, "applied")
        clocks = dict.fromkeys(self.pacing.clocks.workers, load.clock)
        for worker, pushes, clock in load.took:
            if worker in clocks:
                clocks[worker] = clock
                self._next[worker] = pushes
        self.pacing.restart(load.clock, load.clock, clocks.items())
        self._origins.clear()
        self._sum.clear(held=False)
        self.totals.restart()

    def _enter(self, enter: msg.Enter, outcome: EntryOutcome) -> None:
        if self._members.get(enter.worker) != enter.life:
            return
        self._origins.setdefault(enter.worker, self.version)
        entered = self.pacing.enter(enter.worker, max(enter.clock, self.totals.open_step(self.pacing.completed)))
        if enter.number:
            outcome.answers.append(PushAnswer(enter.worker, enter.life, enter.number, "applied", entered=entered))

    def _change(self, view: msg.ClusterView, outcome: EntryOutcome) -> None:
        """Drop workers that are no longer members. New ones count once they have entered."""
        now = view.members_of(self._number)
        for worker, life in list(self._members.items()):
            if now.get(worker) == life:
                continue
            self._sum.leave(worker, outcome)
            self.pacing.leave(worker)
            self._unwritten.pop(worker, None)
            self._origins.pop(worker, None)
            del self._next[worker]
        self._next |= {worker: 0 for worker in now if worker not in self._next}
        self._members = now

    def _release(self, outcome: EntryOutcome) -> None:
        """List the reads that are due now: all that the minimum allows, and those that waited for a push of theirs."""
        ready = self.pacing.released()
        for answer in outcome.answers:
            ready += self._unwritten.pop(answer.worker, [])
        for ask in ready:
            self._asked.discard((ask.worker, ask.life, ask.number))
        outcome.due += [ask for ask in ready if self.ask(ask)]

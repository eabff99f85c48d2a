"""One shard of the parameters, as what it does with the entries of its log: the same entries, the same shard.

It knows nothing of replicas, networks and time. Given an entry it answers which work is to be done on the numbers, what
the senders are told, and which reads have become due. Every replica of a shard runs this on the same log.

Under a rule that aggregates (`bsp`, `drop_slowest`, `deadline`, codes) a step's gradients are summed and applied once:
see `step_sum`. Under `ssp` and `asp` every push is applied as it comes, with weight 1/p, so that p of them move the
model as far as one synchronous step.

The staleness of a read at clock c is how far the slowest clock that is fully in it is behind: c - minimum, at least 0.
A read is due once minimum >= c - s, so it sees all updates of clocks up to c - s (exclusive, as clocks count finished
steps), and its staleness is at most s.

Where gradients that come late are corrected by how far the values have moved since, what they were computed from must
be known, and to whoever takes over, too. Reads are not in the log. But replicas have the same values at the same
version, and nobody computes from an older version than it has done before: so each replica keeps, by itself, all
versions from the oldest of those on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from offbeat.protocols.machine import NOTHING, Effects, Payload, Start
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import (
    ClusterView,
    Enter,
    Entry,
    Load,
    Members,
    Pull,
    Push,
    PushRefused,
    ShardState,
    StepDeadline,
)
from offbeat.protocols.servers.pacing import Pacing
from offbeat.protocols.servers.replica.step_sum import PushedGradient, StepSum
from offbeat.protocols.servers.replica.works import Ask, EntryOutcome, PushAnswer, Restore, Update


class Shard:
    """The deterministic core of one shard."""

    def __init__(self, rule: Rule, view: ClusterView) -> None:
        self.rule = rule
        self.version = 0
        """Updates that were applied."""
        self.counts: Counter[str] = Counter()
        """Pushes by what became of them: applied, duplicate, late, refused."""
        self.staleness: Counter[int] = Counter()
        """Reads by how stale they were."""
        self._members = view.members
        self.pacing: Pacing[Ask] = Pacing(rule, self._members)
        """Who may start a step."""
        self._sum = StepSum(rule, self.pacing)
        self._next = dict.fromkeys(self._members, 0)
        """The number of each worker's next push: they are taken in order, so that `last` is last."""
        self._asked: set[tuple[int, int, int]] = set()
        self._unwritten: dict[int, list[Ask]] = {}
        self._origins: dict[int, int] = {}
        """Of each worker, the version that its last gradient was computed from."""

    @property
    def minimum(self) -> int:
        """Steps that are complete: all their updates are in the values."""
        return self.pacing.minimum

    @property
    def members(self) -> Mapping[int, int]:
        """The workers that take part, and the life that each is in."""
        return self._members

    @property
    def between_steps(self) -> bool:
        """Whether nothing of a step is held or summed up: all that was taken is in the values."""
        return self._sum.empty

    def expected(self, worker: int, life: int) -> int:
        """The number of the next push of a worker in this life."""
        return self._next[worker] if self._members.get(worker) == life else 0

    def knows(self, worker: int, life: int, number: int) -> bool:
        """Whether this push has been met before."""
        return number < self.expected(worker, life)

    def has_answered(self, push: Push | Load) -> bool:
        """Whether this push has been met before, and is not a part that waits for its step's last one."""
        return self.knows(push.worker, push.life, push.number) and not self._sum.holds(push.worker, push.number)

    def skips(self, ask: Ask) -> bool:
        """Whether the reader goes on from a later step than the shard awaits of it.

        It was late elsewhere, and another shard's clock is ahead of this one's. Unless the log says so (`Enter`), this
        shard may wait for a step that nobody does any more.
        """
        awaited = self.pacing.clocks.get(ask.worker)
        if awaited is None or not self.rule.closes or not isinstance(ask, Pull):
            return False
        return ask.clock > awaited and self.knows(ask.worker, ask.life, ask.after)

    # What it is.

    def taken(self, members: Mapping[int, int]) -> dict[int, tuple[int, int, int]]:
        """Of each of these workers: its life, how many of its pushes are in the values, and its clock."""
        return {
            worker: (life, self._next[worker], self.pacing.clocks.get(worker) or 0)
            if self._members.get(worker) == life
            else (life, 0, 0)
            for worker, life in members.items()
        }

    def state(self) -> ShardState:
        """What this is, without its numbers; only between two steps."""
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
        )

    def adopt(self, state: ShardState) -> None:
        """Be what another replica is."""
        self.version, self.counts = state.version, Counter(state.counts)
        self._members = {who: life for who, life, _, _ in state.workers}
        self._next = {who: number for who, _, number, _ in state.workers}
        clocks = {who: clock for who, _, _, clock in state.workers}
        order = [(worker, clocks[worker]) for worker in state.order]
        self.pacing.restart(state.completed, state.minimum, order, state.overdue)
        self.pacing.forget()
        self._sum.clear(held=True)
        self._sum.settings = state.settings
        self._asked, self._unwritten = set(), {}
        self._origins = dict(state.origins)

    # What it does.

    def apply(self, entry: Entry, payload: Payload = NOTHING, out: Effects | None = None) -> EntryOutcome:
        """Take the next entry of the log, and begin the work on the numbers that follows from it."""
        outcome = EntryOutcome()
        before = self.minimum
        match entry:
            case Push() | PushRefused():
                push, unfit = (entry, "") if isinstance(entry, Push) else (entry.push, entry.reason)
                if self._is_new(push, payload, outcome):
                    take = self._sum.collect if self.rule.aggregated else self._apply_alone
                    take(PushedGradient(push, payload, unfit), outcome)
            case Load():
                self._load(entry, payload, outcome)
            case Enter():
                self._enter(entry, outcome)
            case StepDeadline():
                self.pacing.expire(entry.step)
            case Members():
                self._change(entry.view, outcome)
        while self.pacing.is_complete():
            if (weight := self._sum.close(outcome)) > 0:
                self.version += 1
                outcome.works.append(Update(self.version, 1 / weight, self._sum.settings))
            self._sum.give_up_on_the_slow(outcome)
        outcome.moved = self.minimum > before
        self.counts.update(outcome.statuses)
        if out is not None:
            out.done += [Start(work) for work in outcome.works]
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
        """Whether a push is of one who takes part, and new; else it is answered and left unused."""
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
            scale, given = 1 / len(self.pacing.clocks), (payload, missed, push.absent, oldest)
            outcome.works.append(Update(self.version, scale, push.settings, push.start, push.stop, *given))
        outcome.settle(push, payload, "refused" if unfit else "applied", unfit)
        if push.last:
            self.pacing.finish(push.worker, push.clock + 1)

    def _oldest(self) -> int:
        """No gradient will come that was computed from an older version; of who has not pushed yet nothing is known."""
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

    def _enter(self, enter: Enter, outcome: EntryOutcome) -> None:
        if self._members.get(enter.worker) != enter.life:
            return
        self._origins.setdefault(enter.worker, self.version)
        entered = self.pacing.enter(enter.worker, enter.clock)
        if enter.number:
            outcome.answers.append(PushAnswer(enter.worker, enter.life, enter.number, "applied", entered=entered))

    def _change(self, view: ClusterView, outcome: EntryOutcome) -> None:
        """Let go of those who no longer take part. Those who are new count once they have entered."""
        now = view.members
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
        """Name the reads that are due now: all that the minimum allows, and those that waited for a push of theirs."""
        ready = self.pacing.released()
        for answer in outcome.answers:
            ready += self._unwritten.pop(answer.worker, [])
        for ask in ready:
            self._asked.discard((ask.worker, ask.life, ask.number))
        outcome.due += [ask for ask in ready if self.ask(ask)]

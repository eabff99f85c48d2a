"""One shard of the parameters, as what it does with the entries of its log: the same entries, the same shard.

It knows nothing of replicas, networks and time. Given an entry it answers which work is to be done on the numbers, what
the senders are told, and which reads have become due. Every replica of a shard runs this on the same log.

Under a rule that aggregates (`bsp`, `drop_slowest`, `deadline`) a step's gradients are summed, each weighted by its
examples, and applied once, over the total weight of what came. A worker's step counts whole or not at all: parts of it
are held, unanswered, until the last one has come; unless they say that they count by themselves, as microbatches do
whose worker may not come to its last one in time. Under `ssp` and `asp` every push is applied as it comes, with weight
1/p, so that p of them move the model as far as one synchronous step.

Where steps are coded, answers are held until they are enough to have the sum of all workers' gradients from; then each
is used by its coefficient in that sum, and those that are not needed are discarded.

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
from dataclasses import dataclass, field

from offbeat.errors import UsageError
from offbeat.protocols.coding import Matrix, code_for
from offbeat.protocols.machine import NOTHING, Payload
from offbeat.protocols.servers.consistency import Clocks, Parked, Rule
from offbeat.protocols.servers.messages import (
    ClusterView,
    Deadline,
    Enter,
    Entry,
    Fetch,
    Load,
    Members,
    Pull,
    Push,
    Refused,
    Settings,
    ShardState,
    Status,
)

Ask = Pull | Fetch
"""A read that a worker has asked for."""


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Add `weight` times a gradient, which covers [start, stop) of the shard, to the sum of this step."""

    payload: Payload
    weight: float
    start: int
    stop: int
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges of the shard, inside of that, that have no gradient."""


@dataclass(frozen=True, slots=True)
class Update:
    """Apply `scale` times a gradient to [start, stop) of the shard, and with it reach this version."""

    version: int
    scale: float
    settings: Settings
    start: int = 0
    stop: int = -1
    payload: Payload | None = None
    """The gradient; none: the sum of this step, which is then cleared."""
    missed: int = 0
    """Updates that have come since the values were read that the gradient was computed from."""
    absent: tuple[tuple[int, int], ...] = ()
    """Ranges of the shard that the given gradient does not have."""
    oldest: int | None = None
    """Keep the values as they are before this update, and of earlier ones those from this version on; None: none."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Leave a gradient unused: its memory is about to be its sender's again."""

    payload: Payload


@dataclass(frozen=True, slots=True)
class Restore:
    """Put back a state, which has this version, and clear the sum."""

    payload: Payload
    version: int


Work = Accumulate | Update | Discard | Restore


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker is told about what it sent."""

    worker: int
    life: int
    number: int
    status: Status
    reason: str = ""
    then_pull: int = 0
    """Number of the pull that is to follow; 0: none."""
    step: int = 0
    entered: int | None = None
    """The clock from which the worker is waited for, if that is what it asked for."""


@dataclass(slots=True)
class Outcome:
    """What follows from an entry."""

    works: list[Work] = field(default_factory=list[Work])
    answers: list[Answer] = field(default_factory=list[Answer])
    due: list[Ask] = field(default_factory=list[Ask])
    """Reads that waited for this."""
    moved: bool = False
    """More steps are complete than before."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a step that is held until the step's last one has come."""

    push: Push
    payload: Payload
    unfit: str


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
        self._code = code_for(len(self._members), rule.coded, rule.cyclic) if rule.coded else None
        self._clocks = Clocks(self._members)
        self._next = dict.fromkeys(self._members, 0)
        self._held: dict[int, list[_Part]] = {}
        self._completed = 0
        self._weight = 0.0
        self._settings: Settings = ()
        self._overdue = False
        self._parked: Parked[Ask] = Parked()
        self._asked: set[tuple[int, int, int]] = set()
        self._unwritten: dict[int, list[Ask]] = {}
        self._origins: dict[int, int] = {}
        """Of each worker, the version that its last gradient was computed from."""

    @property
    def minimum(self) -> int:
        """Steps that are complete: all their updates are in the values."""
        return self._completed if self.rule.aggregated else self._clocks.minimum

    @property
    def members(self) -> Mapping[int, int]:
        """The workers that take part, and the life that each is in."""
        return self._members

    @property
    def begun(self) -> bool:
        """Something has arrived for the step that is open."""
        return self._weight > 0

    def expected(self, worker: int) -> int:
        """The number of the worker's next push: they are taken in order, so that `last` is last."""
        return self._next[worker]

    def clock(self, worker: int) -> int:
        """Steps that a worker has finished, as far as its pushes say."""
        return self._clocks.get(worker) or 0

    def knows(self, worker: int, life: int, number: int) -> bool:
        """Whether this push has been met before."""
        return self._members.get(worker) == life and number < self._next[worker]

    def skips(self, ask: Ask) -> bool:
        """Whether the reader goes on from a later step than the shard awaits of it.

        It was late elsewhere, and another shard's clock is ahead of this one's. Unless the log says so (`Enter`), this
        shard may wait for a step that nobody does any more.
        """
        awaited = self._clocks.get(ask.worker)
        if awaited is None or not self.rule.closes or not isinstance(ask, Pull):
            return False
        return ask.clock > awaited and self.knows(ask.worker, ask.life, ask.after)

    @property
    def between_steps(self) -> bool:
        """Whether nothing of a step is held or summed up: all that was taken is in the values."""
        return not self._held and not self._weight

    def state(self) -> ShardState:
        """What this is, without its numbers; only between two steps."""
        return ShardState(
            version=self.version,
            completed=self._completed,
            minimum=self._clocks.minimum,
            workers=tuple(
                (who, life, self._next[who], -1 if who not in self._clocks else self._clocks.of(who))
                for who, life in self._members.items()
            ),
            order=tuple(self._clocks.workers),
            settings=self._settings,
            overdue=self._overdue,
            counts=dict(self.counts),
            origins=tuple(self._origins.items()) if self.rule.remembers else (),
        )

    def adopt(self, state: ShardState) -> None:
        """Be what another replica is."""
        self.version, self.counts = state.version, Counter(state.counts)
        self._members = {who: life for who, life, _, _ in state.workers}
        self._next = {who: number for who, _, number, _ in state.workers}
        clocks = {who: clock for who, _, _, clock in state.workers}
        self._clocks = Clocks((), state.minimum)
        for worker in state.order:
            self._clocks.join(worker, clocks[worker])
        self._held, self._weight = {}, 0.0
        self._completed, self._settings, self._overdue = state.completed, state.settings, state.overdue
        self._parked, self._asked, self._unwritten = Parked(), set(), {}
        self._origins = dict(state.origins)

    def holds(self, worker: int, number: int) -> bool:
        """Whether this push is a part that waits for the step's last one, and is not answered yet."""
        return any(part.push.number == number for part in self._held.get(worker, ()))

    def apply(self, entry: Entry, payload: Payload = NOTHING) -> Outcome:
        """Take the next entry of the log."""
        outcome = Outcome()
        before = self.minimum
        match entry:
            case Push():
                self._push(entry, payload, outcome)
            case Refused():
                self._push(entry.push, payload, outcome, entry.reason)
            case Load():
                self._load(entry, payload, outcome)
            case Enter():
                self._enter(entry, outcome)
            case Deadline():
                self._overdue = entry.step == self._completed
            case Members():
                self._change(entry.view, outcome)
        if self.rule.aggregated:
            self._complete_steps(outcome)
        outcome.moved = self.minimum > before
        self._release(outcome)
        return outcome

    def ask(self, ask: Ask) -> bool:
        """Whether a read is due now; if not, it waits, and an `Outcome` will name it."""
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
        if self.minimum < needed:
            self._asked.add(key)
            self._parked.park(needed, ask)
            return False
        if isinstance(ask, Pull):
            self.staleness[max(0, ask.clock - self.minimum)] += 1
        return True

    def _push(self, push: Push, payload: Payload, outcome: Outcome, unfit: str = "") -> None:
        if not self._meet(push, payload, outcome):
            return
        if self.rule.aggregated:
            self._collect(_Part(push, payload, unfit), outcome)
        else:
            self._apply_alone(_Part(push, payload, unfit), outcome)

    def _meet(self, push: Push | Load, payload: Payload, outcome: Outcome) -> bool:
        """Whether a push is of one who takes part, and new; else it is answered and left unused."""
        if self._members.get(push.worker) != push.life or push.worker not in self._clocks:
            self._settle(push, payload, outcome, "refused", "its sender does not take part")
            return False
        if self.knows(push.worker, push.life, push.number):
            self._settle(push, payload, outcome, "duplicate")
            return False
        self._next[push.worker] = push.number + 1
        return True

    def _settle(self, push: Push | Load, payload: Payload, outcome: Outcome, status: Status, reason: str = "") -> None:
        """Answer a push; unless it was applied, leave it unused."""
        if isinstance(push, Push):
            self.counts[status] += 1
        if status != "applied" and payload.nbytes:
            outcome.works.append(Discard(payload))
        then_pull, step = (push.then_pull, push.clock) if isinstance(push, Push) else (0, 0)
        outcome.answers.append(Answer(push.worker, push.life, push.number, status, reason, then_pull, step))

    def _apply_alone(self, part: _Part, outcome: Outcome) -> None:
        push = part.push
        if part.payload.nbytes and not part.unfit:
            missed = max(0, self.version - push.version)
            oldest = self._oldest() if self.rule.remembers else None
            self._origins[push.worker] = min(push.version, self.version)
            self.version += 1
            scale, given = 1 / len(self._clocks), (part.payload, missed, push.absent, oldest)
            outcome.works.append(Update(self.version, scale, push.settings, push.start, push.stop, *given))
        self._settle(push, part.payload, outcome, "refused" if part.unfit else "applied", part.unfit)
        if push.last:
            self._clocks.tick(push.worker, push.clock + 1)

    def _oldest(self) -> int:
        """No gradient will come that was computed from an older version; of who has not pushed yet nothing is known."""
        return min((self._origins.get(worker, 0) for worker in self._clocks.workers), default=0)

    def _collect(self, part: _Part, outcome: Outcome) -> None:
        push = part.push
        if push.clock < self._completed:
            self._settle(push, part.payload, outcome, "late")
        elif push.clock > self._completed:
            reason = f"it is for step {push.clock} while step {self._completed} is open: pull before pushing on"
            self._settle(push, part.payload, outcome, "refused", reason)
        elif push.counts and not push.last:
            self._add([part], push, outcome)
        else:
            self._held.setdefault(push.worker, []).append(part)
            if push.last and self._code is not None:
                self._clocks.tick(push.worker, push.clock + 1)
            elif push.last:
                self._sum_up(push, self._held.pop(push.worker), outcome)

    def _whole(self) -> dict[int, list[_Part]]:
        """Answers to a coded step that are complete and fit to be used, by worker."""
        held = self._held.items()
        return {w: parts for w, parts in held if parts[-1].push.last and not any(part.unfit for part in parts)}

    def _coefficients(self) -> Matrix | None:
        """How much of each worker's answer to a coded step goes into the sum; None if there are not enough of them."""
        whole = self._whole()
        if self._code is None or len(whole) * (self._code.tolerated + 1) < self._code.workers:
            return None
        try:
            return self._code.decode(whole)
        except UsageError:
            return None

    def _combine(self, outcome: Outcome) -> None:
        """A coded step is complete: use what has come, each by its coefficient."""
        coefficients, whole = self._coefficients(), self._whole()
        for worker, parts in [entry for entry in self._held.items() if entry[1][-1].push.last]:
            del self._held[worker]
            factor = 1.0 if coefficients is None else float(coefficients[worker])
            if worker not in whole or (coefficients is not None and factor):
                self._sum_up(parts[-1].push, parts, outcome, factor)
                continue
            for part in parts:
                if coefficients is None:
                    self._settle(part.push, part.payload, outcome, "refused", "too many workers are gone for its code")
                else:
                    self._settle(part.push, part.payload, outcome, "late")

    def _sum_up(self, last: Push, parts: list[_Part], outcome: Outcome, factor: float = 1.0) -> None:
        """A worker's step is whole: it is done, and nobody waits for it."""
        self._add(parts, last, outcome, factor)
        self._clocks.tick(last.worker, last.clock + 1)

    def _add(self, parts: list[_Part], last: Push, outcome: Outcome, factor: float = 1.0) -> None:
        """Parts that belong together join the sum; if any of them is unfit, none is used."""
        unfit = next((part.unfit for part in parts if part.unfit), "")
        for part in parts:
            push = part.push
            if part.payload.nbytes and not unfit:
                weight = factor * last.weight
                outcome.works.append(Accumulate(part.payload, weight, push.start, push.stop, push.absent))
            self._settle(push, part.payload, outcome, "refused" if unfit else "applied", unfit)
        if not unfit:
            self._weight += factor * last.weight
        self._settings = last.settings or self._settings  # Told once: also with numbers that are not used.

    def _load(self, load: Load, payload: Payload, outcome: Outcome) -> None:
        if not self._meet(load, payload, outcome):
            return
        self.version = load.version
        outcome.works.append(Restore(payload, load.version))
        self._settle(load, payload, outcome, "applied")
        self._clocks = Clocks(self._clocks.workers, load.clock)
        for worker, pushes, clock in load.took:
            if worker in self._clocks:
                self._clocks.join(worker, clock)
                self._next[worker] = pushes
        self._completed = load.clock
        self._origins.clear()
        self._weight, self._overdue = 0.0, False

    def _enter(self, enter: Enter, outcome: Outcome) -> None:
        if self._members.get(enter.worker) != enter.life:
            return
        at = max(enter.clock, self.minimum)
        self._origins.setdefault(enter.worker, self.version)
        if enter.worker in self._clocks:
            self._clocks.tick(enter.worker, at)
        else:
            self._clocks.join(enter.worker, at)
        entered = self._clocks.of(enter.worker)
        if enter.number:
            outcome.answers.append(Answer(enter.worker, enter.life, enter.number, "applied", entered=entered))

    def _change(self, view: ClusterView, outcome: Outcome) -> None:
        """Let go of those who no longer take part. Those who are new count once they have entered."""
        now = view.members
        for worker, life in list(self._members.items()):
            if now.get(worker) == life:
                continue
            for part in self._held.pop(worker, []):
                self._settle(part.push, part.payload, outcome, "refused", "its sender does not take part")
            self._clocks.leave(worker)
            self._unwritten.pop(worker, None)
            self._origins.pop(worker, None)
            del self._next[worker]
        self._next |= {worker: 0 for worker in now if worker not in self._next}
        self._members = now

    def _complete_steps(self, outcome: Outcome) -> None:
        while self._is_complete():
            if self._code is not None:
                self._combine(outcome)
                if self.rule.cyclic and self._weight:
                    self._weight = 1.0  # Answers are shares of the mean over all examples; coefficients are not.
            if self._weight > 0:
                self.version += 1
                outcome.works.append(Update(self.version, 1 / self._weight, self._settings))
            self._completed += 1
            self._weight, self._overdue = 0.0, False
            if self._clocks.minimum < self._completed:
                self._give_up_on_the_slow(outcome)

    def _is_complete(self) -> bool:
        """Whether as many as are waited for have done the open step, or have said that they never will."""
        if not len(self._clocks):
            return False
        if self._clocks.minimum > self._completed:
            return True
        if not self.rule.closes:
            return False
        if self._code is not None:
            return self._coefficients() is not None
        done = sum(self._clocks.of(worker) > self._completed for worker in self._clocks.workers)
        if self._overdue:
            return done > 0 or self._weight > 0
        return done >= self.rule.enough(len(self._clocks))

    def _give_up_on_the_slow(self, outcome: Outcome) -> None:
        for worker in self._clocks.workers:
            self._clocks.tick(worker, self._completed)
            held = self._held.get(worker, [])
            if held and held[0].push.clock < self._completed:
                for part in self._held.pop(worker):
                    self._settle(part.push, part.payload, outcome, "late")

    def _release(self, outcome: Outcome) -> None:
        """Name the reads that are due now: all that the minimum allows, and those that waited for a push of theirs."""
        ready = self._parked.release(self.minimum)
        for answer in outcome.answers:
            ready += self._unwritten.pop(answer.worker, [])
        for ask in ready:
            self._asked.discard((ask.worker, ask.life, ask.number))
        outcome.due += [ask for ask in ready if self.ask(ask)]

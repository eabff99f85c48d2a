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

from offbeat.protocols.machine import NOTHING, Payload
from offbeat.protocols.servers.consistency import Rule
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
from offbeat.protocols.servers.pacing import Pacing

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
        self.pacing: Pacing[Ask] = Pacing(rule, self._members)
        """Who may start a step."""
        self._next = dict.fromkeys(self._members, 0)
        self._held: dict[int, list[_Part]] = {}
        self._weight = 0.0
        self._settings: Settings = ()
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

    def expected(self, worker: int) -> int:
        """The number of the worker's next push: they are taken in order, so that `last` is last."""
        return self._next[worker]

    def clock(self, worker: int) -> int:
        """Steps that a worker has finished, as far as its pushes say."""
        return self.pacing.clocks.get(worker) or 0

    def knows(self, worker: int, life: int, number: int) -> bool:
        """Whether this push has been met before."""
        return self._members.get(worker) == life and number < self._next[worker]

    def skips(self, ask: Ask) -> bool:
        """Whether the reader goes on from a later step than the shard awaits of it.

        It was late elsewhere, and another shard's clock is ahead of this one's. Unless the log says so (`Enter`), this
        shard may wait for a step that nobody does any more.
        """
        awaited = self.pacing.clocks.get(ask.worker)
        if awaited is None or not self.rule.closes or not isinstance(ask, Pull):
            return False
        return ask.clock > awaited and self.knows(ask.worker, ask.life, ask.after)

    @property
    def between_steps(self) -> bool:
        """Whether nothing of a step is held or summed up: all that was taken is in the values."""
        return not self._held and not self._weight

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
            settings=self._settings,
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
        self._held, self._weight, self._settings = {}, 0.0, state.settings
        self._asked, self._unwritten = set(), {}
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
                self.pacing.expire(entry.step)
            case Members():
                self._change(entry.view, outcome)
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
        if not self.pacing.admits(needed, ask):
            self._asked.add(key)
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
        if self._members.get(push.worker) != push.life or push.worker not in self.pacing.clocks:
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
            scale, given = 1 / len(self.pacing.clocks), (part.payload, missed, push.absent, oldest)
            outcome.works.append(Update(self.version, scale, push.settings, push.start, push.stop, *given))
        self._settle(push, part.payload, outcome, "refused" if part.unfit else "applied", part.unfit)
        if push.last:
            self.pacing.finish(push.worker, push.clock + 1)

    def _oldest(self) -> int:
        """No gradient will come that was computed from an older version; of who has not pushed yet nothing is known."""
        return min((self._origins.get(worker, 0) for worker in self.pacing.clocks.workers), default=0)

    def _collect(self, part: _Part, outcome: Outcome) -> None:
        push, step = part.push, self.pacing.completed
        if push.clock < step:
            self._settle(push, part.payload, outcome, "late")
        elif push.clock > step:
            reason = f"it is for step {push.clock} while step {step} is open: pull before pushing on"
            self._settle(push, part.payload, outcome, "refused", reason)
        elif push.counts and not push.last:
            self._add([part], push, outcome)
        else:
            self._held.setdefault(push.worker, []).append(part)
            if push.last:
                self._finish(push, outcome)

    def _finish(self, last: Push, outcome: Outcome) -> None:
        """A worker's step is whole. What is coded is held until there is enough of it; anything else joins the sum."""
        if not self.rule.coded:
            self._add(self._held.pop(last.worker), last, outcome)
        elif not _unfit(self._held[last.worker]):
            self.pacing.contribute(last.worker)
        self.pacing.finish(last.worker, last.clock + 1)

    def _combine(self, outcome: Outcome) -> None:
        """A coded step is complete: use what has come, each by its coefficient."""
        coefficients = self.pacing.coefficients()
        for worker, parts in [entry for entry in self._held.items() if entry[1][-1].push.last]:
            del self._held[worker]
            factor = 1.0 if coefficients is None else float(coefficients[worker])
            if _unfit(parts) or (coefficients is not None and factor):
                self._add(parts, parts[-1].push, outcome, factor)
                continue
            for part in parts:
                if coefficients is None:
                    self._settle(part.push, part.payload, outcome, "refused", "too many workers are gone for its code")
                else:
                    self._settle(part.push, part.payload, outcome, "late")

    def _add(self, parts: list[_Part], last: Push, outcome: Outcome, factor: float = 1.0) -> None:
        """Parts that belong together join the sum; if any of them is unfit, none is used."""
        unfit = _unfit(parts)
        for part in parts:
            push = part.push
            if part.payload.nbytes and not unfit:
                weight = factor * last.weight
                outcome.works.append(Accumulate(part.payload, weight, push.start, push.stop, push.absent))
            self._settle(push, part.payload, outcome, "refused" if unfit else "applied", unfit)
        if not unfit:
            self._weight += factor * last.weight
            self.pacing.contribute(last.worker)
        self._settings = last.settings or self._settings  # Told once: also with numbers that are not used.

    def _load(self, load: Load, payload: Payload, outcome: Outcome) -> None:
        if not self._meet(load, payload, outcome):
            return
        self.version = load.version
        outcome.works.append(Restore(payload, load.version))
        self._settle(load, payload, outcome, "applied")
        clocks = dict.fromkeys(self.pacing.clocks.workers, load.clock)
        for worker, pushes, clock in load.took:
            if worker in clocks:
                clocks[worker] = clock
                self._next[worker] = pushes
        self.pacing.restart(load.clock, load.clock, clocks.items())
        self._origins.clear()
        self._weight = 0.0

    def _enter(self, enter: Enter, outcome: Outcome) -> None:
        if self._members.get(enter.worker) != enter.life:
            return
        self._origins.setdefault(enter.worker, self.version)
        entered = self.pacing.enter(enter.worker, enter.clock)
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
            self.pacing.leave(worker)
            self._unwritten.pop(worker, None)
            self._origins.pop(worker, None)
            del self._next[worker]
        self._next |= {worker: 0 for worker in now if worker not in self._next}
        self._members = now

    def _complete_steps(self, outcome: Outcome) -> None:
        while self.pacing.is_complete():
            if self.rule.coded:
                self._combine(outcome)
                if self.rule.cyclic and self._weight:
                    self._weight = 1.0  # Answers are shares of the mean over all examples; coefficients are not.
            if self._weight > 0:
                self.version += 1
                outcome.works.append(Update(self.version, 1 / self._weight, self._settings))
            self._weight = 0.0
            self.pacing.close()
            self._give_up_on_the_slow(outcome)

    def _give_up_on_the_slow(self, outcome: Outcome) -> None:
        """What is held of steps that were completed without it is late."""
        late = [who for who, parts in self._held.items() if parts[0].push.clock < self.pacing.completed]
        for part in [part for worker in late for part in self._held.pop(worker)]:
            self._settle(part.push, part.payload, outcome, "late")

    def _release(self, outcome: Outcome) -> None:
        """Name the reads that are due now: all that the minimum allows, and those that waited for a push of theirs."""
        ready = self.pacing.released()
        for answer in outcome.answers:
            ready += self._unwritten.pop(answer.worker, [])
        for ask in ready:
            self._asked.discard((ask.worker, ask.life, ask.number))
        outcome.due += [ask for ask in ready if self.ask(ask)]


def _unfit(parts: list[_Part]) -> str:
    """Why a step in these parts cannot be used; empty if it can."""
    return next((part.unfit for part in parts if part.unfit), "")

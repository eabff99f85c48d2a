"""The worker's half of training with servers: what it sends, reads and waits for when it has computed a step.

A rhythm answers with actions, in order. The strategy carries them out with tensors (`strategies`), the simulator with
sizes and times (`simulate.servers.training`); both ask the same rhythm, so that
they cannot differ in who sends what when.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple, Protocol

from offbeat.protocols.servers.consistency import Rule

IN_FLIGHT = 2
"""Pushes of a worker that may be unanswered at once; one more waits for the oldest of them."""


class Action(Enum):
    """One thing that a worker does between two steps."""

    PUSH = auto()
    """Send what was computed, and go on."""
    PUSH_AND_PULL = auto()
    """Send it, and ask in the same message for values that include it."""
    PULL = auto()
    """Ask for the newest values."""
    AWAIT = auto()
    """Wait for the values that were asked for; nothing was: go on."""
    SETTLE = auto()
    """Wait until every push is answered."""
    TAKE_FRESH = auto()
    """Use values that servers sent unasked, if they are fresh enough and include this worker's pushes; else pull."""
    REUSE = auto()
    """Compute the next step from the values that are here."""
    MEET = auto()
    """Wait for every worker to come to the same point."""


class StepActions(NamedTuple):
    """What a worker does when it has computed a step."""

    actions: tuple[Action, ...] = ()
    own_step: bool = False
    """Its optimizer steps on its own copy of the parameters as well."""


class Rhythm(Protocol):
    """When one worker exchanges with the servers."""

    def trains(self) -> bool:
        """Whether this worker computes the coming step, or only keeps the others company."""
        ...

    def computed(self, clock: int) -> StepActions:
        """What to do when a step is computed; `clock` steps count as finished before it."""
        ...

    def read(self, complete: int) -> None:
        """Values have come in which so many steps are complete."""
        ...


RhythmOf = Callable[[int], Rhythm]
"""The rhythm of a worker, by its number."""


class EveryStep:
    """Push every step's gradient and wait for values that include it: bsp, asp, dropping, deadlines and codes."""

    def trains(self) -> bool:
        """In every step."""
        return True

    def computed(self, clock: int) -> StepActions:
        """The same after every step."""
        del clock
        return _PUSH_AND_READ

    def read(self, complete: int) -> None:
        """It reads always: what it has read does not matter."""


class Lazily(EveryStep):
    """Read only when the staleness bound is about to break; until then make one's own updates oneself.

    Values are asked for one step before the bound would break: the answer is there at once, and nobody is waited for.
    (Read-my-writes: Ho et al. 2013, section 2.)
    """

    __slots__ = ("_complete", "_rule")

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._complete = 0

    def computed(self, clock: int) -> StepActions:
        """Read if what was read last is too old for the step after the next."""
        return _PUSH_AND_READ if self._complete < self._rule.needed(clock + 2) else _PUSH_AND_REUSE

    def read(self, complete: int) -> None:
        """Remember how fresh it is."""
        self._complete = complete


class Eagerly(EveryStep):
    """Use what servers send by themselves, and ask only if that is not fresh enough."""

    def computed(self, clock: int) -> StepActions:
        """The same after every step."""
        del clock
        return _PUSH_AND_TAKE


class PushAndFetch:
    """Downpour: push the sum of some steps, fetch after some, and step on one's own copy in between.

    In a warm start of some steps only worker 0 trains; the others keep step with it and take what it has learned.
    """

    __slots__ = ("_fetch", "_leads", "_push", "_warm", "steps")

    def __init__(self, push: int, fetch: int, warm: int = 0, leads: bool = True) -> None:
        self._push, self._fetch, self._warm, self._leads = push, fetch, warm, leads
        self.steps = 0
        """Steps that were computed, or sat out."""

    @property
    def warming(self) -> bool:
        """Whether the coming step belongs to the warm start."""
        return self.steps < self._warm

    @property
    def fetched(self) -> bool:
        """Whether nothing was computed since values were fetched last."""
        return self.steps % self._fetch == 0

    def trains(self) -> bool:
        """During the warm start only the one who leads."""
        return self._leads or not self.warming

    def computed(self, clock: int) -> StepActions:
        """Push and fetch what is due."""
        del clock
        warming = self.warming
        self.steps += 1
        pushes, own = self.steps % self._push == 0, self._fetch > 1
        if warming:
            own = own and self._leads
            return StepActions(self._warm_up(pushes), own)
        if self.fetched:
            return StepActions((Action.PUSH_AND_PULL if pushes else Action.PULL, Action.AWAIT), own)
        return StepActions((Action.PUSH,) if pushes else (), own)

    def _warm_up(self, pushes: bool) -> tuple[Action, ...]:
        push = (Action.PUSH,) if pushes else ()
        reads = (Action.PULL, Action.AWAIT) if self.fetched or not self._leads else ()
        return (*push, Action.SETTLE, Action.MEET, *reads, Action.MEET)

    def read(self, complete: int) -> None:
        """When to fetch is fixed: what was read does not matter."""


class Spring:
    """Elastic averaging: step alone, and exchange with the centre every `period` steps.

    Asynchronously, the centre is read and moved at once. Together, what all have made of it is needed at the next
    exchange only, and comes while workers compute.
    """

    __slots__ = ("_asynchronous", "_period", "steps")

    def __init__(self, period: int, asynchronous: bool) -> None:
        self._period, self._asynchronous = period, asynchronous
        self.steps = 0
        """Steps that were computed."""

    def trains(self) -> bool:
        """In every step."""
        return True

    def computed(self, clock: int) -> StepActions:
        """Exchange with the centre if it is time."""
        del clock
        due = self.steps > 0 and self.steps % self._period == 0
        self.steps += 1
        if not due:
            return _OWN_STEP
        return _MOVE_THE_CENTRE if self._asynchronous else _MOVE_IT_TOGETHER

    def read(self, complete: int) -> None:
        """When to exchange is fixed: what was read does not matter."""


def rhythm_of(rule: Rule) -> RhythmOf:
    """How a worker of `server(consistency=...)` goes about it."""
    if rule.eager:
        return lambda _: Eagerly()
    if rule.bound:
        return lambda _: Lazily(rule)
    shared = EveryStep()
    return lambda _: shared


_PUSH_AND_READ = StepActions((Action.PUSH_AND_PULL, Action.AWAIT))
_PUSH_AND_REUSE = StepActions((Action.PUSH, Action.REUSE), own_step=True)
_PUSH_AND_TAKE = StepActions((Action.PUSH, Action.SETTLE, Action.TAKE_FRESH))
_OWN_STEP = StepActions(own_step=True)
_MOVE_THE_CENTRE = StepActions((Action.PULL, Action.AWAIT, Action.PUSH), own_step=True)
_MOVE_IT_TOGETHER = StepActions((Action.AWAIT, Action.PUSH_AND_PULL), own_step=True)

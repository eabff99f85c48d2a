"""The worker's half of training with servers: what it sends, reads and waits for when it has computed a step.

A rhythm answers with actions, in order. The strategy carries them out with tensors (`strategies`), the simulator with
sizes and times (`simulate.servers.training`). Both use the same rhythm, so they cannot differ in what is sent when.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from offbeat.protocols.servers.consistency import Rule

IN_FLIGHT = 2  # Pushes of a worker that may be unanswered at once; one more waits for the oldest of them.


class RhythmAction(Enum):
    """One thing that a worker does between two steps."""

    PUSH = auto()  # Send what was computed, and continue.
    PUSH_AND_PULL = auto()  # Send it, and ask in the same message for values that include it.
    PULL = auto()  # Ask for the newest values.
    AWAIT = auto()  # Wait for the requested values, if any.
    SETTLE = auto()  # Wait until every push is answered.
    TAKE_FRESH = auto()  # Use values sent unasked, if fresh enough and with this worker's pushes; else pull.
    REUSE = auto()  # Compute the next step from the values at hand.
    MEET = auto()  # Wait for every worker to come to the same point.


class StepActions(NamedTuple):
    """What a worker does when it has computed a step."""

    actions: tuple[RhythmAction, ...] = ()
    own_step: bool = False  # Its optimizer also steps on its own copy of the parameters.


class Rhythm:
    """When one worker exchanges with the servers. By default it trains in every step, and any read will do."""

    def trains(self) -> bool:
        """Whether this worker computes the coming step, or only waits for the others."""
        return True

    def computed(self, clock: int) -> StepActions:
        """What to do when a step is computed; `clock` steps count as finished before it."""
        raise NotImplementedError

    def read(self, complete: int) -> None:
        """Values have come in which `complete` steps are complete."""


RhythmOf = Callable[[int], Rhythm]  # The rhythm of a worker, by its number.


class EveryStep(Rhythm):
    """Push every step's gradient and wait for values that include it: bsp, asp, dropping, deadlines and codes."""

    def computed(self, clock: int) -> StepActions:  # noqa: ARG002
        """The same after every step."""
        return _PUSH_AND_READ


class Lazily(Rhythm):
    """Read only when the staleness bound is about to break; until then apply one's own updates locally.

    Values are requested one step before the bound would break: the answer comes at once, without waiting for anybody.
    (Read-my-writes: Ho et al. 2013, section 2.)
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._complete = 0

    def computed(self, clock: int) -> StepActions:
        """Read if the last values are too old for the step after the next."""
        return _PUSH_AND_READ if self._complete < self._rule.needed(clock + 2) else _PUSH_AND_REUSE

    def read(self, complete: int) -> None:
        """Remember how fresh it is."""
        self._complete = complete


class Eagerly(Rhythm):
    """Use what servers send unasked, and pull only if that is not fresh enough."""

    def computed(self, clock: int) -> StepActions:  # noqa: ARG002
        """The same after every step."""
        return _PUSH_AND_TAKE


class PushAndFetch(Rhythm):
    """Downpour: push the sum of some steps, fetch after some, and step on one's own copy in between.

    In a warm start of some steps only worker 0 trains; the others keep step with it and take what it has learned.
    """

    def __init__(self, push: int, fetch: int, warm: int = 0, leads: bool = True) -> None:
        self._push, self._fetch, self._warm, self._leads = push, fetch, warm, leads
        self.steps = 0  # Steps that were computed, or sat out.

    @property
    def warming(self) -> bool:
        """Whether the coming step belongs to the warm start."""
        return self.steps < self._warm

    @property
    def fetched(self) -> bool:
        """Whether nothing was computed since values were last fetched."""
        return self.steps % self._fetch == 0

    def trains(self) -> bool:
        """During the warm start only the leader trains."""
        return self._leads or not self.warming

    def computed(self, clock: int) -> StepActions:  # noqa: ARG002
        """Push and fetch what is due."""
        warming = self.warming
        self.steps += 1
        pushes, own = self.steps % self._push == 0, self._fetch > 1
        push = (RhythmAction.PUSH,) if pushes else ()
        if warming:
            reads = (RhythmAction.PULL, RhythmAction.AWAIT) if self.fetched or not self._leads else ()
            return StepActions(
                (*push, RhythmAction.SETTLE, RhythmAction.MEET, *reads, RhythmAction.MEET), own and self._leads
            )
        if self.fetched:
            return StepActions((RhythmAction.PUSH_AND_PULL if pushes else RhythmAction.PULL, RhythmAction.AWAIT), own)
        return StepActions(push, own)


class Spring(Rhythm):
    """Elastic averaging: step alone, and exchange with the centre every `period` steps.

    Asynchronously, the centre is read and moved at once. Synchronously, the moved centre is needed only at the next
    exchange, and comes while workers compute.
    """

    def __init__(self, period: int, asynchronous: bool) -> None:
        self._period, self._asynchronous = period, asynchronous
        self.steps = 0  # Steps that were computed.

    def computed(self, clock: int) -> StepActions:  # noqa: ARG002
        """Exchange with the centre when due."""
        due = self.steps > 0 and self.steps % self._period == 0
        self.steps += 1
        if not due:
            return _OWN_STEP
        return _MOVE_THE_CENTRE if self._asynchronous else _MOVE_IT_TOGETHER


def rhythm_of(rule: Rule) -> RhythmOf:
    """The rhythm of a worker of `server(consistency=...)`."""
    if rule.eager:
        return lambda _: Eagerly()
    if rule.bound:
        return lambda _: Lazily(rule)
    shared = EveryStep()
    return lambda _: shared


_PUSH_AND_READ = StepActions((RhythmAction.PUSH_AND_PULL, RhythmAction.AWAIT))
_PUSH_AND_REUSE = StepActions((RhythmAction.PUSH, RhythmAction.REUSE), own_step=True)
_PUSH_AND_TAKE = StepActions((RhythmAction.PUSH, RhythmAction.SETTLE, RhythmAction.TAKE_FRESH))
_OWN_STEP = StepActions(own_step=True)
_MOVE_THE_CENTRE = StepActions((RhythmAction.PULL, RhythmAction.AWAIT, RhythmAction.PUSH), own_step=True)
_MOVE_IT_TOGETHER = StepActions((RhythmAction.AWAIT, RhythmAction.PUSH_AND_PULL), own_step=True)

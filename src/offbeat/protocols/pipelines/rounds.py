"""A pipeline as a schedule, and what each stage does by it.

There is a `COMPUTE` round for each action and a `SEND` round for each value that crosses to another stage, as soon as
it is computed. Rounds are listed in the order in which they begin (if messages take no time, unless it is known what
they take), so a stage sends in the order in which it computes. A step ends on each stage with a `COMPUTE` round that
takes no time, when the loss and the gradients of tied weights have come. The rounds are what is checked, costed,
simulated and drawn, and `program` reads off them what a process does: nothing else decides who sends what to whom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from offbeat.errors import ScheduleError
from offbeat.protocols.pipelines.orders import Action, Work
from offbeat.protocols.pipelines.plan import Crossing, LossMessage, Message, PipelinePlan, TiedGradient
from offbeat.protocols.schedule import IntArray, Layout, Op, Round, Schedule, Stream, View

AHEAD = 1
"""By how many computations a receive is posted before its value is sent: with 1, sends need no buffer to end."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A stage has computed everything: it sums the gradients of tied weights, and knows the loss."""

    stage: int

    @property
    def brief(self) -> str:
        """In few words, for tables."""
        return "end of the step"

    def __str__(self) -> str:
        """In words, for errors and pictures."""
        return f"end of the step of stage {self.stage}"


class ComputeStep(NamedTuple):
    """Compute, when what it uses has come."""

    action: Action
    uses: tuple[Crossing, ...]  # What other stages send for it.


class EndStep(NamedTuple):
    """End the step, when what it uses has come."""

    uses: tuple[Message, ...]  # What other stages send for it.


class SendStep(NamedTuple):
    """Send a value; nobody waits until it has arrived."""

    value: Message
    target: int


class ReceiveStep(NamedTuple):
    """Post a receive: the value may come from now on; only the computation that uses it waits for it."""

    value: Message
    source: int


PipelineStep = ComputeStep | EndStep | SendStep | ReceiveStep


def schedule(plan: PipelinePlan) -> Schedule:
    """The rounds for everything that takes schedules, with the plan's view and layout."""

    def pipeline(view: View, layout: Layout) -> Iterator[Round]:
        if view.size != plan.stages or layout != plan.layout:
            raise ScheduleError(
                f"a pipeline of {plan.stages} stages cannot be played with {view.size} ranks and {layout}: it takes "
                f"the `view` and `layout` of its plan."
            )
        yield from rounds(plan)

    return pipeline


Delay = Callable[[Crossing], float]


def rounds(plan: PipelinePlan, delay: Delay = lambda _: 0.0) -> list[Round]:
    """All rounds; a ScheduleError if the orders of the stages wait for each other for ever.

    `delay` is what a message takes. It changes only which of several stages is listed first.
    """
    writer = _RoundWriter(plan)
    for _, _, stage, what in sorted(_events(plan, delay), key=lambda event: event[:2]):
        if isinstance(what, Action):
            writer.compute(stage, what)
        else:
            writer.send(what)
    writer.end()
    return writer.rounds


def program(played: Sequence[Round], stage: int, ahead: int = AHEAD) -> tuple[PipelineStep, ...]:
    """What a stage does, one after the other, as the rounds have it.

    A receive is posted before the last `ahead` computations that the stage begins before the value is sent, or earlier,
    so that receives from a stage are posted in the order in which it sends.
    """
    steps: list[tuple[int, PipelineStep]] = []  # With the number of computations before it.
    receives: dict[int, tuple[int, ReceiveStep]] = {}  # By round, with the computations before it.
    computed = 0
    for number, each in enumerate(played):
        what = each.what
        if each.op is Op.COMPUTE and each.target[0] == stage:
            uses: list[Any] = [receives[earlier][1].value for earlier in each.after if earlier in receives]
            step = ComputeStep(what, tuple(uses)) if isinstance(what, Action) else EndStep(tuple(uses))
            steps.append((computed, step))
            computed += 1
        elif isinstance(what, Message) and each.source[0] == stage:
            steps.append((computed - 1, SendStep(what, int(each.target[0]))))
        elif isinstance(what, Message) and each.target[0] == stage:
            receives[number] = computed, ReceiveStep(what, int(each.source[0]))
    return tuple(_merged(steps, list(receives.values()), ahead))


def _merged(
    steps: list[tuple[int, PipelineStep]], receives: list[tuple[int, ReceiveStep]], ahead: int
) -> Iterator[PipelineStep]:
    """The steps, and before each computation the receives to be posted by then."""
    soonest: dict[int, int] = {}  # By the stage that sends: when its later receives are posted.
    posts: list[tuple[int, PipelineStep]] = []
    for computed, receive in reversed(receives):
        soonest[receive.source] = min(computed - ahead, soonest.get(receive.source, computed))
        posts.append((soonest[receive.source], receive))
    posts.reverse()
    early = deque(sorted(posts, key=lambda post: post[0]))
    for number, step in steps:
        while isinstance(step, ComputeStep | EndStep) and early and early[0][0] <= number:
            yield early.popleft()[1]
        yield step


_Event = tuple[float, int, int, Action | Crossing]  # When, in which order, on which stage, what.


def _events(plan: PipelinePlan, delay: Delay) -> Iterator[_Event]:
    """Every computation when it begins and every value when it leaves, if messages never queue."""
    came: dict[Crossing, float] = {}
    free, place = [0.0] * plan.stages, [0] * plan.stages
    left, count = sum(map(len, plan.orders)), 0
    done: set[tuple[int, Action]] = set()
    while left:
        before = left
        for stage, order in enumerate(plan.orders):
            while place[stage] < len(order):
                action = order[place[stage]]
                values = plan.needs(stage, action)
                if own_lack(action, stage, done) is not None or any(value not in came for value in values):
                    break
                begin = max([free[stage], *(came[value] for value in values)])
                yield begin, count, stage, action
                free[stage] = begin + plan.takes(stage, action)
                for number, value in enumerate(plan.gives(stage, action), start=count + 1):
                    came[value] = free[stage]
                    count = number
                    if plan.crosses(value):
                        came[value] += delay(value)
                        yield free[stage], number, stage, value
                done.add((stage, action))
                place[stage], left, count = place[stage] + 1, left - 1, count + 1
        if left == before:
            raise ScheduleError(f"this pipeline never ends: {'; '.join(_stuck(plan, place, came, done))}")


def own_lack(action: Action, stage: int, done: set[tuple[int, Action]]) -> Action | None:
    """The action on the same stage that must come before, and has not."""
    if action.work is Work.FORWARD:
        return None
    work = Work.INPUT_GRADIENT if action.work is Work.WEIGHT_GRADIENT else Work.FORWARD
    before = action._replace(work=work)
    return None if (stage, before) in done else before


def _stuck(
    plan: PipelinePlan, place: list[int], came: dict[Crossing, float], done: set[tuple[int, Action]]
) -> Iterator[str]:
    for stage, order in enumerate(plan.orders):
        if place[stage] < len(order):
            action = order[place[stage]]
            lack = own_lack(action, stage, done)
            lacking = [lack] if lack else [value for value in plan.needs(stage, action) if value not in came]
            yield f"stage {stage} cannot begin the {action}, its computation {place[stage]}, without the {lacking[0]}"


class _RoundWriter:
    """Numbers rounds, and finds those that each comes after."""

    def __init__(self, plan: PipelinePlan) -> None:
        self.rounds: list[Round] = []
        self._plan = plan
        self._ranks: list[IntArray] = [np.array([stage], dtype=np.int64) for stage in range(plan.stages)]
        self._nothing = np.zeros(1, dtype=np.int64)
        self._last: dict[int, int] = {}  # By stage: its last computation.
        self._sent: dict[Message, int] = {}
        self._computes: dict[Message, int] = {}

    def compute(self, stage: int, action: Action) -> None:
        """A computation: after the one before, and after what it uses of other stages has come."""
        plan = self._plan
        number = self._add(stage, action, plan.needs(stage, action), plan.takes(stage, action))
        for value in plan.gives(stage, action):
            self._computes[value] = number
        if plan.tells_loss and (stage, action) == (plan.loss_stage, plan.last_loss):
            for target in range(plan.stages):
                if target != stage:
                    self._computes[LossMessage(target)] = number
                    self.send(LossMessage(target))

    def send(self, value: Message) -> None:
        """A message: after the computation of what it brings."""
        self._sent[value] = len(self.rounds)
        start, stop = (np.array([end], dtype=np.int64) for end in self._plan.extent(value))
        source, target = (self._ranks[stage] for stage in self._plan.ends(value))
        self.rounds.append(Round(Op.SEND, source, target, start, stop, start, (self._computes[value],), what=value))

    def end(self) -> None:
        """What stages tell each other when they have computed everything, and the ends of their steps."""
        plan = self._plan
        ends = [plan.needs_at_end(stage) for stage in range(plan.stages)]
        for value in (value for values in ends for value in values if isinstance(value, TiedGradient)):
            self._computes[value] = self._last[value.source]
            self.send(value)
        for stage, values in enumerate(ends):
            if values:
                self._add(stage, StepEnd(stage), values, 0.0)

    def _add(self, stage: int, what: Action | StepEnd, needs: Sequence[Message], seconds: float) -> int:
        values = (value for value in needs if value in self._sent)
        after = {*(self._sent[value] for value in values), *([self._last[stage]] if stage in self._last else [])}
        self._last[stage] = number = len(self.rounds)
        rank, nothing = self._ranks[stage], self._nothing
        later, stream = tuple(sorted(after)), Stream.COMPUTE
        self.rounds.append(Round(Op.COMPUTE, rank, rank, nothing, nothing, nothing, later, stream, seconds, what=what))
        return number

"""Pipelines under faults, in virtual time: stages are killed or stopped, and every other one ends and says why.

Each stage follows its program as processes do: it computes, sends without waiting, and waits for what it needs no
longer than a deadline, after which it ends and names the stage that it waited for. That stage may only have waited
itself: the names lead, one after the other, to the one that has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from offbeat.protocols.machine import Effect, Event, Name, Payload, Received, Send, SetTimer, Timer
from offbeat.protocols.pipelines.plan import Message, PipelinePlan
from offbeat.protocols.pipelines.rounds import ComputeStep, EndStep, PipelineStep, SendStep, program, rounds
from offbeat.simulate.machines import Kill, LossyNetwork, Simulation, Stop

FOREVER = 1e9
"""Virtual seconds after which whoever still waits is said to wait for ever."""


class CarriedValue(Struct, frozen=True):
    """A value on its way."""

    value: Message


class StageEnd(Struct, frozen=True):
    """How a stage has ended."""

    at: float
    waited_since: float  # When it began its last wait; when it ended, if it did not wait.
    missing: int | None = None  # The stage that it waited for; None: it has done everything.


def stage_name(stage: int) -> Name:
    """The name of a stage's machine."""
    return f"stage {stage}"


@dataclass
class StageMachine:
    """One stage: its program, and how long it waits."""

    plan: PipelinePlan
    stage: int
    steps: Sequence[PipelineStep]
    deadline: float

    def __post_init__(self) -> None:
        """Begin with the first step."""
        self.name: Name = stage_name(self.stage)
        self.end: StageEnd | None = None
        self._place = 0
        self._came: set[Message] = set()
        self._waits_since: float | None = None

    def begin(self, now: float) -> Sequence[Effect]:
        """Everything up to the first computation or wait."""
        return self._go_on(now)

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """A value has come, a computation is done, or a wait has lasted too long."""
        if self.end is not None:
            return ()
        match event:
            case Received(_, CarriedValue(value), _):
                self._came.add(value)
                return self._go_on(now) if self._waits_since is not None else ()
            case Timer(("computed", place)) if place == self._place:
                self._place += 1
                return self._go_on(now)
            case Timer(("waited", place)) if place == self._place and self._waits_since is not None:
                self.end = StageEnd(now, self._waits_since, self.plan.ends(self._lacking()[0])[0])
            case _:
                pass
        return ()

    def _lacking(self) -> list[Message]:
        step = self.steps[self._place]
        return (
            [value for value in step.uses if value not in self._came] if isinstance(step, ComputeStep | EndStep) else []
        )

    def _go_on(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._place < len(self.steps):
            step = self.steps[self._place]
            if isinstance(step, ComputeStep | EndStep):
                if not self._lacking():
                    self._waits_since = None
                    seconds = self.plan.takes(self.stage, step.action) if isinstance(step, ComputeStep) else 0.0
                    effects.append(SetTimer(seconds, ("computed", self._place)))
                elif self._waits_since is None:
                    self._waits_since = now
                    effects.append(SetTimer(self.deadline, ("waited", self._place)))
                return effects
            if isinstance(step, SendStep):
                start, stop = self.plan.extent(step.value)
                effects.append(Send(stage_name(step.target), CarriedValue(step.value), Payload(stop - start)))
            self._place += 1
        self.end = StageEnd(now, now)
        return effects


def play_faults(
    plan: PipelinePlan, faults: Sequence[Kill | Stop], deadline: float, network: LossyNetwork, seed: int = 0
) -> Mapping[int, StageEnd | None]:
    """How each stage ends; None: it was killed, or would never have ended."""
    played = rounds(plan)
    stages = [StageMachine(plan, stage, program(played, stage), deadline) for stage in range(plan.stages)]
    Simulation(stages, seed=seed, network=network, faults=faults).run(FOREVER)
    return {machine.stage: machine.end for machine in stages}

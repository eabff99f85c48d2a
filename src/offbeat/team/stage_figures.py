"""Figures of the stages of a pipeline: for the result, and for the predicted time of a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from offbeat.protocols.pipelines.orders import Work
from offbeat.protocols.pipelines.plan import PartSeconds, PipelinePlan
from offbeat.runtime.groups.group import Group
from offbeat.runtime.pipeline.executor import StageExecutor
from offbeat.runtime.pipeline.state import SplitState
from offbeat.runtime.run.stopwatch import Kind, Stopwatch
from offbeat.runtime.split.mesh import MeshPlace
from offbeat.runtime.split.stages import SplitModel
from offbeat.simulate.pipelines import StagedStep, peak_activations
from offbeat.simulate.predicted_step import Step, network_of, step_time
from offbeat.strategies import Pipeline
from offbeat.team.stage_costs import StageCosts

OWN: tuple[Kind, ...] = ("input", "compute", "other")
"""Kinds of time in which a worker does something by itself."""
KEPT = 10_000
"""Steps of which the times are kept, the latest ones."""
OUTLIER = 3.0
"""A step that takes so many times as long as usual has a checkpoint in it, and does not count."""


class StepSeconds(NamedTuple):
    """Where the time between two steps went."""

    total: float
    outside: float  # This stage's own work besides its parts.


@dataclass
class StageFigures:
    """What one worker knows about its stage, brought together in the end."""

    pipeline: Pipeline
    place: MeshPlace
    world: Group
    stopwatch: Stopwatch
    state: SplitState
    executor: StageExecutor
    costs: StageCosts
    microbatches: int
    """Microbatches of the first batch."""
    evenness: float
    """Mean time of a part over the time of the slowest, as measured when the model was cut."""
    steps: deque[StepSeconds] = field(default_factory=lambda: deque[StepSeconds](maxlen=KEPT))
    """The times between steps."""
    _before: tuple[float, float, float] | None = None

    def at_step(self) -> None:
        """Note the time since the step before; evaluations do not count."""
        total, seconds = self.stopwatch.total(), self.stopwatch.seconds
        evaluated = seconds["evaluate"]
        outside = sum(seconds[kind] for kind in OWN) - sum(self.executor.seconds.values())
        if self._before is not None and evaluated == self._before[2]:
            self.steps.append(StepSeconds(total - self._before[0], outside - self._before[1]))
        self._before = total, outside, evaluated

    def usual_step(self) -> StepSeconds:
        """The mean of the steps that count, the first one aside: it is slower than all others."""
        steps = list(self.steps)[1:] or list(self.steps)
        if not steps:
            return StepSeconds(nan, 0.0)
        limit = OUTLIER * median(step.total for step in steps)
        counted = [step for step in steps if step.total <= limit]
        return StepSeconds(*(sum(column) / len(counted) for column in zip(*counted, strict=True)))

    # -- at the end ----------------------------------------------------------------------------------------------------

    def notes(self) -> dict[str, Any]:
        """What each stage has, how long it computed, and how much memory it needed. Collective."""
        memory = self.state.memory() | {"activations": self._activations()}
        seconds = float(sum(self.executor.seconds.values()))
        own = [seconds, self.stopwatch.seconds["bubble"], self.usual_step().total, *map(float, memory.values())]
        table = self._by_stage([*own, *self._in_run()])
        split, count = self.executor.split, self.pipeline.stages
        layers, chunks = _ends(split), self.pipeline.chunks
        stages: list[dict[str, Any]] = []
        for stage in range(count):
            compute, bubble, _, *rest = table[stage]
            parts = np.reshape(rest[len(memory) :], (chunks, 2)).tolist()
            stages.append(
                {
                    "layers": [list(layers[part]) for part in range(stage, len(layers), count)],
                    "compute_seconds": compute,
                    "bubble_seconds": bubble,
                    "parts": [{"forward_seconds": forward, "backward_seconds": back} for forward, back in parts],
                    "bytes": dict(zip(memory, map(int, rest[: len(memory)]), strict=True)),
                }
            )
        slowest = max(range(count), key=lambda stage: stages[stage]["compute_seconds"])
        computed = [stage["compute_seconds"] for stage in stages]
        return {
            "split": {
                "stages": stages,
                "slowest_stage": slowest,
                "evenness": self.evenness,
                "evenness_in_run": sum(computed) / count / max(computed) if max(computed) > 0 else 1.0,
                "schedule": self.pipeline.schedule.value,
                "microbatches": self.microbatches,
                "step_seconds": _number(sum(row[2] for row in table) / count),
                "bounds": list(split.bounds),
                "costs": [
                    {
                        "name": cost.name,
                        "forward_seconds": cost.forward,
                        "backward_seconds": cost.backward,
                        "parameter_bytes": cost.parameter_bytes,
                        "crossing_bytes": cost.activation_bytes,
                    }
                    for cost in split.costs
                ],
            }
        }

    def predicted(self, exchange: Step | str, batches: int) -> StagedStep | str:
        """A step by the costs that were measured before the first one; or why it cannot be predicted. Collective."""
        if isinstance(exchange, str) and self.place.replicas > 1:
            return exchange
        exchanging = 0.0
        if isinstance(exchange, Step) and exchange.trials:
            exchanging = step_time(exchange, network_of(exchange), [0.0] * len(exchange.hosts))
        costs = [number for cost in self.costs.parts for number in cost[:3]]
        table = self._by_stage([self.usual_step().outside, exchanging, *costs])
        pipeline = self.pipeline
        parts = [PartSeconds()] * (pipeline.stages * pipeline.chunks)
        for stage, (_, _, *rest) in enumerate(table):
            for chunk, (forward, both, weights) in enumerate(np.reshape(rest, (pipeline.chunks, 3)).tolist()):
                parts[chunk * pipeline.stages + stage] = PartSeconds(forward, both, min(weights, both))
        return StagedStep(
            kind=pipeline.schedule,
            microbatches=self.microbatches,
            chunks=pipeline.chunks,
            parts=tuple(parts),
            edges=self.costs.edges,
            tied=tuple(tied.weights for tied in self.executor.tied if tied.parameter.requires_grad),
            hosts=self.hosts,
            inside=self.costs.inside,
            between=self.costs.between,
            outside=tuple(max(0.0, row[0]) for row in table),
            exchanging=tuple(row[1] for row in table),
            batches=float(batches),
        )

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each stage of this replica."""
        hosts = self.world.direct.view.hosts.tolist()
        return tuple(hosts[rank] for rank in self.place.pipeline)

    def _activations(self) -> int:
        """Bytes that are kept for backward at the worst moment, as the schedule has it."""
        pipeline = self.pipeline
        plan = PipelinePlan(pipeline.schedule, pipeline.stages, self.microbatches, pipeline.chunks)
        nbytes = [0] * plan.parts
        nbytes[self.place.stage :: pipeline.stages] = [cost.saved_bytes for cost in self.costs.parts]
        return peak_activations(plan, self.place.stage, nbytes)

    def _in_run(self) -> list[float]:
        """Mean seconds of forward and backward of a microbatch in the steps of the run, for each part of the stage."""
        seconds, count = self.executor.seconds, max(1, self.executor.microbatches)
        numbers: list[float] = []
        for part in range(self.place.stage, len(self.executor.split.parts), self.pipeline.stages):
            forward = seconds[part, Work.FORWARD]
            numbers += [forward / count, (sum(seconds[part, work] for work in Work) - forward) / count]
        return numbers

    def _by_stage(self, own: Sequence[float]) -> list[list[float]]:
        """For each stage the mean of what its workers give, one in each replica. Collective."""
        rows = self.world.gather(own, "the figures of the stages").tolist()
        place = self.place
        table: list[list[float]] = []
        for stage in range(place.stages):
            same = [rows[place.rank_of(replica, stage, 0)] for replica in range(place.replicas)]
            table.append([sum(column) / len(same) for column in zip(*same, strict=True)])
        return table


def _ends(split: SplitModel) -> list[tuple[str, str]]:
    """The first and the last layer of each part."""
    return [(split.costs[layers[0]].name, split.costs[layers[-1]].name) for layers in split.cut.ranges]


def _number(value: float) -> float | None:
    """A number; None if it is unknown."""
    return value if value == value else None

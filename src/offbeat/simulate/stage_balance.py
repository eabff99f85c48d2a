"""The cut that would have suited a pipeline's run: the best one for what its layers took in the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from offbeat.protocols.pipelines.cut import LayerCost, PipelineCut, as_cut, best_cut
from offbeat.protocols.pipelines.orders import PipelineKind
from offbeat.protocols.pipelines.plan import PartEdge, PartSeconds, PipelinePlan
from offbeat.simulate.network import Link, Network
from offbeat.simulate.pipelines import predicted_pipeline_step

WORTH = 0.02
"""Share of a step that another cut must save to be named: measured times differ by about as much."""


class CutAdvice(Struct, frozen=True):
    """The cut of a run against the best one for what its layers took."""

    slowest_seconds: float  # Of the slowest part, for a microbatch.
    step_seconds: float  # Of a step's pipeline, played with what the parts took.
    better: tuple[str, ...]  # The first layers of the parts of a better cut, but the first; empty if there is none.
    better_slowest_seconds: float
    better_step_seconds: float

    @property
    def words(self) -> str:
        """What a better cut would bring."""
        if not self.better:
            return "no other cut of its layers would make a step faster"
        slowest = f"{1e3 * self.slowest_seconds:.3g} to {1e3 * self.better_slowest_seconds:.3g} ms"
        step = f"{1e3 * self.step_seconds:.3g} to {1e3 * self.better_step_seconds:.3g} ms"
        gain = self.step_seconds / self.better_step_seconds
        return (
            f"cut before {', '.join(self.better)} instead: the slowest part goes from {slowest} per microbatch, a step "
            f"from {step} ({gain:.2f}x as fast)"
        )


def cut_advice(split: Mapping[str, Any], predicted: Mapping[str, Any]) -> CutAdvice | None:
    """The advice for a run, from `split` and `predicted` in its result; None if its layers were not measured."""
    layers, bounds = _layers(split), [int(bound) for bound in split["bounds"]]
    if layers is None:
        return None
    stages = len(split["stages"])
    rate = predicted.get("bytes_per_second")
    link = Link(float(predicted.get("latency_seconds") or 0.0), 1 / rate if rate else 0.0)

    def step(cut: PipelineCut) -> float:
        parts = [layers[start:stop] for start, stop in pairwise(cut.bounds)]
        plan = PipelinePlan(
            PipelineKind(split["schedule"]),
            stages,
            int(split["microbatches"]),
            cut.parts // stages,
            tuple(PartEdge(n, n + 1, max(1, part[-1].activation_bytes)) for n, part in enumerate(parts[:-1])),
            tuple(PartSeconds(sum(c.forward for c in part), sum(c.backward for c in part)) for part in parts),
        )
        return predicted_pipeline_step(plan, Network.uniform(link)).seconds

    own, other = as_cut(layers, bounds), best_cut(layers, len(bounds) - 1)
    before, after = step(own), step(other)
    if after > before * (1 - WORTH):
        return CutAdvice(own.slowest, before, (), own.slowest, before)
    names = tuple(layers[bound].name for bound in other.bounds[1:-1])
    return CutAdvice(own.slowest, before, names, other.slowest, after)


def _layers(split: Mapping[str, Any]) -> list[LayerCost] | None:
    """The layers with the seconds that they took in the run, by those of the parts that they are in.

    Layers were measured alone, in one process; in the run they took as much longer as their part did. On the last part
    the criterion is computed, too: what that part took beyond the others is its last layer's.
    """
    costs, bounds = split["costs"], split["bounds"]
    parts = [split["stages"][n % len(split["stages"])]["parts"] for n in range(len(bounds) - 1)]
    took = [own[n // len(split["stages"])] for n, own in enumerate(parts)]
    scaled: dict[str, list[float]] = {}
    for way in ("forward_seconds", "backward_seconds"):
        alone = [sum(cost[way] for cost in costs[start:stop]) for start, stop in pairwise(bounds)]
        if min(alone) <= 0:
            return None
        factors = [part[way] / seconds for part, seconds in zip(took, alone, strict=True)]
        usual = sum(factors[:-1]) / max(1, len(factors) - 1)
        beyond = max(0.0, took[-1][way] - alone[-1] * usual) if len(factors) > 1 else 0.0
        factors[-1] -= beyond / alone[-1]
        scaled[way] = _scaled([cost[way] for cost in costs], bounds, factors)
        scaled[way][-1] += beyond
    return [
        LayerCost(cost["name"], forward, backward, cost["crossing_bytes"], cost["parameter_bytes"])
        for cost, forward, backward in zip(costs, scaled["forward_seconds"], scaled["backward_seconds"], strict=True)
    ]


def _scaled(seconds: Sequence[float], bounds: Sequence[int], factors: Sequence[float]) -> list[float]:
    parts = zip(pairwise(bounds), factors, strict=True)
    return [seconds[layer] * factor for (start, stop), factor in parts for layer in range(start, stop)]

"""What the stages of a pipeline cost, measured on all of them together before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.protocols.pipelines.plan import PartEdge
from offbeat.runtime.groups.group import Group
from offbeat.runtime.pipeline.executor import StageExecutor
from offbeat.runtime.pipeline.link_trials import MessageTrial, measured_messages
from offbeat.runtime.pipeline.part_costs import PartCost, PartSettings, Rehearsal
from offbeat.runtime.pipeline.routes import Routes
from offbeat.runtime.split.mesh import Mesh
from offbeat.simulate.fit import CostTerms, fit_link
from offbeat.simulate.pipelines import LinkCost
from offbeat.strategies import Pipeline

_WHAT = "measuring the stages"


@dataclass(frozen=True)
class StageCosts:
    """What this worker's stage costs, and what crosses between all of them."""

    parts: tuple[PartCost, ...]
    """The parts of this stage, by chunk."""
    edges: tuple[PartEdge, ...]
    """What crosses between parts."""
    inside: LinkCost
    """Messages between stages on one host."""
    between: LinkCost
    """Messages between stages on different hosts."""

    @classmethod
    def measured(
        cls,
        pipeline: Pipeline,
        mesh: Mesh,
        world: Group,
        executor: StageExecutor,
        rehearsal: Rehearsal,
        settings: PartSettings,
    ) -> StageCosts:
        """Measure the parts, on all stages at once, and the links between them. Collective."""
        numbers = range(mesh.place.stage, len(executor.split.parts), pipeline.stages)

        def longest(seconds: float) -> float:
            return float(world.gather([seconds], _WHAT).max())

        world.barrier(_WHAT)
        costs = rehearsal.costs(numbers, settings, longest)
        edges = _edges(executor.routes, rehearsal)
        most = max((max(edge.nbytes, edge.back) for edge in edges), default=1)
        trials = measured_messages(mesh.pipeline, executor.bundles, most)
        hosts = mesh.pipeline.view.hosts.tolist()
        return cls(
            tuple(costs),
            edges,
            _link([trial for trial in trials if hosts[trial.stage] == hosts[trial.stage + 1]]),
            _link([trial for trial in trials if hosts[trial.stage] != hosts[trial.stage + 1]]),
        )


def _edges(routes: Routes, rehearsal: Rehearsal) -> tuple[PartEdge, ...]:
    """What crosses between parts, with the bytes of the microbatch that was measured."""
    return tuple(
        PartEdge(
            *edge, max(1, rehearsal.nbytes(values)), rehearsal.nbytes(value for value in values if value.differentiable)
        )
        for edge, values in routes.values.items()
    )


def _link(trials: Sequence[MessageTrial]) -> LinkCost:
    """The link that explains these times."""
    if not trials:
        return LinkCost()
    terms = [CostTerms(1.0, float(trial.nbytes), 0.0, 0.0) for trial in trials]
    link = fit_link([trial.nbytes for trial in trials], [trial.seconds for trial in trials], terms)
    return LinkCost(link.alpha, link.beta)

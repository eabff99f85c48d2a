"""Pipelines in virtual time: what a step takes, how long each stage idles, and a timeline of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.protocols.checker import cost
from offbeat.protocols.pipelines.formulas import bubble_share
from offbeat.protocols.pipelines.orders import Action, PipelineKind, Work
from offbeat.protocols.pipelines.plan import Crossing, Message, PartEdge, PartSeconds, PipelinePlan, TiedWeights
from offbeat.protocols.pipelines.rounds import StepEnd, rounds
from offbeat.protocols.schedule import Op
from offbeat.simulate.network import Link, Network
from offbeat.simulate.schedules import Activity, Interval, Trace, finish_times, trace
from offbeat.simulate.timeline import RoundSummary, Timeline, summaries

_ACTIVITIES = {
    Work.FORWARD: Activity.FORWARD,
    Work.BACKWARD: Activity.BACKWARD,
    Work.INPUT_GRADIENT: Activity.BACKWARD,
    Work.WEIGHT_GRADIENT: Activity.WEIGHTS,
}


class LinkCost(NamedTuple):
    """What a message costs."""

    latency: float = 0.0  # Seconds, whatever its size.
    per_byte: float = 0.0  # Seconds.


class PipelinePrediction(Struct, frozen=True):
    """What a step of a pipeline takes."""

    seconds: float  # Until the last stage is done.
    computing: tuple[float, ...]  # Seconds of each stage.

    @property
    def idle(self) -> tuple[float, ...]:
        """For each stage the share of the step in which it does not compute: bubbles, and waits for messages."""
        return tuple(1 - own / self.seconds if self.seconds else 0.0 for own in self.computing)


class StagedStep(Struct, frozen=True, kw_only=True):
    """A step of a pipeline and of what comes with it, by measured costs."""

    kind: PipelineKind
    microbatches: int
    chunks: int
    parts: tuple[PartSeconds, ...]  # Seconds of each part for a microbatch.
    edges: tuple[PartEdge, ...]  # What crosses between parts.
    hosts: tuple[int, ...]  # The host of each stage.
    inside: LinkCost  # Of messages between stages on one host.
    between: LinkCost  # Of messages between stages on different hosts.
    tied: tuple[TiedWeights, ...] = ()  # Parameters that several stages use.
    outside: tuple[float, ...] = ()  # Seconds of each stage's own work besides its parts, such as its optimizer's.
    exchanging: tuple[float, ...] = ()  # Seconds in which each stage sums its gradients with those of other replicas.
    batches: float = 1.0  # Batches of a step: several if gradients are accumulated.

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.hosts)

    @property
    def plan(self) -> PipelinePlan:
        """The pipeline with its seconds and bytes."""
        numbers = self.kind, self.stages, self.microbatches, self.chunks
        return PipelinePlan(*numbers, self.edges, self.parts, tied=self.tied, tells_loss=True)

    @property
    def network(self) -> Network:
        """The links."""
        return Network(Link(*self.between), Link(*self.inside))

    @property
    def message_bytes(self) -> int:
        """Bytes that the stages of a replica send each other in a step."""
        plan = self.plan
        return round(self.batches * int(cost(rounds(plan), plan.view(), plan.layout).bytes_sent.sum()))

    def prediction(self) -> PipelinePrediction:
        """What a step takes."""
        one = predicted_pipeline_step(self.plan, self.network, self.hosts, self.outside)
        computing = tuple(self.batches * each for each in one.computing)
        return PipelinePrediction(self.batches * one.seconds + max(self.exchanging, default=0.0), computing)


def peak_activations(plan: PipelinePlan, stage: int, nbytes: Sequence[int]) -> int:
    """Bytes that a stage keeps for backward at its worst moment, from those that each part keeps for a microbatch."""
    held = most = 0
    for action in plan.orders[stage]:
        if action.work is Work.FORWARD:
            held += nbytes[plan.part_of(stage, action)]
        elif action.work is not Work.INPUT_GRADIENT:  # Until the last gradient is computed.
            held -= nbytes[plan.part_of(stage, action)]
        most = max(most, held)
    return most


def predicted_pipeline_step(
    plan: PipelinePlan, network: Network, hosts: Sequence[int] | None = None, after: Sequence[float] = ()
) -> PipelinePrediction:
    """What a step takes, with the plan's seconds and bytes on these links.

    Args:
        plan: The pipeline; its `seconds` are those of each part, its `edges` what crosses between them.
        network: What messages cost.
        hosts: The host of each stage; by default all are on one.
        after: What each stage does when it has computed all, in seconds, such as its optimizer's step.

    """
    if after and len(after) != plan.stages:
        raise UsageError(f"{len(after)} times after computing were given for {plan.stages} stages; give one for each.")
    ends = finish_times(rounds(plan, _delay(plan, network, hosts)), plan.view(hosts), plan.layout, network)
    own = np.asarray(after or [0.0] * plan.stages)
    computing = (sum(plan.takes(stage, action) for action in order) for stage, order in enumerate(plan.orders))
    return PipelinePrediction(float((ends + own).max()), tuple(np.add(tuple(computing), own).tolist()))


def pipeline_timeline(plan: PipelinePlan, network: Network, title: str, hosts: Sequence[int] | None = None) -> Timeline:
    """Every computation and message of a step; the gaps are bubbles."""
    view = plan.view(hosts)
    played = trace(rounds(plan, _delay(plan, network, hosts)), view, plan.layout, network)
    work = tuple(_work(plan, played))
    end = max(each.end for each in work)
    gaps = [gap for stage in range(plan.stages) for gap in _gaps(played, [each for each in work if each.lane == stage])]
    gaps += _last_gaps(work, end, plan.stages)
    lanes = tuple(f"stage {stage}" for stage in range(plan.stages))
    notes = tuple(_notes(plan, work, end))
    return Timeline(
        title,
        lanes,
        tuple(view.hosts.tolist()),
        (*gaps, *work),
        played.transfers,
        tuple(_described(played, plan)),
        notes,
    )


def _delay(plan: PipelinePlan, network: Network, hosts: Sequence[int] | None) -> Callable[[Crossing], float]:
    """What a message takes that need not queue."""

    def delay(value: Crossing) -> float:
        start, stop = plan.extent(value)
        source, target = plan.ends(value)
        link = network.inside if hosts is None or hosts[source] == hosts[target] else network.between
        return link.alpha + link.beta * (stop - start)

    return delay


def _described(played: Trace, plan: PipelinePlan) -> Iterator[RoundSummary]:
    for each in summaries(played, plan.layout):
        what = played.rounds[each.number].what
        yield each._replace(what=what.brief if isinstance(what, Action | StepEnd | Message) else "")


def _work(plan: PipelinePlan, played: Trace) -> Iterator[Interval]:
    for number, each in enumerate(played.rounds):
        if isinstance(each.what, Action):
            stage, action = int(each.target[0]), each.what
            end = float(played.end[number, stage])
            mark = f"{action.microbatch}" + ("abcdefgh"[action.chunk % 8] if plan.chunks > 1 else "")
            activity = _ACTIVITIES[action.work]
            yield Interval(stage, end - each.seconds, end, activity, str(action), mark, action.chunk % 2 == 1)


def _gaps(played: Trace, own: Sequence[Interval]) -> Iterator[Interval]:
    """When a stage waits, and for which message."""
    causes = {
        (int(each.target[0]), str(each.what)): [
            brought.what for brought in (played.rounds[earlier] for earlier in each.after) if brought.op is Op.SEND
        ]
        for each in played.rounds
        if each.op is Op.COMPUTE
    }
    before = 0.0
    for each in own:
        if each.begin > before * (1 + 1e-12):
            waited = causes[each.lane, each.label]
            label = f"waits for {' and '.join(map(str, waited))}" if waited else "waits"
            yield Interval(each.lane, before, each.begin, Activity.WAIT, label)
        before = each.end


def _last_gaps(work: Sequence[Interval], end: float, stages: int) -> Iterator[Interval]:
    for stage in range(stages):
        done = max(each.end for each in work if each.lane == stage)
        if done < end:
            yield Interval(stage, done, end, Activity.WAIT, "has computed everything")


def _notes(plan: PipelinePlan, work: Sequence[Interval], end: float) -> Iterator[str]:
    busy = [sum(each.end - each.begin for each in work if each.lane == stage) for stage in range(plan.stages)]
    idle = 1 - sum(busy) / (plan.stages * end)
    formula = bubble_share(plan.kind, plan.stages, plan.microbatches, plan.chunks)
    yield (
        f"Stages idle {idle:.1%} of the time; with equal stages and free messages it would be {formula:.1%} "
        f"({plan.kind.value}, {plan.microbatches} microbatches)."
    )

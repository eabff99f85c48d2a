"""Pipelines in virtual time: predicted steps, and stages that are killed or stopped while others wait for them."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from offbeat.errors import UsageError
from offbeat.protocols.pipelines.formulas import bubble_share
from offbeat.protocols.pipelines.orders import PipelineKind
from offbeat.protocols.pipelines.plan import PartEdge, PartSeconds, PipelinePlan
from offbeat.simulate.faults.stage_faults import StageEnd, play_faults, stage_name
from offbeat.simulate.machines import Kill, LossyNetwork, Stop
from offbeat.simulate.network import Link, Network
from offbeat.simulate.pipelines import LinkCost, StagedStep, predicted_pipeline_step

DEADLINE = 5.0
DELAY = 0.001


def plan_of(chance: Random) -> PipelinePlan:
    """Any kind of schedule, with uneven stages."""
    kind, stages = chance.choice(list(PipelineKind)), chance.choice((2, 3, 4, 6))
    chunks = chance.choice((2, 3)) if kind is PipelineKind.INTERLEAVED else 1
    costs = tuple(PartSeconds(chance.uniform(0.01, 0.05), chance.uniform(0.02, 0.1)) for _ in range(stages * chunks))
    return PipelinePlan(kind, stages, 2 * stages, chunks, seconds=costs)


def blamed(ends: Mapping[int, StageEnd | None], stage: int) -> list[int]:
    """The stages to which the names lead, from one missing stage to the next."""
    names: list[int] = []
    end = ends[stage]
    while end is not None and end.missing is not None and end.missing not in names:
        names.append(end.missing)
        end = ends[end.missing]
    return names


def play(plan: PipelinePlan, faults: list[Kill | Stop], seed: int = 0) -> Mapping[int, StageEnd | None]:
    network = LossyNetwork(delay=DELAY, jitter=DELAY, ordered=True)
    return play_faults(plan, faults, DEADLINE, network, seed)


@pytest.mark.parametrize("seed", range(10))
def test_random_kills_and_stops_end_every_stage_with_the_name_of_a_missing_one(seed: int) -> None:
    chance, harmed, finished = Random(seed), 0, 0
    for _ in range(20):
        plan = plan_of(chance)
        step = predicted_pipeline_step(plan, Network.uniform(Link(DELAY, 0.0))).seconds
        victim, at = chance.randrange(plan.stages), chance.uniform(0, step)
        kills, seconds = chance.random() < 0.5, chance.choice((1.0, 60.0))
        fault = Kill(stage_name(victim), at) if kills else Stop(stage_name(victim), at, seconds)
        ends = play(plan, [fault], seed)
        lost = {stage for stage, end in ends.items() if end is None}
        assert lost <= ({victim} if kills else set()), "a stage that lives always ends"
        complete = all(end is not None and end.missing is None for end in ends.values())
        harmed, finished = harmed + (not complete), finished + complete
        if not kills and seconds < DEADLINE - step:
            assert complete, "a short stop delays, and harms nothing"
        for stage, end in ends.items():
            if end is None or end.missing is None:
                continue
            assert end.missing != stage
            resumed = 0.0 if kills or stage != victim else at + seconds
            assert end.at <= max(end.waited_since + DEADLINE, resumed) + 1e-9
            assert stage == victim or end.at <= at + 2 * step + DEADLINE, "nobody waits for more than one deadline"
            assert stage == victim or victim in blamed(ends, stage)
            if kills and plan.chunks == 1:
                assert end.missing == stage + (1 if victim > stage else -1), "its neighbour towards the killed one"
    assert harmed >= 5
    assert finished >= 2


def test_a_killed_stage_is_where_all_names_lead() -> None:
    plan = PipelinePlan(PipelineKind.ONE_F_ONE_B, 4, 8, seconds=(PartSeconds(0.01, 0.02),) * 4)
    ends = play(plan, [Kill(stage_name(2), 0.1)])
    assert ends[2] is None
    assert [blamed(ends, stage) for stage in (0, 1, 3)] == [[1, 2], [2], [2]]
    assert all(end is None or end.at < 0.4 + DEADLINE for end in ends.values())


def test_without_a_deadline_the_others_would_wait_for_ever() -> None:
    plan = PipelinePlan(PipelineKind.ONE_F_ONE_B, 3, 6)
    ends = play_faults(plan, [Kill(stage_name(1), 2.5)], float("inf"), LossyNetwork())
    assert ends == {0: None, 1: None, 2: None}


def test_without_faults_all_stages_finish_when_the_simulator_says() -> None:
    chance = Random(3)
    for _ in range(20):
        plan = plan_of(chance)
        ends = play_faults(plan, [], 1e6, LossyNetwork(delay=DELAY))
        expected = predicted_pipeline_step(plan, Network.uniform(Link(DELAY, 0.0))).seconds
        assert max(end.at for end in ends.values() if end is not None) == pytest.approx(expected)


def test_a_predicted_step_has_the_bubble_and_what_follows_computing() -> None:
    free = Network.uniform(Link(0.0, 0.0))
    plan = PipelinePlan(PipelineKind.ONE_F_ONE_B, 4, 8, seconds=(PartSeconds(0.01, 0.02),) * 4)
    step = predicted_pipeline_step(plan, free)
    assert step.seconds == pytest.approx(11 * 0.03)
    assert step.idle == pytest.approx([bubble_share(plan.kind, 4, 8)] * 4)
    followed = predicted_pipeline_step(plan, free, after=(0.5, 0.0, 0.0, 0.0))
    assert followed.seconds == pytest.approx(11 * 0.03 + 0.5)
    assert followed.computing == pytest.approx([0.74, 0.24, 0.24, 0.24])
    with pytest.raises(UsageError, match="1 times after computing were given for 4 stages"):
        predicted_pipeline_step(plan, free, after=(0.5,))


def test_a_slow_stage_and_slow_links_between_hosts_show_in_the_prediction() -> None:
    edges = tuple(PartEdge(part, part + 1, 10_000) for part in range(3))
    costs = [PartSeconds(0.01, 0.02)] * 4
    plan = PipelinePlan(PipelineKind.GPIPE, 4, 8, edges=edges, seconds=tuple(costs))
    network = Network(Link(0.002, 1e-7), Link(0.0, 0.0))
    near = predicted_pipeline_step(plan, network, hosts=(0, 0, 0, 0)).seconds
    apart = predicted_pipeline_step(plan, network, hosts=(0, 0, 1, 1)).seconds
    assert apart == pytest.approx(near + 2 * 0.003)
    costs[1] = PartSeconds(0.02, 0.04)
    slow = PipelinePlan(PipelineKind.GPIPE, 4, 8, edges=edges, seconds=tuple(costs))
    assert predicted_pipeline_step(slow, network).seconds == pytest.approx(near + 8 * 0.03)


def test_a_step_has_its_bubbles_its_messages_what_stages_do_besides_and_their_exchange() -> None:
    def seconds(outside: tuple[float, ...] = (), exchanging: tuple[float, ...] = (), latency: float = 0.0) -> float:
        step = StagedStep(
            kind=PipelineKind.ONE_F_ONE_B,
            microbatches=8,
            chunks=1,
            parts=(PartSeconds(1.0, 2.0),) * 4,
            edges=tuple(PartEdge(part, part + 1, 100) for part in range(3)),
            hosts=(0, 0, 1, 1),
            inside=LinkCost(),
            between=LinkCost(latency),
            outside=outside,
            exchanging=exchanging,
        )
        return step.prediction().seconds

    assert seconds() == pytest.approx((8 + 4 - 1) * 3)
    assert seconds(outside=(5.0, 0.0, 0.0, 0.0)) == pytest.approx(33 + 5), "stage 0 is the last to end"
    assert seconds(outside=(0.0, 0.0, 0.0, 5.0)) < 33 + 5, "stage 3 ends earlier"
    assert seconds(exchanging=(1.0, 4.0, 1.0, 1.0)) == pytest.approx(33 + 4)
    assert seconds(latency=0.5) >= 33 + 2 * 0.5, "a first microbatch crosses between hosts, and its gradient back"

"""Pipelines without a process: every schedule is proved correct, keeps its formulas, and wrong ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from offbeat.errors import ScheduleError, UsageError
from offbeat.protocols.checker import cost
from offbeat.protocols.pipelines.checker import check_pipeline
from offbeat.protocols.pipelines.formulas import bubble_share, most_in_flight
from offbeat.protocols.pipelines.orders import Action, PipelineKind, Work, orders
from offbeat.protocols.pipelines.plan import (
    LOSS_BYTES,
    Crossing,
    LossMessage,
    PartEdge,
    PartSeconds,
    PipelinePlan,
    TiedGradient,
    TiedWeights,
)
from offbeat.protocols.pipelines.rounds import ComputeStep, ReceiveStep, SendStep, program, rounds, schedule
from offbeat.protocols.schedule import Op, Round
from offbeat.simulate.network import Link, Network
from offbeat.simulate.schedules import finish_times, trace

FREE = Network.uniform(Link(0.0, 0.0))
Shape = tuple[PipelineKind, int, int, int]
ONE_CHUNK = tuple(kind for kind in PipelineKind if kind is not PipelineKind.INTERLEAVED)


def shapes(stages: int, microbatches: range | tuple[int, ...]) -> Iterator[Shape]:
    """Every kind of schedule that these numbers can have."""
    for number in microbatches:
        for kind in ONE_CHUNK:
            yield kind, stages, number, 1
        if number % stages == 0:
            for chunks in (2, 3):
                yield PipelineKind.INTERLEAVED, stages, number, chunks


def seconds_of(plan: PipelinePlan, played: list[Round] | None = None, network: Network = FREE) -> float:
    """When the last stage is done in the simulator."""
    return float(finish_times(played or rounds(plan), plan.view(), plan.layout, network).max())


# -- proofs -----------------------------------------------------------------------------------------------------------


def prove(stages: int, microbatches: range | tuple[int, ...]) -> int:
    """Check every schedule, and that stages hold exactly what the formula allows."""
    count = 0
    for kind, p, m, v in shapes(stages, microbatches):
        tied = (TiedWeights((0, p - 1)),) if p > 1 else ()
        report = check_pipeline(PipelinePlan(kind, p, m, v, tells_loss=True, tied=tied))
        assert report.in_flight == tuple(most_in_flight(kind, stage, p, m, v) for stage in range(p)), (kind, p, m, v)
        assert report.messages == (2 * m * (p * v - 1) + p - 1 + 2) * (p > 1)
        count += 1
    return count


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 16])
def test_every_schedule_is_proved_without_a_process(stages: int) -> None:
    assert prove(stages, (1, 2, 3, 5, 8, 16)) >= 24


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(1, 17))
def test_every_schedule_is_proved_for_all_numbers_of_microbatches(stages: int) -> None:
    assert prove(stages, range(1, 33)) == 4 * 32 + 2 * (32 // stages)


def test_formulas_of_memory_are_those_of_the_papers() -> None:
    assert [most_in_flight(PipelineKind.GPIPE, stage, 4, 8) for stage in range(4)] == [8, 8, 8, 8]
    assert [most_in_flight(PipelineKind.ONE_F_ONE_B, stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight(PipelineKind.ONE_F_ONE_B, stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert [most_in_flight(PipelineKind.ZERO_BUBBLE, stage, 4, 8) for stage in range(4)] == [4, 4, 4, 4]
    assert [most_in_flight(PipelineKind.INTERLEAVED, stage, 4, 8, 2) for stage in range(4)] == [11, 9, 7, 5]


# -- time -------------------------------------------------------------------------------------------------------------


def expect_bubble(shape: Shape, seconds: PartSeconds) -> None:
    kind, p, m, v = shape
    part = PartSeconds(seconds.forward / v, seconds.backward / v, None if v > 1 else seconds.weights)
    plan = PipelinePlan(kind, p, m, v, seconds=(part,) * (p * v))
    computing = m * (seconds.forward + seconds.backward)
    assert 1 - computing / seconds_of(plan) == pytest.approx(bubble_share(kind, p, m, v, seconds), abs=1e-12), shape


@pytest.mark.parametrize("stages", [1, 2, 4, 5, 8])
def test_with_equal_stages_and_free_links_the_bubble_is_the_formulas(stages: int) -> None:
    for shape in shapes(stages, (1, 2, 4, 5, 8, 10)):
        expect_bubble(shape, PartSeconds())


def test_the_bubble_of_zero_bubble_is_the_papers_and_less_than_that_of_one_f_one_b() -> None:
    for p, m in ((2, 2), (4, 8), (5, 5), (8, 9), (3, 2), (6, 1)):
        for seconds in (PartSeconds(1, 2, 1), PartSeconds(2, 5, 2), PartSeconds(1, 4, 3), PartSeconds(1, 3, 2.5)):
            expect_bubble((PipelineKind.ZERO_BUBBLE, p, m, 1), seconds)
            shares = [bubble_share(kind, p, m, 1, seconds) for kind in ONE_CHUNK[2:]]
            assert shares[1] < shares[0] or m == 1
    share = bubble_share(PipelineKind.ZERO_BUBBLE, 4, 8)
    assert share == pytest.approx(3 * (1 + 1 - 1) / (8 * 3 + 3 * (1 + 1 - 1)))


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(1, 17))
def test_the_bubble_is_the_formulas_for_many_numbers_of_microbatches(stages: int) -> None:
    for shape in shapes(stages, range(1, 33) if stages <= 8 else (1, 7, stages, 2 * stages, 32)):
        expect_bubble(shape, PartSeconds())


def test_uneven_stages_of_gpipe_take_the_exact_formula() -> None:
    costs = (PartSeconds(1, 2), PartSeconds(3, 5), PartSeconds(2, 7), PartSeconds(0.5, 1))
    forward, backward = [each.forward for each in costs], [each.backward for each in costs]
    for m in (1, 3, 8):
        plan = PipelinePlan(PipelineKind.GPIPE, 4, m, seconds=costs)
        expected = sum(forward) + (m - 1) * max(forward) + sum(backward) + (m - 1) * max(backward)
        assert seconds_of(plan) == pytest.approx(expected)


def test_messages_overlap_computing_and_cost_what_they_carry() -> None:
    edges = tuple(PartEdge(part, part + 1, 1_000_000) for part in range(3))
    plan = PipelinePlan(PipelineKind.GPIPE, 4, 8, edges=edges, seconds=(PartSeconds(0.01, 0.02),) * 4)
    moved = cost(rounds(plan), plan.view(), plan.layout)
    assert moved.bytes_sent.tolist() == [8_000_000, 16_000_000, 16_000_000, 8_000_000]
    assert moved.hops == 6
    slow = Network.uniform(Link(0.001, 1e-9))
    assert seconds_of(plan, network=slow) == pytest.approx(11 * 0.03 + 6 * 0.002), "only those of one microbatch show"


# -- graphs of parts --------------------------------------------------------------------------------------------------


def test_a_value_that_several_parts_need_crosses_once_to_each_stage() -> None:
    chain = [PartEdge(part, part + 1) for part in range(5)]
    skips = (PartEdge(0, 2, 21), PartEdge(0, 3, 11), PartEdge(1, 3, 5, 0))
    plan = PipelinePlan(PipelineKind.INTERLEAVED, 3, 6, 2, edges=(*chain, *skips))
    report = check_pipeline(plan)
    sent = [each.what for each in rounds(plan) if each.op is Op.SEND]
    assert Crossing(0, 2, 5) in sent
    assert Crossing(0, 3, 5) not in sent, "part 3 is on the stage of part 0"
    assert Crossing(1, 3, 5) in sent
    assert Crossing(3, 1, 5) not in sent, "no gradient goes back"
    assert report.messages == 6 * (2 * 5 + 2 + 1)
    assert report.bytes_sent == 6 * (2 * 5 + 2 * 21 + 5)


ENDING = {"tells_loss": True, "tied": (TiedWeights((0, 2), 400), TiedWeights((0, 1, 2), 24))}


@pytest.mark.parametrize("kind", PipelineKind)
def test_a_step_ends_with_the_loss_and_the_gradients_of_tied_weights_on_all_stages_that_need_them(
    kind: PipelineKind,
) -> None:
    v = 2 if kind is PipelineKind.INTERLEAVED else 1
    for m in (3, 9):
        plain, plan = PipelinePlan(kind, 3, m, v), PipelinePlan(kind, 3, m, v, **ENDING)
        assert check_pipeline(plan).messages == check_pipeline(plain).messages + 2 + 2 + 6
        sent = (
            cost(rounds(plan), plan.view(), plan.layout).bytes_sent
            - cost(rounds(plain), plain.view(), plain.layout).bytes_sent
        )
        assert sent.tolist() == [400 + 2 * 24, 2 * 24, 2 * LOSS_BYTES + 400 + 2 * 24]
        assert seconds_of(plan) == pytest.approx(seconds_of(plain)), "free messages take no time"
    slow = Network.uniform(Link(0.5, 0))
    assert seconds_of(plan, network=slow) > seconds_of(plain, network=slow), "the last stage waits for the others"


def random_edges(parts: int, stages: int, chance: Random) -> tuple[PartEdge, ...]:
    """A chain, and skip connections, one at most from a part to a stage."""
    edges = {(part, (part + 1) % stages): PartEdge(part, part + 1, 4) for part in range(parts - 1)}
    for _ in range(2 * parts):
        source, target = sorted(chance.sample(range(parts), 2))
        edge = PartEdge(source, target, 4, chance.choice((0, 4)))
        edges.setdefault((source, target % stages), edge)
    return tuple(edges.values())


@pytest.mark.parametrize("seed", range(12))
def test_skip_connections_between_any_parts_are_proved_too(seed: int) -> None:
    chance = Random(seed)
    for kind in PipelineKind:
        stages, chunks = chance.choice((2, 3, 4)), chance.choice((2, 3)) if kind is PipelineKind.INTERLEAVED else 1
        parts = stages * chunks
        costs = tuple(PartSeconds(chance.random(), chance.random()) for _ in range(parts))
        edges = random_edges(parts, stages, chance)
        check_pipeline(PipelinePlan(kind, stages, 2 * stages, chunks, edges, costs))


# -- programs ---------------------------------------------------------------------------------------------------------


def test_a_program_is_what_the_rounds_have_a_stage_do_with_receives_posted_ahead() -> None:
    plan = PipelinePlan(PipelineKind.ONE_F_ONE_B, 2, 3)
    steps = program(rounds(plan), 1)
    computed = [step.action for step in steps if isinstance(step, ComputeStep)]
    assert tuple(computed) == orders(PipelineKind.ONE_F_ONE_B, 2, 3)[1]
    assert [step.value for step in steps if isinstance(step, ReceiveStep)] == [Crossing(0, 1, m) for m in range(3)]
    assert [step.value for step in steps if isinstance(step, SendStep)] == [Crossing(1, 0, m) for m in range(3)]
    assert steps[:3] == (
        ReceiveStep(Crossing(0, 1, 0), 0),
        ReceiveStep(Crossing(0, 1, 1), 0),
        ComputeStep(Action(Work.FORWARD, 0), (Crossing(0, 1, 0),)),
    )


def test_receives_that_are_not_posted_ahead_deadlock_without_buffers() -> None:
    plan = PipelinePlan(PipelineKind.ONE_F_ONE_B, 2, 4)
    with pytest.raises(ScheduleError, match=r"with unbuffered sends these wait for each other for ever: stage 0 at"):
        check_pipeline(plan, ahead=0)


def test_parts_on_one_stage_send_nothing() -> None:
    plan = PipelinePlan(PipelineKind.INTERLEAVED, 1, 4, 3)
    assert all(isinstance(step, ComputeStep) for step in program(rounds(plan), 0))


# -- what is wrong is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (("interleaved", 4, 6, 2), "6 microbatches cannot be divided into groups of 4: use 4 or 8 microbatches"),
        (("interleaved", 4, 3, 2), "use 4 microbatches"),
        (("interleaved", 4, 8, 1), "chunks=1 has nothing to interleave"),
        (("gpipe", 4, 8, 2), "gpipe has one chunk on each stage, not 2"),
        (("gpipe", 0, 8, 1), "a pipeline of 0 stages computes nothing"),
        (("naive", 2, 0, 1), "a pipeline of 0 microbatches computes nothing"),
    ],
)
def test_numbers_that_no_schedule_has_are_refused_with_those_that_would_do(
    numbers: tuple[str, int, int, int], words: str
) -> None:
    kind, stages, microbatches, chunks = numbers
    with pytest.raises(UsageError, match=words):
        orders(PipelineKind(kind), stages, microbatches, chunks)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"edges": (PartEdge(1, 0),)}, "does not go from one of the 2 parts to a later one"),
        ({"edges": (PartEdge(0, 1, 0),)}, "carries no bytes"),
        ({"edges": (PartEdge(0, 1), PartEdge(0, 1))}, "crosses to stage 1 twice"),
        ({"seconds": (PartSeconds(),)}, "1 costs were given for 2 parts"),
        ({"seconds": (PartSeconds(), PartSeconds(-1.0))}, "its seconds must be numbers, 0 or more"),
        ({"order": ((),)}, "1 orders were given for 2 stages"),
    ],
)
def test_plans_that_make_no_sense_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        PipelinePlan(PipelineKind.GPIPE, 2, 4, **wrong)  # pyright: ignore[reportArgumentType]


def test_a_view_of_another_size_is_refused() -> None:
    plan = PipelinePlan(PipelineKind.GPIPE, 2, 4)
    other = PipelinePlan(PipelineKind.GPIPE, 3, 4)
    with pytest.raises(ScheduleError, match="a pipeline of 2 stages cannot be played with 3 ranks"):
        list(schedule(plan)(other.view(), plan.layout))


Change = Callable[[list[Action]], list[Action]]
ORDERS: dict[str, tuple[Change, str]] = {
    "swapped": (lambda order: [order[-1], *order[1:-1], order[0]], "never ends: .*stage 1 cannot begin the"),
    "dropped": (lambda order: order[1:], "never ends: .*stage 2 cannot begin the forward of microbatch 0"),
    "last dropped": (lambda order: order[:-1], "stage 1 never computes the|never ends: stage 0 cannot begin"),
    "twice": (lambda order: [*order, order[-1]], "repeats round"),
    "of nobody": (lambda order: [*order, Action(Work.WEIGHT_GRADIENT, 99)], "never ends"),
    "backward first": (lambda order: sorted(order, key=lambda action: action.work is Work.FORWARD), "never ends"),
}


@pytest.mark.parametrize("kind", PipelineKind)
@pytest.mark.parametrize("name", ORDERS)
def test_a_wrong_order_of_a_stage_is_refused(kind: PipelineKind, name: str) -> None:
    change, words = ORDERS[name]
    plan = PipelinePlan(kind, 3, 9, 2 if kind is PipelineKind.INTERLEAVED else 1)
    wrong = tuple(tuple(change(list(order))) if stage == 1 else order for stage, order in enumerate(plan.orders))
    with pytest.raises(ScheduleError, match=words):
        check_pipeline(replace(plan, order=wrong))


def test_a_stage_that_holds_more_than_its_schedule_promises_is_refused() -> None:
    wrong = replace(PipelinePlan(PipelineKind.ONE_F_ONE_B, 4, 8), order=orders(PipelineKind.GPIPE, 4, 8))
    with pytest.raises(ScheduleError, match="holds activations of 8 microbatches at once; under one_f_one_b it may ho"):
        check_pipeline(wrong)


def test_an_order_that_delays_others_shows_in_the_simulated_time() -> None:
    plan = PipelinePlan(PipelineKind.ZERO_BUBBLE, 4, 8)
    late = [each for each in plan.orders[3] if each.work is not Work.WEIGHT_GRADIENT]
    for number in range(8):
        place = late.index(Action(Work.INPUT_GRADIENT, number))
        late.insert(place + 1, Action(Work.WEIGHT_GRADIENT, number))
    eager = replace(plan, order=(*plan.orders[:3], tuple(late)))
    check_pipeline(eager)
    assert seconds_of(eager) > seconds_of(plan)


def with_what(played: list[Round], what: object) -> int:
    return next(number for number, each in enumerate(played) if each.what == what)


def without(played: list[Round], number: int) -> list[Round]:
    """The rounds as if one had never been written: those after it move up, and nobody comes after it."""
    kept = [each for place, each in enumerate(played) if place != number]
    return [
        replace(each, after=tuple(sorted(old - (old > number) for old in each.after if old != number))) for each in kept
    ]


def changed(played: list[Round], number: int, **fields: object) -> list[Round]:
    return [*played[:number], replace(played[number], **fields), *played[number + 1 :]]  # pyright: ignore


VALUE, GRADIENT = Crossing(0, 1, 3), Crossing(2, 1, 1)


def swapped(played: list[Round]) -> list[Round]:
    """Two messages bring each other's value."""
    one, other = with_what(played, VALUE), with_what(played, Crossing(0, 1, 1))
    return changed(changed(played, one, what=played[other].what), other, what=VALUE)


MESSAGES: dict[str, tuple[Callable[[list[Round]], list[Round]], str]] = {
    "dropped": (lambda played: without(played, with_what(played, VALUE)), "which nobody has sent"),
    "dropped gradient": (lambda played: without(played, with_what(played, GRADIENT)), "which nobody has sent"),
    "twice": (lambda played: [*played, played[with_what(played, VALUE)]], "repeats round"),
    "swapped": (swapped, "sends what nobody has computed|does not come after|carries"),
    "to another stage": (
        lambda played: changed(played, with_what(played, VALUE), target=np.array([2])),
        "does not go from the value's stage to the one that uses it",
    ),
    "of another range": (lambda played: changed(played, with_what(played, VALUE), start=np.array([0])), "carries"),
    "too early": (lambda played: changed(played, with_what(played, VALUE), after=()), "which computes it"),
    "not waited for": (
        lambda played: changed(played, number := use_of(played, VALUE), after=played[number].after[:-1]),
        "does not come after round",
    ),
    "not in turn": (
        lambda played: changed(played, number := use_of(played, VALUE), after=played[number].after[1:]),
        "the stage's computation before|which brings",
    ),
    "later round": (lambda played: changed(played, 3, after=(5,)), "which is not earlier"),
    "nothing": (lambda played: changed(played, 3, what=None), "neither a computation nor a message"),
}


LOSS, TIED = LossMessage(1), TiedGradient(0, 0, 2)
ENDS: dict[str, tuple[Callable[[list[Round]], list[Round]], str]] = {
    "no loss": (lambda played: without(played, with_what(played, LOSS)), "loss, which nobody has sent"),
    "no gradient": (lambda played: without(played, with_what(played, TIED)), "stage 0, which nobody has sent"),
    "gradient twice": (lambda played: [*played, played[with_what(played, TIED)]], "repeats round"),
    "loss too early": (lambda played: changed(played, with_what(played, LOSS), after=(0,)), "which computes it"),
    "gradient too early": (
        lambda played: changed(played, with_what(played, TIED), after=(0,)),
        "does not come after round",
    ),
    "to another stage": (
        lambda played: changed(played, with_what(played, TIED), target=np.array([1])),
        "does not go from the value's stage to the one that uses it",
    ),
    "no end": (lambda played: without(played, use_of(played, LOSS)), "never (used|ends its step)"),
    "not waited for": (
        lambda played: changed(played, number := use_of(played, TIED), after=played[number].after[:1]),
        "does not come after round",
    ),
    "computing after the end": (
        lambda played: [*played, changed(played, 0, target=np.array([1]), source=np.array([1]))[0]],
        "repeats round",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_wrong_end_of_a_step_is_refused(name: str) -> None:
    change, words = ENDS[name]
    plan = PipelinePlan(PipelineKind.ONE_F_ONE_B, 3, 6, **ENDING)
    played = rounds(plan)
    check_pipeline(plan, played)
    with pytest.raises(ScheduleError, match=words):
        check_pipeline(plan, change(played))


def use_of(played: list[Round], value: object) -> int:
    """The computation that uses a value."""
    sent = with_what(played, value)
    return next(number for number, each in enumerate(played) if each.op is Op.COMPUTE and sent in each.after)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_wrong_message_is_refused(name: str) -> None:
    change, words = MESSAGES[name]
    plan = PipelinePlan(PipelineKind.ONE_F_ONE_B, 3, 6)
    played = rounds(plan)
    check_pipeline(plan, played)
    with pytest.raises(ScheduleError, match=words):
        check_pipeline(plan, change(played))


@pytest.mark.parametrize("name", ["dropped", "dropped gradient", "twice", "too early", "not waited for"])
def test_a_wrong_message_shows_in_the_simulation(name: str) -> None:
    edges = (PartEdge(0, 1, 10**6), PartEdge(1, 2, 10**6))
    plan = PipelinePlan(PipelineKind.ONE_F_ONE_B, 3, 6, edges=edges, seconds=(PartSeconds(0.01, 0.02),) * 3)
    right = rounds(plan)
    wrong = MESSAGES[name][0](right)
    slow, view = Network.uniform(Link(0.05, 1e-8)), plan.view()
    ends = [trace(each, view, plan.layout, slow).end for each in (right, wrong)]
    assert ends[0].shape != ends[1].shape or not np.allclose(ends[0], ends[1], equal_nan=True)

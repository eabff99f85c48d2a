"""What a step is predicted to take: its schedules, the links, and what a run says beside what it took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import offbeat
from offbeat.protocols.collectives import Collective, algorithm
from offbeat.protocols.compression import SumMethod
from offbeat.protocols.exchanges import Exchanged, beside, in_turn
from offbeat.protocols.gossip.topology import GraphShape, mixing
from offbeat.protocols.schedule import Layout, Op, View
from offbeat.run.step_times import GIVEN, MEASURED, predicted
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.simulate import Link, Network, compressed_sum_time, finish_times, gossip_step_time, local_step_time
from offbeat.simulate.predicted_step import Step, Timed, network_of, step_time
from offbeat.tasks.digits import Digits

SIZE, BYTES = 4, 4_000_000
NETWORK = Network.parse("100Mbit,50us")
APART = View.of(SIZE, range(SIZE))


def ring(nbytes: int) -> Exchanged:
    return Exchanged(what="all_reduce", by="ring", nbytes=nbytes)


def step(*exchanges: Exchanged, **more: Any) -> Step:
    return Step(hosts=tuple(range(SIZE)), exchanges=exchanges, **more)


def alone(nbytes: int) -> float:
    return compressed_sum_time(nbytes, SumMethod.REDUCE, SIZE, NETWORK)


def test_a_step_is_its_computing_and_its_exchanges_one_after_the_other() -> None:
    found = step_time(step(ring(BYTES), ring(1000)), NETWORK, [0.2] * SIZE)
    assert found == pytest.approx(0.2 + alone(BYTES) + alone(1000))


def test_the_slowest_worker_sets_the_pace_of_a_sum() -> None:
    assert step_time(step(ring(BYTES)), NETWORK, [0.1, 0.1, 0.5, 0.1]) == pytest.approx(0.5 + alone(BYTES))


def test_a_period_of_local_steps_is_what_the_simulator_says_of_it() -> None:
    found = step_time(step(ring(BYTES), period=4), NETWORK, [0.1] * SIZE)
    assert found == pytest.approx(local_step_time(APART, Layout(BYTES, 1), NETWORK, 0.1, period=4))


@pytest.mark.parametrize("period", [1, 3])
def test_mixing_is_what_the_simulator_says_of_it(period: int) -> None:
    graph = mixing(GraphShape.EXPONENTIAL, SIZE)
    matrices = tuple(tuple(map(tuple, matrix.tolist())) for matrix in graph.matrices)
    exchanges = [Exchanged(what="mix", by=str(turn), nbytes=BYTES) for turn in range(len(matrices))]
    found = step_time(step(*exchanges, matrices=matrices, period=period), NETWORK, [0.1] * SIZE)
    wanted = gossip_step_time(APART, Layout(BYTES, 1), NETWORK, 0.1, graph, 4 * period, period)
    assert found == pytest.approx(wanted)


def test_each_turn_mixes_what_is_its_own() -> None:
    graph = mixing(GraphShape.EXPONENTIAL, SIZE)
    matrices = tuple(tuple(map(tuple, matrix.tolist())) for matrix in graph.matrices)
    rows = [BYTES, BYTES // 4]
    exchanges = [Exchanged(what="mix", by=str(turn), nbytes=nbytes) for turn, nbytes in enumerate(rows)]
    both = [gossip_step_time(APART, Layout(nbytes, 1), NETWORK, 0.1, graph) for nbytes in rows]
    found = step_time(step(*exchanges, matrices=matrices), NETWORK, [0.1] * SIZE)
    assert found == pytest.approx(sum(both) / 2)


def test_messages_from_everybody_to_everybody_are_what_the_simulator_says_of_them() -> None:
    one = Exchanged(what="all_gather", by="ring", nbytes=50_000)
    assert step_time(step(one), NETWORK, [0.0] * SIZE) == pytest.approx(
        compressed_sum_time(50_000, SumMethod.GATHER, SIZE, NETWORK)
    )


def test_elements_of_any_size_take_the_time_of_their_bytes() -> None:
    wide, plain = Exchanged(what="all_reduce", by="ring", nbytes=BYTES, itemsize=8), ring(BYTES)
    assert step_time(step(wide), NETWORK, [0.1] * SIZE) == step_time(step(plain), NETWORK, [0.1] * SIZE)


def test_what_is_handed_round_after_a_step_waits_for_all_of_it() -> None:
    late = step(ring(BYTES), ring(BYTES), beside=True, behind=1)
    assert step_time(late, NETWORK, [100.0] * SIZE) == pytest.approx(100.0 + 2 * alone(BYTES))


def test_sums_beside_backward_are_hidden_as_far_as_there_is_something_to_hide_behind() -> None:
    buckets = step(*[ring(BYTES // 4)] * 4, beside=True)
    assert step_time(buckets, NETWORK, [0.0] * SIZE) == pytest.approx(4 * alone(BYTES // 4))
    long = 100.0
    # All but the last bucket is through when backward ends.
    assert step_time(buckets, NETWORK, [long] * SIZE) == pytest.approx(long + alone(BYTES // 4))
    between = step_time(buckets, NETWORK, [0.4] * SIZE)
    assert 0.4 + alone(BYTES // 4) < between < 0.4 + 4 * alone(BYTES // 4)


def test_what_is_left_of_computing_comes_after_the_last_exchange_has_begun() -> None:
    part = algorithm(Collective.ALL_REDUCE, "ring").schedule, Layout(100, 1)
    rounds = list(beside([1.0, 1.0], [(0.25, part)])(View.of(2, range(2)), Layout(0)))
    computing = [one for one in rounds if one.op is Op.COMPUTE]
    assert [one.seconds for one in computing] == [0.25, 0.75]
    assert computing[1].after == (0,), "it waits for no exchange"


def test_an_exchange_in_turn_waits_for_all_of_the_one_before() -> None:
    part = algorithm(Collective.ALL_REDUCE, "ring").schedule, Layout(100, 1)
    view, layout = View.of(2, range(2)), Layout(0, 1)
    once = finish_times(part[0](view, part[1]), view, part[1], NETWORK)
    twice = finish_times(in_turn([part, part])(view, layout), view, layout, NETWORK)
    assert twice.max() == pytest.approx(2 * once.max())


def test_links_are_learned_from_trials_to_what_they_were() -> None:
    link = Link(2e-4, 1e-8)
    known = Network.uniform(link)
    sizes = (4096, 65536, 1 << 20)
    trials = tuple(Timed(ring(size), step_time(step(ring(size)), known, [0.0] * SIZE)) for size in sizes)
    found = network_of(step(ring(BYTES), trials=trials))
    assert found.between.alpha == pytest.approx(link.alpha, rel=0.01)
    assert found.between.beta == pytest.approx(link.beta, rel=0.01)


def test_where_the_rate_is_known_only_latency_is_measured() -> None:
    found = network_of(step(ring(BYTES), trials=(Timed(ring(8), 6e-3),)), rate=12.5e6)
    assert found.between == Link(1e-3, 1 / 12.5e6)
    together = Step(hosts=(0, 0), exchanges=(), trials=(Timed(ring(1000), 1e-3),))
    assert network_of(together, rate=12.5e6).between.beta == 0.0, "nothing leaves the host"


def result(**more: Any) -> dict[str, Any]:
    """Ten steps of half a second each, two seconds of the run being an evaluation."""
    known = {"steps": 10, "seconds": 7.0, "seconds_by_kind": {"evaluate": 2.0}, "computing_seconds": [1.0] * SIZE}
    return {**known, **more}


def test_a_result_has_both_figures_and_says_them_in_a_line() -> None:
    foreseen = msgspec.to_builtins(step(ring(BYTES), trials=(Timed(ring(8), 6 * 50e-6),)))
    told = predicted(result(foreseen=foreseen), {"hosts": Hosts.alike(SIZE, "100Mbit").plain()})
    assert told["step_seconds"] == pytest.approx(0.5)
    assert told["predicted_seconds"] == pytest.approx(0.1 + alone(BYTES))
    assert told["exchanging_seconds"] == pytest.approx(alone(BYTES))
    assert told["bytes_per_second"] == pytest.approx(12.5e6)
    assert told["links"] == GIVEN
    assert told["words"] == "step 500 ms measured, 580 ms predicted"
    coded = predicted(
        result(foreseen=foreseen, compression={"coding_seconds": 0.7}),
        {"hosts": Hosts.alike(SIZE, "100Mbit").plain()},
    )
    assert coded["predicted_seconds"] == pytest.approx(told["predicted_seconds"] + 0.07)


def test_what_cannot_be_predicted_says_why_and_what_exchanges_nothing_says_nothing() -> None:
    told = predicted(result(foreseen="it is decided as it happens"), {})
    assert told["words"] == "step 500 ms measured; not predicted: it is decided as it happens"
    assert told["predicted_seconds"] is None
    assert predicted(result(foreseen=None), {}) == {}
    assert predicted(result(foreseen="nothing was done", steps=0), {}) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kinds", "period"),
    [
        ("allreduce", ["all_reduce"] * 3, 1),
        ("allreduce(tree)", ["all_reduce"], 1),
        ("allreduce(shard=optimizer)", ["all_reduce", "all_reduce", "reduce_scatter", "all_reduce"], 1),
        ("allreduce + lowrank(2)", ["all_reduce"] * 3, 1),
        ("allreduce + threshold(0.001)", ["all_reduce", "all_reduce", "all_gather"], 1),
        ("local(3) + sign", ["all_reduce", "all_reduce", "all_gather"], 3),
        ("local(3, momentum=averaged)", ["all_reduce"] * 4, 3),
        ("gossip", ["mix_in_memory"], 1),
        ("gossip + threshold(0.001)", ["tell", "tell"], 1),
    ],
)
def test_a_run_tells_what_its_steps_were_predicted_to_take(
    strategy: str, kinds: list[str], period: int, launcher: Launcher, tmp_path: Path
) -> None:
    found = offbeat.fit(Digits(), strategy, workers=2, seed=1, steps=9, out=tmp_path, launcher=launcher).predicted
    assert [one["what"] for one in found["exchanges"]] == kinds
    assert found["period"] == period
    assert found["links"] == MEASURED
    assert found["predicted_seconds"] > found["computing_seconds"] > 0
    numbers = 4 * sum(p.numel() for p in Digits().model().parameters())
    if "+" not in strategy and "momentum" not in strategy:
        assert numbers <= sum(one["nbytes"] for one in found["exchanges"]) < numbers + 1000


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "server"])
def test_a_run_that_nobody_can_predict_says_why(strategy: str, launcher: Launcher, tmp_path: Path) -> None:
    found = offbeat.fit(Digits(), strategy, workers=2, seed=1, steps=4, out=tmp_path, launcher=launcher).predicted
    assert "not predicted: " in found["words"]
    assert found["predicted_seconds"] is None

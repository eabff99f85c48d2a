"""Sandblaster's machines in virtual time: the same bits whatever is lost, stopped or dead; and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.protocols.machine import Received
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.servers.messages import Fenced, server_name, worker_name
from offbeat.simulate.machine_contract import check_machine
from offbeat.simulate.machines import Kill, Stop
from offbeat.simulate.sandblaster.pauses import evaluation_seconds
from offbeat.testing.sandblaster_faults import FOREVER, SHARDS, SandblasterContract, SandblasterWorld, play

COORDINATORS = [server_name(SHARDS, copy) for copy in (0, 1)]


def test_the_undisturbed_result_is_the_optimum() -> None:
    world = SandblasterWorld(iterations=12)
    assert world.simulation().run(FOREVER, lambda: world.over)
    expected = np.linalg.lstsq(world.inputs, world.wanted, rcond=None)[0]
    np.testing.assert_allclose(world.searching[0].row, expected, atol=1e-4)


@pytest.mark.parametrize("block", range(10))
def test_fifty_random_schedules_of_faults_give_the_same_bits(block: int) -> None:
    successors = dead = lost = 0
    for seed in range(50 * block, 50 * block + 50):
        run = play(seed)
        assert run.ended, f"seed {seed} has not ended"
        assert not run.world.wrong(), f"seed {seed}: {run.world.wrong()}"
        assert not run.world.membership.lost, f"seed {seed} has lost a shard"
        view = run.world.membership.view
        successors += sum(name.endswith(".1") for name in view.primaries)
        dead += 3 - len(view.workers)
        lost += run.simulation.lost
    assert successors > 20
    assert dead > 10
    assert lost > 500


def struck(*faults: Kill | Stop) -> SandblasterWorld:
    """A run with these faults, after its end."""
    world = SandblasterWorld()
    assert world.simulation(faults=faults).run(FOREVER, lambda: world.over)
    assert not world.wrong()
    return world


@pytest.mark.parametrize("moment", [0.02 + 0.011 * n for n in range(16)])
@pytest.mark.parametrize("name", [server_name(0, 0), server_name(1, 0), COORDINATORS[0]])
def test_a_server_may_die_at_any_moment_of_a_line_search(name: str, moment: float) -> None:
    world = struck(Kill(name, moment, seen_after=0.05))
    assert name not in world.membership.view.names


def test_a_coordinator_that_was_stopped_for_long_is_refused_by_its_term() -> None:
    world = struck(Stop(COORDINATORS[0], 0.05, 5.0))
    old, new = world.minimizers
    assert not new.fence.retired
    assert world.membership.view.primaries[SHARDS] == COORDINATORS[1]
    # What it wanted to say is refused by a shard in a later term.
    shard = world.shards[0]
    batch = msg.CommandBatch(number=shard.shard.memory.batch + 1, commands=(), term=0)
    (refusal,) = shard.on(Received(old.name, batch), 10.0)
    assert getattr(refusal, "message", None) == Fenced(shard.shard.memory.term)
    assert shard.shard.memory.term > 0


def test_a_shard_that_was_stopped_for_long_answers_nothing_any_more() -> None:
    name = server_name(0, 0)
    world = SandblasterWorld(iterations=12)
    simulation = world.simulation(faults=[Stop(name, 0.05, 5.0)])
    assert simulation.run(FOREVER, lambda: world.over and simulation.now > 10)
    assert not world.wrong()
    assert world.shards[0].fence.retired
    assert world.shards[0].shard.memory.batch < world.shards[1].shard.memory.batch


def test_a_shard_without_copies_that_dies_is_lost() -> None:
    world = SandblasterWorld(replicas=0)
    simulation = world.simulation(faults=[Kill(server_name(1, 0), 0.05, seen_after=0.05)])
    assert simulation.run(FOREVER, lambda: world.over)
    assert world.membership.lost == (1,)


def test_portions_of_a_dead_worker_are_handed_out_again() -> None:
    world = struck(Kill(worker_name(1), 0.05, seen_after=0.1))
    minimizer = world.minimizers[0]
    assert minimizer.account.handed_out[worker_name(1)] > 0
    assert worker_name(1) not in world.membership.view.names


def test_the_contract_holds_for_random_weather() -> None:
    report = check_machine(SandblasterContract(), runs=25)
    assert report.faults["kill"] > 3


def test_a_worker_paused_two_fifths_of_the_time_costs_little_with_portions_and_much_without() -> None:
    paused, calm = (evaluation_seconds(4, 64, 4.0, paused=share) for share in (0.4, 0.0))
    assert 1.1 < paused / calm <= 1.15  # A tenth of the capacity is gone.
    paused, calm = (evaluation_seconds(4, 4, 4.0, paused=share, backups=False) for share in (0.4, 0.0))
    assert 1.6 < paused / calm < 1.7
    assert calm >= 1.0

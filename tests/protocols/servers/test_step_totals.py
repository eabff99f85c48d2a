"""Sums over all shards: every shard's update takes the same, whoever dies and whatever is lost in between."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest
from msgspec import structs
from server_worlds import CALM, Setting, World, add_faults, server_fault

from offbeat.errors import UsageError
from offbeat.protocols.machine import NOTHING, Effects, Payload, Send
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import ClusterView, Push, PushRefused, ShardPartial, ShardTotals
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.totals import ReductionToken, StepTotals, TotalsExchange
from offbeat.protocols.servers.replica.works import AccumulateGradient, ReduceGradients, Update
from offbeat.simulate.machines import Kill, LossyNetwork

LEVELS = (("sum", "largest"), ("dot",))
RULE = Rule(0, proves=True, reductions=LEVELS)
CLOSING = (structs.replace(RULE, drop=1), structs.replace(RULE, deadline=0.3))


def totals_of(world: World) -> list[list[tuple[float, ...]]]:
    return [world.primary(shard).totals for shard in range(world.setting.shards)]


def same_on_all_shards(world: World) -> None:
    first, *others = totals_of(world)
    assert all(other == first for other in others)
    assert len(first) == world.setting.steps
    for name, store in world.stores.items():
        if name in world.view.names and world.simulation.alive(name):
            assert store.totals == first[: len(store.totals)]


def test_an_update_takes_the_sums_over_all_shards() -> None:
    world = World(Setting(workers=2, shards=3, replicas=1, steps=4, rule=RULE)).run().check()
    same_on_all_shards(world)
    # Each shard's mean gradient of step 0 is that of (worker + 2) * 3 over workers 0 and 1: 7.5.
    assert totals_of(world)[0][0] == (22.5, 7.5, 3 * 7.5 * 7.5)


@pytest.mark.parametrize("seed", range(12))
def test_servers_may_die_in_the_middle_and_all_shards_go_on_with_the_same_sums(seed: int) -> None:
    random = Random(seed)
    setting = Setting(workers=2, shards=2, replicas=1, steps=6, rule=RULE, pace=0.05)
    network = LossyNetwork(delay=0.02, jitter=0.05, loss=0.05, duplicate=0.1, until=CALM)
    faults = [fault for shard in range(2) for fault in server_fault(f"server {shard}.0", random.uniform(0, 2), random)]
    world = World(setting, seed, network, faults).run().check()
    same_on_all_shards(world)
    if len(world.starts) == setting.workers:  # No worker was cut off along with a server.
        assert totals_of(world) == totals_of(World(setting).run())


@pytest.mark.parametrize("rule", [RULE, *CLOSING], ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_sums_are_the_same_on_all_shards_under_random_faults(seed: int, rule: Rule) -> None:
    network = LossyNetwork(delay=0.01, jitter=0.02, loss=0.03, duplicate=0.1, until=CALM)
    renews = 0.3 if seed % 2 else None
    world = World(Setting(workers=3, shards=2, replicas=1, rule=rule, steps=8, renews=renews), seed, network)
    add_faults(world, Random(seed))
    world.run().check()
    first, second = totals_of(world)
    assert first == second
    assert first


@pytest.mark.timeout(900)
@pytest.mark.parametrize("worlds", [20, 2_000])
def test_sums_are_the_same_on_all_shards_in_random_worlds(worlds: int) -> None:
    for seed in range(worlds):
        random = Random(seed)
        setting = Setting(
            workers=random.randint(1, 4),
            shards=random.randint(2, 3),
            replicas=random.randint(0, 2),
            rule=random.choice([RULE, *CLOSING]),
            steps=random.randint(3, 8),
            parts=random.choice([1, 1, 2]),
            together=random.random() < 0.6,
            pace=random.choice([0.01, 0.05, 0.3]),
            renews=random.choice([None, 0.3]),
        )
        jitter, loss = random.choice([0.0, 0.02, 0.1]), random.choice([0.0, 0.03, 0.08])
        world = World(setting, seed, LossyNetwork(delay=0.01, jitter=jitter, loss=loss, duplicate=0.1, until=CALM))
        add_faults(world, random)
        first, *others = totals_of(world.run().check())
        assert all(other == first for other in others), f"seed {seed}"


def test_a_step_in_which_a_shard_has_nothing_to_sum_is_refused_on_all() -> None:
    world = World(Setting(workers=1, shards=2, steps=4, rule=RULE), unfit=[(0, 2)]).run().check()
    assert [len(own) for own in totals_of(world)] == [3, 3]


class TellsOnce(ServerMachine):
    """Sends its part of each step once, and never again."""

    def _gather(self, now: float, tell: bool = False) -> None:
        due = (self.shard.totals.sealed, len(self.shard.totals.known))
        super()._gather(now, tell and due != getattr(self, "told", None))
        self.told = due


class UsesItsOwnPart(ServerMachine):
    """Does not wait for the other shards."""

    def _gather(self, now: float, tell: bool = False) -> None:
        if self.serving:
            self._propose(self._exchange.due([self.number], self.shard.pacing.completed), now)


def five_worlds(mutant: type[ServerMachine]) -> None:
    for seed in range(5):
        setting = Setting(workers=2, shards=2, steps=6, rule=RULE)
        world = World(setting, seed, LossyNetwork(loss=0.1), server=mutant).run().check()
        same_on_all_shards(world)
        assert totals_of(world)[0][0] == (15.0, 7.5, 2 * 7.5 * 7.5)


@pytest.mark.parametrize("mutant", [TellsOnce, UsesItsOwnPart])
def test_a_broken_exchange_is_noticed(mutant: type[ServerMachine]) -> None:
    five_worlds(ServerMachine)
    with pytest.raises(AssertionError):
        five_worlds(mutant)


# -- one shard ---------------------------------------------------------------------------------------------------------


class Alone:
    """One shard of two, whose log is written by hand."""

    def __init__(self, rule: Rule = RULE, workers: int = 2) -> None:
        self.shard, self.numbers = Shard(rule, ClusterView.of(workers, 2), 0), dict.fromkeys(range(workers), 0)

    def apply(self, entry: Any) -> Any:
        return self.shard.apply(entry, NOTHING if isinstance(entry, ShardTotals) else Payload(1, None), Effects())

    def push(self, worker: int, clock: int, unfit: str = "", **fields: Any) -> Any:
        push = Push(worker=worker, number=self.numbers[worker], clock=clock, **fields)
        self.numbers[worker] += 1
        return self.apply(PushRefused(push, unfit) if unfit else push)


def test_a_step_is_applied_when_all_its_levels_are_known() -> None:
    alone = Alone()
    alone.push(0, 0, weight=3.0, settings=({"lr": 0.5},))
    sealed = alone.push(1, 0)
    assert sealed.works[1:] == [ReduceGradients(0, 1 / 4, ({"lr": 0.5},), 2, ())]
    assert (alone.shard.minimum, alone.shard.between_steps) == (0, False)
    assert alone.apply(ShardTotals(0, 0, (7.0, 3.0))).works == [
        ReduceGradients(1, 1 / 4, ({"lr": 0.5},), 2, (7.0, 3.0))
    ]
    assert alone.apply(ShardTotals(0, 0, (7.0, 3.0))).works == [], "an entry that comes again"
    assert alone.apply(ShardTotals(0, 1, (2.0,))).works == [Update(1, 1.0, (), workers=2, totals=(7.0, 3.0, 2.0))]
    assert (alone.shard.minimum, alone.shard.between_steps) == (1, True)
    assert alone.shard.state().totals == (ShardTotals(0, 0, (7.0, 3.0)), ShardTotals(0, 1, (2.0,)))


def test_a_push_that_comes_once_sums_are_made_is_late() -> None:
    alone = Alone(CLOSING[0])
    alone.push(0, 0)
    late = alone.push(1, 0)
    assert (late.works, late.answers) == ([], [])
    alone.apply(ShardTotals(0, 0, (7.0, 3.0)))
    closed = alone.apply(ShardTotals(0, 1, (2.0,)))
    assert [(answer.worker, answer.status) for answer in closed.answers] == [(1, "late")]
    assert not any(isinstance(work, AccumulateGradient) for work in closed.works)
    assert alone.shard.minimum == 1


def test_a_step_without_a_usable_gradient_here_is_closed_without_an_update() -> None:
    alone = Alone(workers=1)
    assert not any(isinstance(work, ReduceGradients) for work in alone.push(0, 0, unfit="NaN").works)
    assert alone.shard.totals.refusal
    closed = alone.apply(ShardTotals(0, 0, reason="shard 0 has nothing"))
    assert (closed.works, alone.shard.minimum, alone.shard.version) == ([], 1, 0)


def test_a_step_without_a_usable_gradient_elsewhere_is_refused_here() -> None:
    alone = Alone(workers=1)
    alone.push(0, 0)
    closed = alone.apply(ShardTotals(0, 0, reason="shard 1 has nothing"))
    assert [work.refused for work in closed.works] == ["shard 1 has nothing"]


def test_whoever_has_closed_a_step_tells_the_totals_and_parts_that_do_not_fit_are_ignored() -> None:
    totals = StepTotals(LEVELS)
    exchange, out = TotalsExchange(0, totals), Effects()
    totals.seal(4, "")
    assert totals.begin() == 0
    exchange.reduced(ReductionToken(4, 0), (1.0, 2.0))
    for part in (
        ShardPartial(1, 3, 0, (1.0, 1.0)),
        ShardPartial(1, 9, 0, (1.0, 1.0)),
        ShardPartial(1, 4, 0, (1.0,)),
        ShardPartial(1, 4, 7),
    ):
        exchange.heard("server 1.0", part, 4, out)
    assert exchange.due(range(2), 4) is None
    exchange.heard("server 1.0", ShardPartial(1, 4, 0, (10.0, -5.0)), 4, out)
    agreed = cast("ShardTotals", exchange.due(range(2), 4))
    assert agreed == ShardTotals(4, 0, (11.0, 2.0))
    assert exchange.due(range(2), 4) is None, "it is in the log"
    assert not out.done
    totals.take(agreed)
    exchange.heard("server 1.1", ShardPartial(1, 4, 0, (10.0, -5.0)), 4, out)
    totals.take(ShardTotals(4, 1, (0.0,)))
    totals.close()
    exchange.heard("server 1.1", ShardPartial(1, 4, 1, (10.0,)), 5, out)
    assert [cast("Send", send).message for send in out.done] == [
        ShardTotals(4, 0, (11.0, 2.0)),
        ShardTotals(4, 1, (0.0,)),
    ]


@pytest.mark.parametrize("changes", [{"bound": 2}, {"bound": None}, {"coded": 1}], ids=str)
def test_sums_over_shards_need_steps_that_all_make_together(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="sums over all shards"):
        structs.replace(RULE, **changes).__post_init__()


def test_a_shard_that_is_killed_after_it_has_told_the_totals_is_taken_over_by_a_copy_that_knows_them() -> None:
    setting = Setting(workers=1, shards=2, replicas=1, steps=4, rule=RULE, pace=0.01)
    expected = totals_of(World(setting).run())
    for tenth in range(1, 12):
        faults = [
            Kill("server 0.0", tenth / 20, seen_after=0.01),
            Kill("server 1.0", tenth / 20 + 0.3, seen_after=0.01),
        ]
        world = World(setting, tenth, LossyNetwork(delay=0.02), faults).run().check()
        assert totals_of(world) == expected

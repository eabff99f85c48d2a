"""Servers, clients and coordinator together: nothing acknowledged is lost or doubled, whatever happens to whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs
from server_mutants import (
    AnswersBeforeBackupsHold,
    FencesNobody,
    ForgetsWhatItKnows,
    KeepsTheRestToItself,
    ServesTooEarly,
    TakesPushesOutOfOrder,
    TakesWhateverComesAsNext,
    WakesOnlyTheExactMinimum,
)
from server_worlds import CALM, Gradient, Setting, Store, World, add_faults, random_world

from offbeat.protocols.machine import Done, Effect, Name, Payload, Received, Send, Start
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    ClusterView,
    Fenced,
    Gone,
    Lost,
    Pull,
    PullReply,
    Push,
    PushReply,
    Replicate,
    Replicated,
    Viewed,
)
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.works import Update
from offbeat.simulate.machines import Kill, LossyNetwork, Partition, Restart, Stop


class Hand:
    """Replicas of one shard whose messages are delivered by hand."""

    def __init__(self, replicas: int, rule: Rule | None = None, server: type[ServerMachine] = ServerMachine) -> None:
        self.view = ClusterView.of(2, 1, replicas)
        names = [self.view.primaries[0], *self.view.backups[0]]
        self.servers = {name: server(name, 0, rule or Rule(None), self.view) for name in names}
        self.stores = {name: Store() for name in names}
        self.sent: list[tuple[Name, Send]] = []

    def carry_out(self, name: Name, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.sent.append((name, effect))
            elif isinstance(effect, Start):
                result = self.stores[name].perform(effect.work)
                if effect.token is not None:
                    self.carry_out(name, self.servers[name].on(Done(effect.token, result), 0.0))

    def give(self, to: Name, message: Struct, sender: Name, payload: Payload | None = None) -> None:
        event = Received(sender, message, payload or Payload(0))
        self.carry_out(to, self.servers[to].on(event, 0.0))

    def push(self, to: Name, number: int = 0, worker: int = 0, epoch: int = 0) -> None:
        gradient = Payload(1, Gradient(worker, 0, 0, number, 0, 0))
        self.give(to, Push(worker=worker, number=number, clock=number, epoch=epoch), f"worker {worker}", gradient)

    def deliver(self, kind: type[Struct], to: Name | None = None) -> int:
        """Deliver what has been sent of this kind, to one server or to all; answers how many there were."""
        chosen = [
            (sender, send)
            for sender, send in self.sent
            if isinstance(send.message, kind) and send.to in self.servers and to in (None, send.to)
        ]
        self.sent = [item for item in self.sent if item not in chosen]
        for sender, send in chosen:
            self.give(send.to, send.message, sender, send.payload)
        return len(chosen)

    def replies(self) -> list[tuple[Name, int, str]]:
        """What has been acknowledged: by whom, which number, how."""
        return [
            (sender, send.message.number, send.message.status)
            for sender, send in self.sent
            if isinstance(send.message, PushReply)
        ]

    def promote(self, *names: Name, without: int = 1) -> None:
        """The next view, in which the first replicas are gone, reaches these."""
        replicas = [self.view.primaries[0], *self.view.backups[0]][without:]
        self.view = structs.replace(
            self.view, epoch=self.view.epoch + 1, primaries=(replicas[0],), backups=(tuple(replicas[1:]),)
        )
        for name in names:
            self.give(name, Viewed(self.view), COORDINATOR)


P, B, C = "server 0.0", "server 0.1", "server 0.2"


def test_a_push_is_acknowledged_once_all_backups_hold_it():
    hand = Hand(2)
    hand.push(P)
    assert hand.stores[P].used == []
    hand.deliver(Replicate)
    assert len(hand.stores[B].used) == 1
    assert hand.stores[C].used == [], "backups are told in turn"
    hand.deliver(Replicated)
    assert hand.replies() == []
    hand.deliver(Replicate)
    hand.deliver(Replicated)
    assert hand.replies() == [(P, 0, "applied")]
    assert hand.stores[P] == hand.stores[B] == hand.stores[C]


def test_without_backups_a_push_is_acknowledged_at_once():
    hand = Hand(0)
    hand.push(P)
    assert hand.replies() == [(P, 0, "applied")]


def test_a_replicated_entry_that_comes_again_is_answered_again_and_not_applied_again():
    hand = Hand(1)
    hand.push(P)
    (entry,) = [send for _, send in hand.sent if isinstance(send.message, Replicate)]
    for _ in range(3):
        hand.give(B, entry.message, P, entry.payload)
    assert len(hand.stores[B].used) == 1
    assert sum(isinstance(send.message, Replicated) for _, send in hand.sent) == 3


def test_entries_that_overtake_each_other_are_applied_in_order():
    hand = Hand(1)
    hand.push(P, 0)
    hand.push(P, 1)
    hand.sent.reverse()
    hand.deliver(Replicate)
    assert [gradient.clock for gradient in hand.stores[B].used] == [0, 1]


def test_pushes_that_overtake_each_other_are_taken_in_order():
    hand = Hand(0)
    hand.push(P, 1)
    assert hand.replies() == []
    hand.push(P, 0)
    assert [number for _, number, _ in hand.replies()] == [0, 1]
    assert [gradient.clock for gradient in hand.stores[P].used] == [0, 1]


def test_a_backup_that_takes_over_knows_what_was_pushed_and_says_so():
    hand = Hand(1)
    hand.push(P)
    hand.deliver(Replicate)
    hand.promote(B)
    hand.push(B, epoch=1)
    assert hand.replies() == [(B, 0, "duplicate")]
    assert len(hand.stores[B].used) == 1
    hand.push(B, 1, epoch=1)
    assert hand.replies()[-1] == (B, 1, "applied")


def test_a_primary_of_the_past_acknowledges_nothing_that_its_successor_does_not_hold():
    hand = Hand(1)
    hand.promote(B)
    hand.push(P)
    assert hand.deliver(Replicate, to=B) == 1
    assert hand.deliver(Replicated) == 0
    assert hand.deliver(Fenced) == 1
    assert hand.replies() == []
    assert not hand.servers[P].serving
    hand.push(P, 1)
    assert hand.replies() == []
    hand.give(P, Pull(worker=0, number=5, clock=0), "worker 0")
    assert not any(isinstance(send.message, PullReply) for _, send in hand.sent)
    hand.give(P, Gone(1), COORDINATOR)
    assert hand.servers[P].retired
    hand.push(B, epoch=1)
    assert hand.replies() == [(B, 0, "applied")]


def test_a_backup_acknowledges_only_the_epoch_it_is_in():
    hand = Hand(1)
    later = structs.replace(hand.view, epoch=3)
    hand.give(P, Viewed(later), COORDINATOR)
    hand.push(P)
    hand.deliver(Replicate)
    assert hand.deliver(Replicated) == 0
    assert hand.replies() == []
    hand.give(B, Viewed(later), COORDINATOR)
    assert hand.deliver(Replicated) == 1
    assert hand.replies() == [(P, 0, "applied")]


def test_a_new_primary_acknowledges_what_it_holds_once_the_other_backups_hold_it_too():
    hand = Hand(2)
    hand.push(P)
    hand.deliver(Replicate, to=B)
    hand.promote(B, C)
    hand.push(B, epoch=1)
    assert hand.replies() == [], "the other backup does not have it yet"
    hand.sent = [item for item in hand.sent if item[0] != P]
    hand.deliver(Replicate)
    hand.deliver(Replicated)
    assert hand.replies() == [(B, 0, "duplicate")]
    assert hand.stores[B].used == hand.stores[C].used


def test_a_message_in_anothers_name_is_ignored():
    hand = Hand(0)
    hand.give(P, Push(worker=0, number=0, clock=0), "worker 1", Payload(1, Gradient(0, 0, 0, 0, 0, 0)))
    assert hand.sent == []
    hand.give(P, Viewed(structs.replace(hand.view, epoch=9)), "worker 1")
    assert hand.servers[P].view.epoch == 0


def test_a_pull_that_nothing_has_changed_for_gets_no_values():
    hand = Hand(0)
    hand.push(P)
    hand.sent.clear()
    hand.give(P, Pull(worker=0, number=1, clock=1, newer_than=1), "worker 0")
    hand.give(P, Pull(worker=0, number=2, clock=1, newer_than=0), "worker 0")
    replies = [(send.message.unchanged, send.payload.nbytes) for _, send in hand.sent]
    assert replies == [(True, 0), (False, 1)]


# All together.


def undisturbed(setting: Setting) -> list[float]:
    return World(setting).run().check().values()


def test_a_run_without_disturbance_uses_every_gradient_once():
    world = World(Setting(workers=3, shards=2, replicas=1, steps=5)).run().check()
    for shard in range(2):
        assert len(world.primary(shard).used) == 3 * 5
    assert world.statuses == {"applied": 30}
    assert world.met[0].values == ((5.0,),) * 3


@pytest.mark.parametrize("rule", [Rule(0), Rule(2), Rule(None)])
def test_each_part_of_a_split_model_has_its_own_shards_and_clocks(rule: Rule):
    setting = Setting(workers=6, shards=4, replicas=1, steps=5, parts_of=(0, 1, 1, 0, 0, 1), rule=rule)
    workers = {0, 3, 4}, {1, 2, 5}
    world = World(setting).run().check()
    for shard in range(4):
        part = shard // 2
        assert {gradient.worker for gradient in world.primary(shard).used} == workers[part]
        assert len(world.primary(shard).used) == 3 * 5
    for seed in range(25):  # Servers die within what replicas allow, and workers as they like.
        world = World(setting, seed)
        add_faults(world, Random(seed))
        world.run().check()
        for shard in range(4):
            assert {gradient.worker for gradient in world.primary(shard).used} <= workers[shard // 2]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_killed_primary_loses_no_acknowledged_push_and_changes_no_result(replicas: int, *, together: bool):
    setting = Setting(workers=3, shards=2, replicas=replicas, steps=6, together=together)
    for tenth in range(15):
        world = World(setting, faults=[Kill(P, tenth / 10)]).run().check()
        assert world.values() == pytest.approx(undisturbed(setting), abs=1e-9)
        assert world.coordinator.view.primaries[0] == B


def test_a_primary_that_was_stopped_and_continued_is_fenced():
    setting = Setting(workers=3, steps=40, pace=0.3)
    world = World(setting, faults=[Stop(P, 1.0, 5.0)])
    world.simulation.run(5.9)
    used = len(world.stores[P].used)
    assert world.coordinator.view.primaries[0] == B
    assert not world.servers[0].retired, "it does not know yet"
    world.run().check()
    assert world.servers[0].retired
    assert len(world.stores[P].used) == used
    assert world.values() == pytest.approx(undisturbed(setting), abs=1e-9)


@pytest.mark.parametrize("rule", [Rule(0), Rule(3), Rule(None)], ids=str)
def test_when_a_worker_is_killed_the_others_go_on(rule: Rule):
    world = World(Setting(workers=3, rule=rule, steps=30), faults=[Kill("worker 1", 1.0)])
    world.simulation.run(3.0)
    clocks = [loop.clock for loop in world.loops()]
    world.simulation.run(3.6)
    assert all(loop.clock > clock for loop, clock in zip(world.loops(), clocks, strict=True))
    world.run().check()
    assert len(world.met[0].ranks) == 2


def test_a_worker_that_was_declared_dead_joins_again_in_a_new_life():
    world = World(Setting(workers=3, steps=40), faults=[Stop("worker 1", 1.0, 3.0)]).run().check()
    assert (1, 1) in world.starts
    assert 0 < world.starts[1, 1] < 40
    assert world.met[0].ranks == (0, 1, 2)


def test_a_new_process_takes_a_dead_workers_place():
    holder: list[World] = []
    faults = [Kill("worker 1", 1.0), Restart("worker 1", 1.2, lambda: holder[0].loop(1, process=1))]
    holder.append(World(Setting(workers=3, shards=2, steps=40), faults=faults))
    world = holder[0].run().check()
    assert world.starts[1, 1] > 0
    assert {gradient.process for gradient in world.primary(0).used} == {0, 1}


def test_a_cut_off_primary_and_its_worker_acknowledge_nothing_between_them():
    faults = [Partition(frozenset({P, "worker 0"}), 1.0, 4.0)]
    world = World(Setting(workers=3, rule=Rule(None), steps=30), faults=faults).run().check()
    assert world.coordinator.view.primaries[0] == B
    assert world.starts[0, 1] >= 0


class FailsAtTimes(Store):
    """A store whose third update, and every sixth after it, changes nothing."""

    def perform(self, work: Any) -> Any:
        if isinstance(work, Update) and work.version % 6 == 3:
            self.total = 0.0
            return "inf"
        return super().perform(work)


@pytest.mark.parametrize("rule", [Rule(0, proves=True), Rule(None, proves=True)], ids=str)
def test_an_update_that_fails_is_answered_and_counted_as_refused_by_every_replica(rule: Rule) -> None:
    hand = Hand(1, rule)
    hand.stores = {name: FailsAtTimes() for name in hand.stores}
    workers = (0, 1) if rule.aggregated else (0,)
    for number in range(4):
        for worker in workers:
            hand.push(P, number, worker)
        hand.deliver(Replicate)
        hand.deliver(Replicated)
    statuses = [status for _, number, status in hand.replies() if number == 2]
    assert statuses[-1] == "refused", "the push that completes the update"
    for server in hand.servers.values():
        assert server.shard.counts["refused"] == len(workers)
        assert server.shard.counts["applied"] == 3 * len(workers)
        assert {(refusal.worker, refusal.step) for refusal in server.admission.refusals} == {(w, 2) for w in workers}
    first, second = hand.stores.values()
    assert first.value == second.value


@pytest.mark.parametrize("rule", [Rule(0, proves=True), Rule(2, proves=True), Rule(None, proves=True)], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_answers_that_wait_for_their_update_survive_random_faults(seed: int, rule: Rule) -> None:
    network = LossyNetwork(delay=0.02, jitter=0.02, loss=0.03, duplicate=0.1, until=CALM)
    world = World(Setting(workers=3, replicas=1, rule=rule, steps=8), seed, network)
    add_faults(world, Random(seed))
    world.run().check()


def test_an_unfit_push_is_refused_and_the_run_goes_on():
    world = World(Setting(workers=2, shards=2, steps=4), unfit=[(1, 2)]).run().check()
    assert world.statuses == {"applied": 14, "refused NaN": 2}
    assert all(gradient.fit for gradient in world.primary(0).used)


def test_a_shard_without_replicas_is_announced_as_lost():
    world = World(Setting(replicas=0), faults=[Kill(P, 0.5, seen_after=0.01)])
    world.simulation.run(3.0)
    assert world.coordinator.lost == (0,)
    assert Lost(0) in world.complaints


@settings(max_examples=30)
@given(
    kill=st.floats(0, 2),
    stop=st.floats(0, 2),
    seconds=st.floats(0, 5),
    jitter=st.sampled_from([0.0, 0.01, 0.1]),
    loss=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**32),
)
def test_bsp_ends_the_same_however_servers_fail(
    kill: float, stop: float, seconds: float, jitter: float, loss: float, seed: int
):
    setting = Setting(workers=3, replicas=2, steps=6)
    network = LossyNetwork(jitter=jitter, loss=loss, duplicate=loss)
    faults = [Kill(P, kill), Stop(B, stop, seconds)]
    world = World(setting, seed, network, faults).run().check()
    if len(world.starts) == 3:
        assert world.values() == pytest.approx(undisturbed(setting), abs=1e-9)


def survive(seeds: range) -> None:
    for seed in seeds:
        world = random_world(seed)
        try:
            world.run().check()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {world.setting}") from error


def test_fifty_random_schedules_of_faults_lose_nothing_and_double_nothing():
    survive(range(50))


@pytest.mark.slow
def test_a_thousand_random_schedules_of_faults_lose_nothing_and_double_nothing():
    takeovers = rejoined = fenced = 0
    for seed in range(0, 1000, 100):
        survive(range(seed, seed + 100))
    for seed in range(200):
        world = random_world(seed).run()
        takeovers += world.coordinator.view.primaries != world.view.primaries
        rejoined += len(world.starts) > world.setting.workers
        fenced += any(server.retired for server in world.servers)
    assert min(takeovers, rejoined, fenced) > 20, "the faults really struck"


MUTANTS = [
    ForgetsWhatItKnows,
    AnswersBeforeBackupsHold,
    pytest.param(FencesNobody, marks=pytest.mark.slow),
    WakesOnlyTheExactMinimum,
    TakesWhateverComesAsNext,
    TakesPushesOutOfOrder,
    KeepsTheRestToItself,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_line_is_noticed(mutant: type[ServerMachine]):
    for seed in range(150):
        try:
            random_world(seed, server=mutant).run().check()
        except AssertionError:
            return
        except KeyError:
            continue
    pytest.fail(f"150 schedules of faults do not notice {mutant.__name__}")


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (ServesTooEarly, test_a_new_primary_acknowledges_what_it_holds_once_the_other_backups_hold_it_too),
        (FencesNobody, test_a_primary_of_the_past_acknowledges_nothing_that_its_successor_does_not_hold),
    ],
    ids=lambda value: value.__name__,
)
def test_what_chance_seldom_meets_is_noticed_by_hand(
    mutant: type[ServerMachine], test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
):
    plain = Hand.__init__
    monkeypatch.setattr(Hand, "__init__", lambda self, replicas, rule=None: plain(self, replicas, rule, mutant))
    with pytest.raises(AssertionError):
        test()

"""A shard that has lost a copy gets a new one while it goes on: nothing is lost or doubled, whoever dies meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_worlds import CALM, Setting, World

from offbeat.protocols.machine import (
    Done,
    Effect,
    Effects,
    Event,
    Name,
    Payload,
    Received,
    Send,
    SetTimer,
    Start,
    Timer,
)
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.coordinator import CoordinatorMachine
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    BackupReady,
    ClusterView,
    Gone,
    Heartbeat,
    Install,
    Message,
    Replicate,
    Replicated,
    Timeouts,
    Viewed,
    Volunteer,
)
from offbeat.protocols.servers.replica.replication import Follower
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import ReadShard, Release
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.runtime.messages import Codec, FrameError
from offbeat.runtime.messages.frames import MemoryReference
from offbeat.runtime.servers.plan import ServerPlan
from offbeat.simulate.machines import Kill, LossyNetwork

RULES = [Rule(0), Rule(0), Rule(2), Rule(None), Rule(2, eager=True), Rule(0, drop=1), Rule(0, deadline=0.3)]


class Fate:
    """Kills servers as the run goes, whoever they are then: any novice, and of copies always all but one."""

    name = "fate"

    def __init__(self, world: World, times: Sequence[float], random: Random, worst: bool = False) -> None:
        self.world, self.times, self.random, self.worst = world, times, random, worst
        self.killed: list[Name] = []

    def begin(self, _now: float) -> Sequence[Effect]:
        return [SetTimer(at, at) for at in self.times]

    def on(self, _event: Event, now: float) -> Sequence[Effect]:
        view, alive = self.world.coordinator.view, self.world.simulation.alive
        shard = self.random.randrange(self.world.setting.shards)
        copies = [name for name in (view.primaries[shard], *view.backups[shard]) if name and alive(name)]
        novice = [name for name in (view.novice(shard),) if name and alive(name)]
        # The first of them serves: the worst is to lose it as soon as another can take over.
        spared = copies[1:] if self.worst else self.random.sample(copies, 1)
        doomed = [*([name for name in copies if name not in spared] if len(copies) > 1 else []), *novice]
        if doomed:
            name = doomed[0] if self.worst else self.random.choice(doomed)
            self.killed.append(name)
            self.world.simulation.add([Kill(name, now, self.random.choice([None, 0.01]))])
        return ()


def renewed_world(seed: int, server: type[ServerMachine] = ServerMachine, **changes: Any) -> tuple[World, Fate]:
    """A world whose dead servers are replaced, and several of whom die."""
    random = Random(seed)
    known: dict[str, Any] = {
        "workers": random.randint(1, 3),
        "shards": random.randint(1, 2),
        "replicas": random.randint(1, 2),
        "rule": random.choice(RULES),
        "steps": random.randint(6, 20),
        "parts": random.choice([1, 1, 2]),
        "pace": random.choice([0.05, 0.3]),
        "together": random.random() < 0.6,
        "renews": random.choice([0.01, 0.3]),
    }
    setting = Setting(**(known | changes))
    if setting.rule.drop and setting.workers == 1:
        setting = Setting(**(known | {"workers": 2} | changes))
    network = LossyNetwork(
        delay=random.choice([0.001, 0.02]),
        jitter=random.choice([0.0, 0.02, 0.1]),
        loss=random.choice([0.0, 0.05]),
        duplicate=random.choice([0.0, 0.1]),
        until=CALM,
    )
    world = World(setting, seed, network, server=server)
    span = setting.steps * (setting.pace + 0.1)
    fate = Fate(world, [random.uniform(0.1, span) for _ in range(random.randint(1, 8))], random)
    world.simulation._give_birth(fate)
    return world, fate


def undisturbed(setting: Setting) -> list[float]:
    return World(setting).run().check().values()


# -- whole worlds ------------------------------------------------------------------------------------------------------


def test_the_one_who_took_over_may_die_too_and_the_next_and_the_result_is_the_same() -> None:
    setting = Setting(workers=3, shards=2, replicas=1, steps=60, pace=0.2, renews=0.2)
    world = World(setting)
    fate = Fate(world, [2.0, 4.0, 6.0, 8.0], Random(1), worst=True)
    world.simulation._give_birth(fate)
    world.run().check()
    assert len(fate.killed) == 4
    assert world.values() == pytest.approx(undisturbed(setting), abs=1e-9)
    view = world.coordinator.view
    assert all(view.primaries)
    assert [len(backups) for backups in view.backups] == [1, 1]
    assert view.primaries[0] not in world.view.servers or view.primaries[1] not in world.view.servers


@pytest.mark.parametrize("tenth", range(12))
def test_a_novice_may_die_while_it_is_brought_up_to_date(tenth: int) -> None:
    """And another takes its place; its death is at any moment from when it is known to after it holds all."""
    setting = Setting(workers=2, replicas=1, steps=30, pace=0.1, renews=0.1)
    faults = [Kill("server 0.0", 1.0, 0.01), Kill("server 0.2", 1.14 + tenth / 80, 0.01)]
    world = World(setting, network=LossyNetwork(delay=0.02), faults=faults).run().check()
    assert world.values() == pytest.approx(undisturbed(setting), abs=1e-9)
    assert world.coordinator.view.primaries == ("server 0.1",)
    assert world.coordinator.view.backups == (("server 0.3",),)


def test_when_the_primary_dies_during_the_transfer_its_successor_hands_over_anew() -> None:
    setting = Setting(workers=2, replicas=2, steps=40, pace=0.1, renews=0.1)
    for moment in range(12):
        faults = [Kill("server 0.2", 1.0, 0.01), Kill("server 0.0", 1.1 + moment / 50, 0.01)]
        world = World(setting, network=LossyNetwork(delay=0.03), faults=faults).run().check()
        assert world.values() == pytest.approx(undisturbed(setting), abs=1e-9)
        assert world.coordinator.view.primaries == ("server 0.1",)
        assert len(world.coordinator.view.backups[0]) == 2


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_lost_or_doubled_however_often_servers_die_and_are_replaced(seed: int) -> None:
    world, _ = renewed_world(seed)
    world.run().check()


@settings(max_examples=25)
@given(
    kills=st.lists(st.floats(0.1, 4.0), min_size=1, max_size=5),
    jitter=st.sampled_from([0.0, 0.02, 0.1]),
    loss=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**32),
)
def test_bsp_ends_the_same_however_often_servers_die(kills: list[float], jitter: float, loss: float, seed: int) -> None:
    setting = Setting(workers=2, replicas=1, steps=15, renews=0.05)
    world = World(setting, seed, LossyNetwork(jitter=jitter, loss=loss, duplicate=loss, until=CALM))
    world.simulation._give_birth(Fate(world, kills, Random(seed), worst=True))
    world.run().check()
    if len(world.starts) == 2:
        assert world.values() == pytest.approx(undisturbed(setting), abs=1e-9)


@pytest.mark.slow
def test_three_hundred_schedules_of_deaths_and_replacements() -> None:
    copied = again = 0
    for seed in range(300):
        world, fate = renewed_world(seed)
        try:
            world.run().check()
        except Exception as error:
            raise AssertionError(f"seed {seed}, {world.setting}, killed {fate.killed}") from error
        first = set(world.view.servers)
        copied += any(name not in first for backups in world.coordinator.view.backups for name in backups)
        again += any(name not in first for name in world.coordinator.view.primaries)
    assert copied > 100, "copies were really made"
    assert again > 30, "and took over"


# Each of these breaks one line; the worlds above must notice.


class AnswersWhatItsNoviceDoesNotHold(ServerMachine):
    def _take_state(self, now: float) -> None:
        before = self._renewal.begun
        super()._take_state(now)
        if self._renewal.begun and not before:
            self.replication.feed.add(self._renewal.novice, 2**40, now)


class SaysReadyBeforeItIs(ServerMachine):
    def _take_state(self, now: float) -> None:
        super()._take_state(now)
        if self._renewal.begun:
            self._out.send(COORDINATOR, BackupReady(self.number, self._renewal.novice))


class HandsOverInTheMiddleOfAStep(ServerMachine):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shard.__class__ = NeverBetween


class NeverBetween(Shard):
    @property
    def between_steps(self) -> bool:
        return True


class Reinstalled(Follower):
    def install(self, event: Received, message: Install, out: Effects) -> None:
        self.installed = None
        super().install(event, message, out)


class InstallsAgain(ServerMachine):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._follower.__class__ = Reinstalled


class Forgetful(Follower):
    def install(self, event: Received, message: Install, out: Effects) -> None:
        super().install(event, message, out)
        if self.installed is not None:
            self._shard._next = dict.fromkeys(self._shard._next, 0)


class ForgetsWhoHasPushed(ServerMachine):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._follower.__class__ = Forgetful


MUTANTS = [AnswersWhatItsNoviceDoesNotHold, SaysReadyBeforeItIs, HandsOverInTheMiddleOfAStep, InstallsAgain]
MUTANTS += [ForgetsWhoHasPushed]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_line_is_noticed(mutant: type[ServerMachine]) -> None:
    for seed in range(300):
        world, _ = renewed_world(seed, mutant)
        try:
            world.run().check()
        except (AssertionError, KeyError):
            return
    pytest.fail(f"300 schedules do not notice {mutant.__name__}")


# -- the coordinator's part --------------------------------------------------------------------------------------------


def told(machine: CoordinatorMachine, sender: Name, message: Any) -> list[Send]:
    effects = machine.on(Received(sender, message), 0.0)
    return [effect for effect in effects if isinstance(effect, Send)]


def without_backup() -> CoordinatorMachine:
    machine = CoordinatorMachine(ClusterView.of(1, 2, 1))
    machine.begin(0.0)
    machine._bury(["server 0.1"])
    return machine


def test_a_volunteer_is_a_novice_until_the_primary_says_that_it_holds_all() -> None:
    machine = without_backup()
    sent = told(machine, "server 0.2", Volunteer(0))
    assert (machine.view.novices, machine.view.backups[0]) == (("server 0.2", ""), ())
    assert {one.to for one in sent if isinstance(one.message, Viewed)} >= {"server 0.0", "server 0.2", "worker 0"}
    epoch = machine.view.epoch
    (again,) = told(machine, "server 0.2", Volunteer(0))
    assert (again.to, machine.view.epoch) == ("server 0.2", epoch)
    assert told(machine, "server 0.2", BackupReady(0, "server 0.2")) == [], "only the primary can know"
    assert told(machine, "server 0.0", BackupReady(7, "server 0.2")) == []
    told(machine, "server 0.0", BackupReady(0, "server 0.2"))
    assert (machine.view.novices, machine.view.backups[0]) == (("", ""), ("server 0.2",))


def test_nobody_is_copied_to_where_no_copy_lacks_or_who_was_dead() -> None:
    machine = without_backup()
    for name, shard in (("server 1.2", 1), ("server 0.1", 0), ("server 9.0", 9), ("server 0.7", -1)):
        (sent,) = told(machine, name, Volunteer(shard))
        assert isinstance(sent.message, Gone)
    told(machine, "server 0.2", Volunteer(0))
    assert isinstance(told(machine, "server 0.3", Volunteer(0))[0].message, Gone), "there will be enough"


def test_with_the_last_copy_its_novice_is_of_no_use() -> None:
    machine = without_backup()
    told(machine, "server 0.2", Volunteer(0))
    machine._bury(["server 0.0"])
    assert machine.lost == (0,)
    assert machine.view.servers == ("server 1.0", "server 1.1")


# -- one primary and its novice, by hand -------------------------------------------------------------------------------


def test_a_novice_holds_nothing_before_it_has_the_state_and_then_what_has_overtaken_it() -> None:
    view = ClusterView(3, (0,), ("server 0.0",), ((),), novices=("server 0.2",))
    novice = ServerMachine("server 0.2", 0, Rule(None), ClusterView.of(1, 1, 1), joins=True)
    assert [e.message for e in novice.begin(0.0) if isinstance(e, Send)] == [Volunteer(0)]
    novice.on(Received("coordinator", Viewed(view)), 0.0)
    other = Shard(Rule(None), view)
    from offbeat.protocols.servers.messages import Push

    early = Replicate(epoch=3, index=8, committed=7, entry=Push(worker=0, number=0, clock=0))
    assert novice.on(Received("server 0.0", early), 0.0) == []
    message = Install(epoch=3, number=1, index=8, state=other.state())
    effects = novice.on(Received("server 0.0", message), 0.0)
    assert [e.message for e in effects if isinstance(e, Send)] == [Replicated(3, 8)]
    assert novice.replication.log.end == 9
    assert novice.on(Timer("tick"), 1.0)
    again = novice.on(Received("server 0.0", message), 0.0)
    assert [e.message for e in again if isinstance(e, Send)] == [Replicated(3, 8)], "once, however often it is said"


# -- what late gradients were computed from ----------------------------------------------------------------------------

REMEMBERING = [Rule(None, remembers=True), Rule(3, remembers=True), Rule(2, eager=True, remembers=True)]


def late_after(seed: int, server: type[ServerMachine] = ServerMachine) -> int:
    """How many late gradients whoever serves in the end has known the origin of; every store checks that it does."""
    rule = Random(seed).choice(REMEMBERING)
    world, _ = renewed_world(seed, server, rule=rule, workers=3, parts=1)
    world.run().check()
    return sum(world.primary(shard).late for shard in range(world.setting.shards))


def test_whoever_takes_over_knows_what_gradients_were_computed_from() -> None:
    assert sum(late_after(seed) for seed in range(25)) > 100


class Unaware(Follower):
    def install(self, event: Received, message: Install, out: Effects) -> None:
        payload = event.payload
        if payload.handle is not None:
            payload = Payload(payload.nbytes, replace(payload.handle, kept={}))
        super().install(Received(event.sender, message, payload), message, out)


class RemembersNothingOfItsPredecessor(ServerMachine):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._follower.__class__ = Unaware


class ForgetsTooMuch(ServerMachine):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.shard._oldest = lambda: max(self.shard._origins.values(), default=0)


@pytest.mark.parametrize("mutant", [RemembersNothingOfItsPredecessor, ForgetsTooMuch], ids=lambda one: one.__name__)
def test_a_replica_that_does_not_know_an_origin_is_noticed(mutant: type[ServerMachine]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        sum(late_after(seed, mutant) for seed in range(200))


def test_nothing_is_kept_where_nobody_asked_for_it_nor_longer_than_needed() -> None:
    plain = World(Setting(workers=2, rule=Rule(None), steps=20, pace=0.1)).run().check()
    assert not any(store.kept for store in plain.stores.values())
    kept = World(Setting(workers=2, rule=Rule(None, remembers=True), steps=60, pace=0.1)).run().check()
    assert all(0 < len(store.kept) < 15 for store in kept.stores.values())


# -- large states ------------------------------------------------------------------------------------------------------

GIBIBYTE = 1024**3


def test_a_state_of_gigabytes_is_no_larger_than_a_payload_may_be() -> None:
    install = Install(epoch=3, number=1, index=8, state=Shard(Rule(0), ClusterView.of(1, 1)).state())
    plan = ServerPlan(workers=1, shards=1, replicas=1, rule=Rule(0), folder="")
    reference = MemoryReference("1:2:3", 0, 0, 3 * GIBIBYTE)
    frame = plan.codec().encode_reference(install, reference)
    assert plan.codec().decode([frame]) == (install, reference)
    with pytest.raises(FrameError, match="contradicts itself"):
        Codec(Message).decode([frame])


def test_who_deals_with_gigabytes_may_be_silent_for_longer_and_who_deals_with_little_may_not() -> None:
    for burden, patient in ((25 * 1024**2, False), (2 * GIBIBYTE, True)):
        machine = CoordinatorMachine(ClusterView.of(1, 1, 1))
        machine.begin(0.0)
        for name in ("worker 0", "server 0.0", "server 0.1"):
            machine.on(Received(name, Heartbeat(0, burden if name == "worker 0" else 0)), 0.0)
        for tick in range(1, 81):
            now = tick / 4
            machine.on(Received("worker 0", Heartbeat(0)), now)
            machine.on(Received("server 0.1", Heartbeat(0)), now)
            machine.on(Timer("tick"), now)
        assert (machine.view.primaries == ("server 0.0",)) == patient


def test_a_worker_says_what_is_to_come_before_it_comes_and_is_patient_itself() -> None:
    client = ClientMachine(0, ClusterView.of(1, 1))
    assert client.announce(2 * GIBIBYTE) == [Send("coordinator", Heartbeat(0, 2 * GIBIBYTE))]
    assert Heartbeat(0, 2 * GIBIBYTE) in [one.message for one in client.begin(0.0) if isinstance(one, Send)]
    assert Timeouts().patience(2 * GIBIBYTE) > 60
    assert Timeouts().patience(25 * 1024**2) == Timeouts().resend


def released(effects: Sequence[Effect]) -> list[Payload]:
    return [one.work.payload for one in effects if isinstance(one, Start) and isinstance(one.work, Release)]


def handing_over() -> tuple[ServerMachine, Payload]:
    """A primary that has read its state for a novice, and sent it."""
    view = ClusterView(3, (0,), ("server 0.0",), ((),), novices=("server 0.2",))
    primary = ServerMachine("server 0.0", 0, Rule(None), ClusterView.of(1, 1, 1))
    effects = primary.on(Received("coordinator", Viewed(view)), 0.0)
    (reading,) = [one for one in effects if isinstance(one, Start) and isinstance(one.work, ReadShard)]
    state = Payload(2 * GIBIBYTE, "the state")
    sent = primary.on(Done(reading.token, state), 0.0)
    assert [(one.to, one.payload) for one in sent if isinstance(one, Send)] == [("server 0.2", state)]
    return primary, state


def test_the_memory_of_a_state_is_free_once_the_novice_holds_it_or_is_gone() -> None:
    primary, state = handing_over()
    assert released(primary.on(Timer("tick"), 60.0)) == [], "it is not sent again as long as it may be on its way"
    assert released(primary.on(Received("server 0.2", Replicated(3, -1)), 60.0)) == [state]
    primary, state = handing_over()
    gone = ClusterView(4, (0,), ("server 0.0",), ((),), novices=("server 0.3",))
    assert released(primary.on(Received("coordinator", Viewed(gone)), 1.0)) == [state]

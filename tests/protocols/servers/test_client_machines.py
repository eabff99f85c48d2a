"""The machines of clients and of the coordinator, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs
from server_worlds import Setting, World

from offbeat.protocols.machine import Effect, Ended, Name, Payload, Received, Send, Start, Timer
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.coordinator import Changed, CoordinatorMachine
from offbeat.protocols.servers.messages import (
    COORDINATOR,
    ClusterView,
    Gone,
    Heartbeat,
    JoinRequest,
    Leave,
    Lost,
    MeetingArrival,
    Met,
    Push,
    PushReply,
    Timeouts,
    Viewed,
)
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.protocols.servers.worker.notices import Completed, Departed, Failed, PullRequest, PushedRange, PushRequest
from offbeat.simulate.machines import LossyNetwork

P, B, C = "server 0.0", "server 0.1", "server 0.2"


# Clients.


def client(**changes: Any) -> ClientMachine:
    return ClientMachine(0, ClusterView.of(2, 1, 1), **changes)


def messages(effects: Sequence[Effect], kind: type[Struct] = Struct) -> list[tuple[Name, Any]]:
    return [
        (effect.to, effect.message)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, kind)
    ]


def works(effects: Sequence[Effect]) -> list[Any]:
    return [effect.work for effect in effects if isinstance(effect, Start)]


def test_what_is_unanswered_is_asked_again_under_the_same_number_less_and_less_often():
    machine = client()
    ((_, first),) = messages(machine.ask(PushRequest([PushedRange(0, Payload(1))], 0), 0.0).effects)
    times = []
    for tick in range(1, 40):
        for to, again in messages(machine.on(Timer("tick"), tick * 0.25), Push):
            assert (to, again.number) == (P, first.number)
            times.append(tick * 0.25)
    assert times == [0.5, 1.5, 3.5, 5.5, 7.5, 9.5]


def test_what_is_unanswered_goes_to_the_successor_at_once():
    machine = client()
    machine.ask(PushRequest([PushedRange(0, Payload(1))], 0), 0.0)
    view = structs.replace(machine.view, epoch=1, primaries=(B,), backups=((),))
    ((to, again),) = messages(machine.on(Received(COORDINATOR, Viewed(view)), 0.1), Push)
    assert (to, again.number, again.epoch) == (B, 0, 1)
    reply = PushReply(number=0, status="applied", version=1, clock=1, epoch=0)
    assert works(machine.on(Received(P, reply), 0.2)) == [], "who is no longer asked is no longer heard"
    assert works(machine.on(Received(B, reply), 0.2)) == [Completed(1, ((0, reply),))]


def test_a_request_that_nobody_answers_names_who_was_waited_for():
    machine = client(timing=Timeouts(deadline=1.0))
    asked = machine.ask(PushRequest([PushedRange(0, Payload(1))], 0), 0.0)
    assert machine.outstanding.waited_for() == (P,)
    assert Failed(asked.token, (P,)) in works(machine.on(Timer("tick"), 1.0))
    assert machine.outstanding.waited_for() == ()


def test_a_reply_of_another_life_is_not_taken_for_one_of_this():
    machine = client()
    machine.ask(PushRequest([PushedRange(0, Payload(1))], 0), 0.0)
    reply = PushReply(life=1, number=0, status="applied", version=1, clock=1, epoch=0)
    assert machine.on(Received(P, reply), 0.1) == []


def test_an_answer_that_was_overtaken_by_fresh_values_does_not_replace_them():
    world = World(Setting(workers=3, rule=Rule(2, eager=True), steps=8), network=LossyNetwork(delay=0.02, jitter=0.05))
    world.run().check()
    assert world.refreshed > 0


def test_one_who_was_declared_dead_is_told_whatever_it_asks():
    machine = client()
    assert works(machine.on(Received(COORDINATOR, Gone(1)), 0.0)) == [Departed(1)]
    assert works(machine.ask(PullRequest(0), 0.1).effects) == [Departed(0)]
    assert messages(machine.on(Timer("tick"), 0.2)) == []
    assert messages(machine.join()) == [(COORDINATOR, JoinRequest(0, 0))]


# The coordinator.


def told(machine: CoordinatorMachine, sender: Name, message: Struct, now: float = 0.0) -> Sequence[Effect]:
    return machine.on(Received(sender, message), now)


def test_one_who_is_silent_is_declared_dead_and_the_first_backup_takes_over():
    machine = CoordinatorMachine(ClusterView.of(1, 1, 2))
    machine.begin(0.0)
    effects: list[Effect] = []
    for tick in range(12):
        for name in ("worker 0", B, C, *([P] if tick < 2 else [])):
            told(machine, name, Heartbeat(machine.view.epoch), tick * 0.25)
        effects += machine.on(Timer("tick"), tick * 0.25)
    assert (machine.view.epoch, machine.view.primaries, machine.view.backups) == (1, (B,), ((C,),))
    assert [work.died for work in works(effects)] == [(P,)]
    assert messages(told(machine, P, Heartbeat(0), 3.0)) == [(P, Gone(1))]
    assert messages(told(machine, C, Heartbeat(0), 3.0)) == [(C, Viewed(machine.view))]


def test_a_coordinator_that_was_stopped_itself_blames_nobody():
    machine = CoordinatorMachine(ClusterView.of(2, 1))
    machine.begin(0.0)
    for name in (P, "worker 0", "worker 1"):
        told(machine, name, Heartbeat(0), 0.2)
    assert works(machine.on(Timer("tick"), 30.0)) == []
    assert machine.view.epoch == 0


def test_an_end_that_was_seen_needs_no_silence_and_the_last_replica_is_a_loss():
    machine = CoordinatorMachine(ClusterView.of(2, 2))
    effects = machine.on(Ended("server 1.0"), 1.0)
    assert Lost(1) in works(effects)
    assert messages(effects, Lost) == [("worker 0", Lost(1)), ("worker 1", Lost(1))]
    assert machine.view.primaries == (P, "")
    assert machine.on(Ended("server 1.0"), 1.1) == []


def test_a_new_process_ends_the_life_of_the_one_before_it():
    machine = CoordinatorMachine(ClusterView.of(2, 1))
    effects = told(machine, "worker 1", JoinRequest(1, process=7))
    assert machine.view.members == {0: 0, 1: 1}
    assert messages(effects, Viewed)[-1] == ("worker 1", Viewed(machine.view, 7))
    told(machine, "worker 1", JoinRequest(1, process=7))
    assert machine.view.members == {0: 0, 1: 1}, "the same process asking again has the same life"
    told(machine, "worker 2", JoinRequest(2, process=0))
    assert machine.view.members == {0: 0, 1: 1, 2: 0}


def test_a_meeting_is_over_when_all_who_live_have_come():
    machine = CoordinatorMachine(ClusterView.of(3, 1))
    for worker in (2, 0):
        assert not told(
            machine, f"worker {worker}", MeetingArrival(worker=worker, number=4, what="end", values=(worker,))
        )
    effects = machine.on(Ended("worker 1"), 1.0)
    met = Met(number=4, what="end", ranks=(0, 2), values=((0,), (2,)))
    assert sorted(messages(effects, Met)) == [("worker 0", met), ("worker 2", met)]
    again = told(machine, "worker 0", MeetingArrival(worker=0, number=4, what="end"))
    assert messages(again) == [("worker 0", met)], "an answer that was lost is given again"


def test_one_who_leaves_is_not_waited_for():
    machine = CoordinatorMachine(ClusterView.of(2, 1))
    effects = told(machine, "worker 1", Leave(1, 0))
    assert [work.left for work in works(effects) if isinstance(work, Changed)] == [(1,)]
    assert machine.view.workers == (0,)

"""Machines in virtual time: what the simulator does to messages and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Done, Effect, Ended, Event, Name, Received, Send, SetTimer, Start, Timer
from offbeat.simulate.machines import Fault, Kill, LossyNetwork, Partition, Restart, Simulation, Stop


class Note(Struct, frozen=True):
    number: int


@dataclass
class Teller:
    """Sends a note every tenth of a second."""

    name: Name = "teller"
    to: Name = "hearer"
    sent: int = 0

    def begin(self, now: float) -> Sequence[Effect]:
        return [SetTimer(0.1, "tick")]

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        if not isinstance(event, Timer):
            return ()
        self.sent += 1
        return [Send(self.to, Note(self.sent)), SetTimer(0.1, "tick")]


@dataclass
class Hearer:
    """Writes down what happens to it, and when."""

    name: Name = "hearer"
    first: Sequence[Effect] = ()
    heard: list[tuple[float, Any]] = field(default_factory=list)

    def begin(self, now: float) -> Sequence[Effect]:
        return self.first

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        what = event.message.number if isinstance(event, Received) and isinstance(event.message, Note) else event
        self.heard.append((round(now, 6), what))
        return ()

    @property
    def numbers(self) -> list[int]:
        return [what for _, what in self.heard if isinstance(what, int)]


def heard(
    seconds: float = 1.05, network: LossyNetwork | None = None, faults: Sequence[Fault] = (), seed: int = 0
) -> Hearer:
    hearer = Hearer()
    Simulation([Teller(), hearer], seed=seed, network=network, faults=faults).run(seconds)
    return hearer


def test_a_message_takes_the_networks_delay():
    assert heard(0.35, LossyNetwork(delay=0.02)).heard == [(0.12, 1), (0.22, 2), (0.32, 3)]


def test_messages_are_lost_doubled_and_overtaken_but_never_invented():
    lossy = heard(50, LossyNetwork(loss=0.2)).numbers
    assert 350 < len(lossy) < 450
    doubled = heard(50, LossyNetwork(duplicate=0.2)).numbers
    assert 550 < len(doubled) < 650
    assert set(doubled) == set(range(1, max(doubled) + 1))
    shuffled = heard(50, LossyNetwork(jitter=0.3)).numbers
    assert shuffled != sorted(shuffled)
    assert len(set(shuffled)) == len(shuffled)


def test_an_ordered_network_keeps_the_order_of_each_pair():
    numbers = heard(50, LossyNetwork(jitter=0.3, ordered=True)).numbers
    assert numbers == sorted(numbers)
    assert len(numbers) > 450


def test_losses_cease_when_the_network_is_said_to_be_calm():
    numbers = heard(20, LossyNetwork(loss=0.5, until=10.0)).numbers
    assert [number for number in numbers if number > 101] == list(range(102, 200))


def test_the_same_seed_gives_the_same_history_and_another_seed_another():
    network = LossyNetwork(jitter=0.1, loss=0.1, duplicate=0.1)
    one, same, other = (heard(20, network, seed=seed).heard for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_a_killed_process_hears_nothing_and_its_observer_is_told():
    hearer, coordinator = Hearer(), Hearer("coordinator")
    faults = [Kill("hearer", at=0.45, seen_after=0.2)]
    simulation = Simulation([Teller(), hearer, coordinator], faults=faults)
    simulation.run(2)
    assert hearer.numbers == [1, 2, 3, 4]
    assert coordinator.heard == [(0.65, Ended("hearer"))]
    assert not simulation.alive("hearer")
    assert simulation.alive("teller")


def test_a_stopped_process_finds_what_came_meanwhile_in_order():
    hearer = heard(1.15, faults=[Stop("hearer", at=0.25, seconds=0.5)])
    assert hearer.numbers == list(range(1, 12))
    assert [at for at, what in hearer.heard if what in (3, 4, 5, 6, 7)] == [0.75] * 5


def test_a_stopped_processs_timers_wait_too():
    hearer = heard(1.05, faults=[Stop("teller", at=0.25, seconds=0.5)])
    assert hearer.heard[:4] == [(0.101, 1), (0.201, 2), (0.751, 3), (0.851, 4)]


def test_a_partition_loses_what_crosses_it_and_heals():
    numbers = heard(1.05, faults=[Partition(frozenset({"teller"}), at=0.25, seconds=0.5)]).numbers
    assert numbers == [1, 2, 8, 9, 10]
    inside = heard(1.05, faults=[Partition(frozenset({"teller", "hearer"}), at=0.25, seconds=0.5)]).numbers
    assert inside == list(range(1, 11))


def test_a_process_that_is_started_anew_has_a_new_machine_and_none_of_the_old_timers():
    hearer = Hearer()
    faults = [Kill("teller", at=0.25), Restart("teller", at=0.5, machine=lambda: Teller(sent=100))]
    Simulation([Teller(), hearer], faults=faults).run(0.75)
    assert hearer.heard == [(0.101, 1), (0.201, 2), (0.601, 101), (0.701, 102)]


def test_setting_a_timer_again_replaces_it():
    hearer = Hearer(first=[SetTimer(1.0, "a"), SetTimer(2.0, "a"), SetTimer(0.5, "b")])
    Simulation([hearer]).run(5)
    assert hearer.heard == [(0.5, Timer("b")), (2.0, Timer("a"))]


def test_work_is_done_in_order_and_its_result_is_told_if_there_is_a_token():
    done: list[str] = []

    def perform(work: str) -> int:
        done.append(work)
        return len(done)

    hearer = Hearer(first=[Start("one"), Start("two", 7), Start("three"), Send("hearer", Note(1), NOTHING)])
    Simulation([hearer], perform={"hearer": perform}).run(1)
    assert done == ["one", "two", "three"]
    assert hearer.heard == [(0.0, Done(7, 2)), (0.001, 1)]


def test_a_run_ends_when_it_is_told_to():
    hearer = Hearer()
    simulation = Simulation([Teller(), hearer])
    assert simulation.run(100, lambda: len(hearer.heard) == 3)
    assert simulation.now < 0.4
    assert not simulation.run(0.5, lambda: len(hearer.heard) == 30)

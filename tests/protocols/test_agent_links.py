"""Links between launcher and agents under faults: in order, once, and lost only if silent."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from offbeat.protocols.agents import LAUNCHER, Deliver, LinksMachine, LinkTiming, Offer, PeerLost
from offbeat.protocols.machine import Done, Payload
from offbeat.simulate.machines import Fault, Kill, LossyNetwork, Partition, Simulation, Stop

TIMING = LinkTiming(beat=0.5, resend=1.0, silence=5.0, window=4000)
AGENTS = ("agent a", "agent b", "agent c")


class LinkWorld:
    """A launcher and three agents that send each other contents of several sizes."""

    def __init__(self, seed: int, faults: list[Fault], network: LossyNetwork | None = None) -> None:
        machines = [
            LinksMachine(LAUNCHER, AGENTS, TIMING),
            *(LinksMachine(name, [LAUNCHER], TIMING) for name in AGENTS),
        ]
        self.sent: dict[tuple[str, str], list[int]] = {}
        self.heard: dict[tuple[str, str], list[int]] = {}
        self.lost: dict[tuple[str, str], float] = {}
        self.simulation = Simulation(machines, seed=seed, network=network or LossyNetwork(), faults=faults)
        for machine in machines:
            self.simulation.performing(machine.name, lambda work, name=machine.name: self._perform(name, work))

    def _perform(self, name: str, work: Any) -> None:
        match work:
            case Deliver(sender, content):
                self.heard.setdefault((sender, name), []).append(content.handle)
            case PeerLost(peer, _):
                self.lost[name, peer] = self.simulation.now
            case _:
                pytest.fail(f"unknown work {work}")

    def offer(self, sender: str, to: str, number: int, nbytes: int) -> None:
        if self.simulation.alive(sender):
            machine = self.simulation.machine(sender)
            self.sent.setdefault((sender, to), []).append(number)
            event = Done(Offer(to), Payload(nbytes, number))
            self.simulation.carry_out(sender, machine.on(event, self.simulation.now))

    def chatter(self, seed: int, until: float) -> None:
        """Both directions of every link carry contents at random times."""
        random, at = Random(seed), 0.0
        for number in range(120):
            at += random.expovariate(120 / until)
            self.simulation.run(at)
            agent = random.choice(AGENTS)
            pair = (LAUNCHER, agent) if random.random() < 0.4 else (agent, LAUNCHER)
            self.offer(*pair, number, random.choice((10, 900, 9000)))


def faults_of(random: Random) -> list[Fault]:
    """Faults that a link must survive: shorter than its silence, with time in between for a sign of life."""
    faults: list[Fault] = []
    at = random.uniform(0.5, 3.0)
    for _ in range(2):
        seconds = random.uniform(0.2, 2.0)
        name = random.choice((*AGENTS, LAUNCHER))
        kind = random.choice((Partition(frozenset({name}), at, seconds), Stop(name, at, seconds)))
        faults.append(kind)
        at += seconds + 6.0
    return faults


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_everything_arrives_once_and_in_order_whatever_happens_to_messages(start: int) -> None:
    for seed in range(start, start + 50):
        random = Random(seed)
        network = LossyNetwork(delay=0.002, jitter=0.05, loss=0.15, duplicate=0.1, until=20.0)
        world = LinkWorld(seed, faults_of(random), network)
        world.chatter(seed, 18.0)
        world.simulation.run(60.0, lambda world=world: world.heard == world.sent)
        assert world.heard == world.sent, seed
        assert not world.lost, seed


@pytest.mark.parametrize("seed", range(20))
def test_only_the_dead_are_lost_and_soon(seed: int) -> None:
    random = Random(seed)
    at = random.uniform(1.0, 6.0)
    world = LinkWorld(seed, [Kill("agent b", at)], LossyNetwork(delay=0.01, jitter=0.02, loss=0.05))
    world.chatter(seed, 10.0)
    world.simulation.run(30.0)
    assert list(world.lost) == [(LAUNCHER, "agent b")]
    assert at < world.lost[LAUNCHER, "agent b"] < at + TIMING.silence + 2 * TIMING.beat
    for (sender, to), numbers in world.heard.items():
        assert numbers == world.sent[sender, to][: len(numbers)]


def test_agents_lose_a_launcher_that_dies_within_seconds() -> None:
    world = LinkWorld(0, [Kill(LAUNCHER, 3.0)])
    world.simulation.run(20.0)
    assert sorted(world.lost) == [(name, LAUNCHER) for name in AGENTS]
    assert max(world.lost.values()) < 3.0 + TIMING.silence + 2 * TIMING.beat


def test_a_paused_launcher_is_lost_for_good_and_hears_so() -> None:
    # After a pause longer than the silence both sides must have given up: neither may go on with half a run.
    world = LinkWorld(0, [Stop(LAUNCHER, 3.0, 8.0)])
    world.simulation.run(30.0)
    assert set(world.lost) >= {(name, LAUNCHER) for name in AGENTS}
    world.offer(LAUNCHER, AGENTS[0], 1, 10)
    world.simulation.run(40.0)
    assert (LAUNCHER, AGENTS[0]) not in world.heard
    assert set(world.lost) >= {(LAUNCHER, name) for name in AGENTS}


def test_no_more_than_a_window_is_in_flight() -> None:
    world = LinkWorld(0, [])
    world.simulation.run(1.0)
    machine = world.simulation.machine("agent a")
    sends = [
        effect
        for number in range(20)
        for effect in machine.on(Done(Offer(LAUNCHER), Payload(1000, number)), world.simulation.now)
    ]
    assert len(sends) == 4

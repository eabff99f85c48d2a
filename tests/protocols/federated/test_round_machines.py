"""The machines of a federated deployment: equal to the closed form of virtual rounds, and right under any faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from federated_worlds import SavedServer, ServerDisk, WorkingClient, deaths
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from offbeat.limits import EXAMPLES
from offbeat.protocols.federated.federation_state import HOPELESS
from offbeat.protocols.federated.messages import (
    SERVER,
    AddUpdate,
    Beat,
    ClientFailure,
    ClientLeave,
    Examine,
    Examined,
    Goodbye,
    MembershipRequest,
    Refused,
    RoundClosed,
    RoundTask,
    Settled,
    UnknownClient,
    UpdateSent,
    Welcome,
    patience_for,
)
from offbeat.protocols.federated.plan import ClientSpeeds, RoundPlan
from offbeat.protocols.federated.round_server import RoundServer
from offbeat.protocols.machine import Done, Effect, Payload, Received, Send, Start, Timer
from offbeat.runtime.federated.aggregation import ClientUpdate, ExactMean, Selected, UpdateLayout, alone
from offbeat.simulate.federated import RoundOutcome, VirtualRounds
from offbeat.simulate.machines import LossyNetwork, Partition, Restart, Simulation, Stop


def plan(**changes: Any) -> RoundPlan:
    return RoundPlan(**{"clients": 3, "fraction": 1.0, "beat": 1.0, "silence": 4.0, **changes})


# -- equal to the closed form -----------------------------------------------------------------------------------------


def played(rounds: VirtualRounds, sizes: list[int], seed: int, count: int) -> tuple[list[RoundOutcome], Any, Any]:
    """Rounds in closed form, and the same ones played message by message."""
    expected: list[RoundOutcome] = []
    fates: dict[tuple[int, int], tuple[float, float]] = {}  # Seconds of work, and until lost, by round and client.
    for _ in range(count):
        outcome = next(rounds)
        chosen = np.array(outcome.cohort, np.int64)
        takes = rounds._fleet.takes(chosen).sum(axis=0)
        lost = rounds._lost(outcome.number, chosen, outcome.started, outcome.started + takes)
        for client, seconds, until in zip(
            outcome.cohort, takes.tolist(), (lost - outcome.started).tolist(), strict=True
        ):
            fates[outcome.number, client] = (seconds, until)
        expected.append(outcome)
    clients = [
        WorkingClient(client, size, lambda task, client=client: fates[task.number, client])
        for client, size in enumerate(sizes)
    ]
    disk = ServerDisk()
    server = SavedServer(rounds.plan, seed, count, disk)
    simulation = Simulation([server, *clients], network=LossyNetwork(delay=0.0, ordered=True))
    assert simulation.run(1e7, until=lambda: server.inner.state.phase == "finished")
    assert disk.wrong == []
    return expected, disk.closed, fates


@hypothesis_settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    clients=st.integers(1, 12),
    fraction=st.sampled_from([0.3, 0.5, 1.0]),
    sigma=st.sampled_from([0.0, 0.7]),
    dropout=st.sampled_from([0.0, 0.3]),
    deadline=st.sampled_from([None, 3.0, 20.0]),
    more=st.sampled_from(["plain", "over", "poisson"]),
)
def test_virtual_rounds_equal_the_machines_played_message_by_message(
    seed: int, clients: int, fraction: float, sigma: float, dropout: float, deadline: float | None, more: str
) -> None:
    rules = RoundPlan(
        clients=clients,
        fraction=fraction,
        over=min(1.5, clients) if more == "over" else 1.0,
        poisson=more == "poisson",
        deadline=deadline,
        dropout=dropout,
        speeds=ClientSpeeds(6.0, sigma),
        beat=1.0,
        silence=7.3,  # No silence is noticed just at a deadline.
    )
    sizes = np.random.default_rng(seed).integers(0, 9, clients).tolist()
    sizes[0] += 1
    expected, closed, fates = played(VirtualRounds(rules, sizes, 8, 8, seed), sizes, seed, 6)
    for outcome in expected:
        if outcome.number not in closed:  # The server has given up: nobody sent anything in the rounds before.
            assert outcome.number > HOPELESS
            continue
        real = closed[outcome.number]
        assert real.cohort == outcome.cohort
        assert real.participants == tuple(each.client for each in outcome.participants)
        assert bool(real.failed) is bool(outcome.failed)
        assert real.ended - real.started == pytest.approx(outcome.ended - outcome.started, abs=1e-9)
        # Of the lost, the server has noticed those that were silent long enough; the others seem late to it.
        span = outcome.ended - outcome.started + 1e-9
        lost = {client: fates[outcome.number, client][1] for client in outcome.dropped}
        noticed = {client for client, at in lost.items() if math.floor(at) + rules.silence <= span}
        assert set(real.dropped) == noticed
        assert set(real.late) == set(outcome.late) | (set(lost) - noticed)


# -- under faults -----------------------------------------------------------------------------------------------------


@hypothesis_settings(max_examples=80)
@given(seed=st.integers(0, 10**9))
def test_every_round_ends_and_counts_each_update_once_under_any_faults(seed: int) -> None:
    random = Random(seed)
    count, rounds, calm = random.randint(1, 5), random.randint(1, 5), 60.0
    rules = plan(
        clients=count,
        fraction=random.choice([0.5, 1.0]),
        over=random.choice([1.0, min(1.5, count)]),
        deadline=random.choice([None, 15.0]),
    )
    clients = [
        WorkingClient(client, random.randint(1, 5), lambda _task: (random.uniform(0.1, 6.0), math.inf))
        for client in range(count)
    ]
    disk, dies = ServerDisk(), deaths(random, random.choice([0.0, 0.02, 0.1]), most=15)
    network = LossyNetwork(
        delay=random.uniform(0.0, 0.2),
        jitter=random.choice([0.0, 0.3]),
        loss=random.choice([0.0, 0.2]),
        duplicate=random.choice([0.0, 0.2]),
        until=calm,
    )

    def started() -> SavedServer:
        return SavedServer(rules, seed, rounds, disk, dies)

    simulation = Simulation([started(), *clients], seed=seed, network=network)
    names = [SERVER, *(client.name for client in clients)]
    simulation.add(
        [
            Stop(random.choice(names), random.uniform(0, calm), random.uniform(0.5, 8))
            for _ in range(random.randint(0, 3))
        ]
    )
    simulation.add([Partition(frozenset([random.choice(names)]), random.uniform(0, calm), 6.0)] * random.randint(0, 1))

    def server() -> SavedServer:
        machine: Any = simulation.machine(SERVER)
        return machine

    def over() -> bool:
        if server().dead:
            simulation.add([Restart(SERVER, simulation.now, started)])
        return server().inner.state.phase == "finished"

    assert simulation.run(4000.0, until=over), server().inner.state
    assert disk.wrong == []
    assert sorted(disk.closed) == list(range(1, len(disk.closed) + 1))
    state = server().inner.state
    assert state.number == rounds or state.fruitless >= HOPELESS
    for client in clients:
        for number, fate in client.settled.items():
            outcome = disk.closed[number]
            came = int(client.name.split()[1]) in outcome.participants
            assert came == (fate == "accepted") or outcome.failed, (client.name, number, fate, outcome)


# -- one message at a time --------------------------------------------------------------------------------------------


class Table:
    """A server, to which messages are handed one by one."""

    def __init__(self, rules: RoundPlan, rounds: int = 3, **more: Any) -> None:
        self.server = RoundServer(SERVER, rules, 0, rounds, Payload(8), **{"update_bytes": 8, **more})
        self.now, self.sent = 0.0, list[Send]()
        self.take_as: Callable[[AddUpdate], str] = lambda _work: ""
        self.examined = Examined()
        self._perform(self.server.begin(0.0))

    def _perform(self, effects: Any) -> None:
        todo: list[Effect] = list(effects)
        while todo:
            effect = todo.pop(0)
            if isinstance(effect, Send):
                self.sent.append(effect)
            elif isinstance(effect, Start):
                match effect.work:
                    case Examine():
                        result: Any = self.examined
                    case AddUpdate() as work:
                        result = self.take_as(work)
                    case _:
                        result = RoundClosed(True, Payload(8), last=False)
                todo += self.server.on(Done(effect.token, result), self.now)

    def hear(self, client: int | str, message: Any, nbytes: int = 0) -> list[Any]:
        """What is sent because of a client's message."""
        self.sent.clear()
        name = f"client {client}" if isinstance(client, int) else client
        self._perform(self.server.on(Received(name, message, Payload(nbytes)), self.now))
        return [effect.message for effect in self.sent]

    def timer(self, token: Any) -> None:
        self._perform(self.server.on(Timer(token), self.now))

    def filled(self) -> Table:
        """All clients have joined, so the first round is under way."""
        for client in range(self.server.plan.clients):
            self.hear(client, MembershipRequest(f"party {client}", client))
            self.hear(client, Beat(0, "idle", 5))
        assert self.server.state.phase == "gathering"
        return self


def update(number: int = 1) -> UpdateSent:
    return UpdateSent(number, 0.5, 5)


def test_the_size_of_updates_is_what_the_first_client_says_and_large_ones_are_waited_for_longer() -> None:
    table = Table(plan(clients=2, fraction=1.0), update_bytes=0)
    patience = table.server.roster.patience
    table.examined = Examined(update_bytes=3_000_000)
    table.filled()
    assert table.server.roster.patience == patience_for(table.server.plan.silence, 3_000_000) > patience
    assert [message.fate for message in table.hear(0, update(), 8)] == ["refused"]
    assert table.hear(1, update(), 3_000_000)[0].fate == "accepted"


def test_the_first_round_waits_for_all_clients_or_for_as_many_as_are_wanted() -> None:
    table = Table(plan())
    assert isinstance(table.hear(0, MembershipRequest("a", 0))[0], Welcome)
    table.hear(0, Beat(0, "idle", 5))
    assert table.server.state.phase == "waiting"
    assert table.server.missing == "1 of 3 clients are there, 1 with examples"
    assert Table(plan(), first=1).server.state.phase == "waiting"
    two = Table(plan(), first=1)
    two.hear(1, MembershipRequest("b", 1))
    assert any(isinstance(message, RoundTask) for message in two.hear(1, Beat(0, "idle", 5)))


def test_a_client_that_is_still_preparing_is_not_selected() -> None:
    table = Table(plan(clients=1))
    table.hear(0, MembershipRequest("a", 0))
    table.hear(0, Beat(0, "preparing", 0))
    assert table.server.state.phase == "waiting"


def test_a_client_without_examples_takes_no_part_but_the_round_goes_on() -> None:
    table = Table(plan())
    for client, examples in enumerate([5, 0, 5]):
        table.hear(client, MembershipRequest(f"party {client}", client))
        table.hear(client, Beat(0, "idle", examples))
    assert sorted(table.server.state.round.cohort) == [0, 2]


def test_a_second_copy_of_an_update_is_counted_once_and_answered_as_the_first() -> None:
    table = Table(plan()).filled()
    assert Settled(1, "accepted") in table.hear(0, update(), 8)
    assert Settled(1, "accepted") in table.hear(0, update(), 8)
    assert table.server.state.round.came == [0]
    assert table.server.state.counts["duplicates"] == 1


def test_an_update_of_another_round_is_discarded_and_counted() -> None:
    table = Table(plan()).filled()
    assert Settled(7, "late") in table.hear(0, update(7), 8)
    assert table.server.state.round.came == []
    assert table.server.state.counts["stale"] == 1


def test_an_update_of_the_wrong_size_is_refused_and_the_round_goes_on_without_it() -> None:
    table = Table(plan()).filled()
    (settled,) = [message for message in table.hear(0, update(), 9) if isinstance(message, Settled)]
    assert settled.fate == "refused"
    assert "9 bytes" in settled.why
    table.hear(1, update(), 8)
    table.hear(2, update(), 8)
    assert table.server.state.number == 2
    assert table.server.state.counts["refused"] == 1


def test_what_cannot_be_added_is_refused_with_the_reason() -> None:
    table = Table(plan()).filled()
    table.take_as = lambda _work: "it has NaN"
    assert Settled(1, "refused", "it has NaN") in table.hear(0, update(), 8)
    assert table.server.troubles[-1][1].error == "update refused: it has NaN"


def test_a_message_that_is_none_costs_only_its_sender_the_round() -> None:
    table = Table(plan()).filled()
    table._perform(table.server.reject("client 1", "too large", 1.0))
    assert table.server.state.round.refused == [1]
    table._perform(table.server.reject("stranger", "too large", 1.0))
    assert table.server.state.round.refused == [1]


def test_a_failed_client_is_dropped_at_once_and_its_error_is_kept_for_people() -> None:
    table = Table(plan()).filled()
    assert Settled(1, "failed") in table.hear(0, ClientFailure(1, "ValueError: no", "Traceback"))
    assert table.server.state.round.dropped == [0]
    assert table.server.troubles[-1] == ("client 0", ClientFailure(1, "ValueError: no", "Traceback"))
    assert UnknownClient() in table.hear(0, Beat(1, "working", 5))  # It has ended: to come back, it joins again.


def test_a_silent_client_is_dropped_and_a_beating_one_is_waited_for() -> None:
    table = Table(plan()).filled()
    table.hear(0, update(), 8)
    table.hear(1, update(), 8)
    table.now = 3.0
    for client in (0, 1):
        table.hear(client, Beat(1, "idle", 5))
    table.now = 4.0
    table.timer(("silent", 2))
    assert table.server.state.number == 2
    assert table.server.state.counts["dropped"] == 1


def test_a_deadline_closes_the_round_and_discards_what_comes_later() -> None:
    table = Table(plan(deadline=3.0)).filled()
    table.hear(0, update(), 8)
    table.now = 3.0
    table.timer("overdue")
    assert table.server.state.number == 2
    assert table.server.state.counts["late"] == 2
    assert Settled(1, "late") in table.hear(1, update(), 8)


def test_too_few_updates_leave_the_model_as_it_is() -> None:
    table = Table(plan(fewest=2, deadline=3.0)).filled()
    table.hear(0, update(), 8)
    closed: list[Any] = []
    original = table.server.on
    table.server.on = lambda event, now: closed.append(event) or original(event, now)  # type: ignore[method-assign]
    effects = original(Timer("overdue"), 3.0)
    (work,) = [effect.work for effect in effects if isinstance(effect, Start)]
    assert work.outcome.participants == ()
    assert "a round needs 2" in work.outcome.failed


def test_over_selected_clients_that_are_not_needed_are_late() -> None:
    table = Table(plan(fraction=0.5, over=1.5)).filled()
    assert len(table.server.state.round.cohort) == 3
    table.hear(0, update(), 8)
    table.hear(1, update(), 8)
    assert table.server.state.number == 2
    assert table.server.state.counts["late"] == 1


def test_ten_rounds_without_an_update_end_the_federation() -> None:
    table = Table(plan(clients=1), rounds=1000).filled()
    table.take_as = lambda _work: "it has NaN"
    for number in range(1, HOPELESS + 1):
        table.hear(0, update(number), 8)
    assert table.server.state.phase == "finishing"
    assert table.server.state.fruitless == HOPELESS


def test_those_that_are_not_enrolled_or_have_another_number_are_refused_and_counted() -> None:
    table = Table(plan(), enrolled=["client 0", "client 1", "client 2"])
    assert isinstance(table.hear("stranger", MembershipRequest("x"))[0], Refused)
    (refusal,) = table.hear(1, MembershipRequest("b", 2))
    assert isinstance(refusal, Refused)
    assert refusal.why == "it is client 1, not 2"
    assert table.server.state.counts["rejected_joins"] == 2
    assert isinstance(table.hear(1, MembershipRequest("b", 2))[0], Refused)
    shown = [failure.error for _, failure in table.server.troubles]
    assert len(shown) == len(set(shown)) == 2, "who asks again is answered again, and people read it once"
    assert isinstance(table.hear(1, MembershipRequest("b"))[0], Welcome)


@pytest.mark.parametrize(
    "lie",
    [
        Beat(0, "idle", -1),
        Beat(0, "idle", 2**63),
        UpdateSent(1, 0.5, 2**62),
        UpdateSent(1, 0.5, 5, scored=-1),
        Goodbye(0.5, 2**60),
        MembershipRequest("long " * 1000),
    ],
)
def test_numbers_that_no_client_can_have_are_no_message(lie: Any) -> None:
    """Their sum over clients would not fit into 64 bits, and end the server."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(lie), type=type(lie))


def test_the_most_examples_that_a_client_may_claim_can_be_summed() -> None:
    table = Table(plan())
    for client in range(3):
        table.hear(client, MembershipRequest("x", client))
        table.hear(client, Beat(0, "idle", EXAMPLES))
    assert table.server.state.phase == "gathering"
    mean = ExactMean(UpdateLayout(2, 2, torch.float32))
    mean.begin(Selected(1, range(3), [EXAMPLES] * 3))
    for client in range(3):
        assert mean.add(ClientUpdate(client, torch.ones(2), None, EXAMPLES, 0.5, EXAMPLES))
    mean.combine(alone)
    assert mean.mean()[0].tolist() == [1, 1]
    assert mean.examples == 3 * EXAMPLES


def test_a_number_is_given_once_and_there_are_no_more_than_the_plan_says() -> None:
    table = Table(plan(clients=2), first=2)
    table.hear("a", MembershipRequest("a", 1))
    (refusal,) = table.hear("b", MembershipRequest("b", 1))
    assert isinstance(refusal, Refused)
    assert "client 1 has joined already, under the name 'a'" in refusal.why
    (refusal,) = table.hear("b", MembershipRequest("b", 5))
    assert isinstance(refusal, Refused)
    (welcome,) = table.hear("b", MembershipRequest("b"))
    assert isinstance(welcome, Welcome)
    assert welcome.client == 0
    (refusal,) = table.hear("c", MembershipRequest("c"))
    assert refusal == Refused("all 2 clients have joined")
    assert table.hear("a", MembershipRequest("a"))[0].client == 1  # It was restarted.


def test_a_goodbye_or_a_leave_is_answered_and_the_end_needs_nobody_else() -> None:
    table = Table(plan(clients=2), rounds=1).filled()
    table.hear(0, update(), 8)
    table.hear(1, update(), 8)
    assert table.server.state.phase == "finishing"
    table.hear(0, Goodbye(0.5, 10))
    table.hear(1, ClientLeave())
    assert table.server.state.phase == "finished"
    assert table.server.state.round.scores == [(0.5, 10)]

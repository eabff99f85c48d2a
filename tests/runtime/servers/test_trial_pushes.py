"""Payloads that are brought to servers only to see what that takes: looked at, answered, and never used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, optim
from torch.nn import Parameter

from offbeat.protocols.compression import TopKFormat
from offbeat.protocols.machine import Done, Payload, Received, Send, Start, Timer
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import ClusterView, Fenced, Trial, Tried
from offbeat.protocols.servers.replica.server import ServerMachine
from offbeat.protocols.servers.replica.works import InspectPayload, ReadShard, Restore
from offbeat.protocols.servers.worker.client import ClientMachine
from offbeat.protocols.servers.worker.notices import Completed, PushedRange, TrialRequest
from offbeat.runtime.compression import build
from offbeat.runtime.servers.shard_state import Numbers, first_state
from offbeat.runtime.servers.updater import Recipe, settings_of

VIEW = ClusterView.of(2, 1, 1)
P, B = "server 0.0", "server 0.1"


def test_a_trial_is_looked_at_and_answered_and_leaves_the_shard_as_it_is() -> None:
    server = ServerMachine(P, 0, Rule(0), VIEW)
    payload = Payload(8, "numbers")
    trial = Trial(worker=1, number=7, compressed=True)
    (begun,) = server.on(Received("worker 1", trial, payload), 0.0)
    assert isinstance(begun, Start)
    assert begun.work == InspectPayload(payload, True)
    (answer,) = server.on(Done(begun.token), 0.1)
    assert answer == Send("worker 1", Tried(number=7, epoch=0))
    assert server.replication.log.end == 0, "nothing goes to the log, nor to backups"
    assert (server.shard.version, server.shard.minimum) == (0, 0)
    assert not server.shard.counts


def test_only_who_serves_the_shard_is_tried_and_only_in_ones_own_name() -> None:
    trial = Trial(worker=1, number=7)
    backup = ServerMachine(B, 0, Rule(0), VIEW)
    assert backup.on(Received("worker 1", trial), 0.0) == [Send("worker 1", Fenced(0))]
    assert ServerMachine(P, 0, Rule(0), VIEW).on(Received("worker 0", trial), 0.0) == []


def test_a_trial_that_is_lost_is_sent_again_until_it_is_answered() -> None:
    machine = ClientMachine(0, VIEW)
    asked = machine.ask(TrialRequest([PushedRange(0, Payload(4))], compressed=False), 0.0)
    (first,) = asked.effects
    assert isinstance(first, Send)
    assert isinstance(first.message, Trial)
    again = [e for e in machine.on(Timer("tick"), 0.6) if isinstance(e, Send) and isinstance(e.message, Trial)]
    assert [(e.to, e.message) for e in again] == [(P, first.message)]
    answer = Tried(number=first.message.number, epoch=0)
    (done,) = machine.on(Received(P, answer), 0.7)
    assert isinstance(done, Start)
    assert done.work == Completed(asked.token, ((0, answer),))
    assert machine.on(Received(P, answer), 0.8) == [], "a second answer is of no use"


def held(numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers.do(ReadShard()).handle.copy())


@pytest.mark.parametrize("nbytes", [16, 15, 0])
@pytest.mark.parametrize("letter", [True, False])
def test_whatever_is_tried_numbers_stay_as_they_are(nbytes: int, letter: bool) -> None:
    optimizer = optim.SGD([Parameter(torch.zeros(4))], lr=0.5)
    form = TopKFormat(0.5)
    recipe = Recipe(optimizer="SGD", ranges=(((0, 4),),), settings=settings_of(optimizer), coders=(form,))
    numbers = Numbers(lambda _: None)
    state = first_state(recipe, torch.ones(4))
    numbers.do(Restore(Payload(state.nbytes, state), 3))
    row = build(form, seed=0).encode(torch.tensor([1.0, -4.0, 3.0, 2.0])).numpy()
    payload = Payload(nbytes, np.array(row[:nbytes]) if nbytes else None)
    numbers.do(InspectPayload(payload, letter))
    assert held(numbers).tolist() == [1.0] * 4
    assert numbers.version == 3

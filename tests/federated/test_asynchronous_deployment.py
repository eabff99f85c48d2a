"""FedBuff on real clients: the machine of the simulation, with arrivals as they happen, through kills of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cluster_task import Clusters, federated_run
from federation import same_model

from offbeat.protocols.federated.buffered_turns import BufferedTurns, BufferState
from offbeat.runtime.federated.round_log import read_rounds
from offbeat.simulate.federated import ClientTimes, Flight, Participant, RoundOutcome, RoundProgress
from offbeat.strategies import combined, parse
from offbeat.strategies.federated.update_path import rules_of
from offbeat.worker import federated

STRATEGY = "federated(clients=4, fraction=0.75, batch=16, data=quantity(1), algorithm=fedbuff(2))"
SEED = 4


def recorded(run: Path) -> list[RoundOutcome]:
    """The steps of a run; times that are not known are null in the file."""
    outcomes: list[RoundOutcome] = []
    for entry in read_rounds(run):
        counts = {name: entry.pop(name) for name in ("updates", "refused")}
        assert counts["refused"] == 0
        outcomes.append(msgspec.convert({**entry, "times": []}, RoundOutcome))
    return outcomes


class Replay(Iterator[RoundOutcome]):
    """In place of virtual rounds: the steps of another run, with the models that its clients still needed."""

    def __init__(self, outcomes: list[RoundOutcome]) -> None:
        self._left = list(outcomes)
        self.progress = RoundProgress()

    def __next__(self) -> RoundOutcome:
        outcome = self._left.pop(0)
        needed = {each.version for later in self._left for each in later.participants}
        nowhere = ClientTimes(0, 0.0, 0.0, 0.0, 0.0)
        flights = tuple(Flight(0, 0, version, 0.0, nowhere) for version in sorted(needed))
        self.progress = RoundProgress(outcome.number, outcome.version, outcome.ended, flights)
        return outcome


def asked_again(outcomes: list[RoundOutcome]) -> list[tuple[Participant, ...]]:
    """Who takes part with what, if the rule says who is asked and only the order of arrivals is what was recorded."""
    state, steps = BufferState(), list[tuple[Participant, ...]]()
    turns = BufferedTurns(rules_of(combined(parse(STRATEGY))).plan(), state, SEED)
    sizes = np.ones(4, np.int64)
    for version, outcome in enumerate(outcomes):
        for each in outcome.participants:
            list(turns.begin(sizes, version))
            assert each.client in state.at_work, "it was not asked"
            turns.arrived(each.client)
        steps.append(tuple(federated_participant(turn, version) for turn in turns.step()))
    return steps


def federated_participant(turn: Any, version: int) -> Participant:
    return Participant(turn.client, turn.version, 1 / (1 + version - turn.version) ** 0.5, turn.number)


@pytest.mark.slow
def test_an_asynchronous_server_that_is_killed_continues_and_its_order_replayed_gives_the_same_bits(
    deployment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = deployment("Clusters", source="cluster_task")
    server = real.serve(STRATEGY, rounds=8, seed=SEED)
    clients = [real.join(part, fault="slow" if part in (1, 3) else "") for part in range(4)]
    for number in (2, 5):
        real.wait_for(lambda state, number=number: state.number == number, f"step {number}")
        server.kill()
        server = real.resume()
    result = server.result()
    assert result["steps"] == 8
    assert result["federated"]["updates"] == 16
    assert result["score"] is not None
    for client in clients:
        assert set(client.result()["rounds"]) <= {"accepted", "late"}
    outcomes = recorded(real.run)
    assert any(each.factor < 1 for outcome in outcomes for each in outcome.participants), "nobody was stale"
    used = [each.turn for outcome in outcomes for each in outcome.participants]
    assert len(set(used)) == 16
    monkeypatch.setattr(federated, "VirtualRounds", lambda *_parts, **_more: Replay(outcomes))
    federated_run(Clusters(), STRATEGY, 8, tmp_path, seed=SEED)
    assert same_model(real.run, tmp_path)


@pytest.mark.slow
def test_who_is_asked_when_follows_from_the_order_of_arrivals_alone(deployment: Any) -> None:
    real = deployment("Clusters", source="cluster_task")
    server = real.serve(STRATEGY, rounds=6, seed=SEED)
    for part in range(4):
        real.join(part, fault="slow" if part == 2 else "")
    server.result()
    outcomes = recorded(real.run)
    assert asked_again(outcomes) == [outcome.participants for outcome in outcomes]


@pytest.mark.slow
def test_an_asynchronous_server_outlives_clients_that_hang_send_nan_or_die(deployment: Any) -> None:
    real = deployment("Clusters", source="cluster_task")
    strategy = "federated(clients=5, fraction=1, batch=16, algorithm=fedbuff(2))"
    server = real.serve(strategy, rounds=4, patience=2.0)
    faults = ["", "", "hangs", "nan", "dies training"]
    for part, fault in enumerate(faults):
        real.join(part, fault=fault)
    counts = server.result()["federated"]
    assert counts["rounds"] == 4
    assert counts["updates"] == 8
    assert counts["refused"] >= 1
    assert "update refused: it has NaN" in server.output

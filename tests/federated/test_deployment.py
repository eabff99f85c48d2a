"""Federated deployments as real processes on loopback: equal to simulation, killed, stopped, lied to, and resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from federated_tasks import Images, Owners
from federation import Deployment, same_model

from conftest import wait_until
from offbeat.errors import DataError, OffbeatError, RunError, StrategyError, TaskError, UsageError
from offbeat.federated import join, serve
from offbeat.federated.server import resume
from offbeat.protocols.federated.federation_state import FederationState
from offbeat.run.drive import fit
from offbeat.run.round_advice import RoundsExplained, explained_rounds
from offbeat.runtime.federated.round_log import read_rounds
from offbeat.runtime.launch import Launcher
from offbeat.runtime.messages import Keys

ALL = "federated(clients=3, fraction=1, batch=4, {})"
LOOPBACK = "tcp://127.0.0.1:9"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedsgd"])
def test_a_task_deployed_gives_the_bits_that_it_gives_simulated(
    algorithm: str, deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    strategy = f"federated(clients=3, fraction=0.7, epochs=2, batch=16, data=quantity(1), algorithm={algorithm})"
    simulated = fit(Images(), strategy, steps=4, seed=4, launcher=launcher, out=tmp_path)
    real = deployment("Images")
    server = real.serve(strategy, rounds=4, seed=4, validate=True)
    clients = [real.join(part) for part in (2, 0, 1)]
    result = server.result()
    assert all(client.result()["client"] == part for client, part in zip(clients, (2, 0, 1), strict=True))
    assert same_model(real.run, simulated.run)
    assert same_model(real.run, real.folder / "kept" / "client-client-1")
    assert result["score"] == pytest.approx(simulated.score)
    cohorts = [
        (outcome["cohort"], sorted(p["client"] for p in outcome["participants"])) for outcome in read_rounds(real.run)
    ]
    planned = [
        (outcome["cohort"], sorted(p["client"] for p in outcome["participants"]))
        for outcome in read_rounds(simulated.run)
    ]
    assert cohorts == planned


@pytest.mark.slow
def test_a_server_that_is_killed_again_and_again_goes_on_to_the_same_bits(
    deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    strategy = ALL.format("algorithm=fedadam")
    simulated = fit(Images(), strategy, steps=6, launcher=launcher, out=tmp_path)
    real = deployment("Images")
    server = real.serve(strategy, rounds=6)
    for part in range(3):
        real.join(part, fault="slow")

    def within(number: int, came: int) -> Any:
        return lambda state: state.number > number or (state.number == number and len(state.round.came) >= came)

    for number, came in ((1, 1), (2, 1), (4, 0)):
        real.wait_for(within(number, came), f"{came} updates of round {number}, or a later one")
        server.kill()
        server = real.resume()
    result = server.result()
    assert result["steps"] == 6
    assert result["federated"]["updates"] == 18
    assert same_model(real.run, simulated.run)
    lines = [json.loads(line)["step"] for line in (real.run / "metrics.jsonl").read_text().splitlines()]
    assert lines == sorted(set(lines))


@pytest.mark.slow
def test_sick_clients_cost_a_round_nothing_but_themselves(deployment: Any) -> None:
    real = deployment("Images")
    server = real.serve("federated(clients=6, fraction=1, batch=8)", rounds=3)
    faults = ["", "raise", "nan", "shape", "huge", "slow"]
    clients = {fault: real.join(part, fault=fault) for part, fault in enumerate(faults)}
    wait_until(lambda: "round 1: training" in clients["slow"].output, "the slow client's training")
    clients["slow"].send(signal.SIGSTOP)
    result = server.result()
    counts = result["federated"]
    assert counts["rounds"] == 3
    assert counts["failed_rounds"] == 0
    assert counts["updates"] >= 3
    assert counts["refused"] >= 7, server.output  # Of three liars in three rounds; one of them is slow.
    assert counts["dropped"] >= 2  # The one that raised, the one that was stopped.
    assert counts["malformed_messages"] >= 1
    assert clients[""].result()["rounds"] == {"accepted": 3}
    # Everybody's error reaches whoever runs the server, with its own traceback.
    assert "ValueError: the disk of this clinic is full" in server.output
    assert "in loss" in server.output
    assert "update refused: it has NaN" in server.output
    assert "update refused: it has 8 bytes" in server.output
    assert "too large" in server.output
    assert "the disk of this clinic is full" in clients["raise"].fails()
    assert "refused: it has NaN" in clients["nan"].output


@pytest.mark.slow
def test_a_client_that_hangs_in_training_while_it_gives_signs_of_life_costs_the_rounds_only_itself(
    deployment: Any,
) -> None:
    real = deployment("Images")
    server = real.serve(ALL.format("epochs=1"), rounds=3, patience=2.0)
    clients = [real.join(part, fault="hangs" if part == 1 else "") for part in range(3)]
    counts = server.result()["federated"]
    assert counts["rounds"] == 3
    assert counts["updates"] == 6
    assert counts["late"] == 1, "it gets no second task while it is still at its first one"
    assert counts["dropped"] == 0
    assert "client 1: round 1: still at work after" in server.output
    assert clients[0].result()["rounds"] == {"accepted": 3}
    assert clients[1].process.is_alive()


@pytest.mark.slow
def test_a_killed_client_comes_back_as_the_same_one(deployment: Any) -> None:
    real = deployment("Images")
    server = real.serve(ALL.format("algorithm=scaffold, fewest=3"), rounds=4)
    for part in range(2):
        real.join(part)
    slow = real.join(2, fault="slow")
    real.wait_for(lambda state: state.number == 2 and 2 in state.outstanding, "round 2")
    slow.kill()
    back = real.join(2)
    result = server.result()
    assert back.result()["client"] == 2
    assert result["federated"]["updates"] == 12  # It had its task again before it was given up.


@pytest.mark.slow
def test_unknown_keys_and_names_of_others_are_refused_and_counted(deployment: Any, tmp_path: Path) -> None:
    keys = {name: Keys.generate() for name in ("server", "a", "b", "stranger")}
    enrolled = keys["server"].allow(keys["a"].public).allow(keys["b"].public)
    for name, pair in {**keys, "server": enrolled}.items():
        pair.save(tmp_path / f"{name}.keys")
    real = deployment("Owners")
    server = real.serve(
        "federated(clients=2, fraction=1)",
        rounds=2,
        keys=str(tmp_path / "server.keys"),
    )
    public = enrolled.public

    def party(name: str, part: int, **words: Any) -> Any:
        return real.join(part, keys=str(tmp_path / f"{name}.keys"), server_key=public, **words)

    stranger = party("stranger", 0, timeout=4.0)
    without = real.join(0, timeout=4.0)
    assert "did not answer" in stranger.fails()
    assert "did not answer" in without.fails()
    swapped = party("a", 1)
    assert "it is client 0, not 1" in swapped.fails()
    clients = [party("a", 0), party("b", 1)]
    counts = server.result()["federated"]
    assert [client.result()["rounds"] for client in clients] == [{"accepted": 2}] * 2
    assert counts["unknown_keys"] == 1
    assert counts["rejected_joins"] >= 1


@pytest.mark.slow
def test_an_interrupted_server_and_client_say_so_and_end(deployment: Any) -> None:
    real = deployment("Images")
    server = real.serve(ALL.format("fewest=2"), rounds=50)
    clients = [real.join(part, fault="slow") for part in range(3)]
    real.wait_for(lambda state: state.number == 2, "round 2")
    clients[0].send(signal.SIGINT)
    clients[0].fails()
    real.wait_for(lambda state: state.members["client 0"].gone, "the client's farewell")
    server.send(signal.SIGINT)
    server.fails()
    known = json.loads((real.run / "run.json").read_text())
    assert known["state"] == "interrupted"
    assert known["result"]["steps"] >= 1


@pytest.mark.slow
def test_another_model_or_task_is_refused_at_join_and_the_difference_is_named(deployment: Any) -> None:
    real = deployment("Images")
    real.serve(ALL.format("epochs=1"), rounds=1)
    other = Deployment(real.folder, "Owners")
    other.address = real.address
    refused = [other.join(0), real.join(0, arguments={"examples": 100})]
    try:
        words = refused[0].fails()
        assert "parameter 0.weight is float64 (4, 2) at the client, float32 (16, 6) at the server" in words
        assert 'its task has arguments {"examples": 100}, the server\'s {}' in refused[1].fails()
    finally:
        other.close()


# -- refused before anything starts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "words", "why"),
    [
        ("allreduce", {}, "is not federated"),
        ("federated(clients=3, dropout=0.1)", {}, "those of simulated clients"),
        ("federated(clients=3, fraction=0)", {}, "fraction"),
        ("federated(clients=3, fraction=1.5)", {}, "fraction"),
        ("federated(clients=3, fewest=4)", {}, "fewest"),
        ("federated(clients=3)", {"rounds": 0}, "--rounds 0 makes no sense"),
        ("federated(clients=3)", {"first": 4}, "--first 4"),
        ("federated(clients=3)", {"silence": 0.0}, "--silence"),
        ("federated(clients=3)", {"patience": 0.5}, "--patience 0.5 makes no sense"),
        ("federated(clients=3)", {"address": "tcp://0.0.0.0:7777"}, "without keys"),
    ],
)
def test_a_server_that_could_not_run_is_refused(strategy: str, words: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match=why):
        serve(Owners(), strategy, out=tmp_path, **{"rounds": 1, **words})


def test_a_key_file_that_allows_another_number_of_clients_is_refused(tmp_path: Path) -> None:
    Keys.generate([Keys.generate().public]).save(tmp_path / "keys")
    with pytest.raises(UsageError, match="allows 1 clients, and the strategy has clients=3"):
        serve(Owners(), "federated(clients=3)", rounds=1, keys=tmp_path / "keys", out=tmp_path)


def test_a_server_without_clients_gives_up_and_says_how_many_were_there(tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match="0 of 3 clients are there"):
        serve(Owners(), "federated(clients=3)", rounds=1, timeout=0.3, out=tmp_path)
    assert not FederationState().members


def test_a_run_that_is_no_federation_is_not_resumed(launcher: Launcher, tmp_path: Path) -> None:
    run = fit(Owners(), "federated(clients=4)", steps=1, launcher=launcher, out=tmp_path).run
    with pytest.raises(OffbeatError, match="not the run of a federated server"):
        resume(run)


@pytest.mark.parametrize(
    ("words", "error", "why"),
    [
        ({}, UsageError, "a client needs data"),
        ({"data": ".", "part": 0}, UsageError, "Not both"),
        ({"part": 1, "client": 2}, UsageError, "is the data of client 1"),
        ({"part": -1}, UsageError, "--part -1"),
        ({"data": "/nowhere"}, DataError, "There is no folder"),
        ({"part": 0, "server_key": "ab" * 32}, UsageError, "--server-key needs --keys"),
        ({"part": 0, "timeout": 0.3}, RunError, "did not answer"),
    ],
)
def test_a_client_that_could_not_take_part_is_refused(
    words: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        join(LOOPBACK, Owners(), out=tmp_path, **words)


def test_a_task_that_reads_no_folder_says_what_to_define(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Define client_data\(folder\)"):
        Owners().client_data(tmp_path)


def test_strategies_of_strangers_are_never_imported() -> None:
    from offbeat.strategies.language.parser import parse_built_in

    with pytest.raises(StrategyError, match="not imported here"):
        parse_built_in("mine.py:Push(0.5)")


# -- compressed updates -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["topk(0.1)", "randomk(0.25) + quantize(8)"])
def test_compressed_updates_travel_as_they_are_counted_to_the_bits_of_simulation(
    compression: str, deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    strategy = f"federated(clients=2, fraction=1, batch=16) + {compression}"
    simulated = fit(Images(), strategy, steps=3, seed=4, launcher=launcher, out=tmp_path)
    real = deployment("Images")
    server = real.serve(strategy, rounds=3, seed=4)
    for part in range(2):
        real.join(part)
    assert server.result()["federated"]["updates"] == 6
    assert same_model(real.run, simulated.run)


@pytest.mark.slow
def test_clients_that_send_nan_or_garbage_for_a_compressed_update_are_refused_and_counted(deployment: Any) -> None:
    real = deployment("Images")
    server = real.serve("federated(clients=4, fraction=1, batch=16) + topk(0.1)", rounds=2)
    for part, fault in enumerate(["", "nan", "shape", "garbage"]):
        real.join(part, fault=fault)
    counts = server.result()["federated"]
    assert counts["refused"] == 6, server.output
    assert counts["updates"] == 2
    assert counts["failed_rounds"] == 0


# -- privacy, robust rules and explanations ---------------------------------------------------------------------------


@pytest.mark.slow
def test_privacy_deployed_spends_what_the_simulation_spends_and_a_resumed_server_goes_on_counting(
    deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    strategy = "federated(clients=3, fraction=1, batch=4, privacy=privacy(noise=2, delta=0.01, clip=1))"
    simulated = fit(Owners(), strategy, steps=3, launcher=launcher, out=tmp_path)
    real = deployment("Owners")
    server = real.serve(strategy, rounds=3)
    for part in range(3):
        real.join(part, fault="slow")
    real.wait_for(lambda state: state.number == 2, "round 2")
    server.kill()
    result = real.resume().result()
    assert result["federated"]["epsilon"] == pytest.approx(simulated.federated["epsilon"])
    assert result["federated"]["epsilon"] > 0


def explained(real: Deployment) -> RoundsExplained:
    known = explained_rounds(real.run, json.loads((real.run / "run.json").read_text()))
    assert known is not None
    return known


@pytest.mark.slow
def test_a_robust_rule_deployed_gives_the_bits_of_simulation_and_its_rounds_are_explained(
    deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    strategy = "federated(clients=3, fraction=1, batch=16, robust=median)"
    simulated = fit(Images(), strategy, steps=3, seed=4, launcher=launcher, out=tmp_path)
    real = deployment("Images")
    server = real.serve(strategy, rounds=3, seed=4)
    for part in range(3):
        real.join(part, fault="slow" if part == 1 else "")
    assert server.result()["federated"]["updates"] == 9
    assert same_model(real.run, simulated.run)
    causes = explained(real).rounds
    assert [cause.client for cause in causes] == [1, 1, 1]
    assert all(0 < cause.alone <= cause.seconds for cause in causes)

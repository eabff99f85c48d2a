"""Iterative tasks on real clients: sums of statistics, to the bits of the simulation, with server kills and liars."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import same_model
from safetensors.torch import load_file
from torch import Tensor

from offbeat.errors import CheckpointError, OffbeatError
from offbeat.federated import join, serve
from offbeat.federated.description import MOST_STATISTICS, TensorForm, described, encoded
from offbeat.federated.server_work import ServerWork
from offbeat.federated.store import ServerStore
from offbeat.protocols.federated.federation_state import FederationState
from offbeat.protocols.federated.messages import Examine, Examined, MembershipRequest
from offbeat.run.drive import fit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE
from offbeat.runtime.run.metrics import Ledger
from offbeat.strategies import combined, parse
from offbeat.task import reference_to
from offbeat.tasks.mixture import Mixture

SMALL = {"components": 2, "features": 2, "examples": 300}
SUMS = "federated(clients=3, fraction=0.7, data=quantity(1))"


@pytest.mark.slow
def test_an_iterative_task_deployed_gives_the_bits_of_simulation_though_its_server_is_killed(
    deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    simulated = fit(Mixture(**SMALL), SUMS, steps=9, seed=4, target=100.0, launcher=launcher, out=tmp_path)
    real = deployment("Mixture", source="offbeat.tasks.mixture", **SMALL)
    server = real.serve(SUMS, rounds=9, seed=4, target=100.0, validate=True)
    clients = [real.join(part, fault="slow") for part in (1, 0)]
    real.wait_for(lambda state: len(state.members) == 2, "two clients")
    other = real.join(2, fault="other statistics")
    words = other.fails()
    assert "statistic more is float64 (2,) at the client, missing at the first that joined" in words
    assert "statistic square is float64 (1, 2) at the client, float64 (2, 2) at the first that joined" in words
    clients.append(real.join(2, fault="slow"))
    real.wait_for(lambda state: state.number >= 3, "round 3")
    server.kill()
    server = real.resume()
    result = server.result()
    assert result["federated"]["rejected_joins"] == 1
    assert same_model(real.run, simulated.run)
    assert same_model(real.run, real.folder / "kept" / "client-client-1")
    assert result["score"] == simulated.score
    assert result["steps"] == 9
    assert all(client.result()["client"] == part for client, part in zip(clients, (1, 0, 2), strict=True))


@pytest.mark.slow
def test_folders_of_clients_are_summed_though_one_is_empty_and_another_sends_nan(
    deployment: Any, tmp_path: Path
) -> None:
    real = deployment("Average")
    server = real.serve("federated(clients=4, fraction=1)", rounds=2)
    clients: list[Any] = []
    for number, numbers in enumerate(([1.0, 2.0], [6.0], [], [5.0, 5.0])):
        folder = tmp_path / f"party {number}"
        folder.mkdir()
        (folder / "numbers.json").write_text(json.dumps(numbers))
        clients.append(real.join(None, client=number, data=str(folder), fault="nan" if number == 3 else ""))
    result = server.result()
    assert result["federated"]["updates"] == 4
    assert result["federated"]["refused"] == 2
    assert "update refused: it has NaN" in server.output
    # The server scores by what clients say of their own data: 3, 3 and 4 away, of 2, 1 and 2 examples.
    assert [client.result()["score"] for client in clients] == [-3.0, -3.0, None, -4.0]
    assert result["score"] == pytest.approx(-(2 * 3 + 3 + 2 * 4) / 5)
    assert load_file(real.run / MODEL_FILE)["mean"].item() == pytest.approx(3.0)


# -- bounds and refusals ----------------------------------------------------------------------------------------------


def examined(tmp_path: Path) -> Callable[[dict[str, Tensor]], Examined]:
    """A server's judgement of clients with these statistics."""
    task = Mixture(**SMALL)
    reference, strategy = reference_to(task), combined(parse(SUMS))
    work = ServerWork(task, reference, strategy, 0, tmp_path, Ledger(None), rounds=1, validate=False)
    work.load()

    def examine(statistics: dict[str, Tensor]) -> Examined:
        description = encoded(described(reference, task.initial(), statistics))
        return work.do(Examine("anybody", MembershipRequest("anybody"), description), FederationState())

    return examine


@pytest.mark.parametrize(
    ("statistics", "why"),
    [
        ({"sum": torch.empty(MOST_STATISTICS + 1, device="meta")}, "cannot be read"),
        ({name: torch.empty(MOST_STATISTICS // 2 + 1, device="meta") for name in "ab"}, "can have 1 to 8,388,608"),
        ({"sum": torch.empty(0)}, "have 0 numbers"),
        ({"sum": torch.empty(2, dtype=torch.complex64)}, "is complex64, and federated sums real numbers"),
        ({str(number): torch.empty(1) for number in range(1001)}, "cannot be read"),
    ],
)
def test_statistics_that_are_too_many_or_no_real_numbers_are_refused_at_join(
    statistics: dict[str, Tensor], why: str, tmp_path: Path
) -> None:
    examine = examined(tmp_path)
    assert why in examine(statistics).why
    # They fix nothing for others.
    assert examine({"sum": torch.empty(3)}) == Examined("", 24)


def test_the_first_client_with_examples_fixes_the_statistics_for_a_resumed_server_too(tmp_path: Path) -> None:
    examine = examined(tmp_path)
    assert examine({}) == Examined("", 0)
    assert examine({"sum": torch.empty(3)}) == Examined("", 24)
    for judge in (examine, examined(tmp_path)):
        assert "statistic sum is float32 (4,) at the client, float32 (3,)" in judge({"sum": torch.empty(4)}).why
        assert judge({}) == Examined("", 24)


def test_updates_stay_until_it_is_on_disk_that_their_round_is_closed(tmp_path: Path) -> None:
    store = ServerStore(tmp_path)
    store.write_update(3, 1, {"loss": 0.5})
    store.save(FederationState(phase="closing", number=3))
    assert store.read_update(3, 1) == {"loss": 0.5}
    store.save(FederationState(phase="gathering", number=4))
    with pytest.raises(CheckpointError):
        store.read_update(3, 1)


def test_a_changed_file_of_statistics_is_refused(tmp_path: Path) -> None:
    store = ServerStore(tmp_path)
    store.write_statistics({"sum": TensorForm("float64", (2,))})
    assert store.read_statistics() == {"sum": TensorForm("float64", (2,))}
    store.write_statistics({"sum": TensorForm("quaternion", (2,))})
    with pytest.raises(CheckpointError, match="was changed: statistic sum is quaternion"):
        store.read_statistics()


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("federated(clients=3, fraction=1, secure=True)", "secure=True cannot be used with Mixture"),
        ("federated(clients=3, privacy=privacy(noise=1, delta=0.1))", "no bound to clip them by"),
        ("federated(clients=3, epochs=2)", "epochs=2 cannot be used with Mixture"),
        ("federated(clients=3, algorithm=fedadam)", "algorithm=fedadam.* cannot be used with Mixture"),
        ("federated(clients=3, algorithm=fedbuff(2))", "algorithm=fedbuff.* cannot be used with Mixture"),
        ("federated(clients=3, personal=finetune)", "personal=finetune.* cannot be used with Mixture"),
        ("federated(clients=3) + topk(0.1)", r"topk\(0.1\) cannot be used with Mixture"),
    ],
)
def test_what_statistics_cannot_do_is_refused_before_the_server_starts(strategy: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match=why):
        serve(Mixture(**SMALL), strategy, rounds=1, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_client_whose_statistics_would_have_to_be_masked_is_refused(tmp_path: Path) -> None:
    peers = tmp_path / "peers.keys"
    peers.write_text("".join(f"{number:064x}\n" for number in range(1, 4)))
    with pytest.raises(OffbeatError, match="have no bound"):
        join("tcp://127.0.0.1:9", Mixture(**SMALL), part=0, peers=peers, out=tmp_path)

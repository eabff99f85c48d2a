"""Personal models of real clients: trained and kept where the data is; the server gets their scores only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster_task import Clusters
from federation import same_model
from safetensors.torch import load_file

from offbeat.federated.client_work import PERSONAL_FILE, HoldingOut, from_folder
from offbeat.protocols.federated.federation_state import RoundStatus
from offbeat.protocols.federated.messages import Goodbye
from offbeat.run.drive import fit
from offbeat.runtime.federated.client_state import ClientStates
from offbeat.runtime.launch import Launcher
from offbeat.strategies import combined, parse
from offbeat.strategies.federated.update_path import rules_of
from offbeat.task import Data
from offbeat.worker.federated_personal import PERSONAL_FOLDER


@pytest.mark.slow
@pytest.mark.parametrize("personal", ["finetune", "ditto(0.5, epochs=2)"])
def test_personal_models_deployed_are_those_of_simulation_and_only_their_scores_leave_the_client(
    personal: str, deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    strategy = f"federated(clients=3, fraction=0.7, batch=16, data=dirichlet(0.3), personal={personal})"
    simulated = fit(Clusters(), strategy, steps=4, seed=4, launcher=launcher, out=tmp_path)
    real = deployment("Clusters", source="cluster_task")
    server = real.serve(strategy, rounds=4, seed=4)
    clients = [real.join(part, fault="slow" if part else "") for part in range(3)]
    real.wait_for(lambda state: state.number == 3, "round 3")
    server.kill()
    result = real.resume().result()
    assert same_model(real.run, simulated.run)
    assert result["federated"]["personal"] == simulated.federated["personal"]
    assert result["federated"]["personal"]["clients"] == 3
    states = ClientStates(simulated.run / PERSONAL_FOLDER)
    for part, client in enumerate(clients):
        before, after = client.result()["personal"]
        assert 0 <= before <= 1
        assert 0 <= after <= 1
        own = load_file(real.folder / "kept" / f"client-client-{part}" / PERSONAL_FILE)
        expected = states.read(part, 100).tensors["model"]
        assert own["weight"].flatten().tolist() == expected[: own["weight"].numel()].tolist()
    assert not list(real.run.rglob("*ersonal*")), "the server has no model of a client's own"


def test_a_client_with_a_folder_holds_out_its_own_share(tmp_path: Path) -> None:
    task = Clusters(examples=50)
    task.client_data = lambda _folder: task.data()  # type: ignore[method-assign]
    rules = rules_of(combined(parse("federated(clients=3, personal=finetune(held=0.2))")))

    def sizes(parted: HoldingOut) -> list[int]:
        return [len(parted.data.train), len(parted.held)]  # type: ignore[arg-type]

    assert sizes(from_folder(task, tmp_path)(rules, 1)) == [40, 10]
    plain = rules_of(combined(parse("federated(clients=3)")))
    assert sizes(from_folder(task, tmp_path)(plain, 1)) == [50, 0]
    small = Data(task.data().train, task.data().validation, task.data().test)
    assert sizes(HoldingOut.of(small, rules, 1)) == [40, 10]


@pytest.mark.parametrize("scores", [(float("nan"), 0.5), (0.5,), (0.1, 0.2, 0.3), (0.5, float("inf"))])
def test_scores_that_are_none_are_not_counted(scores: tuple[float, ...]) -> None:
    status = RoundStatus()
    status.score(Goodbye(personal=scores))
    assert status.personal == []
    status.score(Goodbye(personal=(0.5, 0.75)))
    status.score(Goodbye(personal=()))
    assert status.personal == [(0.5, 0.75), ()]

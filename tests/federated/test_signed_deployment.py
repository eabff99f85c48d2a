"""Signed secure sums on real processes: servers that lie get no share, and clients end with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federated_tasks import Images
from federation import Deployment, same_model
from safetensors.torch import load_file
from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.errors import UsageError
from offbeat.federated import join
from offbeat.federated.peer_file import client_folder, public_key, read_peers
from offbeat.federated.server import Federation, federation_of, reference_of, run_server
from offbeat.run.drive import fit
from offbeat.runtime.federated.flat_model import FlatModel
from offbeat.runtime.federated.round_log import read_rounds
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE

SECURE = "federated(clients={}, fraction=1, batch=8, secure=True)"


def peers_of(real: Deployment, clients: int) -> str:
    """The list of the clients' keys, as they would exchange it."""
    path = real.folder / "peers.keys"
    keys = [public_key(client_folder(real.folder / "kept", f"client {part}")) for part in range(clients)]
    path.write_text("\n".join(f"{key}  site {part}" for part, key in enumerate(keys)))
    return str(path)


@pytest.mark.slow
def test_signed_rounds_give_the_bits_of_the_simulation_and_another_list_is_refused(
    deployment: Any, launcher: Launcher, tmp_path: Path
) -> None:
    simulated = fit(Images(), SECURE.format(3), steps=2, seed=4, launcher=launcher, out=tmp_path)
    real = deployment("Images")
    peers = peers_of(real, 3)
    other = real.folder / "other.keys"
    other.write_text(Path(peers).read_text() + f"\n{'ab' * 32}")
    server = real.serve(SECURE.format(3), rounds=2, seed=4, peers=peers, silence=20.0)
    assert "is not the server's" in real.join(0, peers=str(other)).fails()
    assert "keys (none) is not the server's" in real.join(0).fails()
    # Each says by its key who it is; which of them is there first does not matter.
    clients = [real.join(part, peers=peers) for part in (2, 0, 1)]
    assert server.result()["federated"]["failed_rounds"] == 0
    assert [client.result()["client"] for client in clients] == [2, 0, 1]
    assert real.state().round.secure.plan.signed
    assert same_model(real.run, simulated.run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("invents a client", "the long-term key of client 1 is not the one that is known"),
        ("splits the survivors", "of 4 clients signed the list of survivors, and 3 are needed"),
    ],
)
def test_a_server_that_lies_gets_no_sum_and_the_round_ends(lie: str, why: str, deployment: Any) -> None:
    real = deployment("Images")
    peers = peers_of(real, 4)
    server = real.serve(SECURE.format(4), rounds=1, peers=peers, fault=lie)
    clients = [real.join(part, peers=peers) for part in range(4)]
    result = server.result()["federated"]
    assert (result["failed_rounds"], result["updates"]) == (1, 0)
    if lie == "invents a client":
        reasons = [client.fails() for part, client in enumerate(clients) if part != 1]
        assert all("this client releases nothing in the secure sum of round 1" in reason for reason in reasons)
        assert all(why in reason for reason in reasons)
        assert why in server.output, "its operator sees the reason, too"
    else:
        assert why in read_rounds(real.run)[0]["failed"]
    state = real.state().round.secure.server
    assert not state.released
    assert not state.total or len(state.masked) == 4, "what it has is masked"
    flat, before = FlatModel(Images().model()), FlatModel(Images().model()).values
    with torch.no_grad():
        flat.module.load_state_dict(load_file(real.run / MODEL_FILE))
    assert torch.equal(flat.values, before), "the model stays"


@pytest.mark.slow
def test_a_server_that_leaves_out_the_masks_is_left(deployment: Any) -> None:
    real = deployment("Images")
    peers = peers_of(real, 3)
    plain = real.serve("federated(clients=3, fraction=1, batch=8)", rounds=1, timeout=5.0, fault="takes any list")
    why = real.join(0, peers=peers).fails()
    assert "sends each update as it is, and this client was started with a list of peers" in why
    plain.fails()


def test_a_client_prints_the_key_that_it_will_join_with(tmp_path: Path) -> None:
    words = ["federated", "identity", "--part", "1", "--out", str(tmp_path)]
    printed = [CliRunner().invoke(app, words).stdout.strip() for _ in range(2)]
    assert printed == [public_key(client_folder(tmp_path, "client 1"))] * 2
    assert (client_folder(tmp_path, "client 1") / "identity.key").stat().st_mode & 0o77 == 0


def test_a_client_that_is_not_in_its_own_list_is_refused_before_it_connects(tmp_path: Path) -> None:
    peers = tmp_path / "peers.keys"
    peers.write_text("\n".join(character * 64 for character in "abc"))
    with pytest.raises(UsageError, match=r"this client's signing key, [0-9a-f]{64}, is not in the list of peers"):
        join("tcp://127.0.0.1:1", Images(), part=0, peers=peers, out=tmp_path)


def test_a_list_of_peers_that_cannot_be_used_is_refused_before_a_server_listens(tmp_path: Path) -> None:
    peers, task = tmp_path / "peers.keys", reference_of(Images())
    with pytest.raises(UsageError, match=r"--peers is for rounds that clients sign, and only secure=True"):
        Federation("federated(clients=3, fraction=1)", 1, peers=str(peers))
    with pytest.raises(UsageError, match="cannot be read"):
        read_peers(peers)
    peers.write_text("\n".join(character * 64 for character in "abcd"))
    with pytest.raises(UsageError, match=r"has the keys of 4 clients, and the strategy has clients=3"):
        run_server(task, federation_of(task, SECURE.format(3), peers=peers, rounds=1), tmp_path)
    peers.write_text("\n".join(f"{number:064x}" for number in range(300)))
    with pytest.raises(UsageError, match=r"300 clients in a round are too many to sign it: 257 can"):
        run_server(task, federation_of(task, SECURE.format(300), peers=peers, rounds=1), tmp_path)
    peers.write_text("hello")
    with pytest.raises(UsageError, match=r"peers.keys: line 1 of the list of peers begins with 'hello'"):
        read_peers(peers)

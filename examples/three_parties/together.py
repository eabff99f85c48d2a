"""Three parties learn one model, each a process that reads only its own folder, with a server that has no data.

    python examples/three_parties/together.py parties

It writes a folder for each party, and runs the commands of docs/federated-deployment.md: `offbeat federated serve`
once, and `offbeat federated join` for each party. Then it does so again for one round of one local step on all data of
each party, and shows that the mean of the three models is that of one step of gradient descent on all data.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from make_folders import PARTIES, make_folders
from safetensors.torch import load_file
from task import PrivateDigits, party
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TASK = f"{Path(__file__).with_name('task.py')}:PrivateDigits"
OFFBEAT = [sys.executable, "-m", "offbeat", "federated"]
WAIT = 300.0


def federate(parties: Path, strategy: str, rounds: int, out: Path) -> dict[str, Any]:
    """Run a server and three parties; returns the server's result."""
    serve = ["serve", TASK, "--strategy", strategy, "--rounds", str(rounds), "--out", str(out), "--format", "json"]
    print("$ offbeat federated", *serve)
    log = out / "server.log"
    out.mkdir(parents=True, exist_ok=True)
    with log.open("w") as printed:
        server = subprocess.Popen([*OFFBEAT, *serve], stdout=subprocess.PIPE, stderr=printed, text=True)
    clients: list[subprocess.Popen[bytes]] = []
    try:
        address = address_in(log, server)
        for number, name in enumerate(PARTIES):
            join = ["join", address, TASK, "--data", str(parties / name), "--client", str(number), "--out", str(out)]
            print("$ offbeat federated", *join)
            clients.append(subprocess.Popen([*OFFBEAT, *join], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        printed_result, _ = server.communicate(timeout=WAIT)
        for client in clients:
            client.wait(WAIT)
    finally:
        for process in (server, *clients):
            if process.poll() is None:
                process.kill()
    if server.returncode:
        raise SystemExit(log.read_text())
    return json.loads(printed_result)


def address_in(log: Path, server: subprocess.Popen[str]) -> str:
    """Where the server listens, as it prints it."""
    deadline = time.monotonic() + WAIT
    while "listening at " not in log.read_text():
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(log.read_text())
        time.sleep(0.05)
    return log.read_text().split("listening at ")[1].split()[0]


def alone(images: Tensor, labels: Tensor) -> nn.Module:
    """The model that a party would get by itself."""
    task = PrivateDigits()
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    for _ in range(30):
        for inputs, target in DataLoader(TensorDataset(images, labels), 10, shuffle=True):
            optimizer.zero_grad()
            task.loss(model, (inputs, target)).backward()
            optimizer.step()
    return model


def score(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of right answers."""
    with torch.no_grad():
        return PrivateDigits().score(model, [(images, labels)])


def loaded(run: str) -> nn.Module:
    """The model of a run."""
    model = PrivateDigits().model()
    model.load_state_dict(load_file(Path(run) / "model.safetensors"))
    return model


def one_step(parties: Iterable[tuple[Tensor, Tensor]]) -> nn.Module:
    """One step of gradient descent on the training data of all parties."""
    cuts = [(images[: len(labels) * 4 // 5], labels[: len(labels) * 4 // 5]) for images, labels in parties]
    task = PrivateDigits()
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    task.loss(model, (torch.cat([images for images, _ in cuts]), torch.cat([labels for _, labels in cuts]))).backward()
    optimizer.step()
    return model


def main(parties: Path) -> None:
    """Learn together, and compare."""
    make_folders(parties)
    everything = [party(parties / name) for name in PARTIES]
    images, labels = (torch.cat(tensors) for tensors in zip(*everything, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        together = federate(parties, "federated(clients=3, fraction=1, batch=20)", 20, Path(folder, "many"))
        share = score(loaded(together["run"]), images, labels)
        print(f"\nOf the images of all ten digits, the model of all three parties recognizes {share:.0%}.")
        for name, own in zip(PARTIES, everything, strict=True):
            print(f"  {name} alone, with images of {PARTIES[name]}: {score(alone(*own), images, labels):.0%}")
        print("\nOne local step on all data of each party, and the mean by examples:")
        step = federate(parties, "federated(clients=3, fraction=1, batch=full)", 1, Path(folder, "one"))
        pairs = zip(loaded(step["run"]).parameters(), one_step(everything).parameters(), strict=True)
        apart = max(float((mine - other).detach().abs().max()) for mine, other in pairs)
        print(f"\nIt differs by {apart:.1e} at most from one step of gradient descent on all data together.")
        if apart > 1e-6:
            raise SystemExit("these should be equal up to rounding")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

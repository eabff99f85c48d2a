"""Simulated federated rounds: time per client beside Flower's and pfl's simulations, and memory with 100,000 clients.

Claims: a client costs at most a 15th of what it costs in Flower, and no more than in pfl; and a worker that simulates
10 rounds of 1,000 of 100,000 clients needs at most 200 MB more than one that simulates 10 rounds of 100 clients.

The network has 784-200-200-10 units, a client makes one step with ten examples, and 100 of 1,000 clients take part in
a round. Each simulation has two processes and a thread in each. All of them run at the same time, but wait at a gate
while it is not their turn (`_gate.py`): a block times some rounds of each, in an order that rotates. Before the times
count, every simulation must begin with the same loss over all data, and lower it. Two simulations of
ours that differ in nothing are the A/A pair.

The peers are no dependencies of ours, so each has an environment of its own:

    python -m venv flower && flower/bin/pip install "flwr[simulation]" torch==2.13.0
    python -m venv pfl && pfl/bin/pip install "pfl[pytorch]" torch==2.13.0
    python benchmarks/federated.py --flower flower/bin/python --pfl pfl/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, TensorDataset

import offbeat
from offbeat.bench import environment, holds, ratio
from offbeat.runtime.launch import free_port

sys.path.insert(0, str(Path(__file__).parent))
from _gate import CLIENTS, COHORT, EXAMPLES, PATIENCE, RATE, Gate, network, problem

RESULTS = Path(__file__).parent / "results"
HERE = Path(__file__).parent
AT_LEAST_AS_FAST_AS_FLOWER = 15.0
MEGABYTES = 200.0
INITIAL = 2.309373
"""The loss over all data before the first round."""
FLOWERS = 1
"""Rounds of a block of Flower's; of the others, as many as --rounds says, which take about as long."""
WARM_UP = 2
"""Blocks that do not count; in the first one of Flower's, its actors are started."""


@dataclass(eq=False)
class Gated(offbeat.Task):
    """The problem of the benchmark; a score is a wait at the gate."""

    gate: str
    name: str
    rounds: int

    def __post_init__(self) -> None:
        self.evaluate_every = self.rounds
        self._gate = Gate(self.gate, self.name, os.environ.get("RANK", "0") == "0")
        self._data = problem()
        self._scores = 0

    def model(self) -> nn.Module:
        """The network."""
        return network()

    def data(self) -> offbeat.Data:
        """Ten examples for each client; the whole of it is scored at the gate, whatever the loader has."""
        inputs, labels = self._data
        few = TensorDataset(inputs[:1], labels[:1])
        return offbeat.Data(TensorDataset(inputs, labels), few, few)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """Plain SGD."""
        return SGD(params, lr=RATE)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(output, target)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """Wait for the next turn; the run ends when the target, 1, is reached."""
        del data
        inputs, labels = self._data
        return 0.0 if self._gate.wait(float(self.criterion(model(inputs), labels))) else 1.0


@dataclass(eq=False)
class Crowd(offbeat.Task):
    """Many clients with two examples each, that notes the memory of each worker at its end."""

    folder: str
    clients: int

    def model(self) -> nn.Module:
        """The network."""
        return network()

    def data(self) -> offbeat.Data:
        """Points that are made when they are read: only what the simulation keeps is counted."""
        return offbeat.Data(_Points(2 * self.clients), _Points(10), _Points(10))

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        """Plain SGD."""
        return SGD(params, lr=RATE)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(output, target)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """Note the peak of this process's memory."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        Path(self.folder, f"{self.clients}-{os.environ['RANK']}").write_text(str(peak))
        return offbeat.accuracy(model, data)


class _Points(Dataset[Any]):
    """As many examples as are said to be there."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((784,), (index % 97) / 97), index % 10


def peers(options: argparse.Namespace, folder: Path) -> dict[str, list[subprocess.Popen[bytes]]]:
    """The processes of each simulation, started."""
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    started: dict[str, list[subprocess.Popen[bytes]]] = {}

    def start(name: str, words: Sequence[str], env: dict[str, str]) -> None:
        log = (folder / f"{name}.log").open("ab")
        process = subprocess.Popen(words, cwd=HERE, env=env, stdout=log, stderr=subprocess.STDOUT)
        started.setdefault(name, []).append(process)

    for name in ("offbeat", "offbeat, again"):
        start(name, [sys.executable, __file__, "--simulate", name, str(folder), "--rounds", str(options.rounds)], plain)
    if options.pfl:
        port = str(free_port())
        for rank in ("0", "1"):
            own = {"TORCHELASTIC_RUN_ID": "benchmark", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
            own |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            start("pfl", [options.pfl, "_pfl_rounds.py", str(folder), "pfl", str(options.rounds)], plain | own)
    if options.flower:
        start("Flower", [options.flower, "_flower_rounds.py", str(folder), "Flower", str(FLOWERS)], plain)
    return started


def heard(folder: Path, name: str, block: int, processes: Sequence[subprocess.Popen[bytes]]) -> dict[str, float]:
    """What a simulation reported of a block, once it has."""
    path, deadline = folder / f"{name}.done.{block}", time.monotonic() + PATIENCE
    while not path.exists():
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            raise SystemExit(f"{name} has ended, or makes no rounds:\n{(folder / f'{name}.log').read_text()[-3000:]}")
        time.sleep(0.01)
    return json.loads(path.read_text())


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Milliseconds per client in each block."""
    started = peers(options, folder)
    names = list(started)
    first, times = {}, {name: list[float]() for name in names}
    try:
        for name in names:
            first[name] = heard(folder, name, 0, started[name])["loss"]
        for block in range(1, options.blocks + WARM_UP + 1):
            for name in names[block % len(names) :] + names[: block % len(names)]:
                (folder / f"{name}.go.{block}").touch()
                done = heard(folder, name, block, started[name])
                rounds = FLOWERS if name == "Flower" else options.rounds
                if block > WARM_UP:
                    times[name].append(1e3 * done["seconds"] / (rounds * COHORT))
                verify(name, first[name], done["loss"], block * rounds)
    finally:
        (folder / "stop").touch()
        for process in (each for group in started.values() for each in group):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
    return times


def verify(name: str, first: float, last: float, rounds: int) -> None:
    """A simulation that trains begins with our model, and lowers the loss by about 0.001 a round at first."""
    assert first < INITIAL + 1e-4, f"{name} begins with another model: {first}"
    assert last < INITIAL - 0.0005 * min(rounds, 40), f"{name} does not learn: {last} after {rounds} rounds"


def memory(folder: Path) -> dict[str, float]:
    """The most memory of a worker in MB, with few clients and with many."""
    peaks: dict[str, float] = {}
    for clients, fraction in ((100, 1.0), (100_000, 0.01)):
        strategy = f"federated(clients={clients}, fraction={fraction})"
        offbeat.fit(Crowd(str(folder), clients), strategy, workers=2, steps=10, out=folder)
        peaks[f"{clients:,}"] = max(float((folder / f"{clients}-{rank}").read_text()) for rank in range(2))
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of a block, except for Flower")
    parser.add_argument("--flower", help="a Python that has flwr[simulation]")
    parser.add_argument("--pfl", help="a Python that has pfl[pytorch]")
    parser.add_argument("--out", type=Path, default=RESULTS / "federated.json")
    parser.add_argument("--simulate", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.simulate:
        name, folder = options.simulate
        strategy = f"federated(clients={CLIENTS}, fraction={COHORT / CLIENTS}, batch={EXAMPLES})"
        task = Gated(folder, name, options.rounds)
        offbeat.fit(task, strategy, workers=2, steps=10**6, target=1.0, out=Path(folder) / "runs")
        return
    with tempfile.TemporaryDirectory() as folder:
        peaks = memory(Path(folder))
        times = measure(options, Path(folder))
    for name, each in times.items():
        print(f"{name:15} {sorted(each)[len(each) // 2]:8.3f} ms per client")
    grown = peaks["100,000"] - peaks["100"]
    bars: list[dict[str, Any]] = [
        {
            "bar": "memory of a worker with 100,000 clients over 100, MB",
            "found": round(grown, 1),
            "at most": MEGABYTES,
            "holds": grown <= MEGABYTES,
        }
    ]
    for peer, least in (("Flower", AT_LEAST_AS_FAST_AS_FLOWER), ("pfl", 1.0)):
        if peer in times:
            spread = ratio(times[peer], times["offbeat"])
            bars.append(
                {
                    "bar": f"time per simulated client: {peer} / offbeat",
                    "found": spread.plain(),
                    "at least": least,
                    "holds": holds(spread, at_least=least),
                }
            )
    noise = ratio(times["offbeat, again"], times["offbeat"])
    for bar in bars:
        print(f"{'holds ' if bar['holds'] else 'missed'} {bar['bar']}: {bar['found']}")
    print(f"noise, offbeat twice: {noise}")
    stored = {
        "benchmark": "federated",
        "holds": all(bar["holds"] for bar in bars),
        "environment": environment(),
        "milliseconds per client": times,
        "megabytes": peaks,
        "noise": noise.plain(),
        "bars": bars,
    }
    options.out.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()

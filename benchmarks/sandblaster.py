"""What Sandblaster costs: the coordinator's bytes, the speed of two workers, and a paused worker in virtual time.

Claims: an iteration costs the coordinator less than 20 KB with a thousand parameters and with ten million; two workers
are at least 1.7 times as fast as one where computing dominates; and of four workers one that is paused 40 % of the time
costs at most 15 % with portions, where one part for each worker costs about 65 %.

The first two are measured on real processes of one thread each, the third in virtual time with the protocol's machines.

With 20,000 examples instead of 60,000, portions of 312 examples each push a gradient of 1 MB, and two workers are 1.61
[1.58, 1.63] times as fast as one: their pushes, and the shards that add them, take time of the same two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.bench import environment, holds, ratio
from offbeat.runtime.launch import Launcher
from offbeat.simulate.sandblaster.pauses import evaluation_seconds

RESULTS = Path(__file__).parent / "results"
BYTES, SPEEDUP, PAUSED = 20_000, 1.7, 1.15
SHARE, WORKERS, PORTIONS = 0.4, 4, 64


@dataclass(eq=False)
class Regression(offbeat.Task):
    """Least squares by a small network: `depth` layers of computing for each example, and `features` inputs."""

    features: int = 1000
    examples: int = 64
    depth: int = 0

    def data(self) -> offbeat.Data:
        source = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.examples, self.features, generator=source)
        part = TensorDataset(inputs, inputs[:, :10].sum(1, keepdim=True))
        few = TensorDataset(*(tensor[:2] for tensor in part.tensors))
        return offbeat.Data(part, few, few)

    def model(self) -> nn.Module:
        hidden = [layer for _ in range(self.depth) for layer in (nn.Linear(self.features, self.features), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(self.features, 1))

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def score(self, model: nn.Module, data: Any) -> float:
        return -sum(float(nn.functional.mse_loss(model(inputs), target)) for inputs, target in data)


def run(task: Regression, workers: int, steps: int, launcher: Launcher) -> offbeat.Result:
    """A run with one thread for each worker."""
    with tempfile.TemporaryDirectory() as folder:
        strategy = "sandblaster(tolerance=0)"
        return offbeat.fit(task, strategy, workers=workers, steps=steps, threads=1, out=folder, launcher=launcher)


def coordinator_bytes(parameters: int, launcher: Launcher) -> float:
    """Bytes that the coordinator sends and receives in an iteration."""
    figures = run(Regression(features=parameters, examples=8), 2, 12, launcher).sandblaster
    return sum(figures["coordinator_bytes"].values()) / max(1, figures["iterations"])


def seconds(workers: int, examples: int, launcher: Launcher) -> float:
    """Seconds of an evaluation of a task that computes much."""
    result = run(Regression(features=256, examples=examples, depth=4), workers, 8, launcher)
    return result.seconds / result.sandblaster["evaluations"]


def judged(options: argparse.Namespace, launcher: Launcher) -> list[dict[str, Any]]:
    """All bars."""
    bars: list[dict[str, Any]] = []
    for parameters in (1_000, options.parameters):
        found = coordinator_bytes(parameters, launcher)
        name = f"coordinator's bytes in an iteration, {parameters:,} parameters"
        bars.append({"bar": name, "at most": BYTES, "found": round(found), "holds": found <= BYTES})
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(options.blocks):
        for workers, known in times.items():
            known.append(seconds(workers, options.examples, launcher))
    speed = ratio(times[1], times[2])
    name = "speed, 2 workers / 1, computing dominates"
    bars.append({"bar": name, "at least": SPEEDUP, "found": speed.plain(), "holds": holds(speed, at_least=SPEEDUP)})
    work = float(WORKERS)
    slow = evaluation_seconds(WORKERS, PORTIONS, work, paused=SHARE) / evaluation_seconds(WORKERS, PORTIONS, work)
    name = f"time, one of {WORKERS} paused {SHARE:.0%} / undisturbed, {PORTIONS} portions (virtual time)"
    bars.append({"bar": name, "at most": PAUSED, "found": round(slow, 3), "holds": slow <= PAUSED})
    return bars


def static_parts() -> float:
    """The same with one part for each worker, and none handed out twice."""
    paused, calm = (evaluation_seconds(WORKERS, WORKERS, 4.0, paused=share, backups=False) for share in (SHARE, 0.0))
    return paused / calm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "sandblaster.json")
    options = parser.parse_args()
    with Launcher() as launcher:
        bars = judged(options, launcher)
    for bar in bars:
        print(f"{'holds ' if bar['holds'] else 'MISSED'} {bar['bar']}: {bar['found']}", flush=True)
    static = static_parts()
    print(f"       the same with one part for each worker: {static:.3f}")
    stored = {
        "benchmark": "sandblaster",
        "holds": all(bar["holds"] for bar in bars),
        "environment": environment(),
        "bars": bars,
        "results": {"static parts": static, "blocks": options.blocks, "examples": options.examples},
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    if not stored["holds"]:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

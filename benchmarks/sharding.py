"""Training steps with sharded gradients and parameters against torch's FSDP, interleaved, in two processes each.

Claims, with 2 workers of 1 thread on one host, on a 10-million-parameter MLP with 16 examples per worker: a step of
`allreduce(shard=parameters)` takes at most 0.4 of the time of torch's `fully_shard` on Gloo, called as its users call
it (each linear layer a group, and the whole model), with SGD and with Adam; so does `allreduce(shard=gradients)`; and
neither is slower than `fully_shard` on our backend.

Blocks, turns and the comparison of parameters are those of `benchmarks/training.py`. There are two copies of
`fully_shard` on Gloo: against each other they show the noise floor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import training
from offbeat.bench import environment, holds, ratio
from offbeat.runtime.launch import Control, Launcher

FSDP, AGAIN, STOCK, GRADIENTS, PARAMETERS = (
    "fully_shard",
    "fully_shard again",
    "fully_shard on offbeat",
    "allreduce(shard=gradients)",
    "allreduce(shard=parameters)",
)
OURS = (GRADIENTS, PARAMETERS)
BARS = {FSDP: 0.4, STOCK: 1.0}
"""What a step of ours may take of each peer's time."""
WORKS = ("mlp, batch 16, SGD", "mlp, batch 16, Adam")


@contextmanager
def team(
    name: str, work: training.Work, model: nn.Module, optimizer: Optimizer
) -> Generator[tuple[nn.Module, training.Step]]:
    """Join this variant's other process; the model to call so that a step of it is a step of this variant."""
    if name in OURS:
        with training.team(name, work, model, optimizer) as joined:
            yield joined
        return
    dist.init_process_group("offbeat" if name == STOCK else "gloo", timeout=training.TIMEOUT)
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model:  # pyright: ignore[reportGeneralTypeIssues]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # As its users do: the optimizer is made, or its groups filled, after the model is sharded.
    optimizer.param_groups[0]["params"] = list(model.parameters())
    yield model, lambda: cast("None", dist.barrier())
    dist.destroy_process_group()


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One of the two processes of a variant."""
    training.worker(config, control, team)


def judged(times: Mapping[str, Sequence[float]], apart: float) -> dict[str, Any]:
    """Medians, and ratios of ours to the peers', with their bars."""
    peers = {
        FSDP: [(a + b) / 2 for a, b in zip(times[FSDP], times[AGAIN], strict=True)],
        STOCK: list(times[STOCK]),
    }
    bars: list[dict[str, Any]] = []
    for ours in OURS:
        for peer, most in BARS.items():
            found = ratio(times[ours], peers[peer])
            bar = {"bar": f"{ours} / {peer}", "at most": most, "found": found.plain()}
            bars.append(bar | {"holds": holds(found, at_most=most)})
    return {
        "milliseconds": {name: 1e3 * float(np.median(own)) for name, own in times.items()},
        "bars": bars,
        "fully_shard again / fully_shard (noise)": ratio(times[AGAIN], times[FSDP]).plain(),
        "blocks": len(times[FSDP]),
        "largest difference of parameters, of the largest change": apart,
    }


def main() -> None:
    """Measure all, print it, and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--only", default="", help="run what has this in its name")
    parser.add_argument("--out", type=Path, default=training.RESULTS / "sharding.json")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with Launcher() as launcher:
        for name in WORKS:
            if options.only not in name:
                continue
            variants = [FSDP, PARAMETERS, STOCK, GRADIENTS, AGAIN]
            entry = f"{Path(__file__).stem}:worker"
            times, apart = training.measured(name, variants, options.blocks, launcher, entry)
            result = results[name] = judged(times, apart)
            noise = result["fully_shard again / fully_shard (noise)"]
            print(f"{name}: noise {noise['low']:.2f} to {noise['high']:.2f}; ms {result['milliseconds']}")
            for bar in result["bars"]:
                found = bar["found"]
                spread = f"{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
                print(f"  {'holds ' if bar['holds'] else 'MISSED'} {bar['bar']}: {spread}, bar {bar['at most']}")
    bars = [bar | {"bar": f"{name}, {bar['bar']}"} for name, result in results.items() for bar in result["bars"]]
    everything = all(bar["holds"] for bar in bars)
    stored = {
        "benchmark": "sharding",
        "holds": everything,
        "environment": environment(),
        "bars": bars,
        "results": results,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    if not everything:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

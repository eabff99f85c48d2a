"""Training steps of tensor(2) against DTensor's `parallelize_module` on Gloo and against one process, interleaved.

Claims, with processes of 1 thread each: on a small MLP and a small transformer, where exchanges and dispatching count,
a step of tensor(2) takes at most 0.7 of the time of `torch.distributed.tensor.parallel.parallelize_module` with the
same column and row layers on Gloo; on large ones, where there is work to divide, one process takes at least 1.8 times
as long as tensor(2). Large products take the same time under both, so there the first ratio comes near 1.

Each block times every variant for some steps, in an order that rotates; a block's time is the slowest worker's. All
others sleep meanwhile. There are two copies of DTensor's variant: against each other they show the noise floor, and
their mean is what we are compared with. Parameters are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.optim import SGD

from offbeat.bench import environment, holds, ratio
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.system.malloc import keep_freed_memory
from offbeat.runtime.tensor_parallel.apply import apply
from offbeat.runtime.tensor_parallel.plan import plan
from offbeat.runtime.tensor_parallel.splits import Manner
from offbeat.runtime.tensor_parallel.state import logical_state

RESULTS = Path(__file__).parent / "results"
TIMEOUT = timedelta(seconds=120)
WARM_UP = 2
"""Blocks that do not count."""
OURS, THEIRS, AGAIN, ALONE = "tensor(2)", "parallelize_module", "parallelize_module again", "one process"
SIZES = {OURS: 2, THEIRS: 2, AGAIN: 2, ALONE: 1}
Meet = Callable[[], object]


class Block(nn.Module):
    """A transformer block with the usual names."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, value: Tensor) -> Tensor:
        normed = self.norm1(value)
        heads = [
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        value = value + self.o_proj(seen.transpose(1, 2).flatten(-2))
        return value + self.think(self.norm2(value))


def mlp(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def transformer(width: int) -> nn.Module:
    return nn.Sequential(*(Block(width, 8) for _ in range(4)))


@dataclass(frozen=True)
class Work:
    """Something to train."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of a batch; the target has the same."""
    steps: int
    """In a block of one variant."""
    large: bool
    """Whether products take most of the time, so that one process is to be beaten; otherwise DTensor is."""


WORKS = {
    "small mlp, width 256, batch 64": Work(lambda: mlp(256), (64, 256), 12, False),
    "small transformer, width 128, batch 4 of 64": Work(lambda: transformer(128), (4, 64, 128), 8, False),
    "large mlp, width 1024, batch 256": Work(lambda: mlp(1024), (256, 1024), 1, True),
    "large transformer, width 512, batch 4 of 128": Work(lambda: transformer(512), (4, 128, 512), 1, True),
}


@contextmanager
def split(name: str, model: nn.Module) -> Generator[tuple[Meet, Callable[[], dict[str, Tensor]]]]:
    """Join this variant's other process and split the model; a barrier, and the whole parameters by name."""
    if name in (THEIRS, AGAIN):
        dist.init_process_group("gloo", timeout=TIMEOUT)
        styles: dict[str, ParallelStyle] = {
            part.name: ColwiseParallel() if part.manner is Manner.COLUMN else RowwiseParallel()
            for part in plan(model, 2).splits
            if part.manner in (Manner.COLUMN, Manner.ROW)
        }
        parallelize_module(model, init_device_mesh("cpu", (2,)), styles)
        yield dist.barrier, lambda: {key: _full(value) for key, value in model.state_dict().items()}
        dist.destroy_process_group()
        return
    keep_freed_memory()
    group = DirectGroup(where(), TIMEOUT, torch.device("cpu"))
    if name == OURS:
        apply(plan(model, 2), model, group)
    yield group.barrier, lambda: logical_state(model, group)
    group.close()


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One process of a variant: it trains when it is its variant's turn, and sleeps otherwise."""
    name, work, rank = config["variant"], WORKS[config["work"]], where().rank
    torch.manual_seed(0)
    model = work.model()
    inputs, target = torch.randn(work.shape), torch.randn(work.shape)
    turns = dist.TCPStore("127.0.0.1", config["turns"], is_master=False, timeout=timedelta(seconds=900))
    with split(name, model) as (meet, whole):
        optimizer = SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            functional.mse_loss(model(inputs), target).backward()
            optimizer.step()

        for _ in range(3):
            step()
        state = {key: value.detach().contiguous().clone() for key, value in whole().items()}
        if rank == 0:
            save_file(state, Path(config["folder"]) / f"{config['number']}.safetensors")
        control.send({"ready": name})
        for block, turn in enumerate(config["own turns"], -WARM_UP):
            turns.wait([f"turn {turn}"])
            meet()
            start = time.perf_counter()
            for _ in range(work.steps):
                step()
            elapsed = (time.perf_counter() - start) / work.steps
            meet()
            if block >= 0:
                control.send({"variant": name, "block": block, "seconds": elapsed})
            if turns.add(f"done {turn}", 1) == SIZES[name]:
                turns.set(f"turn {turn + 1}", "")


def compared(folder: Path, count: int, work: Work) -> float:
    """All variants have the same parameters after three steps; answers how far apart they are, of how far they went."""
    torch.manual_seed(0)
    before = work.model().state_dict()
    states = [load_file(folder / f"{number}.safetensors") for number in range(count)]
    moved = max(float((states[0][key] - old).abs().max()) for key, old in before.items())
    apart = max(float((own[key] - states[0][key]).abs().max()) for own in states for key in own)
    assert moved > 1e-6, "three steps have changed nothing"
    assert apart < 1e-3 * moved, f"parameters differ by {apart} after moving by {moved}"
    return apart / moved


def measured(name: str, blocks: int, launcher: Launcher) -> dict[str, Any]:
    """Block times of every variant, and how far apart their parameters were."""
    variants = list(SIZES)
    times: dict[str, dict[int, float]] = {variant: {} for variant in variants}
    ready: list[str] = []
    apart: list[float] = []
    turns, count = serve_store(), len(variants)

    with tempfile.TemporaryDirectory() as folder:

        def heard(_: Role, message: Mapping[str, Any]) -> None:
            if "ready" in message:
                ready.append(message["ready"])
                if len(ready) == sum(SIZES.values()):
                    apart.append(compared(Path(folder), count, WORKS[name]))
                    turns.set("turn 0", "")
                return
            known = times[message["variant"]]
            known[message["block"]] = max(known.get(message["block"], 0.0), message["seconds"])

        # In round r, the variant that comes at place k is number (r + k) of all, so that the order rotates.
        rounds = range(blocks + WARM_UP)
        stores = [serve_store() for _ in variants]
        roles = [
            Role(
                "worker", 2 * number + rank, f"{Path(__file__).stem}:worker",
                {
                    "work": name, "variant": variant, "number": number, "folder": folder, "turns": turns.port,
                    "own turns": [r * count + (number - r) % count for r in rounds],
                },
                worker_environment(rank, SIZES[variant], stores[number].port), Path(folder) / f"{number}-{rank}.log",
                threads=1,
            )
            for number, variant in enumerate(variants)
            for rank in range(SIZES[variant])
        ]  # fmt: skip
        launcher.run(roles, on_message=heard)
    by_block = {variant: [known[block] for block in range(blocks)] for variant, known in times.items()}
    return judged(by_block, max(apart), WORKS[name].large)


def judged(times: Mapping[str, Sequence[float]], apart: float, large: bool) -> dict[str, Any]:
    """Medians, ratios, and which bars hold."""
    theirs = [(a + b) / 2 for a, b in zip(times[THEIRS], times[AGAIN], strict=True)]
    against, faster = ratio(times[OURS], theirs), ratio(times[ALONE], times[OURS])
    bar = {f"{OURS} / {THEIRS}": {**against.plain(), "at most": 0.7, "holds": holds(against, at_most=0.7)}}
    if large:
        bar = {f"{ALONE} / {OURS}": {**faster.plain(), "at least": 1.8, "holds": holds(faster, at_least=1.8)}}
    return {
        "milliseconds": {name: 1e3 * float(np.median(own)) for name, own in times.items()},
        "bars": bar,
        f"{OURS} / {THEIRS}": against.plain(),
        f"{ALONE} / {OURS}": faster.plain(),
        "noise": ratio(times[AGAIN], times[THEIRS]).plain(),
        "blocks": len(theirs),
        "largest difference of parameters, of the largest change": apart,
    }


def in_words(name: str, entry: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{variant} {value:.1f} ms" for variant, value in entry["milliseconds"].items())
    lines = [f"{name}: {shown}; noise {entry['noise']['low']:.2f} to {entry['noise']['high']:.2f}"]
    for bar, found in entry["bars"].items():
        spread = f"{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
        lines.append(f"  {'holds ' if found['holds'] else 'MISSED'} {bar:32} {spread}")
    return "\n".join(lines)


def bars_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every bar in the form that all our results have."""
    return [
        {
            "bar": f"{work}, {name}",
            **{key: bar[key] for key in ("at most", "at least") if key in bar},
            "found": {key: bar[key] for key in ("median", "low", "high")},
            "holds": bar["holds"],
        }
        for work, entry in results.items()
        for name, bar in cast("dict[str, Any]", entry["bars"]).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--only", default="", help="run what has this in its name")
    parser.add_argument("--out", type=Path, default=RESULTS / "tensor.json")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with Launcher() as launcher:
        for name in WORKS:
            if options.only in name:
                results[name] = measured(name, options.blocks, launcher)
                print(in_words(name, results[name]), flush=True)
    everything = all(bar["holds"] for bar in bars_of(results))
    stored = {
        "benchmark": "tensor",
        "holds": everything,
        "environment": environment(),
        "bars": bars_of(results),
        "results": results,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    if not everything:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

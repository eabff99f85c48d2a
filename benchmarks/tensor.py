"""Training steps of tensor(2) against DTensor's `parallelize_module` on Gloo and against one process, interleaved.

Claims, with processes of 1 thread each: on a small MLP and a small transformer, where exchanges and dispatching count,
a step of tensor(2) takes at most 0.7 of the time of `torch.distributed.tensor.parallel.parallelize_module` with the
same column and row layers on Gloo; on large ones, where there is work to divide, one process takes at least 1.8 times
as long as tensor(2). Large products take the same time under both, so there the first ratio comes near 1. Beside them
run two halves that never exchange anything, which show how much the machine lets two processes gain at most.

Variants take turns, in blocks of some steps; a block's time is the slowest worker's. There are two copies of DTensor's
variant: against each other they show the noise floor, and their mean is what we are compared with. Parameters are
compared, in float64, before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
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

from _blocks import Block
from _turns import measured, slowest, take_turns
from offbeat.bench import environment, holds, ratio
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control, Launcher
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.system.malloc import keep_freed_memory
from offbeat.runtime.tensor_parallel.apply import apply
from offbeat.runtime.tensor_parallel.plan import plan
from offbeat.runtime.tensor_parallel.splits import Manner
from offbeat.runtime.tensor_parallel.state import logical_state
from offbeat.runtime.tensor_parallel.ways import TensorWays

RESULTS = Path(__file__).parent / "results"
TIMEOUT = timedelta(seconds=120)
OURS, THEIRS, AGAIN, ALONE = "tensor(2)", "parallelize_module", "parallelize_module again", "one process"
SIZES = {OURS: 2, THEIRS: 2, AGAIN: 2, ALONE: 1}
APART = "halves apart"
"""Two processes that compute as tensor(2) does but never meet: what could be gained at most. Its results are wrong."""
Meet = Callable[[], object]


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
    if name == APART:
        TensorWays.sum = _unsummed
    if name in (OURS, APART):
        apply(plan(model, 2), model, group)
    yield group.barrier, lambda: logical_state(model, group)
    group.close()


def _unsummed(self: TensorWays, tensor: Tensor, what: str) -> Tensor:
    del self, what
    return tensor


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One process of a variant."""
    name, work = config["variant"], WORKS[config["work"]]
    torch.manual_seed(0)
    model = work.model().double()  # In which a rounding error does not change what a ReLU does.
    batch = [torch.randn(work.shape) for _ in range(2)]
    with split(name, model) as (meet, whole):
        optimizer = SGD(model.parameters(), lr=0.1)

        def step(inputs: Tensor, target: Tensor) -> None:
            optimizer.zero_grad()
            functional.mse_loss(model(inputs), target).backward()
            optimizer.step()

        for _ in range(3):
            step(*(each.double() for each in batch))
        state = {key: value.detach().contiguous().clone() for key, value in whole().items()}
        if where().rank == 0:
            save_file(state, Path(config["folder"]) / f"{config['number']}.safetensors")
        model.float()
        take_turns(config, control, meet, lambda: step(*batch))


def compared(folder: Path, count: int, work: Work) -> float:
    """All variants have the same parameters after three steps; answers how far apart they are, of how far they went."""
    torch.manual_seed(0)
    before = work.model().double().state_dict()
    states = [load_file(folder / f"{number}.safetensors") for number in range(count)]
    moved = max(float((states[0][key] - old).abs().max()) for key, old in before.items())
    apart = max(float((own[key] - states[0][key]).abs().max()) for own in states for key in own)
    assert moved > 1e-6, "three steps have changed nothing"
    assert apart < 1e-9 * moved, f"parameters differ by {apart} after moving by {moved}"
    return apart / moved


def results_of(name: str, blocks: int, launcher: Launcher) -> dict[str, Any]:
    """Block times of every variant, and how far apart their parameters were."""
    work, apart = WORKS[name], list[float]()

    def verify(folder: Path) -> None:
        apart.append(compared(folder, len(SIZES), work))

    config, variants = {"work": name, "steps": work.steps}, SIZES | ({APART: 2} if work.large else {})
    found = measured(launcher, f"{Path(__file__).stem}:worker", variants, config, blocks, verify)
    return judged({variant: slowest(own) for variant, own in found.items()}, max(apart), work.large)


def judged(times: Mapping[str, Sequence[float]], apart: float, large: bool) -> dict[str, Any]:
    """Medians, ratios, and which bars hold."""
    theirs = [(a + b) / 2 for a, b in zip(times[THEIRS], times[AGAIN], strict=True)]
    against, faster = ratio(times[OURS], theirs), ratio(times[ALONE], times[OURS])
    bar = {f"{OURS} / {THEIRS}": {**against.plain(), "at most": 0.7, "holds": holds(against, at_most=0.7)}}
    if large:
        bar = {f"{ALONE} / {OURS}": {**faster.plain(), "at least": 1.8, "holds": holds(faster, at_least=1.8)}}
    most = {f"{ALONE} / {APART}": ratio(times[ALONE], times[APART]).plain()} if large else {}
    return {
        "milliseconds": {name: 1e3 * float(np.median(own)) for name, own in times.items()},
        "bars": bar,
        f"{OURS} / {THEIRS}": against.plain(),
        f"{ALONE} / {OURS}": faster.plain(),
        **most,
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
                results[name] = results_of(name, options.blocks, launcher)
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

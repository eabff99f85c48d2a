"""Training steps of ours against stock DistributedDataParallel, interleaved, each in two processes of its own.

Claims, with 2 workers of 1 thread, against `ddp` (torch's DistributedDataParallel on Gloo with
gradient_as_bucket_view, called as its users call it): a step of a 10-million-parameter MLP takes `allreduce` at most
0.55 of its time at batch 16 and 0.68 at batch 64, and `allreduce(shard=optimizer)` at most 0.42 and 0.58, with SGD and
with Adam; on the digits CNN and the text transformer neither is slower; and stock DistributedDataParallel is faster on
our backend than on Gloo on all of them.

Each block times every variant for some steps, in an order that rotates; a block's time is the slowest worker's. All
others sleep meanwhile. There are two copies of DDP: against each other they show the noise floor, and their mean is
what we are compared with. Parameters are compared before anything is timed.

DDP runs as its users run it, in plain processes. Ours keep freed memory (`runtime.system.malloc`), which spares them
thousands of page faults a step; `ddp, memory kept` shows what DDP would gain by the same and is not a bar.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

from offbeat.bench import environment, holds, ratio
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.stopwatch import Stopwatch
from offbeat.runtime.system.malloc import keep_freed_memory
from offbeat.strategies import Exchanging, parse
from offbeat.strategies.worker.capabilities import OptimizerHooks, StepGuard
from offbeat.strategies.worker.exchange import adopt
from offbeat.tasks.digits import Digits
from offbeat.tasks.text import Text

RESULTS = Path(__file__).parent / "results"
TIMEOUT = timedelta(seconds=120)
WARM_UP = 2
"""Blocks that do not count."""
DDP, AGAIN, KEPT, STOCK, OURS, SHARDED = (
    "ddp",
    "ddp again",
    "ddp, memory kept",
    "stock ddp on offbeat",
    "allreduce",
    "allreduce(shard=optimizer)",
)
Step = Callable[[], None]


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((784, 2048), (2048, 2048), (2048, 2048)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def sgd(parameters: Iterable[Parameter]) -> Optimizer:
    return SGD(parameters, lr=1e-3)


def adam(parameters: Iterable[Parameter]) -> Optimizer:
    return Adam(parameters, lr=1e-4)


def images(batch: int, shape: tuple[int, ...], random: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, *shape, generator=random), torch.randint(0, 10, (batch,), generator=random)


def characters(batch: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 96, (batch, 65), generator=random)
    return drawn[:, :-1], drawn[:, 1:]


@dataclass(frozen=True)
class Work:
    """Something to train, and how much of ddp's time each variant may take."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[Parameter]], Optimizer]
    batch: int
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    steps: int
    """In a block of one variant."""
    bars: Mapping[str, float]


def mlp_work(batch: int, optimizer: Callable[[Iterable[Parameter]], Optimizer], ours: float, sharded: float) -> Work:
    bars = {OURS: ours, SHARDED: sharded, STOCK: 1.0}
    return Work(mlp, optimizer, batch, lambda n, r: images(n, (784,), r), cross_entropy, 4, bars)


NEVER_SLOWER = {OURS: 1.0, SHARDED: 1.0, STOCK: 1.0}
WORKS: dict[str, Work] = {
    "mlp, batch 16, SGD": mlp_work(16, sgd, 0.55, 0.42),
    "mlp, batch 64, SGD": mlp_work(64, sgd, 0.68, 0.58),
    "mlp, batch 16, Adam": mlp_work(16, adam, 0.55, 0.42),
    "mlp, batch 64, Adam": mlp_work(64, adam, 0.68, 0.58),
    "digits CNN, batch 64, SGD": Work(
        Digits().model, sgd, 64, lambda n, r: images(n, (1, 8, 8), r), cross_entropy, 60, NEVER_SLOWER
    ),
    "text transformer, batch 16, AdamW": Work(
        Text().model, Text().optimizer, 16, characters, Text().criterion, 12, NEVER_SLOWER
    ),
}


@contextmanager
def team(name: str, work: Work, model: nn.Module, optimizer: Optimizer) -> Generator[tuple[nn.Module, Step]]:
    """Join this variant's other process; the model to call so that a step of it is a step of this variant."""
    place = where()
    if name in (DDP, AGAIN, STOCK, KEPT):
        if name == KEPT:
            keep_freed_memory()
        dist.init_process_group("offbeat" if name == STOCK else "gloo", timeout=TIMEOUT)
        yield DistributedDataParallel(model, gradient_as_bucket_view=True), lambda: cast("None", dist.barrier())
        dist.destroy_process_group()
        return
    group = DirectGroup(place, TIMEOUT, torch.device("cpu"))
    exchange = cast("Exchanging", parse(name)).connect(group, Stopwatch())
    adopt(exchange, model)
    if isinstance(exchange, OptimizerHooks):
        exchange.attend(optimizer)
    exchange.weigh(work.batch, work.batch * group.size)

    def before(stepping: Optimizer, _args: Any, _kwargs: Any) -> None:
        if isinstance(exchange, StepGuard):
            exchange.stepping(stepping)

    optimizer.register_step_pre_hook(before)
    yield model, group.barrier
    exchange.close()
    group.close()


Join = Callable[[str, Work, nn.Module, Optimizer], AbstractContextManager[tuple[nn.Module, Step]]]


def worker(config: Mapping[str, Any], control: Control, join: Join = team) -> None:
    """One of the two processes of a variant: it trains when it is its variant's turn, and sleeps otherwise."""
    name, work, rank = config["variant"], WORKS[config["work"]], where().rank
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    inputs, target = work.draw(work.batch, torch.Generator().manual_seed(rank))
    turns = dist.TCPStore("127.0.0.1", config["turns"], is_master=False, timeout=timedelta(seconds=900))
    with join(name, work, model, optimizer) as (called, meet):

        def step() -> None:
            optimizer.zero_grad()
            work.loss(called(inputs), target).backward()
            optimizer.step()

        for _ in range(3):
            step()
        # A sharded parameter of torch's is gathered, which takes all workers.
        values = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        if rank == 0:
            trained = {str(i): p.detach().clone() for i, p in enumerate(values)}
            save_file(trained, Path(config["folder"]) / f"{config['number']}.safetensors")
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
            if turns.add(f"done {turn}", 1) == 2:
                turns.set(f"turn {turn + 1}", "")


def compared(folder: Path, count: int, work: Work) -> float:
    """All variants have the same parameters after three steps; answers how far apart they are, of how far they went."""
    torch.manual_seed(0)
    before = [p.detach() for p in work.model().parameters()]
    found = [load_file(folder / f"{number}.safetensors") for number in range(count)]
    moved = max(float((found[0][str(i)] - old).abs().max()) for i, old in enumerate(before))
    apart = max(float((own[key] - found[0][key]).abs().max()) for own in found for key in own)
    assert moved > 1e-6, "three steps have changed nothing"
    assert apart < 1e-3 * moved, f"parameters differ by {apart} after moving by {moved}"
    return apart / moved


def measured(
    name: str, variants: Sequence[str], blocks: int, launcher: Launcher, entry: str = f"{Path(__file__).stem}:worker"
) -> tuple[dict[str, list[float]], float]:
    """Block times of every variant, and how far apart their parameters were."""
    times: dict[str, dict[int, float]] = {variant: {} for variant in variants}
    ready: list[str] = []
    turns, count = serve_store(), len(variants)
    apart: list[float] = []

    with tempfile.TemporaryDirectory() as folder:

        def heard(_: Role, message: Mapping[str, Any]) -> None:
            if "ready" in message:
                ready.append(message["ready"])
                if len(ready) == 2 * count:
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
                "worker", 2 * number + rank, entry,
                {
                    "work": name, "variant": variant, "number": number, "folder": folder, "turns": turns.port,
                    "own turns": [r * count + (number - r) % count for r in rounds],
                },
                worker_environment(rank, 2, stores[number].port), Path(folder) / f"{number}-{rank}.log", threads=1,
            )
            for number, variant in enumerate(variants)
            for rank in range(2)
        ]  # fmt: skip
        launcher.run(roles, on_message=heard)
    return {variant: [known[block] for block in range(blocks)] for variant, known in times.items()}, max(apart)


def judged(work: Work, times: Mapping[str, Sequence[float]], apart: float) -> dict[str, Any]:
    """Medians, ratios to the mean of both copies of ddp, and which bars hold."""
    both = [(a + b) / 2 for a, b in zip(times[DDP], times[AGAIN], strict=True)]
    ratios = {name: ratio(own, both) for name, own in times.items() if name in work.bars}
    kept = {KEPT: ratio(times[KEPT], both).plain()} if KEPT in times else {}
    return {
        "milliseconds": {name: 1e3 * float(np.median(own)) for name, own in times.items()},
        "over ddp": {
            name: {**found.plain(), "bar": work.bars[name], "holds": holds(found, at_most=work.bars[name])}
            for name, found in ratios.items()
        },
        **{f"{name} / ddp": found for name, found in kept.items()},
        "ddp again / ddp (noise)": ratio(times[AGAIN], times[DDP]).plain(),
        "blocks": len(both),
        "largest difference of parameters, of the largest change": apart,
    }


def in_words(name: str, found: Mapping[str, Any]) -> str:
    noise = found["ddp again / ddp (noise)"]
    lines = [f"{name}: ddp {found['milliseconds'][DDP]:.2f} ms, noise {noise['low']:.2f} to {noise['high']:.2f}"]
    for variant, entry in found["over ddp"].items():
        verdict = "holds " if entry["holds"] else "MISSED"
        spread = f"{entry['median']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"
        lines.append(f"  {verdict} {variant:28} {found['milliseconds'][variant]:7.2f} ms  {spread}  bar {entry['bar']}")
    return "\n".join(lines)


def bars_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every bar in the form that all our results have."""
    return [
        {
            "bar": f"{work}, {variant} / ddp",
            "at most": entry["bar"],
            "found": {key: entry[key] for key in ("median", "low", "high")},
            "holds": entry["holds"],
        }
        for work, found in results.items()
        for variant, entry in found["over ddp"].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--only", default="", help="run what has this in its name")
    parser.add_argument("--variants", nargs="*", default=[OURS, SHARDED, STOCK, KEPT], help="beside both copies of ddp")
    parser.add_argument("--out", type=Path, default=RESULTS / "training.json")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with Launcher() as launcher:
        for name in WORKS:
            if options.only in name:
                times, apart = measured(name, [DDP, *options.variants, AGAIN], options.blocks, launcher)
                results[name] = judged(WORKS[name], times, apart)
                print(in_words(name, results[name]), flush=True)
    everything = all(entry["holds"] for found in results.values() for entry in found["over ddp"].values())
    stored = {
        "benchmark": "training",
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

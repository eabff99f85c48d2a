"""A training step of ours against stock DistributedDataParallel, interleaved in the same two processes.

Claim: with 2 workers of 1 thread, `allreduce` takes at most 1.03x the time of `ddp` (torch's DistributedDataParallel on
Gloo with gradient_as_bucket_view, called as its users call it) for a step of a 10-million-parameter MLP (batch 64 per
worker) and of the digits CNN (batch 64 per worker).

Each block times every variant for some steps, in an order that rotates; a block's time is the slowest worker's. There
are two copies of DDP: against each other they show the noise floor (where a model happens to lie in memory is worth a
few percent), and their mean is what we are compared with. Gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from offbeat.runtime.group import Group
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment
from offbeat.runtime.place import where
from offbeat.runtime.stopwatch import Stopwatch
from offbeat.strategies import AllReduce
from offbeat.tasks.digits import Digits

RESULTS = Path(__file__).parent / "results"
BAR = 1.03
BATCH = 64
Step = Callable[[], None]


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((784, 2048), (2048, 2048), (2048, 2048)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def cnn() -> nn.Module:
    return Digits().model()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {"mlp": (mlp, (784,)), "digits": (cnn, (1, 8, 8))}


def ours(model: nn.Module, group: Group) -> nn.Module:
    exchange = AllReduce().connect(group, Stopwatch())
    exchange.adopt(model)
    exchange.weigh(BATCH, BATCH * group.size)
    return model


def stock(model: nn.Module, group: Group) -> nn.Module:
    return DistributedDataParallel(model, process_group=group.process_group, gradient_as_bucket_view=True)


VARIANTS: dict[str, Callable[[nn.Module, Group], nn.Module]] = {"ddp": stock, "offbeat": ours, "ddp again": stock}


def variant(name: str, kind: str, group: Group) -> tuple[nn.Module, Step]:
    """A model of its own under this variant, and one training step of it."""
    torch.manual_seed(0)
    make, shape = MODELS[kind]
    model = make()
    wrapped = VARIANTS[name](model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(group.rank)
    inputs, labels = torch.randn(BATCH, *shape, generator=random), torch.randint(0, 10, (BATCH,), generator=random)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(wrapped(inputs), labels).backward()
        optimizer.step()

    return model, step


def verify(models: Mapping[str, nn.Module], steps: Mapping[str, Step]) -> float:
    """All variants have the same gradients after three steps; answers how far apart they are."""
    for _ in range(3):
        for step in steps.values():
            step()
    gradients = {name: [p.grad for p in model.parameters()] for name, model in models.items()}
    furthest = 0.0
    for name, own in gradients.items():
        for mine, theirs in zip(own, gradients["ddp"], strict=True):
            assert isinstance(mine, Tensor), f"{name} left a parameter without gradient"
            assert isinstance(theirs, Tensor)
            furthest = max(furthest, float((mine - theirs).abs().max()))
    assert furthest < 1e-5, f"gradients differ by {furthest}"
    return furthest


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One of the two processes."""
    group = Group(where(), timedelta(seconds=120), torch.device("cpu"))
    for kind in MODELS:
        made = {name: variant(name, kind, group) for name in VARIANTS}
        steps = {name: step for name, (_, step) in made.items()}
        apart = verify({name: model for name, (model, _) in made.items()}, steps)
        repeats = config["repeats"][kind]
        for block in range(-2, config["blocks"]):
            names = list(steps)
            for name in names[block % 3 :] + names[: block % 3]:
                group.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    steps[name]()
                elapsed = (time.perf_counter() - start) / repeats
                slowest = float(group.gather([elapsed], "a block").max())
                if group.rank == 0 and block >= 0:
                    control.send({"model": kind, "variant": name, "seconds": slowest, "apart": apart})
    group.close()


def ratio(ours: list[float], theirs: list[float], seed: int = 0) -> dict[str, float]:
    """The ratio of medians over blocks, with a 95 % bootstrap interval over paired blocks."""
    a, b = np.array(ours), np.array(theirs)
    picks = np.random.default_rng(seed).integers(0, len(a), (4000, len(a)))
    resampled = np.median(a[picks], axis=1) / np.median(b[picks], axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return {"median": float(np.median(a) / np.median(b)), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "step.json")
    options = parser.parse_args()
    times: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in VARIANTS} for kind in MODELS}
    apart: dict[str, float] = {}

    def heard(_: Role, message: Mapping[str, Any]) -> None:
        times[message["model"]][message["variant"]].append(message["seconds"])
        apart[message["model"]] = message["apart"]

    config = {"blocks": options.blocks, "repeats": {"mlp": 4, "digits": 100}}
    log = options.out.parent
    log.mkdir(exist_ok=True)
    with Launcher() as launcher:
        store = serve_store()
        roles = [
            Role("worker", rank, f"{Path(__file__).stem}:worker", config, worker_environment(rank, 2, store.port),
                 Path("/dev/null"), threads=1)
            for rank in range(2)
        ]  # fmt: skip
        launcher.run(roles, on_message=heard)
    report(times, apart, options.out)


def in_words(kind: str, found: Mapping[str, Any]) -> str:
    def spread(entry: Mapping[str, float]) -> str:
        return f"{entry['median']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"

    took = "   ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in found["milliseconds"].items())
    verdict = "holds" if found["holds"] else "MISSED"
    ratios = f"ratio {spread(found['offbeat / ddp'])}   noise {spread(found['ddp again / ddp (noise)'])}"
    return f"{kind:8} {took}   {ratios}   bar {BAR}: {verdict}"


def report(times: dict[str, dict[str, list[float]]], apart: dict[str, float], out: Path) -> None:
    results: dict[str, Any] = {}
    for kind, by_variant in times.items():
        both = [(a + b) / 2 for a, b in zip(by_variant["ddp"], by_variant["ddp again"], strict=True)]
        found = ratio(by_variant["offbeat"], both)
        results[kind] = {
            "milliseconds": {name: 1e3 * float(np.median(t)) for name, t in by_variant.items()},
            "offbeat / ddp": found,
            "ddp again / ddp (noise)": ratio(by_variant["ddp again"], by_variant["ddp"]),
            "bar": BAR,
            "holds": bool(found["low"] <= BAR and found["median"] <= BAR * 1.05),
            "blocks": len(by_variant["ddp"]),
            "largest difference of gradients": apart[kind],
        }
        print(in_words(kind, results[kind]))
    machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    out.write_text(json.dumps({"benchmark": "step", "environment": machine, "results": results}, indent=2) + "\n")
    if not all(entry["holds"] for entry in results.values()):
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

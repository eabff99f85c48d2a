"""Hogwild! with 2 processes on sparse logistic regression, against two processes that know nothing of each other.

Claims, with 2 workers of 1 thread: `hogwild` does at least 0.85 of the updates per second that two independent
processes do, and its loss on the training data after some epochs is that of one process that goes through the same
examples in whole batches, to 2 %.

The speed is judged twice. First all run the same loop on the same batches, tensors that are indexed in a random order,
which is the fastest input there is; under `hogwild` the model and the optimizer are prepared by a team: this compares
the sharing of parameters alone. Then `hogwild` has a prepared loader, whose cost the independent processes do not have:
this compares what users get with the plainest loop there is. Each block is an epoch of every variant, in an order that
rotates; a block's time is the slowest worker's. Two copies of the independent processes show the noise floor, and their
mean is what we are compared with. Losses (with the prepared loader) are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.bench import environment, holds, ratio
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment
from offbeat.tasks.sparse import Sparse
from offbeat.team.team import Team

RESULTS = Path(__file__).parent / "results"
ALONE, AGAIN, OURS, LOADED = "independent", "independent again", "hogwild", "hogwild, prepared loader"
WORKERS = 2
UPDATES, LOSS = 0.85, 0.02
Epoch = Callable[[], None]


def task() -> Sparse:
    return Sparse(examples=50_000, features=100_000)


def steps(work: Sparse, model: nn.Module, optimizer: Optimizer, batches: Iterable[Any]) -> None:
    """The loop that all variants run."""
    for batch in batches:
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        optimizer.step()


def in_any_order(
    inputs: Tensor, labels: Tensor, batch: int, random: torch.Generator
) -> Iterable[tuple[Tensor, Tensor]]:
    return ((inputs[rows], labels[rows]) for rows in torch.randperm(len(labels), generator=random).split(batch))


def loaded(work: Sparse, team: Team) -> tuple[nn.Module, Epoch]:
    """A model that all workers train, and an epoch of it from a prepared loader."""
    model = work.model()
    made = model, work.optimizer(model.parameters()), DataLoader(work.data().train, work.global_batch, shuffle=True)
    model, optimizer, batches = team.prepare(*made)
    return model, lambda: steps(work, model, optimizer, batches)


def by_hand(work: Sparse, share: slice, batch: int, seed: int, team: Team | None = None) -> tuple[nn.Module, Epoch]:
    """A model of this process, or of all workers of a team, and an epoch of it over some of the examples."""
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    if team is not None:
        team.prepare(model, optimizer)
    inputs, labels = (tensor[share] for tensor in trained_on(work))
    random = torch.Generator().manual_seed(seed)
    return model, lambda: steps(work, model, optimizer, in_any_order(inputs, labels, batch, random))


def trained_on(work: Sparse) -> tuple[Tensor, ...]:
    part = work.data().train
    assert isinstance(part, TensorDataset)
    return part.tensors


def loss_after(epochs: int, work: Sparse, model: nn.Module, epoch: Epoch) -> float:
    for _ in range(epochs):
        epoch()
    with torch.no_grad():
        return -work.score(model, [trained_on(work)])


def compare_losses(work: Sparse, team: Team, config: Mapping[str, Any], control: Control) -> None:
    """Both ways from scratch, some times; worker 0 tells what each came to."""
    for repeat in range(config["repeats"]):
        model, epoch = loaded(work, team)
        for _ in range(config["epochs"]):
            epoch()
        with team.averaged(model):
            ours = loss_after(0, work, model, epoch)
        if team.rank == 0:
            theirs = loss_after(config["epochs"], work, *by_hand(work, slice(None), work.global_batch, repeat))
            control.send({"losses": [ours, theirs]})
        team.group.barrier()


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One of the two processes."""
    work = task()
    with offbeat.init("hogwild", seed=0) as team:
        compare_losses(work, team, config, control)
        share, batch = slice(team.rank, None, WORKERS), work.global_batch // WORKERS
        epochs = {
            ALONE: by_hand(work, share, batch, 1)[1],
            OURS: by_hand(work, share, batch, 2, team)[1],
            AGAIN: by_hand(work, share, batch, 3)[1],
            LOADED: loaded(work, team)[1],
        }
        names = list(epochs)
        for block in range(-2, config["blocks"]):
            turn = block % len(names)
            for name in names[turn:] + names[:turn]:
                seconds = timed(epochs[name], team)
                if team.rank == 0 and block >= 0:
                    control.send({"variant": name, "seconds": seconds})


def timed(epoch: Epoch, team: Team) -> float:
    """Seconds of the slowest worker."""
    team.group.barrier()
    start = time.perf_counter()
    epoch()
    elapsed = time.perf_counter() - start
    return float(team.group.gather([elapsed], "a block").max())


def measured(config: Mapping[str, Any]) -> tuple[dict[str, list[float]], list[list[float]]]:
    """Seconds of every block by variant, and pairs of losses."""
    times: dict[str, list[float]] = {name: [] for name in (ALONE, OURS, AGAIN, LOADED)}
    losses: list[list[float]] = []

    def heard(_: Role, message: Mapping[str, Any]) -> None:
        if "losses" in message:
            losses.append(message["losses"])
        elif "variant" in message:
            times[message["variant"]].append(message["seconds"])

    store = serve_store()
    with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
        roles = [
            Role("worker", rank, f"{Path(__file__).stem}:worker", config, worker_environment(rank, WORKERS, store.port),
                 Path(folder) / f"{rank}.log", threads=1)
            for rank in range(WORKERS)
        ]  # fmt: skip
        launcher.run(roles, on_message=heard)
    return times, losses


def independent(times: Mapping[str, list[float]]) -> list[float]:
    """The mean of both copies, block by block."""
    return [(a + b) / 2 for a, b in zip(times[ALONE], times[AGAIN], strict=True)]


def judged(times: Mapping[str, list[float]], losses: list[list[float]]) -> list[dict[str, Any]]:
    """All bars."""
    speeds = {name: ratio(independent(times), times[name]) for name in (OURS, LOADED)}
    ours, theirs = zip(*losses, strict=True)
    loss = ratio(ours, theirs)
    low, high = 1 - LOSS, 1 + LOSS
    return [
        *(
            {
                "bar": f"updates per second, {name} / independent processes",
                "at least": UPDATES,
                "found": speed.plain(),
                "holds": holds(speed, at_least=UPDATES),
            }
            for name, speed in speeds.items()
        ),
        {
            "bar": "final loss, hogwild / one process",
            "at least": low,
            "at most": high,
            "found": loss.plain(),
            "holds": low <= loss.median <= high,
        },
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=5, help="trainings whose losses are compared")
    parser.add_argument("--epochs", type=int, default=5, help="of each of them")
    parser.add_argument("--out", type=Path, default=RESULTS / "hogwild.json")
    options = parser.parse_args()
    config = {"blocks": options.blocks, "repeats": options.repeats, "epochs": options.epochs}
    times, losses = measured(config)
    bars = judged(times, losses)
    for bar in bars:
        found = bar["found"]
        spread = f"{found['median']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"
        print(f"{'holds ' if bar['holds'] else 'MISSED'} {bar['bar']}: {spread}", flush=True)
    updates = WORKERS * (len(trained_on(task())[0]) // task().global_batch)
    stored = {
        "benchmark": "hogwild",
        "holds": all(bar["holds"] for bar in bars),
        "environment": environment(),
        "bars": bars,
        "results": {
            "updates per second": {name: updates / float(np.median(own)) for name, own in times.items()},
            "independent again / independent (noise)": ratio(times[AGAIN], times[ALONE]).plain(),
            "blocks": len(times[OURS]),
            "losses, hogwild and one process": losses,
        },
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    if not stored["holds"]:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

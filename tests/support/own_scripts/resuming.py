"""A loop with everything that has a state, killed where a test says so: `python resuming.py OUT KILLS DATA STYLE`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from parts import CLASSES, INPUTS, examples, leave
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

import offbeat

EPOCHS, BATCHES = 3, 5


class Noisy(Dataset[Any]):
    """Examples with noise that is drawn anew each time."""

    def __init__(self) -> None:
        self.inner = examples(40)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.inner[index]
        return x + 0.1 * torch.randn(INPUTS), y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(examples(40))


def loader_of(kind: str) -> Iterable[Any]:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=8)
    return DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2 if kind == "loading" else 0)


def die_if_told(out: str, kills: str, rank: int, here: tuple[int, int]) -> None:
    """Each `epoch.batch.rank` in KILLS strikes once, in order; a file remembers which have."""
    struck = Path(f"{out}-struck")
    done = len(struck.read_text()) if struck.exists() else 0
    told = [tuple(map(int, word.split("."))) for word in kills.split(",") if word]
    if done < len(told) and told[done] == (*here, rank):
        with struck.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    out, kills, data, style = sys.argv[1:]
    torch.manual_seed(0)
    team = offbeat.init()
    model = nn.Sequential(nn.Linear(INPUTS, 10), nn.BatchNorm1d(10), nn.Dropout(0.3), nn.Linear(10, CLASSES))
    first, second = Adam(model[:2].parameters(), lr=0.02), SGD(model[3].parameters(), lr=0.1, momentum=0.9)
    schedules = [StepLR(first, 2, 0.5), ExponentialLR(second, 0.97), ExponentialLR(first, 0.99)]
    model, first, second, train = team.prepare(model, first, second, loader_of(data))
    for epoch in range(EPOCHS) if style == "range" else team.epochs(EPOCHS):
        model.train()
        for x, y in train:
            first.zero_grad()
            second.zero_grad()
            cross_entropy(model(x), y).backward()
            first.step()
            second.step()
            schedules[1].step()
            die_if_told(out, kills, team.rank, (epoch, train.batches))
        schedules[0].step()
        schedules[2].step()
        with team.averaged(model), torch.no_grad():
            model.eval()
            x, y = examples(40).tensors
            loss = float(cross_entropy(model(x), y))
        team.report(loss=loss + 0.0 * float(torch.rand(())))
    facts = {
        "rates": [s.get_last_lr() for s in schedules],
        "chance": float(torch.rand(())),
        "momentum": [float(v["momentum_buffer"].sum()) for v in second.state.values()],
        "loss": loss,
        "steps": team.step,
    }
    leave(out, team.rank, {"model": model}, facts)


if __name__ == "__main__":
    main()

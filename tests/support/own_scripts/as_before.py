"""Scripts with and without their lines of offbeat: `python as_before.py OUT plain|team CASE...`.

Without them a case trains as its author wrote it; with them, alone or on one worker, it must end with the same bits.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import CLASSES, INPUTS, examples, leave, network
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

import offbeat

COUNT, BATCH, EPOCHS = 43, 8, 2
Prepare = Callable[..., Any]


class Augmented(Dataset[Any]):
    """Examples with noise from all three global generators."""

    def __init__(self) -> None:
        self.inner = examples(COUNT)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.inner[index]
        return x + 0.1 * torch.randn(INPUTS) + 0.1 * float(np.random.rand()) + 0.1 * random.random(), y


class Items(Augmented):
    """The examples themselves; no TensorDataset."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inner[index]


class Stream(IterableDataset[Any]):
    """A stream with a shuffle buffer, shared by loading processes as torch's manual says."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        held: list[Any] = []
        for number, example in enumerate(examples(COUNT)):
            if info is not None and number % info.num_workers != info.id:
                continue
            held.append(example)
            if len(held) == 10:
                yield held.pop(random.randrange(10))
        random.shuffle(held)
        yield from held


class Lengths:
    """A batch sampler that decides batch by batch."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(COUNT))
        while left:
            some = random.sample(left, min(len(left), int(torch.randint(3, 9, ()))))
            left = [index for index in left if index not in some]
            yield some


class Windows:
    """Finished batches, drawn anew each time, as small language models do."""

    def __init__(self) -> None:
        self.inputs, self.labels = examples(COUNT).tensors

    def __iter__(self) -> Iterator[Any]:
        for _ in range(5):
            chosen = torch.randint(COUNT, (BATCH,))
            yield self.inputs[chosen], self.labels[chosen]


def seed_process(number: int) -> None:
    """As torch's page on reproducibility has it."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed + number)


def given(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weighted() -> DataLoader[Any]:
    return DataLoader(Items(), BATCH, sampler=WeightedRandomSampler(torch.arange(1.0, COUNT + 1), COUNT))


def split() -> DataLoader[Any]:
    return DataLoader(random_split(Items(), [COUNT - 10, 10])[0], BATCH, shuffle=True)


def replaced() -> DataLoader[Any]:
    return DataLoader(Items(), BATCH, sampler=RandomSampler(Items(), replacement=True, generator=given(4)))


def seeded_processes() -> DataLoader[Any]:
    return DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2, worker_init_fn=seed_process, generator=given(7))


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffled": lambda: DataLoader(examples(COUNT), BATCH, shuffle=True),
    "items": lambda: DataLoader(Items(), BATCH, shuffle=True),
    "generator": lambda: DataLoader(examples(COUNT), BATCH, shuffle=True, generator=given(5)),
    "weighted": weighted,
    "split": split,
    "subset": lambda: DataLoader(Items(), BATCH, sampler=SubsetRandomSampler(range(5, COUNT))),
    "replaced": replaced,
    "batch_sampler": lambda: DataLoader(Items(), batch_sampler=Lengths()),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "windows": Windows,
    "list": lambda: list(DataLoader(examples(COUNT), BATCH, shuffle=True)),
    "loading": lambda: DataLoader(Items(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "loading_stream": lambda: DataLoader(Stream(), BATCH, num_workers=2),
    "augmented": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "loading_augmented": lambda: DataLoader(Augmented(), BATCH, shuffle=True, num_workers=2),
    "seeded_processes": seeded_processes,
    "lasting_processes": lambda: DataLoader(Augmented(), BATCH, True, num_workers=2, persistent_workers=True),
    "dropout": lambda: DataLoader(Items(), BATCH, shuffle=True),
    "dropout_and_lengths": lambda: DataLoader(Items(), batch_sampler=Lengths()),
    "dropout_and_windows": Windows,
    "normalized": lambda: DataLoader(Augmented(), BATCH, shuffle=True, drop_last=True),
}


def model_for(case: str) -> nn.Module:
    if case.startswith("dropout"):
        return nn.Sequential(nn.Linear(INPUTS, 10), nn.Dropout(0.3), nn.Linear(10, CLASSES))
    if case == "normalized":
        return nn.Sequential(nn.Linear(INPUTS, 10), nn.BatchNorm1d(10), nn.Linear(10, CLASSES))
    return network()


def train(case: str, prepare: Prepare) -> nn.Module:
    """Two epochs, each with an evaluation, whose loaders draw from the global generator too."""
    model: nn.Module = model_for(case)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain, divided = (DataLoader(examples(20), 7, shuffle=last) for last in (False, True))
    model, optimizer, batches, divided = prepare(model, optimizer, LOADERS[case](), divided)
    for _ in range(EPOCHS):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for loader in (plain, divided):
                for x, _ in loader:
                    model(x)
    return model


def main() -> None:
    out, mode, *cases = sys.argv[1:]
    for case in cases:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        if mode == "plain":
            leave(Path(out) / case, 0, {"model": train(case, lambda *things: things)}, {"chance": chance()})
            continue
        with offbeat.init() as team:
            leave(Path(out) / case, team.rank, {"model": train(case, team.prepare)}, {"chance": chance()})


def chance() -> list[float]:
    """Where the generators stand at the end."""
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


if __name__ == "__main__":
    main()

"""Tasks whose examples take a while to decode, as images do, or cannot be decoded at all."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset, IterableDataset

import offbeat


class Images(Dataset[Any]):
    """Numbered examples that take `seconds` to decode; one of them may be broken."""

    def __init__(self, count: int, seconds: float = 0.0, broken: int | None = None) -> None:
        self.count, self.seconds, self.broken = count, seconds, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if index == self.broken:
            raise OSError(f"image-{index}.png is truncated")
        time.sleep(self.seconds)
        number = torch.tensor([float(index)])
        return number, number.sin(), index


class ImageStream(IterableDataset[Any]):
    """The same examples as a stream."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __iter__(self) -> Iterator[Any]:
        return (self.images[index] for index in range(self.images.count))


@dataclass(eq=False)
class Decoded(offbeat.Task):
    """Learn y = sin(x); every worker notes the numbers of the examples of each batch in its folder."""

    folder: str = ""
    examples: int = 45
    batch: int = 8
    milliseconds: float = 0.0
    broken: int | None = None
    stream: bool = False
    strange: bool = False
    table: str = ""

    def __post_init__(self) -> None:
        self.global_batch = self.batch
        self.epochs = 3
        if self.strange:
            self.collate = set

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def data(self) -> offbeat.Data:
        if self.table:
            rows = offbeat.data.parquet(self.table, ["x", "y", "id"])
            known = Images(5)
            return offbeat.Data(rows.shuffled(buffer=30) if self.stream else rows, known, known)
        images = Images(self.examples, self.milliseconds / 1000, self.broken)
        known = Images(5)
        return offbeat.Data(ImageStream(images) if self.stream else images, known, known)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        return SGD(params, lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, target, numbers = batch
        if self.folder:
            with (Path(self.folder) / f"seen-{os.environ['RANK']}").open("a") as file:
                file.write(" ".join(str(int(number)) for number in numbers) + "\n")
        return nn.functional.mse_loss(model(inputs / self.examples), target)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        return -sum(float((model(x / self.examples) - y).square().sum()) for x, y, _ in data)


def seen(folder: Path) -> list[list[list[int]]]:
    """The examples of each batch, by worker."""
    files = sorted(folder.glob("seen-*"))
    return [[[int(word) for word in line.split()] for line in file.read_text().splitlines()] for file in files]

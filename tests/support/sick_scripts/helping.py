"""What sick scripts share: the moment when they fall ill, a model under DDP, and data that is slow to come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset


def falls_ill() -> None:
    """Note when it becomes true; the last of several counts."""
    with Path("ill_since").open("a", encoding="utf-8") as file:
        file.write(f"{time.monotonic()!r}\n")


def begin() -> tuple[int, Tensor]:
    """Meet the others over stock Gloo: this rank, and a tensor to exchange."""
    dist.init_process_group("gloo")
    return dist.get_rank(), torch.ones(4)


def training() -> Callable[[Tensor], None]:
    """A small model under stock DDP; answers what makes a step on a batch."""
    model = DistributedDataParallel(torch.nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


class Slow(Dataset[Tensor]):
    """Examples of which each takes a while to read."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        self._size, self._seconds = size, seconds

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:
        if self._seconds:
            time.sleep(self._seconds)
        return torch.full((100,), index / self._size)

"""Two stages that exchange bundles; reachable in processes because sys.path is passed on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control
from offbeat.runtime.pipeline.messages import Bundles
from offbeat.runtime.run.rank_environment import where
from offbeat.runtime.run.stopwatch import Stopwatch

SHAPES = [
    [(3, 2), (4,)],
    [(3, 2), (4,)],  # As expected.
    [(5, 2), (4,)],
    [(600_000,), (0, 7)],  # Longer than a channel, and empty.
    [(600_000,), (0, 7)],
    [(3, 2), (1,)],
    [(3, 2), (4,)],
]
"""Of the bundles of each step, all for inputs of the same shapes."""


def contents(step: int) -> list[Tensor]:
    """What is sent in a step."""
    random = torch.Generator().manual_seed(step)
    first, second = SHAPES[step]
    return [torch.randn(first, generator=random), torch.randint(9, second, generator=random)]


def exchange(config: dict[str, Any], control: Control) -> None:
    """Rank 0 sends bundles of changing shapes, of which two are in flight at once; rank 1 compares."""
    group = DirectGroup(where(), timedelta(seconds=30), torch.device("cpu"))
    bundles = Bundles(group, Stopwatch(bubbles=True), "stage {}".format)
    right: list[bool] = []
    for step in range(len(SHAPES)):
        if group.rank == 0:
            for number in range(2):
                bundles.send(contents(step), 1, number, "key")
        else:
            posted = [bundles.post(2, 0, number, "activations", "key") for number in range(2)]
            for bundle in posted:
                arrived, sent = bundle.wait(), contents(step)
                right.append(all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(arrived, sent, strict=True)))
        bundles.end_step()
    group.barrier()
    if group.rank == 1:
        control.send({"right": right, "marks": bundles.marks})
    group.close()

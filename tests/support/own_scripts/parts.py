"""What the scripts beside this file share: data, a network, and leaving behind what a test looks at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat

INPUTS, CLASSES, BATCH = 6, 3, 8
UNEVEN = 33
"""Four batches of 8, which 3 workers cannot share evenly, and one of a single example: fewer than there are workers."""

Case = Callable[[offbeat.Team, dict[str, Any]], Mapping[str, nn.Module]]
"""A loop: trains with a team, notes facts, answers its models by name."""


def examples(count: int = UNEVEN) -> TensorDataset:
    """The same examples every time, whatever has been drawn before."""
    chance = torch.Generator().manual_seed(11)
    inputs = torch.randn(count, INPUTS, generator=chance)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (count,), generator=chance))


def batches(count: int = UNEVEN, **options: Any) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(examples(count), **({"batch_size": BATCH, "shuffle": True} | options))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 10), nn.Tanh(), nn.Linear(10, CLASSES))


def leave(out: str | Path, rank: int, models: Mapping[str, nn.Module], facts: Mapping[str, Any]) -> None:
    """One file for each worker, so that a test sees whether they agree."""
    state = {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state": state, "facts": dict(facts)}, f"{out}-{rank}.pt")


def run_cases(cases: Mapping[str, Case]) -> None:
    """`python file.py FOLDER CASE...`: one team after the other."""
    folder, *names = sys.argv[1:]
    for name in names:
        torch.manual_seed(0)
        facts: dict[str, Any] = {}
        with offbeat.init() as team:
            models = cases[name](team, facts)
            leave(Path(folder) / name, team.rank, models, facts)

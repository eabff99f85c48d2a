"""Entries for processes that sum by algorithms of their choice; each worker sends what it saw to the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch

from offbeat.runtime.gradients.algorithm_choice import Sums
from offbeat.runtime.groups.group import DirectGroup, Group
from offbeat.runtime.launch import Control
from offbeat.runtime.run.rank_environment import where

COUNTS = (0, 1, 3, 64, 511, 512, 513, 1500, 20_000)
KINDS = (torch.float32, torch.complex64)


def wrong_sums(group: Group, sums: Sums) -> list[str]:
    """Every size, kind and algorithm on memory that stays in its place, as gradients do; what was wrong."""
    wrong: list[str] = []
    expected = sum(range(1, group.size + 1))
    for dtype in KINDS:
        for count in COUNTS:
            tensor = torch.empty(count, dtype=dtype)
            # Between sums by auto, those that it could have chosen for others: plans of one must not serve another.
            for name in ("auto", *sums.candidates(), "native", "two_shot", "native", "auto"):
                tensor.fill_(group.rank + 1)
                group.sums_by = Sums(group.process_group, name) if name != "auto" else sums  # pyright: ignore
                group.sum(tensor, "a trial")
                if not torch.equal(tensor, torch.full_like(tensor, expected)):
                    wrong.append(f"{count} of {dtype} by {name}")
    return wrong


def run(config: Mapping[str, Any], control: Control) -> None:
    """The entry."""
    group = DirectGroup(where(), timedelta(seconds=20), torch.device("cpu"))
    sums = group.sum_by("auto")
    wrong = wrong_sums(group, sums)
    control.send({"rank": group.rank, "seen": {"wrong": wrong, "choices": sums.choices}})
    group.sums_by = None
    group.barrier()
    group.close()

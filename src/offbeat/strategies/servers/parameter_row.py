"""The parameters of some models side by side in one flat buffer, cut into the shards that servers hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.runtime.groups.group import Group
from offbeat.runtime.servers.state_inspection import KINDS


class ParameterRow:
    """The parameters of some models in one row of memory, and the shards that it is cut into."""

    def __init__(self, parameters: Sequence[Parameter], shards: int) -> None:
        kinds = {p.dtype for p in parameters}
        names = {kind: name for name, kind in KINDS.items()}
        if len(kinds) != 1 or not kinds <= names.keys():
            actual = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "none"
            raise StrategyError(
                f"servers hold parameters of one kind, {' or '.join(KINDS)}; these models have {actual}. Use allreduce."
            )
        (dtype,) = kinds
        self.kind = names[dtype]
        self.parameters = list(parameters)
        self.offsets: list[int] = [0, *np.cumsum([p.numel() for p in parameters]).tolist()]
        self.count = self.offsets[-1]
        self.bounds = [self.count * k // shards for k in range(shards + 1)]
        self.values = torch.empty(self.count, dtype=dtype)
        for parameter, view in zip(parameters, self.views(self.values), strict=True):
            view.copy_(parameter.data)
            parameter.data = view

    def shard(self, row: Tensor, number: int) -> Tensor:
        """A shard's part of a row."""
        return row[self.bounds[number] : self.bounds[number + 1]]

    def shards(self, row: Tensor) -> list[Tensor]:
        """A row, cut into shards."""
        return [row[low:high] for low, high in pairwise(self.bounds)]

    def ranges(self, members: Iterable[Parameter], number: int, joined: bool = True) -> tuple[tuple[int, int], ...]:
        """The ranges of these parameters in a shard, from its beginning; adjacent ones are joined if asked for."""
        places = {id(p): place for p, place in zip(self.parameters, pairwise(self.offsets), strict=True)}
        low, high = self.bounds[number], self.bounds[number + 1]
        ranges: list[tuple[int, int]] = []
        for start, stop in sorted(places[id(p)] for p in members if id(p) in places):
            start, stop = max(start, low) - low, min(stop, high) - low
            if stop <= start:
                continue
            if joined and ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return tuple(ranges)

    def views(self, row: Tensor) -> list[Tensor]:
        """A row like this one, as a tensor for each parameter."""
        pieces = row.split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


def refuse_different_models(group: Group, row: ParameterRow, optimizer: Optimizer | None) -> None:
    """Refuse workers that train different models: servers have one row for all. Collective."""
    sizes = () if optimizer is None else tuple(len(members["params"]) for members in optimizer.param_groups)
    shapes = [tuple(p.shape) for p in row.parameters]
    under = "" if optimizer is None else f" under {type(optimizer).__name__} with {len(sizes)} groups"
    checksum = crc32(f"{shapes} {row.kind} {sizes}{under}".encode())
    known = group.gather([float(checksum), float(row.count), float(len(shapes))], "comparing the workers' models")
    if bool((known[:, 0] == checksum).all()):
        return
    others = {(int(count), int(parts)) for other, count, parts in known.tolist() if other != checksum}
    elsewhere = " or ".join(f"{count:,} in {parts}" for count, parts in sorted(others))
    raise StrategyError(
        f"the workers do not train the same: worker {group.rank} has {row.count:,} numbers ({row.kind}) in "
        f"{len(shapes)} parameters{under}; others have {elsewhere}, of other shapes, kinds or groups. Servers hold one "
        f"model for all: create the same model and optimizer in every worker."
    )

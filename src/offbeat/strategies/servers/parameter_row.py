"""The parameters of some models side by side in one flat buffer, cut into the shards that servers hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from offbeat.errors import StrategyError
from offbeat.runtime.servers.shard_state import KINDS


class ParameterRow:
    """The parameters of some models in one row of memory, and the shards that it is cut into."""

    def __init__(self, parameters: Sequence[Parameter], shards: int) -> None:
        kinds = {p.dtype for p in parameters}
        names = {kind: name for name, kind in KINDS.items()}
        if len(kinds) != 1 or not kinds <= names.keys():
            said = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds)) or "none"
            raise StrategyError(
                f"servers hold parameters of one kind, {' or '.join(KINDS)}; these models have {said}. Use allreduce."
            )
        (dtype,) = kinds
        self.kind = names[dtype]
        self.parameters = list(parameters)
        sizes = [p.numel() for p in parameters]
        self.count = sum(sizes)
        self.offsets = [0, *np.cumsum(sizes).tolist()]
        self.bounds = [self.count * k // shards for k in range(shards + 1)]
        self.values = torch.empty(self.count, dtype=dtype)
        for parameter, start in zip(parameters, self.offsets, strict=False):
            place = self.values[start : start + parameter.numel()].view(parameter.shape)
            place.copy_(parameter.data)
            parameter.data = place

    def shard(self, row: Tensor, number: int) -> Tensor:
        """A shard's part of a row."""
        return row[self.bounds[number] : self.bounds[number + 1]]

    def ranges(self, members: Iterable[Parameter], number: int, joined: bool = True) -> tuple[tuple[int, int], ...]:
        """Which ranges of a shard these parameters take, counted from its beginning; neighbours may be joined."""
        places = {id(p): (start, start + p.numel()) for p, start in zip(self.parameters, self.offsets, strict=False)}
        low, high = self.bounds[number], self.bounds[number + 1]
        found: list[tuple[int, int]] = []
        for start, stop in sorted(places[id(p)] for p in members if id(p) in places):
            start, stop = max(start, low) - low, min(stop, high) - low
            if stop <= start:
                continue
            if joined and found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
        return tuple(found)

    def views(self, row: Tensor) -> list[Tensor]:
        """A row like this one, as a tensor for each parameter."""
        pieces = row.split([p.numel() for p in self.parameters])
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]

"""Optimizer state and updates sharded over the workers: each updates its slice of every parameter (ZeRO, stage 1).

Workers that share memory hold the parameters there once for all of them: a slice that its owner has updated is visible
to everyone, and nothing needs to be gathered. Elsewhere slices are gathered after each step.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn import Parameter

from offbeat.errors import RunError
from offbeat.protocols.exchanges import SMALL_GRADIENT, Exchanged
from offbeat.protocols.schedule import Layout
from offbeat.runtime.groups.group import DirectGroup
from offbeat.strategies.worker.flat_rows import share_parameters


def slices_of(parameters: Sequence[Parameter], size: int) -> list[list[tuple[int, int]]]:
    """For each rank, which range of each parameter it owns: a block of a large one, all or nothing of a small one."""
    owned: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    load = np.zeros(size)
    for parameter in parameters:
        count = parameter.numel()
        if count > SMALL_GRADIENT:
            bounds = Layout(count).blocks(size).tolist()
        else:
            owner = int(load.argmin())
            load[owner] += count
            bounds = [0] * (owner + 1) + [count] * (size - owner)
        for rank in range(size):
            owned[rank].append((bounds[rank], bounds[rank + 1]))
    return owned


class OptimizerShards:
    """One model's parameters, and which slices of them this worker updates."""

    def __init__(self, parameters: Iterable[Parameter], group: DirectGroup) -> None:
        self.parameters = [p for p in parameters if p.is_floating_point()]
        self._group = group
        self._owned = slices_of(self.parameters, group.size)
        self._shared = group.shares_memory
        if self._shared:
            share_parameters(self.parameters, group)
        mine = self._owned[group.rank]
        self.slices = [p.data.view(-1)[low:high] for p, (low, high) in zip(self.parameters, mine, strict=True)]
        """This worker's part of each parameter, in the parameter's own memory; empty where it has none."""
        self.seen: dict[int, tuple[int, int]] = {}
        """Identity and version of each gradient as the exchange left it."""
        self.exchanges: tuple[Exchanged, ...] = ()
        """The exchanges that distributed the last step's slices."""

    def note_gradients(self) -> None:
        """The exchange is over: later changes to gradients would change slices only."""
        self.seen = {id(p): (id(p.grad), p.grad._version) for p in self.parameters if p.grad is not None}

    def hand_gradients(self) -> None:
        """Give each slice its part of the gradient; refuse gradients that were changed since the exchange."""
        owned = self._owned[self._group.rank]
        for parameter, own, (low, high) in zip(self.parameters, self.slices, owned, strict=True):
            gradient = parameter.grad
            if gradient is not None and self.seen.get(id(parameter)) != (id(gradient), gradient._version):
                raise RunError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was changed between backward and "
                    f"step, by clipping perhaps. Under shard=optimizer a worker has only its own slices of the summed "
                    f"gradients, so that would be different on every worker. Use allreduce, where gradients are whole."
                )
            own.grad = None if gradient is None or low == high else gradient.reshape(-1)[low:high]

    def publish(self) -> None:
        """The worker's slices are updated: return when every worker has every slice."""
        for own in self.slices:
            own.grad = None
        self._group.sent.record()
        if self._shared:
            self._group.barrier("the end of a step")
        else:
            for dtype in dict.fromkeys(p.dtype for p in self.parameters):
                self._gather([i for i, p in enumerate(self.parameters) if p.dtype == dtype])
        self.exchanges = self._group.sent.recorded()

    def _gather(self, members: Sequence[int]) -> None:
        lengths = [sum(ranges[i][1] - ranges[i][0] for i in members) for ranges in self._owned]
        mine = torch.cat([self.slices[i].detach() for i in members])
        # Slices are padded to one length; they differ by little.
        padded = torch.nn.functional.pad(mine, (0, max(lengths) - len(mine)))
        gathered = self._group.payloads(padded.view(torch.uint8), True, "the gathering of parameters")
        for row, ranges in zip(gathered, self._owned, strict=True):
            values, at = row.view(mine.dtype), 0
            for i in members:
                low, high = ranges[i]
                self.parameters[i].data.view(-1)[low:high] = values[at : at + high - low]
                at += high - low

    def close(self) -> None:
        """Give every worker a private copy of the parameters."""
        if self._shared:
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()

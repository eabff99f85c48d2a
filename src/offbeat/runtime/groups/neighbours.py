"""Messages of any length between the neighbours of a graph, by the graph's schedule."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offbeat.protocols.exchanges import Exchanged
from offbeat.protocols.gossip.mixing import tell
from offbeat.protocols.schedule import FloatArray, Layout
from offbeat.runtime.collectives.two_sided import Program, compile_schedule
from offbeat.runtime.groups.group import DirectGroup


class Neighbours:
    """One worker's neighbours: every message reaches all neighbours of its sender."""

    def __init__(self, group: DirectGroup, matrix: FloatArray) -> None:
        self._group, self._matrix = group, matrix
        self.ranks = tuple(int(rank) for rank in np.flatnonzero(matrix[group.rank]) if rank != group.rank)
        self._programs: dict[int, Program] = {}

    def trade(self, message: Tensor, fixed: bool, what: str) -> list[Tensor]:
        """Send a row of bytes to all neighbours, and return theirs by rank; `fixed` if all have the same length."""
        count = message.numel()
        if fixed:
            if count not in self._programs:
                self._programs = {count: self._compiled(count, [count] * len(self.ranks))}
            return self._run(self._programs[count], message, [count] * len(self.ranks), what)
        counts = self.trade(torch.tensor([count]).view(torch.uint8), True, what)
        lengths = [int(length.view(torch.int64)) for length in counts]
        return self._run(self._compiled(count, lengths), message, lengths, what)

    def _compiled(self, own: int, theirs: list[int]) -> Program:
        """Compile for this worker, which does not need the lengths of messages between others."""
        group, lengths = self._group, np.zeros(self._group.size, dtype=np.int64)
        lengths[[group.rank, *self.ranks]] = [own, *theirs]
        layout = Layout(own + sum(theirs), 1)
        return compile_schedule(tell(self._matrix, lengths), group.view, layout, group.rank)

    def _run(self, program: Program, message: Tensor, lengths: list[int], what: str) -> list[Tensor]:
        row = torch.empty(program.count, dtype=torch.uint8)
        row[: message.numel()] = message
        exchanged = Exchanged(what="tell", by="0", nbytes=message.numel())
        self._group.run(program, row, row.new_empty(program.scratch), what, exchanged)
        return list(row[message.numel() :].split(lengths))

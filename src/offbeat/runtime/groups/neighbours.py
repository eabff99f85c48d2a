"""What the neighbours of a graph exchange by its schedules: rows that are mixed, and messages of any length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.protocols.exchanges import Exchanged, sent_by
from offbeat.protocols.gossip.mixing import mix, tell
from offbeat.protocols.schedule import FloatArray, Layout, Schedule
from offbeat.runtime.collectives.two_sided import CompiledSchedule, compile_schedule, programs
from offbeat.runtime.groups.connection import ExchangeWait
from offbeat.runtime.groups.group import DirectGroup, Group

_MIXING = "mixing with neighbours"


class RowMixer:
    """Replaces rows by weighted means with the neighbours' rows: in shared memory if all workers are on one host."""

    def __init__(self, group: Group, matrices: Sequence[FloatArray]) -> None:
        self._group, self._matrices = group, matrices
        self._compiled = programs()
        self._bytes_sent = lru_cache(maxsize=256)(sent_by)
        self._scratch: dict[Any, Tensor] = {}

    @cached_property
    def in_memory(self) -> bool:
        """Whether rows are read where their owners publish them; otherwise they are sent."""
        return self._group.direct.shares_memory

    @cached_property
    def _schedules(self) -> list[Schedule]:
        return [mix(matrix, self.in_memory) for matrix in self._matrices]

    def mix(self, tensors: Sequence[Tensor], turn: int) -> None:
        """Mix the row that consists of these tensors, in place, by the matrix of this turn; one alone if it is sent."""
        by = turn % len(self._matrices)
        real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
        nbytes, itemsize = sum(tensor.nbytes for tensor in real), real[0].itemsize
        what, layout = "mix_in_memory" if self.in_memory else "mix", Layout(nbytes // itemsize, itemsize)
        exchanged = Exchanged(what=what, by=str(by), nbytes=nbytes, itemsize=itemsize)
        if self.in_memory:
            self._publish(real, self._schedules[by], layout, exchanged)
        else:
            self._send(real[0].view(-1), self._schedules[by], layout, exchanged)

    def _publish(self, row: Sequence[Tensor], schedule: Schedule, layout: Layout, exchanged: Exchanged) -> None:
        group = self._group.direct
        group.sent.add(self._bytes_sent(schedule, layout, group.view, group.rank), exchanged)
        with ExchangeWait(group.waits, _MIXING):
            group.process_group.mix_in_place(row, schedule, _MIXING)

    def _send(self, row: Tensor, schedule: Schedule, layout: Layout, exchanged: Exchanged) -> None:
        group, kind = self._group.direct, (row.dtype, row.device)
        program = self._compiled(schedule, group.view, layout, group.rank)
        scratch = self._scratch.get(kind)
        if scratch is None or scratch.numel() < program.scratch:
            scratch = self._scratch[kind] = row.new_empty(program.scratch)
        group.run(program, row, scratch, _MIXING, exchanged)


class Neighbours:
    """One worker's neighbours: every message reaches all neighbours of its sender."""

    def __init__(self, group: DirectGroup, matrix: FloatArray) -> None:
        self._group, self._matrix = group, matrix
        self.ranks = tuple(int(rank) for rank in np.flatnonzero(matrix[group.rank]) if rank != group.rank)
        self._programs: dict[int, CompiledSchedule] = {}

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

    def _compiled(self, own: int, theirs: list[int]) -> CompiledSchedule:
        """Compile for this worker, which does not need the lengths of messages between others."""
        group, lengths = self._group, np.zeros(self._group.size, dtype=np.int64)
        lengths[[group.rank, *self.ranks]] = [own, *theirs]
        layout = Layout(own + sum(theirs), 1)
        return compile_schedule(tell(self._matrix, lengths), group.view, layout, group.rank)

    def _run(self, program: CompiledSchedule, message: Tensor, lengths: list[int], what: str) -> list[Tensor]:
        row = torch.empty(program.count, dtype=torch.uint8)
        row[: message.numel()] = message
        exchanged = Exchanged(what="tell", by="0", nbytes=message.numel())
        self._group.run(program, row, row.new_empty(program.scratch), what, exchanged)
        return list(row[message.numel() :].split(lengths))

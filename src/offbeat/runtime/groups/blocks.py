"""Flat rows that workers without shared memory gather, or sum and scatter, in one block for each of them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from offbeat.protocols.collectives import Collective, algorithm
from offbeat.protocols.schedule import Layout
from offbeat.runtime.backend import OffbeatGroup
from offbeat.runtime.collectives.two_sided import programs, run
from offbeat.runtime.groups.connection import ExchangeWait
from offbeat.runtime.groups.group import DirectGroup

BY = "ring"
"""The algorithm of both."""


class Blocks:
    """Gathers and reduce-scatters of rows over one lane; each worker's block is as long as every other's."""

    def __init__(self, group: DirectGroup) -> None:
        self._group, self._compiled = group, programs()

    def own(self, row: Tensor) -> Tensor:
        """The block of a row that is this worker's."""
        block = row.numel() // self._group.size
        return row[self._group.rank * block : (self._group.rank + 1) * block]

    def start_gather(self, row: Tensor, what: str) -> ExchangeWait:
        """Start to fill the other workers' blocks of a row; this worker's own is filled already."""
        return self._start("all_gather", row, what)

    def start_scatter(self, row: Tensor, what: str) -> ExchangeWait:
        """Start to replace this worker's block of a row by its sum over the workers; the others become undefined."""
        return self._start("reduce_scatter", row, what)

    def _start(self, collective: Literal["all_gather", "reduce_scatter"], row: Tensor, what: str) -> ExchangeWait:
        group, process_group = self._group, self._group.process_group
        own, wait = self.own(row), ExchangeWait(self._group.waits, what)
        group.note(collective, own.nbytes if collective == "all_gather" else row.nbytes, row.itemsize, BY)
        with wait:
            if isinstance(process_group, OffbeatGroup):
                schedule, layout = algorithm(Collective(collective), BY).schedule, Layout(row.numel(), row.itemsize)
                program = self._compiled(schedule, group.view, layout, group.rank)
                messages = process_group.messages

                def act() -> None:
                    run(program, row, messages)

                wait.work = process_group.later(act, what, [row])
            elif collective == "all_gather":
                wait.work = process_group._allgather_base(row, own)
            else:
                wait.work = process_group._reduce_scatter_base(own, row)
        return wait

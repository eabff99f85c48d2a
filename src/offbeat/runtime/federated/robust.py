"""Aggregations for clients that may lie: combined by a robust rule, or bounded one by one before the mean."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from offbeat.runtime.federated.aggregation import AddUp, Aggregation, ClientUpdate, ExactMean, Selected, UpdateLayout
from offbeat.runtime.federated.exact_sum import LARGEST, ExactSum
from offbeat.runtime.federated.robust_rules import bounded, nearest, products

BLOCK_NUMBERS: Final = 2**21
"""Numbers of all updates together that are combined at once: 16 MiB as 64-bit floating point."""
IN_MEMORY: Final = 2**28
"""Bytes of updates of a round that a process keeps in memory; beyond, they are in a temporary file."""


class UpdateRows:
    """The updates that one process has of a round, as the rows of a matrix: in memory, or in a temporary file."""

    def __init__(self, layout: UpdateLayout, most: int) -> None:
        shape = most, layout.size
        if most * layout.nbytes <= IN_MEMORY:
            self._rows = torch.empty(shape, dtype=layout.dtype)
        else:
            # NumPy has not all of torch's types, so the file is of bytes. It has no name, and goes with this object.
            with tempfile.TemporaryFile() as file:
                kept = np.memmap(file, np.uint8, "w+", shape=(most, layout.nbytes))
            self._rows = torch.from_numpy(kept).view(layout.dtype)
        self.positions: list[int] = []
        """The position of each row's client among those selected."""

    def add(self, position: int, update: Tensor) -> None:
        """Keep an update."""
        torch.add(update, 0.0, out=self._rows[len(self.positions)])  # And -0.0 becomes 0.0, as in a sum of workers.
        self.positions.append(position)

    def put(self, block: Tensor, start: int) -> None:
        """Copy the columns from `start` on into the rows of a block that has a row for each selected client."""
        if self.positions:
            block[self.positions] = self._rows[: len(self.positions), start : start + block.shape[1]]


class RowAggregation(Aggregation):
    """Combines the updates of all clients as rows of a matrix, a block of columns at a time.

    Every client counts once, whatever its number of examples. The rows stay where they are: for a block of columns,
    all workers add up their rows, with zeros for the others', so that each has the whole block. Sorting and adding rows
    in order gives the same bits on every processor.
    """

    needs_single_updates = True

    _COLUMNS: Final = (
        4  # Of what is known of each client: whether it counts, examples; weight of its loss, and that times it.
    )

    def __init__(self, layout: UpdateLayout, fewest: int) -> None:
        self._layout, self._fewest = layout, fewest
        self._selected = Selected(0, (), ())
        self._places: dict[int, int] = {}
        self._rows = UpdateRows(layout, 0)
        self._known = torch.zeros(0, self._COLUMNS, dtype=torch.float64)
        self._mean = torch.zeros(0)

    def begin(self, selected: Selected) -> None:
        """Forget the rows of the round before."""
        self._selected = selected
        self._places = {client: place for place, client in enumerate(selected.clients)}
        self._rows = UpdateRows(self._layout, len(self._places))
        self._known = torch.zeros(len(self._places), self._COLUMNS, dtype=torch.float64)

    def add(self, sent: ClientUpdate) -> bool:
        """Keep a row."""
        if not ExactSum.fits(sent.update):
            return False
        place = self._places[sent.client]
        losses = [sent.weight, sent.weight * sent.loss] if abs(sent.loss) <= LARGEST else [0.0, 0.0]  # NaN is not.
        self._known[place] = torch.tensor([1.0, sent.examples, *losses], dtype=torch.float64)
        self._rows.add(place, sent.update)
        return True

    def combine(self, add_up: AddUp) -> None:
        """Learn who counts, and combine their rows; the mean stays 0 if they are too few."""
        add_up(self._known, "what is known of the round's updates")
        self._mean = torch.zeros(self._layout.size, dtype=self._layout.dtype)
        if self.updates >= self._fewest:
            self._combine(add_up)

    def _combine(self, add_up: AddUp) -> None:
        """Fill the mean from the rows of all workers."""
        raise NotImplementedError

    def _blocks(self, add_up: AddUp) -> Iterator[tuple[slice, Tensor]]:
        """The columns of each block, and all rows that count."""
        size, counts = self._layout.size, self._known[:, 0] > 0
        width = max(1, BLOCK_NUMBERS // max(1, len(counts)))
        for start in range(0, size, width):
            block = torch.zeros(len(counts), min(width, size - start), dtype=self._layout.dtype)
            self._rows.put(block, start)
            add_up(block, "a block of the round's updates")
            yield slice(start, start + block.shape[1]), block[counts]

    def mean(self) -> tuple[Tensor, Tensor | None]:
        """The combined update."""
        return self._mean, None

    @property
    def updates(self) -> int:
        """Updates that count."""
        return int(self._known[:, 0].sum())

    @property
    def examples(self) -> int:
        """Examples that these clients went through."""
        return int(self._known[:, 1].sum())

    @property
    def loss(self) -> float:
        """Mean loss of the clients, by their examples: as they say, and so only for the display."""
        weight, loss = (float(self._known[:, column].cumsum(0)[-1]) if self.updates else 0.0 for column in (2, 3))
        return loss / weight if weight else float("nan")


class ColumnAggregation(RowAggregation):
    """A rule that treats every coordinate by itself, as the median does."""

    def __init__(self, layout: UpdateLayout, fewest: int, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layout, fewest)
        self._rule = rule

    def _combine(self, add_up: AddUp) -> None:
        for columns, rows in self._blocks(add_up):
            self._mean[columns] = self._rule(rows).to(self._layout.dtype)


class KrumAggregation(RowAggregation):
    """The mean of the updates that are nearest to the others."""

    def __init__(self, layout: UpdateLayout, fewest: int, byzantine: int, keep: int) -> None:
        super().__init__(layout, fewest)
        self._byzantine, self._keep = byzantine, keep
        self.chosen: Sequence[int] = ()
        """The clients whose updates were taken in the last round."""

    def _combine(self, add_up: AddUp) -> None:
        places = torch.nonzero(self._known[:, 0]).flatten().tolist()
        inner = torch.zeros(len(places), len(places), dtype=torch.float64)
        for _, rows in self._blocks(add_up):
            inner += products(rows)
        # Products depend on the processor in the last bits, so each row's are those of the worker that has the row.
        own = set(self._rows.positions)
        for row, place in enumerate(places):
            if place not in own:
                inner[row] = 0.0
        add_up(inner, "the products of the round's updates")
        best = nearest(inner, self._byzantine, self._keep)
        self.chosen = tuple(self._selected.clients[places[row]] for row in best)
        self._average([places[row] for row in best], add_up)

    def _average(self, places: Sequence[int], add_up: AddUp) -> None:
        index = {place: row for row, place in enumerate(torch.nonzero(self._known[:, 0]).flatten().tolist())}
        for columns, rows in self._blocks(add_up):
            total = torch.zeros(rows.shape[1], dtype=torch.float64)
            for place in places:
                total += rows[index[place]]
            self._mean[columns] = total.div_(len(places)).to(self._layout.dtype)


class BoundedMean(ExactMean):
    """The mean by examples of updates that are no longer than a bound: no client moves the model further.

    The server bounds, so that a client that lies cannot leave it out.
    """

    def __init__(self, layout: UpdateLayout, bound: float) -> None:
        super().__init__(layout)
        self._bound = bound

    def add(self, sent: ClientUpdate) -> bool:
        """Bound an update, and add it."""
        return super().add(replace(sent, update=bounded(sent.update, self._bound)))

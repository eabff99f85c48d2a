"""From clients' updates to one mean update: filters on each update, and aggregations that combine them.

Simulation and deployment use the same objects. A filter runs where the client is. An aggregation runs where updates
are added up: in every worker of a simulation, which then combine their parts, or in the one server of a deployment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.exact_sum import LARGEST, ExactSum

AddUp = Callable[[Tensor, str], object]
"""Adds up a tensor over all workers, in place; the text says what it is, for errors. One process: do nothing."""


Agree = Callable[[Callable[[], Sequence[float]]], Sequence[float]]
"""Calls a function in one process, and returns its numbers in all. One process: `here`."""


def here(compute: Callable[[], Sequence[float]]) -> Sequence[float]:
    """The `Agree` of a process that is alone."""
    return compute()


def alone(tensor: Tensor, what: str) -> None:
    """The `AddUp` of a process that has all updates."""
    del tensor, what


@dataclass(frozen=True)
class UpdateLayout:
    """What an update's vector holds."""

    size: int
    """Numbers in it: the parameters, and then floating-point buffers."""
    trainable: int
    """How many of them, at the front, are parameters."""
    dtype: torch.dtype
    """Their type."""
    extra: bool = False
    """Whether a further vector of the same size comes with each update (SCAFFOLD)."""

    @property
    def nbytes(self) -> int:
        """Bytes of an update that no filter has changed, without its further vector."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Selected:
    """The clients selected for a round: the same on all workers, and before the first update."""

    number: int
    """Of the round, from 1."""
    clients: Sequence[int]
    """Whose updates may be added."""
    weights: Sequence[float]
    """The most that each may weigh: its number of examples."""


@dataclass(frozen=True)
class ClientUpdate:
    """What one client sends, after all filters. Vectors may be overwritten as soon as they are added."""

    client: int
    update: Tensor
    extra: Tensor | None
    """The algorithm's further vector."""
    weight: float
    """Its examples, times a factor below 1 if it is stale."""
    loss: float
    """Mean loss of its batches."""
    examples: int
    """Examples that it went through."""
    state: ClientState | None = None
    """What the client keeps between rounds, for what is lost when its update is encoded."""


class UpdateFilter(ABC):
    """Changes a client's update before it is sent: clips, compresses or poisons it."""

    keeps_state: bool = False
    """Whether it keeps something of each client between rounds, in `state`, under a name of its own."""

    @abstractmethod
    def apply(self, update: Tensor, client: int, number: int, state: ClientState | None) -> Tensor:
        """The update as the server will have it; may be changed in place. Randomness: from seed, client and round."""

    def update_bytes(self, size: int, nbytes: int) -> int:
        """Bytes of an update of this many numbers, if it had `nbytes` before this filter."""
        del size
        return nbytes


class Aggregation(ABC):
    """Combines the updates of a round into one, which the server's algorithm then applies.

    A round: `begin`, then `add` for every update, then `combine`, then `mean` and the counts.
    """

    needs_single_updates: bool = False
    """Whether it looks at updates one by one, which secure aggregation hides."""
    moves_always: bool = False
    """Whether the model moves in every round, also if no update has come."""

    def prepare(self, rounds: int | None, agree: Agree = here) -> None:
        """Before the first round of a run, which may have this many in all; None: their number is unknown."""
        del rounds, agree

    @abstractmethod
    def begin(self, selected: Selected) -> None:
        """Forget the round before."""

    @abstractmethod
    def add(self, sent: ClientUpdate) -> bool:
        """Take in an update; False, and nothing happens, if it is refused: it has NaN, for example."""

    @abstractmethod
    def combine(self, add_up: AddUp) -> None:
        """All updates are added: combine the parts of all workers."""

    @abstractmethod
    def mean(self) -> tuple[Tensor, Tensor | None]:
        """The update of the global model, and the sum of further vectors; the same bits on every worker."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Updates that count, of all workers."""

    @property
    @abstractmethod
    def examples(self) -> int:
        """Examples that their clients went through."""

    @property
    @abstractmethod
    def loss(self) -> float:
        """Mean loss of the clients, by weight; NaN without any."""

    def figures(self) -> dict[str, float]:
        """Figures for the display and the metrics, such as the privacy spent."""
        return {}

    def notes(self) -> dict[str, Any]:
        """Entries for the result."""
        return {}

    @property
    def failure(self) -> str:
        """Why the updates of this round cannot be used, other than that they are too few; empty if they can."""
        return ""

    def message_bytes(self, down: int, up: int) -> tuple[int, int]:
        """Bytes that a client gets and sends in a round, if these are what it would with plain updates."""
        return down, up

    @property
    def exhausted(self) -> str:
        """Why no further round may be made; empty if one may."""
        return ""

    def state_dict(self) -> dict[str, Any]:
        """What must outlive the process, such as a ledger."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from such a state."""
        del state


class ExactMean(Aggregation):
    """The mean by weight, summed in fixed point: the same bits in any order and with any number of workers."""

    def __init__(self, layout: UpdateLayout) -> None:
        size = layout.size
        wide = 2 * size if layout.extra else size
        self._layout = layout
        self._row = torch.zeros(wide + len(_Tally.__annotations__), dtype=torch.int64)
        self._update = ExactSum(self._row[:size])
        self._extra = ExactSum(self._row[size:wide]) if layout.extra else None
        self._counts = self._row[wide:]
        self._tally = _Tally()

    def begin(self, selected: Selected) -> None:
        """Start from 0, in units that cannot overflow."""
        self._row.zero_()
        self._update.begin(sum(selected.weights))
        if self._extra is not None:
            self._extra.begin(len(selected.clients))
        self._tally = _Tally()

    def add(self, sent: ClientUpdate) -> bool:
        """Add an update by its weight."""
        if self._extra is not None and (sent.extra is None or not ExactSum.fits(sent.extra)):
            return False
        if not self._update.add(sent.update, sent.weight):
            return False
        if self._extra is not None and sent.extra is not None:
            self._extra.add(sent.extra, 1.0)
        tally, unit = self._tally, self._update.unit
        tally.updates += 1
        tally.examples += sent.examples
        tally.weight += round(sent.weight * unit)
        if abs(sent.loss) <= LARGEST:  # NaN compares as False.
            tally.loss += round(sent.loss * sent.weight * unit)
            tally.loss_weight += round(sent.weight * unit)
        return True

    def combine(self, add_up: AddUp) -> None:
        """One sum of integers."""
        for sums in (self._update, self._extra):
            if sums is not None:
                sums.settle()
        self._counts.copy_(torch.tensor(astuple(self._tally)))
        add_up(self._row, "the sum of updates")
        self._tally = _Tally(*self._counts.tolist())

    def mean(self) -> tuple[Tensor, Tensor | None]:
        """The mean update, and the sum of further vectors."""
        dtype = self._layout.dtype
        mean = self._update.read().div_(self._tally.weight / self._update.unit).to(dtype)
        return mean, None if self._extra is None else self._extra.read().to(dtype)

    @property
    def updates(self) -> int:
        """Updates that count."""
        return self._tally.updates

    @property
    def examples(self) -> int:
        """Examples that these clients went through."""
        return self._tally.examples

    @property
    def loss(self) -> float:
        """Mean loss of the clients, by their examples."""
        weight = self._tally.loss_weight
        return self._tally.loss / weight if weight else math.nan


@dataclass
class _Tally:
    """What is counted beside the sums of vectors; weights and losses in the units of the sum."""

    updates: int = 0
    examples: int = 0
    weight: int = 0
    loss: int = 0
    loss_weight: int = 0

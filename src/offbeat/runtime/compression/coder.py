"""What every compressor does to a row of numbers, and how compressed rows are summed.

A coder turns a row into a letter, a row of bytes that is all that travels, and adds what a letter says to another row.
Coders whose letters can be summed on the way do so in `sum`; the others have everybody read everybody's letter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Link(Protocol):
    """How letters travel between workers that all call the same at the same time."""

    @property
    def rank(self) -> int:
        """The number of this worker."""
        ...

    @property
    def size(self) -> int:
        """How many workers there are."""
        ...

    def sum(self, row: Tensor) -> Tensor:
        """The row summed over the workers, in place, equal to the bit on all of them."""
        ...

    def gather(self, letter: Tensor, fixed: bool) -> list[Tensor]:
        """Everybody's letter, by rank; `fixed` if all letters have one length."""
        ...


class Coder(ABC):
    """One worker's side of a compressor, for one row of so many numbers (float32 or float64)."""

    fixed: ClassVar[bool] = True
    """Whether a letter's length depends on nothing but the row's."""

    @abstractmethod
    def encode(self, row: Tensor) -> Tensor:
        """The row as a letter: a row of bytes. The row is left as it is."""

    @abstractmethod
    def add(self, letter: Tensor, out: Tensor) -> None:
        """Add what a letter says to `out`; refuse a letter that does not fit it with a RunError."""

    def sum(self, row: Tensor, link: Link) -> Tensor:
        """Replace the row by the sum of what all workers' letters say; answers what this worker's own letter said.

        Letters are added by rank, so that the sum is the same on all workers.
        """
        letter = self.encode(row)
        said = torch.zeros_like(row)
        self.add(letter, said)
        row.zero_()
        for other in link.gather(letter, self.fixed):
            self.add(other, row)
        return said

    def state_dict(self) -> dict[str, Any]:
        """What must be remembered to go on to the same bits after a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        del state


class Feedback:
    """A coder that makes up for what it leaves out: what was not said is added to the next row.

    Seide et al., "1-Bit Stochastic Gradient Descent" (2014); Karimireddy et al., "Error Feedback Fixes SignSGD" (2019).
    """

    def __init__(self, coder: Coder, on: bool) -> None:
        self.coder = coder
        self._on = on
        self._owed: Tensor | None = None

    def sum(self, row: Tensor, link: Link) -> None:
        """Replace the row by the workers' sum, and remember what of this worker's is missing in it."""
        whole = self._with_debt(row)
        said = self.coder.sum(row, link)
        if whole is not None:
            self._owed = whole.sub_(said)

    def encode(self, row: Tensor) -> Tensor:
        """A letter for one receiver, such as a server; the row is left with what the letter leaves out."""
        whole = self._with_debt(row)
        letter = self.coder.encode(row)
        if whole is not None:
            said = torch.zeros_like(row)
            self.coder.add(letter, said)
            self._owed = whole.sub_(said)
        return letter

    def _with_debt(self, row: Tensor) -> Tensor | None:
        if not self._on:
            return None
        if self._owed is not None:
            row.add_(self._owed)
        return row.clone()

    def state_dict(self) -> dict[str, Any]:
        """What is owed, and what the coder remembers."""
        return {"owed": self._owed, "coder": self.coder.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._owed = state["owed"]
        self.coder.load_state_dict(state["coder"])

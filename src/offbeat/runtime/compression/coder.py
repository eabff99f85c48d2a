"""What every compressor does to a row of numbers, and how compressed rows are summed.

A coder turns a row into a letter, a row of bytes that is all that travels, and adds what a letter says to another row.
Coders whose letters can be summed on the way do so in `sum`; the others have everybody read everybody's letter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import RunError

PIECE = 1 << 18
"""Numbers that are worked on at once: few enough that what is between two operations stays in a cache, and enough that
starting an operation costs nothing beside it."""


class PayloadExchange(Protocol):
    """How letters travel between workers that all call the same at the same time."""

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
    def add(self, letter: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add what a letter says, times a weight, to `out`; refuse a letter that does not fit it with a RunError."""

    def put(self, letter: Tensor, out: Tensor) -> None:
        """Replace `out` by what a letter says."""
        self.add(letter, out.zero_())

    def sum(self, row: Tensor, total: Tensor, link: PayloadExchange) -> None:
        """Write the sum of what all workers say into `total`, and leave in `row` what was left unsaid.

        The two may be the same row: then only the sum is of interest. Letters are added by rank, so that the sum is the
        same on all workers.
        """
        letter = self.encode(row)
        if row is not total:
            self.add(letter, row, -1.0)
        first, *others = link.gather(letter, self.fixed)
        self.put(first, total)
        for other in others:
            self.add(other, total)

    def state_dict(self) -> dict[str, Any]:
        """What must be remembered to go on to the same bits after a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        del state


class PlainCoder(Coder):
    """Numbers as they are: what sparse coders do with the values that they keep, if nothing else is said."""

    def encode(self, row: Tensor) -> Tensor:
        """The bytes of the numbers."""
        return row.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def add(self, letter: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add the numbers."""
        expect(letter, out.numel() * out.element_size())
        out.add_(numbers(letter, out.dtype), alpha=weight)

    def sum(self, row: Tensor, total: Tensor, link: PayloadExchange) -> None:
        """Everything is said."""
        if row is not total:
            total.copy_(row)
            row.zero_()
        link.sum(total)


class Feedback:
    """A coder that makes up for what it leaves out: what was not said is added to the next row.

    Seide et al., "1-Bit Stochastic Gradient Descent" (2014); Karimireddy et al., "Error Feedback Fixes SignSGD" (2019).
    """

    def __init__(self, coder: Coder, on: bool) -> None:
        self.coder = coder
        self.on = on
        self.owed: Tensor | None = None
        """What this worker has not said yet; None before the first row, and where nobody keeps it."""

    def sum(self, row: Tensor, link: PayloadExchange, idle: Sequence[slice] = ()) -> None:
        """Replace the row by the workers' sum, and remember what of this worker's is missing in it.

        What is owed in the `idle` parts of the row stays owed: nobody would use it now.
        """
        for part in idle:
            row[part].zero_()
        if self.on:
            self.owing(row).add_(row)
        self.settle(row, link, idle)

    def settle(self, row: Tensor, link: PayloadExchange, idle: Sequence[slice] = ()) -> None:
        """The same, of a row that has been added to what is owed already, or lies in `row` if nothing is ever owed."""
        if not self.on:
            self.coder.sum(row, row, link)
            return
        owed = self.owing(row)
        kept = [(part, owed[part].clone()) for part in idle]
        for part in idle:
            owed[part].zero_()
        self.coder.sum(owed, row, link)
        for part, value in kept:
            owed[part].copy_(value)

    def encode(self, row: Tensor) -> Tensor:
        """A letter for one receiver, such as a server."""
        if not self.on:
            return self.coder.encode(row)
        if not finite(row):
            # Who reads it refuses it. What is owed would stay NaN, and every later letter would be refused, too.
            return self.coder.encode(self.owing(row) + row)
        owed = self.owing(row).add_(row)
        letter = self.coder.encode(owed)
        self.coder.add(letter, owed, -1.0)
        return letter

    def owing(self, row: Tensor) -> Tensor:
        """What is owed to such a row, to be added to; zeros at first."""
        if self.owed is None:
            self.owed = torch.zeros_like(row)
        return self.owed

    def state_dict(self) -> dict[str, Any]:
        """What is owed, and what the coder remembers."""
        return {"owed": self.owed, "coder": self.coder.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        owed = state["owed"]
        self.owed = None if owed is None else owed.clone()
        self.coder.load_state_dict(state["coder"])


def finite(row: Tensor) -> bool:
    """Whether no number is NaN or inf. The sum of squares tells it quickest; if it overflows, each is looked at."""
    return math.isfinite(float(torch.dot(row, row))) or bool(row.isfinite().all())


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no number of any of them is NaN or inf; one pass over their memory, unless squares overflow."""
    real = [torch.view_as_real(one) if one.is_complex() else one for one in tensors if one.numel()]
    if not real:
        return True
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(real)])  # pyright: ignore[reportPrivateUsage]
    return bool(norms.isfinite().all()) or all(bool(one.isfinite().all()) for one in real)


def expect(letter: Tensor, length: int) -> None:
    """Refuse a letter of another length: it comes from a wire."""
    if letter.dtype != torch.uint8 or letter.dim() != 1 or letter.numel() != length:
        raise RunError(
            f"a letter of {letter.numel():,} bytes came where one of {length:,} was due. Do all processes run the same "
            f"strategy on the same model?"
        )


def numbers(letter: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a letter, or of a part of it, as numbers; copied where they lie askew."""
    askew = letter.storage_offset() % dtype.itemsize
    return (letter.clone() if askew else letter).view(dtype)


def row_of(values: NDArray[Any]) -> Tensor:
    """Numbers as a row of torch's own; numpy gives rows of one number a stride that torch does not take for a row."""
    return torch.empty(len(values), dtype=torch.from_numpy(values).dtype).copy_(torch.from_numpy(values))

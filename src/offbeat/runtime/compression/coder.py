"""The interface of all compressors, and how compressed rows are summed.

A coder encodes a row of numbers as a payload, a row of bytes that is all that is sent, and adds a payload to a row.
Coders whose payloads can be reduced in transit override `sum`; with the others, all workers read all payloads.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import RunError

if TYPE_CHECKING:
    from offbeat.runtime.groups.group import DirectGroup

PIECE = 1 << 18
"""Numbers worked on at once: few enough to stay in a cache between two operations, and enough to hide the cost of
starting an operation."""


class GroupLink:
    """Sends payloads in one exchange of a group, with bytes and seconds counted; all workers call it in step."""

    def __init__(self, group: DirectGroup, what: str) -> None:
        self._group, self._what, self.size = group, what, group.size
        self.nbytes = 0
        """Bytes that this worker has brought to sums and gathers."""
        self.seconds = 0.0
        """Time that they took, including waits."""

    def sum(self, row: Tensor) -> Tensor:
        """The row summed over the workers, in place, bitwise equal on all of them."""
        start = time.perf_counter()
        self._group.sum(row, self._what)
        self._count(row, start)
        return row

    def gather(self, payload: Tensor, fixed: bool) -> list[Tensor]:
        """All workers' payloads, by rank; `fixed` if all have the same length."""
        start = time.perf_counter()
        payloads = self._group.payloads(payload, fixed, self._what)
        self._count(payload, start)
        return payloads

    def _count(self, sent: Tensor, start: float) -> None:
        self.nbytes += sent.numel() * sent.element_size()
        self.seconds += time.perf_counter() - start


class Coder(ABC):
    """One worker's side of a compressor, for one row of numbers (float32 or float64)."""

    fixed: ClassVar[bool] = True
    """Whether a payload's length depends only on the row's."""

    @abstractmethod
    def encode(self, row: Tensor) -> Tensor:
        """The row as a payload of bytes; the row itself stays unchanged."""

    @abstractmethod
    def add(self, payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add a decoded payload, times a weight, to `out`; a payload that does not fit is refused with a RunError."""

    def put(self, payload: Tensor, out: Tensor) -> None:
        """Replace `out` by a decoded payload."""
        self.add(payload, out.zero_())

    def sum(self, row: Tensor, total: Tensor, link: GroupLink) -> None:
        """Write the sum of all workers' decoded payloads to `total`, and leave the encoding error in `row`.

        If the two are the same row, only the sum is kept. Payloads are added by rank, so that all workers get the same
        sum.
        """
        payload = self.encode(row)
        if row is not total:
            self.add(payload, row, -1.0)
        first, *others = link.gather(payload, self.fixed)
        self.put(first, total)
        for other in others:
            self.add(other, total)

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs to continue bitwise."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        del state


class PlainCoder(Coder):
    """Numbers as they are: the default for the values that sparse coders keep."""

    def encode(self, row: Tensor) -> Tensor:
        """The bytes of the numbers."""
        return row.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def add(self, payload: Tensor, out: Tensor, weight: float = 1.0) -> None:
        """Add the numbers."""
        expect(payload, out.numel() * out.element_size())
        out.add_(numbers(payload, out.dtype), alpha=weight)

    def sum(self, row: Tensor, total: Tensor, link: GroupLink) -> None:
        """The exact sum."""
        if row is not total:
            total.copy_(row)
            row.zero_()
        link.sum(total)


class Feedback:
    """A coder with error feedback: what compression left out is added to the next row.

    Seide et al., "1-Bit Stochastic Gradient Descent" (2014); Karimireddy et al., "Error Feedback Fixes SignSGD" (2019).
    """

    def __init__(self, coder: Coder, on: bool) -> None:
        self.coder = coder
        self.on = on
        self.owed: Tensor | None = None
        """What this worker has not sent yet; None before the first row, and without error feedback."""

    def sum(self, row: Tensor, link: GroupLink, idle: Sequence[slice] = ()) -> None:
        """Replace the row by the workers' sum, and keep the error of this worker's part.

        The error in the `idle` parts of the row is kept: no worker would use it now.
        """
        for part in idle:
            row[part].zero_()
        if self.on:
            self.owing(row).add_(row)
        self.settle(row, link, idle)

    def settle(self, row: Tensor, link: GroupLink, idle: Sequence[slice] = ()) -> None:
        """The same for a row that was already added to the error, or without error feedback is in `row`."""
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
        """A payload for one receiver, such as a server."""
        if not self.on:
            return self.coder.encode(row)
        if not finite(row):
            # The receiver refuses it. The error would stay NaN, and every later payload would be refused, too.
            return self.coder.encode(self.owing(row) + row)
        owed = self.owing(row).add_(row)
        payload = self.coder.encode(owed)
        self.coder.add(payload, owed, -1.0)
        return payload

    def owing(self, row: Tensor) -> Tensor:
        """The error for rows like this one, to be added to; zeros at first."""
        if self.owed is None:
            self.owed = torch.zeros_like(row)
        return self.owed

    def state_dict(self) -> dict[str, Any]:
        """The error, and the coder's state."""
        return {"owed": self.owed, "coder": self.coder.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        owed = state["owed"]
        self.owed = None if owed is None else owed.clone()
        self.coder.load_state_dict(state["coder"])


def finite(row: Tensor) -> bool:
    """Whether no number is NaN or inf. The sum of squares is the quickest test; if it overflows, each is checked."""
    return math.isfinite(float(torch.dot(row, row))) or bool(row.isfinite().all())


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no number in any of them is NaN or inf; one pass over their memory, unless squares overflow."""
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors if tensor.numel()]
    if not real:
        return True
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(real)])  # pyright: ignore[reportPrivateUsage]
    return bool(norms.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in real)


def expect(payload: Tensor, length: int) -> None:
    """Refuse a payload of another length: it comes off a wire."""
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != length:
        raise RunError(
            f"a payload of {payload.numel():,} bytes came where one of {length:,} was due. Do all processes run the "
            f"same strategy on the same model?"
        )


def numbers(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a payload, or of a part of it, as numbers; copied where they are not aligned."""
    unaligned = payload.storage_offset() % dtype.itemsize
    return (payload.clone() if unaligned else payload).view(dtype)


def row_of(values: NDArray[Any]) -> Tensor:
    """An array as a contiguous tensor; numpy gives arrays of one element a stride that torch does not accept."""
    return torch.empty(len(values), dtype=torch.from_numpy(values).dtype).copy_(torch.from_numpy(values))

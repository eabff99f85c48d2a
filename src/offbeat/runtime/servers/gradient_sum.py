"""The sum of the step under way on a shard, and what is pushed to it: looked at, decoded and added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.errors import RunError
from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.replica.works import AccumulateGradient, Update
from offbeat.runtime.compression import Coder

Ranges = Sequence[tuple[int, int]]


class GradientSum:
    """What has come for the numbers of a shard since they were updated last."""

    def __init__(self, total: NDArray[Any], coder: Coder | None = None) -> None:
        self.total = total
        self.covered: list[tuple[int, int]] | None = []
        """Ranges that this step has gradients for; None: all of the shard."""
        self._empty = True
        """Whether the sum is to be taken for zero, whatever lies there."""
        self._coder = coder
        """How pushes are compressed; None: they are the numbers themselves."""

    def decoded(self, payload: Payload) -> NDArray[Any]:
        """The numbers that were pushed."""
        if self._coder is None:
            return cast("NDArray[Any]", payload.handle).view(self.total.dtype)
        said = torch.zeros(self.total.size, dtype=torch.from_numpy(self.total).dtype)
        # A copy, because what another process has lent cannot be written, and torch has no such rows.
        self._coder.add(torch.from_numpy(np.array(payload.handle)), said)
        return said.numpy()

    def unfit(self, payload: Payload, start: int, stop: int, absent: Ranges) -> str:
        """Why a payload cannot be used for [start, stop) of the shard; empty if it can."""
        if payload.handle is None:
            return ""
        if misplaced := self._misplaced(payload, start, stop, absent):
            return misplaced
        try:
            numbers = self.decoded(payload)
        except RunError as error:
            return str(error)
        # The sum of their squares is the quickest look at all of them. It may overflow: only then each is looked at.
        with np.errstate(over="ignore", invalid="ignore"):
            fit = math.isfinite(np.dot(numbers, numbers)) or np.isfinite(numbers).all()
        return "" if fit else f"{np.count_nonzero(~np.isfinite(numbers)):,} of {numbers.size:,} numbers are NaN or inf"

    def _misplaced(self, payload: Payload, start: int, stop: int, absent: Ranges) -> str:
        """Why a payload cannot be for that range; on a shard without numbers only its own length is looked at."""
        size, itemsize = self.total.size, self.total.itemsize
        end = size if stop < 0 else stop
        if size and (not 0 <= start <= end <= size or any(not 0 <= low <= high <= size for low, high in absent)):
            return f"the range {start}:{end} of a shard of {size:,} numbers"
        if self._coder is not None:
            whole = not size or (start, end) == (0, size)
            return "" if whole else f"a compressed push for the range {start}:{end} of a shard: it must be for all"
        nbytes = (end - start) * itemsize
        if size and payload.nbytes != nbytes:
            return f"{payload.nbytes:,} bytes where {nbytes:,} were to come"
        return f"{payload.nbytes:,} bytes, which are not numbers of {itemsize}" if payload.nbytes % itemsize else ""

    def look(self, payload: Payload, letter: bool) -> None:
        """Go over it twice, as over a push: once to see whether it is fit, once to add it."""
        if payload.handle is None or (not letter and payload.nbytes % self.total.itemsize):
            return
        with np.errstate(over="ignore", invalid="ignore"), suppress(RunError):
            for _ in range(2):
                numbers = self.decoded(payload) if letter else payload.handle.view(self.total.dtype)
                np.dot(numbers, numbers)

    def add(self, payload: Payload, weight: float, work: AccumulateGradient | Update) -> None:
        """Add `weight` times a gradient to the range that it is for."""
        start, stop = work.start, self.total.size if work.stop < 0 else work.stop
        if payload.handle is not None:
            part, numbers = self.total[start:stop], self.decoded(payload)
            if self._empty and part.size == self.total.size:
                np.multiply(numbers, part.dtype.type(weight), part)
            else:
                self.clear()
                np.add(part, numbers if weight == 1.0 else numbers * part.dtype.type(weight), part)
            self._empty = False
        if not work.absent and (start, stop) == (0, self.total.size):
            self.covered = None
        if self.covered is not None:
            for low, high in sorted(work.absent):
                self.covered.append((start, low))
                start = high
            self.covered.append((start, stop))

    def clear(self) -> None:
        """Make the sum zero, if it still holds what is to be forgotten."""
        if self._empty:
            self.total.fill(0)

    def restart(self) -> None:
        """Begin the next step."""
        self._empty, self.covered = True, []

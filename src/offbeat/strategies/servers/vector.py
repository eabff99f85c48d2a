"""The parameters on servers as one vector, of which a loop may push and pull any range.

Requests go to the shards of the range. Each push is numbered, sent until it is answered, and applied once; a read is as
fresh as the consistency requires, and contains this worker's own pushes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from offbeat.errors import UsageError
from offbeat.protocols.servers.messages import Fetched, PullReply
from offbeat.protocols.servers.worker.notices import PulledRange, RangeRequest
from offbeat.protocols.servers.worker.rhythm import RhythmAction
from offbeat.strategies.compressors import Compressing
from offbeat.strategies.servers.driver import ServerDriver

_NOTHING_IS_NEWER = 2**62


@dataclass(frozen=True, slots=True)
class Pulled:
    """Values of a range, as servers had them at the time of the request."""

    where: range
    """The range in the vector."""
    values: Tensor
    versions: tuple[int, ...]
    """Number of updates of each shard of the range."""
    clock: int
    """The values contain all updates of steps before this one."""


class _Piece(NamedTuple):
    """The part of a range on one shard: where it is there, and its place in the range."""

    shard: int
    start: int
    stop: int
    place: slice


class Vector:
    """All trained parameters in one row, on the servers. A worker has one, from `team.vector`.

    `push` adds gradients of ranges to the open step, `step` ends it. Under `bsp` the parts of a step count together,
    once all workers have ended theirs; under `ssp` and `asp` each part is an update of its own.
    """

    def __init__(self, driver: ServerDriver, compressions: Sequence[Compressing], counted: Callable[[], None]) -> None:
        self._driver, self._link, self._row = driver, driver.link, driver.row
        self._compressions, self._counted = compressions, counted
        self._tokens: list[int] = []

    def __len__(self) -> int:
        return self._row.count

    @property
    def shards(self) -> tuple[range, ...]:
        """The range that each server holds."""
        return tuple(range(start, stop) for start, stop in pairwise(self._row.bounds))

    def range_of(self, parameter: Parameter) -> range:
        """The range of a parameter of a prepared model."""
        for known, start in zip(self._row.parameters, self._row.offsets, strict=False):
            if known is parameter:
                return range(start, start + parameter.numel())
        raise UsageError(
            "this parameter is not on the servers: it is of no prepared model, empty, or was replaced after prepare(). "
            "Give its model to the first prepare()."
        )

    def pull(self, where: range, newer_than: Pulled | None = None) -> Pulled | None:
        """Values of a range, as fresh as the next step requires; None if none are newer than `newer_than`.

        Shards without an update since then send nothing.
        """
        pieces = self._pieces(where)
        if newer_than is not None and newer_than.where != where:
            raise UsageError(f"{where} cannot be compared with values of {newer_than.where}.")
        if newer_than is None:
            values, versions = torch.empty(len(where), dtype=self._row.values.dtype), [-1] * len(pieces)
        else:
            values, versions = newer_than.values.clone(), list(newer_than.versions)
        ranges = [PulledRange(p.shard, p.start, p.stop, version) for p, version in zip(pieces, versions, strict=True)]
        by_shard = {piece.shard: number for number, piece in enumerate(pieces)}

        def take(shard: int, reply: PullReply | Fetched, numbers: NDArray[np.uint8]) -> None:
            number = by_shard[shard]
            place = values[pieces[number].place].numpy()
            np.copyto(place, numbers.view(place.dtype))
            versions[number] = reply.version

        request = self._link.client.ask(RangeRequest(ranges, self._link.clock), take)
        replies = self._link.wait(request.token, "a pull of a range")
        clock = min(reply.clock for _, reply in replies)
        if newer_than is not None and tuple(versions) == newer_than.versions:
            return None
        return Pulled(where, values, tuple(versions), clock)

    def push(self, where: range, gradient: Tensor) -> None:
        """Add a gradient of this range to the open step. It is copied, and may be changed at once.

        The optimizer skips parameters of which nothing was pushed in this step; of one that was pushed in part, the
        rest on the same shard has a gradient of zeros.
        """
        pieces = self._pieces(where)
        if gradient.numel() != len(where) or gradient.dtype != self._row.values.dtype:
            raise UsageError(
                f"{where} takes {len(where):,} numbers of {self._row.kind}; the gradient has "
                f"{gradient.numel():,} of {str(gradient.dtype).removeprefix('torch.')}."
            )
        if self._compressions:
            raise UsageError(
                f"{', '.join(map(str, self._compressions))} compresses gradients of whole shards, so a range "
                f"cannot be pushed. Omit the compression."
            )
        raw = gradient.detach().reshape(-1).clone().numpy()
        parts = [(*piece[:3], raw[piece.place].view(np.uint8)) for piece in pieces]
        self._tokens.append(self._driver.queue.push_ranges(parts))

    def step(self, weight: float = 1.0) -> None:
        """End the step: wait until all of its pushes are answered, and until the next step may begin.

        `weight` is the number of examples that the gradients are a mean over; it matters under `bsp`.
        """
        if weight <= 0:
            raise UsageError(f"a step's gradient is a mean over {weight:g} examples: give step() a weight above 0.")
        link = self._link
        tokens, self._tokens = self._tokens, []
        self._driver.perform((RhythmAction.PUSH,), weight=weight)
        for token in tokens:
            link.wait(token, "the answer to a push")
        if link.rule.bound is not None:
            # A request whose only answer is "unchanged", which comes when the consistency allows the next step.
            ranges = [PulledRange(shard, 0, 0, _NOTHING_IS_NEWER) for shard in range(len(self.shards))]
            token = link.client.ask(RangeRequest(ranges, link.clock), lambda _shard, _reply, _numbers: None).token
            link.wait(token, "the next step being allowed")
        self._counted()

    def _pieces(self, where: range) -> list[_Piece]:
        """A range cut at the bounds of shards; refused if it is empty, or not within this vector."""
        if where.step != 1 or not 0 <= where.start < where.stop <= len(self):
            raise UsageError(
                f"{where} is not a range of this vector: it must not be empty, must have step 1, and lie "
                f"within range(0, {len(self)})."
            )
        pieces: list[_Piece] = []
        for shard, held in enumerate(self.shards):
            low, high = max(where.start, held.start), min(where.stop, held.stop)
            if low < high:
                place = slice(low - where.start, high - where.start)
                pieces.append(_Piece(shard, low - held.start, high - held.start, place))
        return pieces

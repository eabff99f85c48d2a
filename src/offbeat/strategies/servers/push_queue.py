"""Memory that servers can read for what a worker pushes, until the push is answered; compressed if asked for.

A push goes to several servers, waits there for other workers, and is answered together with the requested values: the
transfer time of a message cannot be told from the rest. So at the end of a run all workers send their last messages to
the servers once more, at the same time, and then dense rows. Servers handle both like pushes, and use neither.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.protocols.machine import Payload
from offbeat.protocols.partition import mixed
from offbeat.protocols.servers.messages import Settings
from offbeat.protocols.servers.worker.notices import PushedRange, PushRequest, TrialRequest, whole_shards
from offbeat.protocols.servers.worker.rhythm import IN_FLIGHT
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.compression import CompressionAccount, Feedback, together
from offbeat.runtime.compression.account import COMPARING, timed
from offbeat.strategies.compressors import Compressing, compressor
from offbeat.strategies.servers.link import ServerLink
from offbeat.strategies.servers.optimizer import ServerOptimizer
from offbeat.strategies.servers.parameter_row import ParameterRow

SLOTS = IN_FLIGHT
"""Slots of memory: one whose push is not answered yet is not written."""
Bytes = NDArray[np.uint8]


class CompressedPushes:
    """Compresses one worker's pushes to all shards, with error feedback, and accounts for costs and savings."""

    def __init__(self, compressions: Sequence[Compressing], sizes: Sequence[int], seed: int, rank: int) -> None:
        self._feedbacks: list[Feedback] = [
            compressor(compressions, [(size,)], mixed(seed, shard), rank) for shard, size in enumerate(sizes)
        ]
        self._last = [np.empty(0, np.uint8) for _ in sizes]
        self._account = CompressionAccount()
        self._waited = 0
        self.trial_bytes = 0
        """Bytes sent only for the comparison with dense pushes."""

    def encode(self, parts: Sequence[Tensor], waited: bool) -> list[Bytes]:
        """The messages of each shard's numbers, in their memory where they fit; `waited` if the step waits for them."""
        start = time.perf_counter()
        self._last = [self._encode(shard, values) for shard, values in enumerate(parts)]
        coding = time.perf_counter() - start
        self._account.note(sum(p.nbytes for p in parts), sum(p.nbytes for p in self._last), coding, 0.0)
        self._waited += waited
        return self._last

    def _encode(self, shard: int, values: Tensor) -> Bytes:
        raw = values.numpy().view(np.uint8)
        if not raw.size:
            return raw
        message = self._feedbacks[shard].encode(values).numpy()
        if message.size > raw.size:
            return message
        raw[: message.size] = message
        return raw[: message.size]

    def compare(self, link: ServerLink, dense: Sequence[Bytes]) -> dict[str, float]:
        """Send the last messages once more, then dense rows; returns costs and savings of all pushes. Collective.

        Transfers that overlap with computation cost nothing: of both kinds, only those that were waited for count.
        """
        client, group = link.client, link.group
        start, sent = time.perf_counter(), client.connection.bytes_sent
        messages = timed(group, lambda: client.answer(TrialRequest(whole_shards(self._last), True), COMPARING))
        rows = timed(group, lambda: client.answer(TrialRequest(whole_shards(dense), False), COMPARING))
        self.trial_bytes = client.connection.bytes_sent - sent
        group.sent.totals.measured += self.trial_bytes
        figures = self._account.figures
        pushes = max(figures["sums"], 1.0)
        share, each = self._waited / pushes, sum(messages) / len(messages)
        figures["sending_seconds"] = self._waited * each
        figures["probes"], figures["dense_seconds"] = float(len(rows)), share * sum(rows)
        figures["compared"] = float(len(messages))
        figures["compressed_seconds"] = len(messages) * (figures["coding_seconds"] / pushes + share * each)
        figures["probing_seconds"] = time.perf_counter() - start
        return together([self._account], group)

    def state(self) -> list[dict[str, Any]]:
        """The error feedback of each shard."""
        return [feedback.state_dict() for feedback in self._feedbacks]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore it."""
        for feedback, saved in zip(self._feedbacks, state, strict=True):
            feedback.load_state_dict(saved)


class PushQueue:
    """One worker's pushes that are being filled, or are in flight."""

    def __init__(
        self,
        link: ServerLink,
        row: ParameterRow,
        optimizer: ServerOptimizer | None = None,
        compressed: CompressedPushes | None = None,
    ) -> None:
        self._link, self._row, self._optimizer, self.compressed = link, row, optimizer, compressed
        width = -(-row.count * row.values.element_size() // 64) * 64
        memory = Segment.create(width * SLOTS)
        link.client.connection.lend(memory)
        link.client.expect(max(shard.nbytes for shard in row.shards(row.values)))
        self.slots: list[Tensor] = [memory.tensor(width * slot, row.count, row.values.dtype) for slot in range(SLOTS)]
        self.views: list[list[Tensor]] = [row.views(slot) for slot in self.slots]
        """For each slot, a tensor for each parameter."""
        self.absent: list[set[int]] = [set() for _ in range(SLOTS)]
        """For each slot, the parameters that have no gradient in it."""
        self._sent: list[int | None] = [None] * SLOTS
        self._turn = 0

    # -- filling -----------------------------------------------------------------------------------------------------

    def free_slot(self) -> int:
        """The slot for the next push, once the last push from it is answered."""
        self._turn = (self._turn + 1) % SLOTS
        self.settle(self._turn)
        self.absent[self._turn] = set()
        return self._turn

    def gradient(self) -> int:
        """Copy the gradients into a slot; returns its number."""
        slot = self.free_slot()
        gradients = [p.grad for p in self._row.parameters]
        self.absent[slot] = {number for number, gradient in enumerate(gradients) if gradient is None}
        if all(g is not None and not g.is_sparse for g in gradients):
            torch._foreach_copy_(self.views[slot], cast("Any", gradients))  # pyright: ignore[reportPrivateUsage]
        else:
            for view, gradient in zip(self.views[slot], gradients, strict=True):
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        return slot

    def add_gradient(self, slot: int) -> None:
        """Add the gradients to a slot."""
        for number, (view, parameter) in enumerate(zip(self.views[slot], self._row.parameters, strict=True)):
            if parameter.grad is not None:
                view.add_(parameter.grad)
                self.absent[slot].discard(number)

    # -- pushing -----------------------------------------------------------------------------------------------------

    def request(self, slot: int | None, then_pull: bool, weight: float = 1.0) -> PushRequest:
        """A request to take a slot as the step's gradient; None only advances the clock."""
        link = self._link
        if slot is None:
            # Where pushes are applied one by one, an empty push is not, and settings in it would be lost.
            settings = self._changed_settings() if link.rule.aggregated else ()
            parts = whole_shards([np.empty(0, np.uint8)] * link.shards)
        else:
            parts = self._parts(slot, waited=then_pull or link.rule.eager)
            settings = self._changed_settings()
        return PushRequest(parts, link.clock, weight, settings, then_pull=then_pull)

    def _changed_settings(self) -> Settings:
        return () if self._optimizer is None else self._optimizer.changed()

    def sent(self, slot: int | None, token: int) -> None:
        """A step's push is in flight: its slot is not reused until this token is answered."""
        self._link.clock += 1
        if slot is None:
            self._link.wait(token, "the answer to a push")
        else:
            self._sent[slot] = token

    def push_microbatch(self, slot: int, weight: float) -> None:
        """Push a slot as a microbatch of the open step that counts by itself."""
        parts, settings = self._parts(slot, waited=False), self._changed_settings()
        request = PushRequest(parts, self._link.clock, weight, settings, final=False, counts=True)
        self._sent[slot] = self._link.client.ask(request).token

    def push_ranges(self, parts: Sequence[tuple[int, int, int, Bytes]]) -> int:
        """Push numbers for ranges of shards, as parts of the open step; returns the token."""
        # Each shard must get the settings with what it applies; where pushes are summed, at the end of the step.
        settings = () if self._optimizer is None or self._link.rule.aggregated else self._optimizer.now()
        ranges = [PushedRange(shard, Payload(part.nbytes, part), start, stop) for shard, start, stop, part in parts]
        return self._link.client.ask(PushRequest(ranges, self._link.clock, settings=settings, final=False)).token

    def settle(self, slot: int) -> None:
        """Wait until the push from this slot is answered."""
        token, self._sent[slot] = self._sent[slot], None
        if token is not None:
            self._link.wait(token, "the answer to a push")

    def settle_all(self) -> None:
        """Wait until all pushes are answered."""
        for slot in range(SLOTS):
            self.settle(slot)

    def _parts(self, slot: int, waited: bool) -> list[PushedRange]:
        """What each shard is sent of a slot, dense or compressed, and which of its ranges have no gradient."""
        values = self._row.shards(self.slots[slot])
        if self.compressed is None:
            payloads = [part.numpy().view(np.uint8) for part in values]
        else:
            payloads = self.compressed.encode(values, waited)
        absent = [self._row.parameters[number] for number in sorted(self.absent[slot])]
        ranges = [self._row.ranges(absent, shard) for shard in range(self._link.shards)] if absent else ()
        return whole_shards(payloads, ranges)

    def compared(self) -> dict[str, Any]:
        """Costs and savings of compression, if there is any. Collective."""
        if self.compressed is None:
            return {}
        # A slot without a message in it: what is sent must not change, and the last messages are sent as well.
        spare = self.slots[(self._turn + 1) % SLOTS].fill_(1.0)
        dense = [part.numpy().view(np.uint8) for part in self._row.shards(spare)]
        return {"compression": self.compressed.compare(self._link, dense)}

"""Memory that servers can read, for what a worker pushes: gradients side by side, until their push is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.messages import Settings
from offbeat.protocols.servers.worker.notices import PushedRange, PushRequest, whole_shards
from offbeat.protocols.servers.worker.rhythm import IN_FLIGHT
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.strategies.servers.compressed_push import Letters
from offbeat.strategies.servers.link import ServerLink
from offbeat.strategies.servers.parameter_row import ParameterRow

SLOTS = IN_FLIGHT
"""Memory for so many pushes: that of one that is not answered yet is not written."""


class SettingsSource(Protocol):
    """Where the settings come from that servers are told with a push."""

    def now(self) -> Settings:
        """What the optimizer's groups are set to."""
        ...

    def changed(self) -> Settings:
        """The same, or nothing if servers know it."""
        ...


class PushQueue:
    """The pushes of one worker that are being filled, or are not answered yet."""

    def __init__(self, link: ServerLink, row: ParameterRow, settings: SettingsSource, letters: Letters | None) -> None:
        self._link, self._row, self._settings, self._letters = link, row, settings, letters
        width = -(-row.count * row.values.element_size() // 64) * 64
        memory = Segment.create(width * SLOTS)
        link.client.connection.lend(memory)
        link.client.expect(max(row.shard(row.values, shard).nbytes for shard in range(link.shards)))
        self.slots: list[Tensor] = [memory.tensor(width * slot, row.count, row.values.dtype) for slot in range(SLOTS)]
        self.views: list[list[Tensor]] = [row.views(slot) for slot in self.slots]
        """Of each slot, a tensor for each parameter."""
        self.absent: list[set[int]] = [set() for _ in range(SLOTS)]
        """Of each slot, which parameters of the row have no gradient there."""
        self._sent: list[int | None] = [None] * SLOTS
        self._turn = 0

    # -- filling -----------------------------------------------------------------------------------------------------

    def free_slot(self) -> int:
        """Memory for what is to be pushed next, once what was pushed from it before is answered."""
        self._turn = (self._turn + 1) % SLOTS
        self.settle(self._turn)
        self.absent[self._turn] = set()
        return self._turn

    def gradient(self) -> int:
        """Put the gradients side by side; answers which slot has them."""
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
        """Add the gradients to what a slot has."""
        for number, (view, parameter) in enumerate(zip(self.views[slot], self._row.parameters, strict=True)):
            if parameter.grad is not None:
                view.add_(parameter.grad)
                self.absent[slot].discard(number)

    # -- pushing -----------------------------------------------------------------------------------------------------

    def request(self, slot: int | None, then_pull: bool, weight: float = 1.0) -> PushRequest:
        """Asks servers to take what lies in a slot as the step's gradient; None: nothing but a tick of the clock."""
        link = self._link
        nothing = [np.empty(0, np.uint8)] * link.shards
        parts = nothing if slot is None else self._payloads(slot, waited=then_pull or link.rule.eager)
        # Where pushes are applied one by one, one without numbers is not: settings would be lost with it.
        settings = () if slot is None and not link.rule.aggregated else self._settings.changed()
        absent = () if slot is None else self._absent_from(slot)
        return PushRequest(whole_shards(parts, absent), link.clock, weight, settings, then_pull=then_pull)

    def sent(self, slot: int | None, token: int) -> None:
        """A step's push is under way: what lies in its slot stays until this token is answered."""
        self._link.clock += 1
        if slot is None:
            self._link.wait(token, "the answer to a push")
        else:
            self._sent[slot] = token

    def push_microbatch(self, slot: int, weight: float) -> None:
        """Push what lies in a slot as a part of a step that counts by itself; the step goes on."""
        parts = whole_shards(self._payloads(slot, waited=False), self._absent_from(slot))
        settings = self._settings.changed()
        request = PushRequest(parts, self._link.clock, weight, settings, final=False, counts=True)
        self._sent[slot] = self._link.client.ask(request).token

    def push_parts(self, parts: Sequence[tuple[int, int, int, NDArray[np.uint8]]]) -> int:
        """Push numbers for ranges of shards, as parts of a step that goes on; answers the token."""
        # Each shard must hear of the settings with what it applies; where steps are summed up, with the step's end.
        settings = () if self._link.rule.aggregated else self._settings.now()
        ranges = [PushedRange(shard, Payload(part.nbytes, part), start, stop) for shard, start, stop, part in parts]
        return self._link.client.ask(PushRequest(ranges, self._link.clock, settings=settings, final=False)).token

    def settle(self, slot: int) -> None:
        """Wait until what was pushed from this slot is answered."""
        token, self._sent[slot] = self._sent[slot], None
        if token is not None:
            self._link.wait(token, "the answer to a push")

    def settle_all(self) -> None:
        """Wait until all that was pushed is answered."""
        for slot in range(SLOTS):
            self.settle(slot)

    def _absent_from(self, slot: int) -> list[tuple[tuple[int, int], ...]]:
        """Of each shard, which ranges have no gradient in a slot; nothing if all have."""
        lacking = [self._row.parameters[number] for number in sorted(self.absent[slot])]
        return [self._row.ranges(lacking, shard) for shard in range(self._link.shards)] if lacking else []

    def _payloads(self, slot: int, waited: bool) -> list[NDArray[np.uint8]]:
        """What each shard's server is sent of a slot: numbers, or the compressed message that is left of them."""
        values = self._by_shard(self.slots[slot])
        if self._letters is None:
            return [part.numpy().view(np.uint8) for part in values]
        return self._letters.write(values, waited)

    def _by_shard(self, row: Tensor) -> list[Tensor]:
        return [self._row.shard(row, shard) for shard in range(self._link.shards)]

    # -- what compression does ---------------------------------------------------------------------------------------

    @property
    def tried_bytes(self) -> int:
        """What was sent only to compare."""
        return 0 if self._letters is None else self._letters.tried_bytes

    def compared(self) -> dict[str, Any]:
        """What compression has cost and saved, if there is any; all workers call this together."""
        if self._letters is None:
            return {}
        # A slot that no message lies in: what is sent must not change, and the last message is sent as well.
        spare = self.slots[(self._turn + 1) % SLOTS].fill_(1.0)
        dense = [part.numpy().view(np.uint8) for part in self._by_shard(spare)]
        return {"compression": self._letters.compare(self._link.client, self._link.group, dense)}

    def owed(self) -> list[dict[str, Any]]:
        """What compression has left out so far, for each shard."""
        return [] if self._letters is None else self._letters.state()

    def owe(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on owing that."""
        if self._letters is not None:
            self._letters.load(state)

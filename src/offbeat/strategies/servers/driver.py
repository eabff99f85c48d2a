"""Drives a worker's parameters on servers: performs with tensors the actions of its rhythm (`protocols.servers`).

What is pushed lies in memory that servers can read until the push is answered; compressed if asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import StrategyError
from offbeat.protocols.machine import Payload
from offbeat.protocols.partition import mixed
from offbeat.protocols.servers.messages import Settings
from offbeat.protocols.servers.worker.notices import (
    FetchRequest,
    LoadRequest,
    PullRequest,
    PushedRange,
    PushRequest,
    TrialRequest,
    whole_shards,
)
from offbeat.protocols.servers.worker.rhythm import IN_FLIGHT, Rhythm, RhythmAction
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.compression import CompressionAccount, Feedback, together
from offbeat.runtime.compression.account import COMPARING, timed
from offbeat.runtime.events.servers import WARM_START
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

        In a run the transfer time of a push cannot be told from waits. Servers handle both like pushes, and use
        neither. Transfers that overlap with computation cost nothing: only those that were waited for count.
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
        self.totals_of: Callable[[Tensor], tuple[float, ...]] = lambda _: ()
        """Sums over a whole gradient that go along with its push to each shard."""
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
        totals = () if slot is None else self.totals_of(self.slots[slot])
        return PushRequest(parts, link.clock, weight, settings, totals=totals, then_pull=then_pull)

    def settings(self) -> Settings:
        """The current settings of the optimizer's groups."""
        return () if self._optimizer is None else self._optimizer.now()

    def _changed_settings(self) -> Settings:
        return () if self._optimizer is None else self._optimizer.changed(self._link.rule.aggregated)

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
        settings = () if self._link.rule.aggregated else self.settings()
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


class ServerDriver:
    """The row of parameters that servers hold, the pushes to it, and the values pulled from it."""

    def __init__(self, link: ServerLink, row: ParameterRow, rhythm: Rhythm, queue: PushQueue, landing: Tensor) -> None:
        self.link, self.row, self.rhythm, self.queue = link, row, rhythm, queue
        self.landing = landing
        """Where pulled values are put: into the parameters, or a buffer beside them."""
        link.client.takes = self._take
        self._pull: int | None = None
        self._complete = 0
        self._eager: dict[int, tuple[int, int]] = {}

    def _take(self, shard: int, values: NDArray[np.uint8]) -> None:
        place = self.row.shard(self.landing, shard).numpy()
        np.copyto(place, values.view(place.dtype))

    # -- in a step ---------------------------------------------------------------------------------------------------

    def perform(
        self, actions: Iterable[RhythmAction], slot: Callable[[], int | None] = lambda: None, weight: float = 1.0
    ) -> None:
        """Perform the rhythm's actions in order; `slot` returns what is to be pushed when that is due."""
        link = self.link
        for action in actions:
            match action:
                case RhythmAction.PUSH | RhythmAction.PUSH_AND_PULL:
                    filled, pulls = slot(), action is RhythmAction.PUSH_AND_PULL
                    request = link.client.ask(self.queue.request(filled, pulls, weight))
                    self._pull = request.pull if pulls else self._pull
                    self.queue.sent(filled, request.token)
                case RhythmAction.PULL:
                    self._pull = link.client.ask(PullRequest(link.clock, anew=True)).token
                case RhythmAction.AWAIT:
                    self.await_values()
                case RhythmAction.SETTLE:
                    self.queue.settle_all()
                case RhythmAction.TAKE_FRESH:
                    if not self._take_fresh():
                        link.arrive(link.client.ask(PullRequest(link.clock, anew=True)).token)
                case RhythmAction.REUSE:
                    link.reused(link.clock - self._complete)
                case RhythmAction.MEET:
                    link.group.barrier(WARM_START)

    def await_values(self) -> None:
        """Wait for requested values, if any are in flight."""
        token, self._pull = self._pull, None
        if token is not None:
            self.link.arrive(token)
            self._has_read()

    def _has_read(self) -> None:
        self._complete = min((clock for _, clock in self.link.client.machine.known.values()), default=0)
        self.rhythm.read(self._complete)

    def _take_fresh(self) -> bool:
        """Take the values that servers sent eagerly, if they are fresh enough and contain this worker's pushes."""
        link = self.link
        shards = range(link.shards)
        newest = [link.client.newest(shard) for shard in shards]
        for shard, new in zip(shards, newest, strict=True):
            if new is not None:
                self._take(shard, new[1])
                self._eager[shard] = new[0].version, new[0].clock
        needed, written = link.rule.needed(link.clock), link.record.written
        known = [self._eager.get(shard, (-1, -1)) for shard in shards]
        if any(version < written.get(k, 0) or clock < needed for k, (version, clock) in enumerate(known)):
            return False
        for _, clock in known:
            link.reused(link.clock - clock)
        return True

    # -- between steps -----------------------------------------------------------------------------------------------

    def put(self, states: Sequence[NDArray[np.uint8]], version: int = 0, clock: int = 0) -> None:
        """The leader puts states on the servers; then all start from them. Collective."""
        self.load(LoadRequest(whole_shards(states), [version] * len(states), clock))
        self.refresh()

    def load(self, request: LoadRequest) -> None:
        """Put states on the servers, if this worker leads. Collective."""
        if self.link.leads:
            replies = self.link.client.answer(request, "putting the parameters on the servers")
            refused = [(shard, reply.reason) for shard, reply in replies if reply.status == "refused"]
            if refused:
                shard, reason = refused[0]
                raise StrategyError(f"server {shard} cannot hold its shard: {reason}.")
        self.link.group.barrier("the parameters being on the servers")

    def refresh(self) -> None:
        """Pull the newest values; values read at an evaluation are not read again for the next steps."""
        self.link.client.answer(PullRequest(self.link.clock, anew=True), "reading the parameters")
        self._has_read()

    def together(self) -> None:
        """Wait for all pushes and pulls of all workers; then all read the same values. Collective."""
        self._settle()
        self.refresh()
        self.link.group.barrier("all having read the same")

    def states(self) -> list[Tensor]:
        """The state of all shards, on the leader. Collective."""
        self._settle()
        states: dict[int, Tensor] = {}

        def keep(shard: int, _reply: Any, state: NDArray[np.uint8]) -> None:
            states[shard] = torch.from_numpy(state.copy())

        client = self.link.client
        if self.link.leads:
            client.wait(client.ask(FetchRequest(), keep).token, "fetching the servers' state")
        self.link.group.barrier("the servers' state being fetched")
        return [states[shard] for shard in sorted(states)]

    def _settle(self) -> None:
        self.await_values()
        self.queue.settle_all()
        self.link.group.barrier("all pushes being answered")

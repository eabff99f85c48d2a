"""Pushes as letters: what a worker sends to servers where gradients are compressed, and what dense ones would take.

A push goes to several servers, waits there for other workers, and is answered along with the values asked for: the
time of a letter on its way cannot be told from the rest. So when the run is over, all workers bring their last letters
to the servers once more, all at once, and then as many numbers as they are. Servers go over both as over pushes, and
use neither.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from offbeat.protocols.partition import mixed
from offbeat.protocols.servers.worker.notices import TrialRequest, whole_shards
from offbeat.runtime.compression import CompressionAccount, Feedback, together
from offbeat.runtime.compression.account import COMPARING, timed
from offbeat.runtime.groups.group import Group
from offbeat.runtime.servers.client import Client
from offbeat.strategies.worker.compression import Compressing, compressor

Bytes = NDArray[np.uint8]


class Letters:
    """One worker's letters to all shards: what it owes each, and what they have cost and saved."""

    def __init__(self, compressions: Sequence[Compressing], sizes: Sequence[int], seed: int, rank: int) -> None:
        made = partial(compressor, compressions, rank=rank)
        self._feedbacks: list[Feedback] = [made([(size,)], seed=mixed(seed, k)) for k, size in enumerate(sizes)]
        self._last = [np.empty(0, np.uint8) for _ in sizes]
        self._account = CompressionAccount()
        self._waited = 0
        self.tried_bytes = 0
        """What was sent only to compare."""

    def write(self, parts: Sequence[Tensor], waited: bool) -> list[Bytes]:
        """What is left of each shard's numbers; it takes their place where it fits.

        `waited`: whether the step does not go on before servers have answered.
        """
        start = time.perf_counter()
        self._last = [self._written(shard, values) for shard, values in enumerate(parts)]
        coding = time.perf_counter() - start
        self._account.note(sum(p.nbytes for p in parts), sum(p.nbytes for p in self._last), coding, 0.0)
        self._waited += waited
        return self._last

    def _written(self, shard: int, values: Tensor) -> Bytes:
        raw = values.numpy().view(np.uint8)
        if not raw.size:
            return raw
        letter = self._feedbacks[shard].encode(values).numpy()
        if letter.size > raw.size:
            return letter
        raw[: letter.size] = letter
        return raw[: letter.size]

    def compare(self, client: Client, group: Group, dense: Sequence[Bytes]) -> dict[str, float]:
        """Bring the last letters to the servers, and rows of numbers, and tell what all pushes have come to.

        All workers call this together. What is under way while a worker computes costs it nothing: of both, only as
        many count as were waited for.
        """
        start, sent = time.perf_counter(), client.connection.bytes_sent
        letters = timed(group, lambda: client.answer(TrialRequest(whole_shards(self._last), True), COMPARING))
        numbers = timed(group, lambda: client.answer(TrialRequest(whole_shards(dense), False), COMPARING))
        self.tried_bytes = client.connection.bytes_sent - sent
        group.sent.totals.measured += self.tried_bytes
        figures = self._account.figures
        pushes = max(figures["sums"], 1.0)
        share, each = self._waited / pushes, sum(letters) / len(letters)
        figures["sending_seconds"] = self._waited * each
        figures["probes"], figures["dense_seconds"] = float(len(numbers)), share * sum(numbers)
        figures["compared"] = float(len(letters))
        figures["compressed_seconds"] = len(letters) * (figures["coding_seconds"] / pushes + share * each)
        figures["probing_seconds"] = time.perf_counter() - start
        return together([self._account], group)

    def state(self) -> list[dict[str, Any]]:
        """What is owed to each shard."""
        return [feedback.state_dict() for feedback in self._feedbacks]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Go on owing."""
        for feedback, own in zip(self._feedbacks, state, strict=True):
            feedback.load_state_dict(own)

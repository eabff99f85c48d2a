"""Gossip with letters: workers mix what they think of each other's models.

Every worker and its neighbours keep the same estimate of its model, and it sends a letter that brings that estimate
nearer to the truth. What a letter leaves out is still in the difference the next time, so nothing is lost, and no
memory of what is owed is needed. Since weights are the same both ways, the mean of all models is kept.

Koloskova, Stich and Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication"
(2019), algorithm 2 (CHOCO-SGD).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.runtime.compression import Coder, CompressionAccount
from offbeat.runtime.groups.neighbours import Neighbours


class Estimates:
    """One worker's estimate of its own row, and the weighted sum of those of its neighbours' rows."""

    def __init__(
        self, start: Tensor, neighbours: Neighbours, weights: Sequence[float], coder: Coder, gamma: float
    ) -> None:
        self._neighbours, self._weights, self._coder, self._gamma = neighbours, list(weights), coder, gamma
        self._total = sum(self._weights)
        self._own = start.clone()
        self._others = start * self._total
        self.account = CompressionAccount()
        """What letters have cost and saved."""

    def mix(self, row: Tensor) -> None:
        """Tell the neighbours how this row has changed, and move it towards what is known of theirs."""
        start = time.perf_counter()
        letter = self._coder.encode(row - self._own)
        self._coder.add(letter, self._own)
        sending = time.perf_counter()
        came = self._neighbours.trade(letter, self._coder.fixed, "messages to neighbours")
        sent = time.perf_counter() - sending
        for weight, other in zip(self._weights, came, strict=True):
            self._coder.add(other, self._others, weight)
        torch.add(row, self._others, alpha=self._gamma, out=row)
        row.sub_(self._own, alpha=self._gamma * self._total)
        self.account.note(row.nbytes, letter.nbytes, time.perf_counter() - start - sent, sent)

    def state_dict(self) -> dict[str, Any]:
        """What is known."""
        return {"own": self._own, "others": self._others, "coder": self._coder.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from it."""
        self._own, self._others = state["own"].clone(), state["others"].clone()
        self._coder.load_state_dict(state["coder"])

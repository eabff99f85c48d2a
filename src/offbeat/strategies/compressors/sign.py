"""One bit for each number."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.protocols import compression
from offbeat.strategies.worker.compression import Compressing


@dataclass(frozen=True)
class Sign(Compressing):
    """One bit for each number, its sign, times the mean magnitude of every 2,048 of them.

    Karimireddy et al., "Error Feedback Fixes SignSGD" (2019); Seide et al., "1-Bit SGD" (2014).
    """

    form = compression.SignFormat
    examples = ("sign", "topk(0.05) + sign")

"""Whole numbers of few bits times a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offbeat.protocols import compression
from offbeat.strategies.worker.compression import Compressing


@dataclass(frozen=True)
class Quantize(Compressing):
    """Numbers become whole numbers of 8, 4 or 2 bits, times a scale for every 2,048 of them.

    Rounded to the nearest, what is left out is added to the next step's. Rounded at random (`stochastic`) numbers are
    right on average, and nothing is remembered. (Alistarh et al., "QSGD", 2017; 2 bits: Wen et al., "TernGrad", 2017.)
    """

    bits: Literal[8, 4, 2] = 8
    """For each number."""
    stochastic: bool = False
    """Whether numbers are rounded up or down at random, with the chances that make the mean right."""

    form = compression.QuantizeFormat
    examples = ("quantize", "quantize(4)", "quantize(2, stochastic=True)", "topk(0.05) + quantize(4)")

    @property
    def owes(self) -> bool:
        """Only to the nearest: random rounding may err by more than the number itself, and would be owed ever more."""
        return self.feedback and not self.stochastic

"""The noise in gradients, from squared norms at two sizes of batch.

A gradient of b examples drawn from n has the expected squared norm |G|^2 + S (1/b - 1/n), where G is the gradient of
all of them and S the trace of the covariance of single ones. A worker's slice and the whole batch are two such
sizes, so both unknowns follow from the two norms, without bias, and the noise scale is S / |G|^2. Single steps show
little: each of the two is averaged over many before one is divided by the other.

McCandlish, Kaplan, Amodei et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1, for n without end.
Diversity: Yin, Pananjady, Lam, Papailiopoulos, Ramchandran and Bartlett, "Gradient Diversity" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.statistics import CONFIDENCE, Estimate, Floats, student

DELTA = 0.25
"""An example of the largest batch counts for at least 1 / (1 + delta) of a single one, here 80 %."""


@dataclass(frozen=True)
class Noise:
    """Estimates of the noise from the steps of a stage."""

    spread: Floats
    """The estimate of S at each step."""
    square: Floats
    """The estimate of |G|^2 at each step."""

    def __len__(self) -> int:
        return len(self.spread)

    def stages(self, count: int) -> list[Noise]:
        """Cut into the given number of consecutive stages."""
        cuts = np.array_split(np.arange(len(self)), count)
        return [Noise(self.spread[cut], self.square[cut]) for cut in cuts]

    def scale(self, confidence: float = CONFIDENCE) -> Estimate:
        """The noise scale: a ratio of means, with the interval of Fieller's theorem.

        Where |G|^2 is not significantly above 0, there is no upper end, and the value may be infinite.
        """
        count = len(self)
        spread, square = float(self.spread.mean()), float(self.square.mean())
        value = max(0.0, spread / square) if square > 0 else math.inf
        if count < 3:
            return Estimate(value, 0.0, math.inf)
        table: Floats = np.cov(self.spread, self.square) / count
        t = student(confidence, count - 1) ** 2
        # All N for which the mean of S - N |G|^2 is within its error of 0.
        a = square**2 - t * float(table[1, 1])
        b = spread * square - t * float(table[0, 1])
        c = spread**2 - t * float(table[0, 0])
        root = b * b - a * c
        if root < 0:
            return Estimate(value, 0.0, math.inf)
        if a <= 0 or square <= 0:
            low = c / (b + math.sqrt(root)) if b + math.sqrt(root) > 0 else 0.0
            return Estimate(value, min(max(0.0, low), value), math.inf)
        low, high = (b - math.sqrt(root)) / a, (b + math.sqrt(root)) / a
        return Estimate(value, max(0.0, low), max(0.0, high))


def noise_of(gradients: Mapping[str, Any]) -> Noise:
    """The noise from a run's measurements: batches, their parts, and squared norms before and after the exchange."""
    batch, parts = np.asarray(gradients["batch"]), np.asarray(gradients["parts"])
    within, joint = np.asarray(gradients["within"]), np.asarray(gradients["joint"])
    usable = (parts > 1) & (batch > parts)
    batch, parts, within, joint = batch[usable], parts[usable], within[usable], joint[usable]
    spread = (within - joint) * batch / (parts - 1)
    examples = gradients.get("examples") or math.inf
    return Noise(spread, joint - spread / batch + spread / examples)


def by_samples(checks: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """S and |G|^2 by the gradients of single examples, each the mean over some passes."""
    spreads = [one["squares"] / one["examples"] - one["joint"] / one["examples"] ** 2 for one in checks]
    squares = [one["joint"] / one["examples"] ** 2 for one in checks]
    return float(np.mean(spreads)), float(np.mean(squares))


def largest_batch(noise: float, delta: float = DELTA) -> float:
    """The largest batch that makes almost proportional progress: 1 + delta n diversity, where n diversity = 1 + noise.

    Each of its examples counts for 1 / (1 + delta) of a single one.
    """
    return 1 + delta * (1 + noise)


def worth(batch: float, noise: float) -> float:
    """The worth of an example of such a batch, relative to a single one: (1 + noise) / (batch + noise)."""
    return 1.0 if math.isinf(noise) else (1 + noise) / (batch + noise)

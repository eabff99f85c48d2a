"""How long a server waits for clients that give signs of life and do not finish: by how long others took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

LONGEST: Final = 86_400.0
"""Seconds after which any round closes that has no deadline."""
REMEMBERED: Final = 10
"""Rounds whose slowest clients are remembered."""
MOST_DOUBLED: Final = 10
"""Rounds without an update that each double the wait."""


class Patience(Struct, frozen=True):
    """The rule: `factor` times as long as the slowest client took, in this round and the last ten."""

    factor: float
    least: float
    """Seconds that are waited at least, as network and processes have delays of their own."""

    def wait(self, earlier: Sequence[float], took: Sequence[float], asked: int, fruitless: int) -> float:
        """Seconds after which a client is not waited for any more; a day while nothing is known.

        Args:
            earlier: What the slowest client took in each of the last rounds.
            took: What clients of this round took. They count when half of the clients that were asked are done.
            asked: How many were asked.
            fruitless: Rounds in a row without an update: each doubles the wait, in case all clients became slower.

        """
        known = [*earlier[-REMEMBERED:], *(took if 2 * len(took) >= asked - 1 else ())]
        if not known:
            return LONGEST
        return min(LONGEST, max(self.least, self.factor * max(known)) * 2.0 ** min(fruitless, MOST_DOUBLED))

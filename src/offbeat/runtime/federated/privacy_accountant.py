"""What rounds of a private run have spent: epsilon, by numerical composition of privacy losses (dp-accounting's PLD).

A round is a Gaussian mechanism on a Poisson sample of clients; neighbours differ by one client with all its data.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, Final, cast

from offbeat.errors import StrategyError, UsageError

INTERVAL: Final = 1e-3
"""Width of the grid of privacy losses: epsilon is rounded up, by about as much in total. dp-accounting's is 1e-4."""
_QUIETEST: Final = 0.1  # Least noise that a calibration gives: with less, epsilon is in the thousands.
_LOUDEST: Final = 10_000.0
_TOLERANCE: Final = 1e-3
_MOST_ROUNDS: Final = 10_000_000


class PrivacyAccountant:
    """Epsilon by the number of rounds, for rounds that are all alike.

    Args:
        noise: Standard deviation of the noise in a round's sum, as a multiple of the clipping bound.
        probability: With which each client takes part in a round.
        delta: Probability with which the bound may fail.
        interval: Width of the grid of privacy losses.

    """

    def __init__(self, noise: float, probability: float, delta: float, interval: float = INTERVAL) -> None:
        self._delta = delta
        self._round = _distributions().from_gaussian_mechanism(
            noise, sampling_prob=probability, value_discretization_interval=interval
        )

    def epsilon(self, rounds: int) -> float:
        """What this many rounds spend."""
        return float(self._round.self_compose(rounds).get_epsilon_for_delta(self._delta)) if rounds else 0.0

    def rounds(self, epsilon: float) -> int:
        """The most rounds that spend no more than this."""
        most = 1
        while most < _MOST_ROUNDS and self.epsilon(most) <= epsilon:
            most *= 2
        least = most // 2
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.epsilon(middle) <= epsilon else (least, middle)
        return least


@functools.lru_cache(maxsize=16)
def calibrated_noise(epsilon: float, probability: float, delta: float, rounds: int) -> float:
    """The least noise with which this many rounds spend no more than epsilon, to a part in a thousand."""
    from scipy.optimize import brentq  # Late: it takes longer to import than the rest of offbeat.

    def excess(logarithm: float) -> float:
        spent = PrivacyAccountant(math.exp(logarithm), probability, delta).epsilon(rounds)
        return math.log(max(spent, 1e-9) / epsilon)

    # Downwards from much noise, because little noise is slow to account for.
    high = math.log(max(1.0, 4 * probability * math.sqrt(rounds * math.log(1 / delta)) / epsilon))
    while excess(high) > 0:
        high += 1
        if high > math.log(_LOUDEST):
            raise StrategyError(
                f"privacy: epsilon={epsilon:g} with delta={delta:g} over {rounds:,} rounds needs noise of more than "
                f"{_LOUDEST:,.0f} times the clipping bound, in which nothing is learned. Use fewer rounds, a smaller "
                f"fraction of the clients, or a larger epsilon."
            )
    low = high - 0.5
    while excess(low) < 0:
        high = low
        if low == math.log(_QUIETEST):
            return _QUIETEST
        low = max(low - 0.5, math.log(_QUIETEST))
    noise = math.exp(cast("float", brentq(excess, low, high, xtol=_TOLERANCE / 2)) + _TOLERANCE)
    return math.ceil(noise * 1e4) / 1e4  # The same on machines whose arithmetic differs in the last bits.


def check_installed() -> None:
    """Refuse privacy without the library that accounts for it."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise UsageError(
            "privacy(...) is accounted for by the package dp-accounting, which is not installed. Install it with "
            "pip install 'offbeat[federated]'."
        )


def _distributions() -> Any:
    """The module of privacy loss distributions, which takes a second to import."""
    check_installed()
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution

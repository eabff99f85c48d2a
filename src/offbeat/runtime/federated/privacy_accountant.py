"""What rounds of a private run have spent: epsilon, by numerical composition of privacy losses (dp-accounting's PLD).

A round is a Gaussian mechanism on a Poisson sample of clients; neighbours differ by one client with all its data. Where
it is known who takes part, as under secure aggregation, sampling hides nobody, and the account is another.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from abc import ABC, abstractmethod
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import StrategyError, UsageError

INTERVAL: Final = 1e-3
"""Width of the grid of privacy losses: epsilon is rounded up, by about as much in total. dp-accounting's is 1e-4."""
_QUIETEST: Final = 0.1  # Least noise that a calibration gives: with less, epsilon is in the thousands.
_LOUDEST: Final = 10_000.0
_TOLERANCE: Final = 1e-3
_MOST_ROUNDS: Final = 10_000_000
_IGNORED: Final = 1e-4  # Share of delta that rare numbers of rounds, far above the mean, may use up.


class RoundAccountant(ABC):
    """Epsilon by the number of rounds, for rounds that are all alike."""

    @abstractmethod
    def epsilon(self, rounds: int) -> float:
        """What this many rounds spend."""

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


class PrivacyAccountant(RoundAccountant):
    """Accounts for rounds of which only the models are seen: who takes part stays hidden.

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


class ParticipantAccountant(RoundAccountant):
    """Accounts for rounds of which it is known who takes part.

    Neighbours differ in one client's updates, which are its own or 0; it takes part, and adds its noise, either way. Of
    `rounds` it takes part in a binomial number, m, and m Gaussian mechanisms are one with noise / sqrt(m).
    """

    def __init__(self, noise: float, probability: float, delta: float) -> None:
        self._noise, self._probability, self._delta = noise, probability, delta

    def epsilon(self, rounds: int) -> float:
        """What this many rounds spend, rounded up by a part in a million."""
        if not rounds:
            return 0.0
        from scipy.stats import binom  # Late: it takes longer to import than the rest of offbeat.

        ignored = self._delta * _IGNORED
        least, most = (int(binom.ppf(share, rounds, self._probability)) for share in (ignored, 1 - ignored))
        # Fewer count as `least`, and in more anything may be revealed.
        times = np.arange(max(1, least), max(1, most) + 1)
        chances = binom.pmf(times, rounds, self._probability)
        chances[0] = binom.cdf(times[0], rounds, self._probability) - (binom.pmf(0, rounds, self._probability))
        beyond = float(binom.sf(times[-1], rounds, self._probability))

        def delta(epsilon: float) -> float:
            return beyond + float(chances @ _gaussian_delta(epsilon, np.sqrt(times) / self._noise))

        high = 1.0
        while delta(high) > self._delta:
            high *= 2
        low = 0.0
        while high - low > 1e-6 * high and delta(low) > self._delta:
            middle = (low + high) / 2
            low, high = (middle, high) if delta(middle) > self._delta else (low, middle)
        return low if delta(low) <= self._delta else high


def _gaussian_delta(epsilon: float, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """The delta at epsilon of Gaussian noise of deviation 1 over vectors of these lengths (Balle and Wang 2018)."""
    from scipy.special import log_ndtr, ndtr

    half, rest = lengths / 2, epsilon / lengths
    return np.asarray(ndtr(half - rest) - np.exp(epsilon + log_ndtr(-half - rest)))


def accountant(noise: float, probability: float, delta: float, *, participants_known: bool) -> RoundAccountant:
    """The accountant for rounds of which it is known who takes part, or not."""
    return (ParticipantAccountant if participants_known else PrivacyAccountant)(noise, probability, delta)


@functools.lru_cache(maxsize=16)
def calibrated_noise(
    epsilon: float, probability: float, delta: float, rounds: int, *, participants_known: bool = False
) -> float:
    """The least noise with which this many rounds spend no more than epsilon, to a part in a thousand."""
    from scipy.optimize import brentq  # Late: it takes longer to import than the rest of offbeat.

    def excess(logarithm: float) -> float:
        noise = math.exp(logarithm)
        spent = accountant(noise, probability, delta, participants_known=participants_known).epsilon(rounds)
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

"""Differential privacy of clients: a setting of `federated`."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import StrategyError
from offbeat.strategies._base import Setting

_LEAST_NOISE = 0.1
_MOST_NOISE = 10_000.0


@dataclass(frozen=True)
class Privacy(Setting):
    """The models of a run hardly depend on whether any single client took part in it: (epsilon, delta)-privacy.

    Say what may be spent, `epsilon`, or how much noise is added in each round, `noise`.
    """

    epsilon: float | None = None
    """What the run may spend; the noise follows from it and from the number of rounds."""
    delta: float = 1e-5
    """Probability with which the bound by epsilon may fail; below 1 / clients."""
    clip: float = 1.0
    """Largest norm of an update; longer ones are shortened to it."""
    noise: float | None = None
    """Standard deviation of the noise in the sum of a round's updates, as a multiple of `clip`."""
    budget: float | None = None
    """With `noise`: the epsilon at which the run stops; None: it is accounted for, and nothing stops."""

    _ranges = (
        ("epsilon", lambda epsilon: epsilon is None or 0.01 <= epsilon <= 100, "it is a number from 0.01 to 100"),
        ("delta", lambda delta: 1e-15 <= delta < 1, "it is a probability, from 1e-15 to below 1"),
        (
            "clip",
            lambda clip: 1e-6 <= clip <= 1e6,
            "noise is measured by the longest update: a bound is from 1e-6 to 1e6",
        ),
        (
            "noise",
            lambda noise: noise is None or _LEAST_NOISE <= noise <= _MOST_NOISE,
            f"it is from {_LEAST_NOISE} to {_MOST_NOISE:,.0f} times the clipping bound: with less nothing is private",
        ),
        ("budget", lambda budget: budget is None or 0.01 <= budget <= 100, "it is an epsilon from 0.01 to 100"),
    )

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other."""
        super().__post_init__()
        if self.epsilon is None and self.noise is None:
            raise StrategyError(
                "privacy: neither epsilon nor noise is given. Say what the run may spend, as privacy(epsilon=8), or "
                "how much noise a round adds, as privacy(noise=1.1)."
            )
        if self.epsilon is not None and self.noise is not None:
            raise StrategyError(
                f"privacy: epsilon={self.epsilon:g} and noise={self.noise:g} are given, but each follows from the "
                f"other. Keep one; to stop a run with this noise at an epsilon, say privacy(noise={self.noise:g}, "
                f"budget={self.epsilon:g})."
            )
        if self.budget is not None and self.noise is None:
            raise StrategyError(
                f"privacy: budget={self.budget:g} is for a given noise, and with epsilon={self.epsilon:g} the run "
                f"stops at that anyway. Leave it out."
            )

    @property
    def limit(self) -> float | None:
        """The epsilon at which the run stops."""
        return self.budget if self.epsilon is None else self.epsilon

"""What is fixed about federated rounds before the first one: how many clients take part, and how long they may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.limits import SIMULATED_WORKERS, above_zero, seconds, whole

MOST_PATIENT: Final = 1_000
"""Times as long as others that a client may take at most."""
LONGEST: Final = 86_400.0
"""Seconds after which any round closes that has no deadline."""
REMEMBERED: Final = 10
"""Rounds whose slowest clients are remembered."""
MOST_DOUBLED: Final = 10
"""Rounds without an update that each double the wait."""


class ClientSpeeds(Struct, frozen=True):
    """How long clients take, in virtual time. Speed and bandwidth of a client are fixed and lognormally distributed."""

    seconds: float = 1.0  # Median over the clients, of training on the mean number of examples.
    sigma: float = 0.0  # Standard deviation of the logarithm; 0: all clients are equally fast.
    bandwidth: float = math.inf  # Median bytes per second of a client's link, each way.

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        seconds("the clients' median training time", self.seconds)
        if not 0 <= self.sigma < 10:
            raise UsageError(f"sigma {self.sigma!r} of the clients' speeds makes no sense: it must be from 0 to 10.")
        if self.bandwidth != math.inf:
            above_zero("the clients' bandwidth", self.bandwidth, "a number of bytes per second above 0")


class RoundPlan(Struct, frozen=True, kw_only=True):
    """How federated rounds go."""

    clients: int  # Numbered from 0.
    fraction: float = (
        0.1  # Of the clients: whose updates a round needs; under Poisson sampling, each one's probability.
    )
    poisson: bool = False  # Each client takes part independently of the others; otherwise a fixed number does.
    over: float = 1.0  # Times as many clients are selected as are needed; the first updates count.
    deadline: float | None = None  # Seconds after which a round closes with the updates that have come.
    fewest: int = 1  # Updates without which a round changes nothing.
    speeds: ClientSpeeds | None = None  # In virtual time; None: as fast as each other.
    dropout: float = (
        0.0  # In virtual time, the probability that a selected client disappears before its update arrives.
    )
    buffer: int | None = (
        None  # Asynchronous (FedBuff): the server applies this many updates at once; None: synchronous.
    )
    beat: float = 5.0  # Seconds between two signs of life of a client.
    silence: float = 30.0  # Seconds without one after which a round no longer waits for a client.
    patience: float | None = (
        None  # Without a deadline, a client may take this many times as long as others did; None: for ever.
    )

    def __post_init__(self) -> None:
        """Refuse what is out of range, or makes no sense together."""
        whole("clients", self.clients, SIMULATED_WORKERS)
        _share("fraction", self.fraction, least_allowed=False)
        _share("dropout", self.dropout)
        if not 1 <= self.over <= self.clients:
            raise UsageError(
                f"over={self.over!r} makes no sense: selecting fewer clients than a round needs, or more than the "
                f"{self.clients:,} there are. Give 1 (no more than needed), or for example 1.3."
            )
        if self.deadline is not None:
            seconds("deadline", self.deadline)
        if self.patience is not None and not 1 <= self.patience <= MOST_PATIENT:
            raise UsageError(
                f"patience={self.patience!r} makes no sense: a client may take this many times as long as the slowest "
                f"of the others, 1 to {MOST_PATIENT:,} times."
            )
        seconds("beat", self.beat)
        seconds("silence", self.silence)
        if self.silence < 2 * self.beat:
            raise UsageError(
                f"silence={self.silence:g} is too short for signs of life every {self.beat:g} s: one lost message "
                f"would exclude a client. Give {2 * self.beat:g} s or more."
            )
        most = self.clients if self.poisson else self.needed
        whole(
            "fewest",
            self.fewest,
            most,
            why=f"of {self.clients:,} clients fraction={self.fraction:g} selects {self.needed:,}" * (not self.poisson),
        )
        if self.poisson and self.over != 1:
            raise UsageError(
                f"over={self.over:g} cannot go with Poisson sampling: which clients count would depend on their speed, "
                f"and the privacy that is accounted for would be wrong. Leave it at 1."
            )
        if self.buffer is not None:
            self._check_buffer(self.buffer)

    def _check_buffer(self, buffer: int) -> None:
        whole("buffer", buffer, self.clients, why="a client is in the buffer once at most")
        for name, is_set in (("poisson", self.poisson), ("over", self.over != 1), ("fewest", self.fewest != 1)):
            if is_set:
                raise UsageError(
                    f"{name} cannot go with buffer={buffer}: an asynchronous server keeps clients training, and "
                    f"applies their updates by {buffer}. Leave it out."
                )

    @property
    def needed(self) -> int:
        """Number of updates that a round waits for, or of clients that train at the same time (FedBuff)."""
        return max(1, int(self.fraction * self.clients + 0.5))

    @property
    def selected(self) -> int:
        """Number of clients that are selected for a round."""
        return min(self.clients, max(self.needed, math.ceil(round(self.over * self.needed, 6))))


def round_failure(plan: RoundPlan, selected: int, came: int) -> str:
    """Why a round makes no update, from the number of clients that were selected and of updates that came; or empty."""
    if not selected:
        return "no client was selected"
    if came < plan.fewest:
        return f"{came:,} of {selected:,} clients sent an update in time, and a round needs {plan.fewest:,}"
    return ""


def _share(name: str, value: float, *, least_allowed: bool = True) -> None:
    if isinstance(value, bool) or not (0 <= value <= 1) or (value == 0 and not least_allowed):
        raise UsageError(
            f"{name}={value!r} makes no sense: it must be {'from 0' if least_allowed else 'above 0, and up'} to 1."
        )


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

"""Private sums of updates: each is clipped, and noise is added to their sum.

McMahan et al., "Learning Differentially Private Recurrent Language Models" (2018), algorithm 1, with the estimator of a
fixed denominator. Sum and noise are integers on one grid, so the result does not show which floating-point numbers it
was made from (Mironov, "On Significance of the Least Significant Bits for Differential Privacy", 2012).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from offbeat.errors import StrategyError
from offbeat.runtime.federated.aggregation import (
    AddUp,
    Aggregation,
    Agree,
    ClientUpdate,
    Selected,
    UpdateLayout,
    here,
)
from offbeat.runtime.federated.exact_sum import ExactSum
from offbeat.runtime.federated.noise import NoiseSource
from offbeat.runtime.federated.privacy_accountant import RoundAccountant, accountant, calibrated_noise

_MARGIN: Final = 1 - 2.0**-20
"""Updates are clipped to this share of the bound, so that rounding never lifts one above it."""
_WHOLE: Final = 16.0
"""Weight for which sums are prepared. In units of the clipping bound no number exceeds 1, not the 2^20 that sums allow
for, so there is room for 16 million clients, on a grid of 2^-36."""


@dataclass(frozen=True)
class PrivacyTerms:
    """What is fixed about the privacy of a run before its first round."""

    clients: int
    """Number of clients."""
    probability: float
    """With which each of them takes part in a round."""
    delta: float
    """Probability with which the bound by epsilon may fail."""
    clip: float
    """Largest norm of an update."""
    noise: float | None
    """Standard deviation of the noise in a sum, as a multiple of `clip`; None: it follows from `limit`."""
    limit: float | None
    """The epsilon at which the run stops."""
    participants_known: bool = False
    """Whether it is known who takes part in a round, as under secure aggregation, so that sampling hides nobody."""

    @property
    def expected(self) -> float:
        """Number of clients in an average round, by which every sum is divided."""
        return self.clients * self.probability

    @property
    def doubt(self) -> str:
        """What is weak about the promise; empty if nothing is."""
        if self.delta <= 1 / self.clients:
            return ""
        return (
            f"privacy with delta={self.delta:g} and {self.clients:,} clients promises little: publishing a client "
            f"drawn at random would keep it, too. Use a delta well below {1 / self.clients:g}."
        )


class PrivacyLedger:
    """The rounds that have been spent, and how many may be."""

    def __init__(self, terms: PrivacyTerms, repeatable: bool) -> None:
        self.terms, self.noise = terms, terms.noise
        self.allowed: int | None = None
        """Rounds that stay within the budget; None: as many as you like."""
        self.spent = 0
        """Rounds that have begun."""
        self._repeatable = repeatable
        self._accountant: RoundAccountant | None = None

    def settle(self, rounds: int | None) -> None:
        """Before the first round: find the noise, and how many rounds may be made with it. Once in a run's life."""
        terms = self.terms
        if self.noise is None:
            if rounds is None or terms.limit is None:
                raise StrategyError(
                    "privacy: the noise for an epsilon follows from the number of rounds, and this run has no limit. "
                    "Give steps or epochs, or say privacy(noise=…, budget=…)."
                )
            self.noise = calibrated_noise(
                terms.limit, terms.probability, terms.delta, rounds, participants_known=terms.participants_known
            )
            self.allowed = rounds
        elif self.allowed is None and terms.limit is not None:
            self.allowed = self.accountant.rounds(terms.limit)
            if not self.allowed:
                raise StrategyError(
                    f"privacy: the first round with noise={self.noise:g} would spend epsilon "
                    f"{self.accountant.epsilon(1):.3g}, and the budget is {terms.limit:g}. Use more noise, or a "
                    f"smaller fraction of the clients."
                )

    def prepare(self, rounds: int | None, agree: Agree) -> None:
        """Settle noise and number of rounds, in the one process that accounts for them."""

        def settle() -> Sequence[float]:
            self.settle(rounds)
            return self.deviation, -1 if self.allowed is None else self.allowed

        self.noise, allowed = agree(settle)
        self.allowed = None if allowed < 0 else int(allowed)

    @property
    def deviation(self) -> float:
        """The noise, which is settled by now."""
        if self.noise is None:
            raise RuntimeError("the noise of a round is asked for before it is settled: call prepare() first.")
        return self.noise

    def begin(self, number: int) -> None:
        """A round begins; from here on it is spent, whatever becomes of it.

        With noise that can be repeated, a round that is repeated after a kill reveals the same numbers once more, and
        counts once.
        """
        self.spent = max(self.spent, number) if self._repeatable else self.spent + 1

    @property
    def accountant(self) -> RoundAccountant:
        """Accounts for rounds with the noise of this run."""
        if self._accountant is None:
            terms = self.terms
            self._accountant = accountant(
                self.deviation, terms.probability, terms.delta, participants_known=terms.participants_known
            )
        return self._accountant

    @property
    def epsilon(self) -> float:
        """What has been spent."""
        return self.accountant.epsilon(self.spent)

    @property
    def exhausted(self) -> str:
        """Why no further round may be made; empty if one may."""
        if self.allowed is None or self.spent < self.allowed:
            return ""
        return (
            f"the privacy budget of epsilon {self.terms.limit:g} is spent: {self.spent:,} rounds were made, and one "
            f"more would exceed it"
        )

    def notes(self) -> dict[str, Any]:
        """What the result says of privacy."""
        terms = self.terms
        return {
            "epsilon": self.epsilon,
            "privacy": {"delta": terms.delta, "clip": terms.clip, "noise": self.noise, "rounds": self.spent},
        }

    def state_dict(self) -> dict[str, Any]:
        """The noise, and the rounds that are spent and allowed."""
        return {"noise": self.noise, "allowed": self.allowed, "spent": self.spent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue; the noise stays as it was, even if the run is to be longer now."""
        self.noise, self.allowed = state["noise"], state["allowed"]
        self.spent = max(self.spent, int(state["spent"]))
        self._accountant = None


class PrivateMean(Aggregation):
    """The clipped sum of updates with noise, divided by the expected number of clients: all weigh the same.

    Every round moves the model, by noise alone if no client has answered: otherwise it would show that.
    """

    moves_always = True

    def __init__(self, layout: UpdateLayout, terms: PrivacyTerms, source: NoiseSource) -> None:
        self._layout, self._terms, self._source = layout, terms, source
        self.ledger = PrivacyLedger(terms, source.repeatable)
        """What is spent."""
        self._row = torch.zeros(layout.size + 2, dtype=torch.int64)
        self._counts = self._row[layout.size :]
        self._sum = ExactSum(self._row[: layout.size], _WHOLE)
        self._number = 0

    def prepare(self, rounds: int | None, agree: Agree = here) -> None:
        """Settle noise and number of rounds, in the one process that accounts for them."""
        self.ledger.prepare(rounds, agree)

    def begin(self, selected: Selected) -> None:
        """Start from 0, and note the round as spent."""
        self._row.zero_()
        self._sum.begin(_WHOLE)
        self._number = selected.number
        self.ledger.begin(selected.number)

    def add(self, sent: ClientUpdate) -> bool:
        """Add an update, clipped; examples do not matter."""
        if not ExactSum.fits(sent.update):
            return False
        self._sum.add(sent.update, clipping_factor(sent.update, self._terms.clip) / self._terms.clip)
        self._counts += torch.tensor([1, sent.examples])
        return True

    def combine(self, add_up: AddUp) -> None:
        """One sum of integers."""
        self._sum.settle()
        add_up(self._row, "the sum of updates")

    def mean(self) -> tuple[Tensor, Tensor | None]:
        """Add the noise, once for all workers, and divide."""
        noise, terms = self.ledger.deviation, self._terms
        drawn = self._source.normal(self._number, self._layout.size).mul_(noise * self._sum.unit)
        total = self._sum.settle()
        total += drawn.round_().long()
        return self._sum.read().mul_(terms.clip / terms.expected).to(self._layout.dtype), None

    @property
    def updates(self) -> int:
        """Updates in the sum."""
        return int(self._counts[0])

    @property
    def examples(self) -> int:
        """Examples that their clients went through."""
        return int(self._counts[1])

    @property
    def loss(self) -> float:
        """Unknown: epsilon does not cover it."""
        return float("nan")

    @property
    def exhausted(self) -> str:
        """Why no further round may be made."""
        return self.ledger.exhausted

    def figures(self) -> dict[str, float]:
        """What is spent."""
        return {"epsilon": self.ledger.epsilon}

    def notes(self) -> dict[str, Any]:
        """What the result says of privacy."""
        return self.ledger.notes()

    def state_dict(self) -> dict[str, Any]:
        """The ledger."""
        return self.ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the ledger."""
        self.ledger.load_state_dict(state)


def clipping_factor(update: Tensor, clip: float) -> float:
    """What an update is multiplied by, so that its norm is `clip` at most."""
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    return 1.0 if norm <= clip * _MARGIN else clip * _MARGIN / norm

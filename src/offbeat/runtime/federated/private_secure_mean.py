"""Private sums by secure aggregation: each client clips its update and adds a share of the noise before it is masked.

The shares of the fewest clients whose sum is ever revealed make up the promised noise, so every sum has at least that.

Rounding costs no privacy. A client sends floor(update + noise + u), u uniform on [0, 1), in units of the encoding. The
characteristic function of a rounded number is that of update + noise + u - u', u' uniform as well, repeated every 2 pi;
that of a sum of rounded numbers is the product of these. Leave out of the product what mixes different repetitions, and
it is that of floor(updates + noises + 2n - 1 uniform numbers), which is computed from the result of the Gaussian
mechanism. With noise of deviation d at each of n clients, what is left out is exp(-2 pi^2 d^2 s (n - s) / n), if s of
them are at another repetition: at most exp(-pi^2 d^2), for two clients, and 1e-69 for d = 4. (The error of the sum of n
discrete Gaussians in Kairouz, Liu and Steinke, "The Distributed Discrete Gaussian Mechanism for Federated Learning with
Secure Aggregation", 2021, is bounded by the same terms.) Uniform numbers that are known to others change nothing in
this; but they also smooth the grid of floating-point noise, so real clients draw them in secret.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import UsageError
from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.secure.common_scale import CommonScale
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.plan import SecureEncoding, lowest_threshold
from offbeat.runtime.federated.aggregation import AddUp, Agree, ClientUpdate, Selected, UpdateLayout, here
from offbeat.runtime.federated.noise import NoiseSource, noise_share
from offbeat.runtime.federated.privacy import PrivacyLedger, PrivacyTerms, clipping_factor
from offbeat.runtime.federated.round_scale import RoundScale
from offbeat.runtime.federated.secure_mean import KeptNumbers, SecureMean, decoded

TAIL: Final = 12.0
"""Standard deviations of its noise for which a client's integers have room; beyond is clipped, with chance 4e-33."""
LEAST_DEVIATION: Final = 4.0
"""Units of the encoding that the deviation of a client's noise must be, so that rounding does not show: error 1e-69."""


class PrivateSecureMean(SecureMean):
    """The sum of clipped updates and of their clients' noise, divided by the expected number: all weigh the same.

    The server knows who takes part, and whether a round fails; so the account takes both to be known.
    """

    weighs = False
    two_thirds = True

    def __init__(
        self,
        layout: UpdateLayout,
        plan: RoundPlan,
        seed: int,
        terms: PrivacyTerms,
        source: NoiseSource,
        kept: KeptNumbers | None = None,
        scale: RoundScale | None = None,
    ) -> None:
        super().__init__(layout, plan, seed, kept, scale)
        self._terms, self._source, self._rounding_seed = terms, source, source.rounding_seed
        # Whatever its noise comes from: a round has one secure sum, which outlives the server's process.
        self.ledger = PrivacyLedger(terms, repeatable=True)
        """What is spent."""

    def prepare(self, rounds: int | None, agree: Agree = here) -> None:
        """Settle noise and number of rounds, and refuse so many clients that their noise would be rounded away."""
        self.ledger.prepare(rounds, agree)
        usual = self._plan.selected
        self._encoding_for(Selected(0, range(usual), [1.0] * usual))

    def begin(self, selected: Selected) -> None:
        """Start from 0, and note the round as spent."""
        super().begin(selected)
        self.ledger.begin(selected.number)

    def add(self, sent: ClientUpdate) -> bool:
        """Add an update; of one with NaN only the noise, because a sum without it would show that."""
        sound = _finite(sent.update)
        self._put(self.encode(sent), sent.client, [sound, sent.examples * sound, 0])
        return sound

    def combine(self, add_up: AddUp) -> None:
        """One sum of integers."""
        super().combine(add_up)
        # By noise alone, too, if all updates have NaN.
        self.moves_always = not self.failure

    def mean(self) -> tuple[Tensor, Tensor | None]:
        """The sum, divided by the expected number of clients."""
        mean, count = decoded(self._sum, self.encoding)
        total = mean * (count / self._terms.expected)
        return self._kept.spread(total, self._layout, self._selected.number), None

    @property
    def updates(self) -> int:
        """Updates in the sum that had no NaN; of a sum from elsewhere that is not known, and all count."""
        return int(self._row[self.encoding.words]) if len(self._row) else len(self._came)

    @property
    def examples(self) -> int:
        """Examples that their clients went through; unknown, 0, of a sum from elsewhere."""
        return int(self._row[self.encoding.words + 1]) if len(self._row) else 0

    @property
    def loss(self) -> float:
        """Unknown: epsilon does not cover it."""
        return math.nan

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

    def _numbers(self, sent: ClientUpdate) -> NDArray[np.float64]:
        """The update, clipped, with its client's share of the noise."""
        clip, number, size = self._terms.clip, self._selected.number, self._kept.count
        update = sent.update if _finite(sent.update) else torch.zeros(self._layout.size)
        taken = torch.from_numpy(self._kept.taken(update, number))
        deviation, sharers = self.ledger.deviation * clip, lowest_threshold(len(self._selected.clients))
        share = noise_share(self._source, number, sent.client, size, deviation, sharers)
        return share.add_(taken, alpha=clipping_factor(taken, clip)).numpy()

    def _encoding_for(self, selected: Selected) -> SecureEncoding:
        clients = max(1, len(selected.clients))
        deviation = self.ledger.deviation * self._terms.clip / math.sqrt(lowest_threshold(clients))
        bound = self._terms.clip + TAIL * deviation
        count = self._kept.count
        encoding: SecureEncoding = (
            FixedPoint(length=count, clients=clients, bound=bound)
            if self.scale is None
            else CommonScale(length=count, clients=clients, bound=bound, bits=self.scale.bits)
        )
        if (units := deviation / bound * encoding.largest) < LEAST_DEVIATION:
            raise UsageError(
                f"privacy with secure=True: of noise={self.ledger.deviation:g} the share of each of {clients:,} "
                f"clients is {units:.2g} units of the integers that they send, and would be rounded away below "
                f"{LEAST_DEVIATION:g}. Use more noise or a smaller fraction."
            )
        return encoding


def _finite(update: Tensor) -> bool:
    return bool(update.isfinite().all())

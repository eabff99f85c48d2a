"""The mean of updates by secure aggregation: each is encoded as real clients do, and only their sum is decoded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import NonFiniteError, UsageError
from offbeat.protocols.federated.plan import RoundPlan
from offbeat.protocols.federated.secure.common_scale import CommonScale
from offbeat.protocols.federated.secure.fixed_point import FixedPoint
from offbeat.protocols.federated.secure.integers import Row
from offbeat.protocols.federated.secure.plan import (
    FEWEST_CLIENTS,
    NEIGHBOURS,
    SecureEncoding,
    SecureRound,
    lowest_threshold,
    neighbourhoods,
    short_of_holders,
)
from offbeat.protocols.federated.secure.traffic import client_traffic
from offbeat.protocols.partition import mixed
from offbeat.runtime.federated.aggregation import AddUp, Aggregation, ClientUpdate, Selected, UpdateLayout
from offbeat.runtime.federated.round_scale import RoundScale

ROUNDING: Final = 0x5EC1  # Which of a seed's streams of random numbers this is.
BOUND: Final = 8.0
"""Largest magnitude of a number of an update; larger ones are clipped to it."""
LOSS_BOUND: Final = 128.0
"""Largest loss; larger ones count as much. It is scaled and summed as one more number of the update."""
RARE: Final = 4.5
"""Standard deviations by which the neighbourhood of a client is hardly ever worse off than others."""
COUNTS: Final = 3
"""Numbers behind an encoded sum: updates, examples gone through, and clipped numbers."""
RARELY: Final = 0.01
"""Share of rounds that may have too few clients by the chance of Poisson sampling."""


def check_survivors(plan: RoundPlan) -> None:
    """Refuse rounds in which too few clients are selected, or too few would usually stay to the end."""
    if plan.selected < FEWEST_CLIENTS:
        raise UsageError(
            f"secure=True needs {FEWEST_CLIENTS} clients in a round, and {plan.selected} are selected: of two, each "
            f"would learn the other's update from the sum. Raise clients or fraction."
        )
    if plan.poisson and (chance := _fewer_than(FEWEST_CLIENTS, plan.clients, plan.fraction)) > RARELY:
        raise UsageError(
            f"with Poisson sampling fraction={plan.fraction:g} selects {plan.clients * plan.fraction:,.3g} of "
            f"{plan.clients:,} clients on average, but fewer than the {FEWEST_CLIENTS} that secure=True needs in "
            f"{chance:.2g} of all rounds, which would end without a sum; {RARELY:g} are accepted. Raise clients or "
            f"fraction."
        )
    least, why = _fewest_staying(plan.selected)
    if plan.needed < least:
        raise UsageError(
            f"over={plan.over:g} selects {plan.selected:,} clients, of which the first {plan.needed:,} count, and "
            f"secure=True needs {least:,}, {why}. Lower it."
        )
    staying = (1 - plan.dropout) * plan.selected
    if staying < least:
        raise UsageError(
            f"dropout={plan.dropout:g} leaves {staying:,.4g} of {plan.selected:,} clients on average, and secure=True "
            f"needs {least:,}, {why}: most rounds would end without a sum. Lower it."
        )


def _fewest_staying(selected: int) -> tuple[int, str]:
    """Of the selected clients, how many must stay so that secrets can be recovered, and why."""
    if selected <= NEIGHBOURS + 1:
        return lowest_threshold(selected), "more than two thirds"
    others = lowest_threshold(NEIGHBOURS + 1) - 1
    # Around each client as many stay as of all, give or take a few.
    share = next(
        share
        for share in np.linspace(2 / 3, 1, 1000)
        if NEIGHBOURS * share - RARE * math.sqrt(NEIGHBOURS * share * (1 - share)) >= others
    )
    return math.ceil(share * selected), f"so that more than two thirds of every client's {NEIGHBOURS} neighbours stay"


def _fewer_than(count: int, clients: int, probability: float) -> float:
    """The chance that fewer of the clients are selected, if each is with the same probability."""
    return sum(
        math.comb(clients, few) * probability**few * (1 - probability) ** (clients - few)
        for few in range(min(count, clients + 1))
    )


@dataclass(frozen=True)
class KeptNumbers:
    """Which numbers of an update are sent: the same for all clients of a round, so that they can be summed."""

    count: int
    """How many, in every round."""
    places: Callable[[int], NDArray[np.int64] | slice]
    """Where they are, by the number of the round."""

    def taken(self, update: Tensor, number: int) -> NDArray[np.float64]:
        """Of an update, what is sent in a round; refused if it has NaN, also where no number is sent."""
        numbers = update.detach().cpu().to(torch.float64).numpy()
        if not np.isfinite(numbers).all():
            raise NonFiniteError("an update has NaN or infinite numbers, which cannot be summed: it is not sent.")
        return numbers[self.places(number)]

    def spread(self, numbers: NDArray[np.float64], layout: UpdateLayout, number: int) -> Tensor:
        """The update of which these numbers were sent, and others are 0."""
        row = np.zeros(layout.size)
        row[self.places(number)] = numbers
        return torch.from_numpy(row).to(layout.dtype)


class SecureMean(Aggregation):
    """The mean by weight of encoded updates, whose integers are summed modulo 2^32.

    In a simulation all workers add encoded updates without masks: these cancel, so that the sum has the same bits. In a
    deployment clients `encode`, and the server hands over the unmasked sum with `receive`.
    """

    weighs: ClassVar[bool] = True
    """Whether clients count by their examples, not all the same."""
    two_thirds: ClassVar[bool] = False
    """Whether more than two thirds of all clients must stay, not only of each client's neighbours."""

    def __init__(
        self,
        layout: UpdateLayout,
        plan: RoundPlan,
        seed: int,
        kept: KeptNumbers | None = None,
        scale: RoundScale | None = None,
    ) -> None:
        self._layout, self._plan, self._seed = layout, plan, seed
        self._kept = kept or KeptNumbers(layout.size, lambda _: slice(None))
        self.scale = scale
        """By which updates are quantized; None: they are not."""
        self._rounding_seed: Callable[[int], int] = lambda usual: usual  # By which numbers are rounded.
        self._selected = Selected(0, (), ())
        self._encoding: SecureEncoding | None = None
        self._row = torch.zeros(0, dtype=torch.int64)
        self._sum: Row | None = None
        self._came: tuple[int, ...] = ()
        self._clipped = 0

    @property
    def encoding(self) -> SecureEncoding:
        """How this round's updates become integers."""
        if self._encoding is None:
            usual = self._plan.selected
            self._encoding = self._encoding_for(Selected(0, range(usual), [1.0] * usual))
        return self._encoding

    @property
    def clients(self) -> tuple[int, ...]:
        """Whose updates are in the sum."""
        return self._came

    def message_bytes(self, down: int, up: int) -> tuple[int, int]:
        """What a client sends and gets instead, in a round of the usual size in which all stay."""
        del up
        count = max(FEWEST_CLIENTS, self._plan.selected)
        clients: list[int] = np.linspace(0, self._plan.clients - 1, count).astype(np.int64).tolist()
        plan = _round(bytes(32), self._encoding_for(Selected(0, clients, [1.0] * count)), count, self.two_thirds)
        # That of a client in the middle, as numbers take more bytes the larger they are.
        middle = count // 2
        around = [clients[(middle + offset) % count] for offset in range(1, plan.degree + 1)]
        traffic = client_traffic(plan, clients[middle], around)
        return down + traffic.down, traffic.up

    def begin(self, selected: Selected) -> None:
        """Start from 0, with room for all selected clients."""
        self._selected, self._encoding = selected, self._encoding_for(selected)
        self._row = torch.zeros(self.encoding.words + COUNTS + len(selected.clients), dtype=torch.int64)
        self._sum, self._came = None, ()

    def encode(self, sent: ClientUpdate) -> Row:
        """An update as integers, with the client's loss as one more number; refused if it has NaN."""
        numbers, encoding = self._numbers(sent), self.encoding
        seed = self._rounding_seed(mixed(self._seed, ROUNDING, self._selected.number, sent.client))
        weight = round(sent.weight) if self.weighs else 1
        row = encoding.encode(numbers, weight, seed)
        if self.scale is not None and isinstance(encoding, CommonScale) and sent.state is not None:
            lost = numbers[: encoding.length - encoding.fine] - encoding.sent(row, weight)
            self.scale.owe(sent.state, lost, self._kept.places(self._selected.number), self._layout)
        return row

    def add(self, sent: ClientUpdate) -> bool:
        """Add an encoded update."""
        try:
            row = self.encode(sent)
        except NonFiniteError:
            return False
        self._put(row, sent.client, [1, sent.examples, self.encoding.clipped(self._numbers(sent))])
        return True

    def _put(self, row: Row, client: int, counts: Sequence[int]) -> None:
        """Add an encoded update, and note whose it is."""
        words = self.encoding.words
        # As numbers with sign, as wide as theirs: modulo the encoding's power of two it is the same.
        self._row[:words] += torch.from_numpy(row.view(f"i{row.itemsize}"))
        self._row[words : words + COUNTS] += torch.tensor(counts)
        self._row[words + COUNTS + self._selected.clients.index(client)] += 1

    def combine(self, add_up: AddUp) -> None:
        """One sum of integers."""
        add_up(self._row, "the sum of encoded updates")
        words = self.encoding.words
        flags: list[int] = self._row[words + COUNTS :].tolist()
        came = tuple(client for client, flag in zip(self._selected.clients, flags, strict=True) if flag)
        total = np.remainder(self._row[:words].numpy(), 2**self.encoding.width)
        self._sum, self._came = total.astype(self.encoding.dtype), came
        self._clipped += int(self._row[words + 2])

    def receive(self, total: Row, clients: Sequence[int]) -> None:
        """Take the unmasked sum of these clients' encoded updates; of each alone nothing is known."""
        self._sum, self._came, self._row = total, tuple(clients), torch.zeros(0, dtype=torch.int64)

    def mean(self) -> tuple[Tensor, Tensor | None]:
        """The mean update; the next round's scale follows from it."""
        numbers = decoded(self._sum, self.encoding)[0]
        if self.scale is not None:
            self.scale.learn(float(numbers[-2]))
        return self._kept.spread(numbers[: self._kept.count], self._layout, self._selected.number), None

    @property
    def updates(self) -> int:
        """Updates in the sum."""
        return len(self._came)

    @property
    def examples(self) -> int:
        """Examples that their clients went through; received from elsewhere, those that they have."""
        words = self.encoding.words
        counted = int(self._row[words + 1]) if len(self._row) else 0
        return counted or (decoded(self._sum, self.encoding)[1] if self._came else 0)

    @property
    def loss(self) -> float:
        """Mean loss of the clients, by weight; NaN without any."""
        return float(decoded(self._sum, self.encoding)[0][-1]) * LOSS_BOUND / BOUND if self._came else math.nan

    @property
    def failure(self) -> str:
        """Why the server could not take the masks off; empty: it could."""
        clients = sorted(self._selected.clients)
        if len(clients) < FEWEST_CLIENTS:
            return f"{len(clients)} clients are too few for secure aggregation, which needs {FEWEST_CLIENTS}"
        number = self._selected.number.to_bytes(8, "big") + self._seed.to_bytes(8, "big", signed=True)
        plan = _round(hashlib.sha256(number).digest(), self.encoding, len(clients), self.two_thirds)
        if len(self._came) < plan.fewest:
            return f"{len(self._came)} of {len(clients)} clients sent a masked update, and {plan.fewest} are needed"
        return short_of_holders(neighbourhoods(clients, plan.degree, plan.id), set(self._came), plan.threshold)

    def notes(self) -> dict[str, Any]:
        """How many numbers of updates were clipped."""
        return {"clipped": self._clipped}

    def state_dict(self) -> dict[str, Any]:
        """What is counted, and the scale of the next round."""
        return {"clipped": self._clipped} | ({} if self.scale is None else {"bound": self.scale.bound})

    def load_state_dict(self, state: Any) -> None:
        """Continue counting."""
        self._clipped = int(state["clipped"])
        if self.scale is not None:
            self.scale.bound = float(state["bound"])

    def _encoding_for(self, selected: Selected) -> SecureEncoding:
        most, clients = max(1, math.ceil(max(selected.weights, default=1.0))), max(1, len(selected.clients))
        if self.scale is not None:
            buffers = self._layout.size - self._layout.trainable
            return self.scale.encoding(self._kept.count, buffers, clients, most, BOUND)
        # One more number, for the loss.
        return FixedPoint(length=self._kept.count + 1, clients=clients, bound=BOUND, examples=most)

    def _numbers(self, sent: ClientUpdate) -> NDArray[np.float64]:
        """The numbers that are sent: of the update, and the loss, of which one that is not finite counts as 0."""
        loss = min(sent.loss, LOSS_BOUND) if math.isfinite(sent.loss) else 0.0
        numbers = self._kept.taken(sent.update, self._selected.number)
        coarse = self._kept.count - (self._layout.size - self._layout.trainable)
        size = [] if self.scale is None else [self.scale.size_of(numbers[:coarse])]
        return np.append(numbers, [*size, loss * BOUND / LOSS_BOUND])


def _round(id: bytes, encoding: SecureEncoding, clients: int, two_thirds: bool) -> SecureRound:  # noqa: A002
    """The round of the protocol with so many clients."""
    return SecureRound.of(id, encoding, clients, fewest=lowest_threshold(clients) if two_thirds else None)


def decoded(total: Row | None, encoding: SecureEncoding) -> tuple[NDArray[np.float64], int]:
    """The mean of a sum that has come, and the sum of weights."""
    if total is None:
        raise RuntimeError("a sum is decoded before it is there: call combine() or receive() first.")
    return encoding.decode(total)


def adopt(sums: SecureMean, wanted: SecureEncoding, number: int, fewest: int) -> str:
    """At a client: begin a round with a server's encoding; why not, if this client would have another one.

    Args:
        sums: The client's own.
        wanted: The server's encoding.
        number: Of the round.
        fewest: Clients without whose updates the server's plan reveals no sum.

    """
    if sums.two_thirds and fewest < (least := lowest_threshold(wanted.clients)):
        return f"the server would reveal a sum of {fewest} clients, and the noise is shared by {least}"
    if sums.scale is not None:
        sums.scale.bound = wanted.bound
    sums.begin(Selected(number, range(wanted.clients), [float(wanted.examples)] * wanted.clients))
    return "" if sums.encoding == wanted else f"the server wants {wanted}, and this client has {sums.encoding}"

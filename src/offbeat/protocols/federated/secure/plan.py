"""What clients and server agree on before a round of secure aggregation: who may take part, and how many must stay."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from offbeat.errors import UsageError
from offbeat.limits import SIMULATED_WORKERS, whole
from offbeat.protocols.federated.secure.common_scale import CommonScale
from offbeat.protocols.federated.secure.fixed_point import FixedPoint

FEWEST_CLIENTS: Final = 3
"""Of two clients, each would learn the other's update from the sum."""
NEIGHBOURS: Final = 128
"""Neighbours of each client, unless there are fewer clients."""
MOST_NEIGHBOURS: Final = 256
"""With more, messages to a client would not fit into a header."""
MOST_CLIENT: Final = 2**32 - 1
ROUND_BYTES: Final = 32

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Client = Annotated[int, Meta(ge=0, le=MOST_CLIENT)]
SecureEncoding = FixedPoint | CommonScale
"""How updates become integers."""


class SecureRound(Struct, frozen=True, kw_only=True):
    """A round of secure aggregation; `SecureRound.of` fills in what follows from the number of clients."""

    id: Annotated[bytes, Meta(min_length=ROUND_BYTES, max_length=ROUND_BYTES)]  # Random, and never used again.
    clients: int  # Clients that are invited.
    encoding: SecureEncoding
    degree: int  # Neighbours with whom each client shares masks and secrets; clients - 1: all others.
    threshold: int  # Of a client's neighbours and itself, how many must stay to the end; more than two thirds.
    fewest: int  # Clients without whose updates the sum is not revealed.
    signed: bool = False  # Clients sign who is left before they release shares: against a server that lies.

    @classmethod
    def of(
        cls,
        id: bytes,  # noqa: A002
        encoding: SecureEncoding,
        clients: int,
        *,
        degree: int | None = None,
        threshold: int | None = None,
        fewest: int | None = None,
        signed: bool = False,
    ) -> SecureRound:
        """A round for some clients, with the usual neighbours and the lowest safe threshold, unless given."""
        around = min(clients - 1, NEIGHBOURS) if degree is None else degree
        least = lowest_threshold(around + 1) if threshold is None else threshold
        fewest = max(least, fewest or 0)
        return cls(
            id=id,
            clients=clients,
            encoding=encoding,
            degree=around,
            threshold=least,
            fewest=fewest,
            signed=signed,
        )

    def __post_init__(self) -> None:
        """Refuse what would not be secure, or could never end well."""
        whole("clients", self.clients, min(self.encoding.clients, SIMULATED_WORKERS), FEWEST_CLIENTS)
        whole("degree", self.degree, min(MOST_NEIGHBOURS, self.clients - 1), 2)
        if self.degree % 2 and self.degree < self.clients - 1:
            raise UsageError(f"degree {self.degree} is odd: neighbours come in pairs. Give an even number.")
        holders = self.degree + 1
        whole("threshold", self.threshold, holders, why=f"each secret has {holders} holders")
        if self.threshold < lowest_threshold(holders):
            raise UsageError(
                f"threshold {self.threshold} is not more than two thirds of {holders} holders of a secret: a server "
                f"could get both secrets of a client from different holders. Give {lowest_threshold(holders)} or more."
            )
        whole("fewest", self.fewest, self.clients)
        if self.fewest < self.threshold:
            raise UsageError(
                f"fewest {self.fewest} is below the threshold {self.threshold}: no secret could be recovered then."
            )
        if self.signed and not self.complete:
            raise UsageError(
                f"signed=True needs every client to be the neighbour of all others, but {self.clients:,} clients have "
                f"{self.degree} each: what a client's neighbours sign would not bind the others. Invite "
                f"{MOST_NEIGHBOURS + 1} clients at most, with degree {self.clients - 1:,}."
            )

    @property
    def complete(self) -> bool:
        """Whether all clients are neighbours."""
        return self.degree == self.clients - 1

    @property
    def least_seen(self) -> int:
        """Survivors without whom no client releases a share: a neighbour of all sees everybody that is in the sum."""
        return self.fewest if self.complete else self.threshold

    @property
    def digest(self) -> bytes:
        """Stands for all that is agreed: in every message, key and signature."""
        return hashlib.sha256(b"offbeat secure round" + msgspec.msgpack.encode(self)).digest()


def lowest_threshold(holders: int) -> int:
    """More than two thirds of them."""
    return 2 * holders // 3 + 1


def neighbourhoods(clients: Sequence[int], degree: int, seed: bytes) -> dict[int, tuple[int, ...]]:
    """The neighbours of each client: those next to it when all sit in a circle, in random order (Bell et al. 2020)."""
    if len(clients) <= degree + 1:
        return {client: tuple(other for other in clients if other != client) for client in clients}
    circle = sorted(clients)
    number = int.from_bytes(hashlib.sha256(b"offbeat neighbours" + seed).digest(), "big")
    Random(number).shuffle(circle)  # noqa: S311 - who is next to whom is not secret
    reach, count = degree // 2, len(circle)
    offsets = [offset for offset in range(-reach, reach + 1) if offset]
    return {
        client: tuple(sorted(circle[(place + offset) % count] for offset in offsets))
        for place, client in enumerate(circle)
    }


def short_of_holders(around: Mapping[int, Sequence[int]], alive: Collection[int], threshold: int) -> str:
    """Why a secret that the sum needs could not be recovered; empty if all can.

    Args:
        around: The neighbours of each client that has dealt shares, of which these hold its shares.
        alive: Clients whose masked updates came.
        threshold: Shares that are needed.

    """
    for client, others in around.items():
        holders = (client in alive) + sum(other in alive for other in others)
        # Without any there is no mask of this client in the sum.
        if 0 < holders < threshold:
            return (
                f"of client {client} and its neighbours {holders} sent a masked update, and {threshold} are needed to "
                f"recover its secret"
            )
    return ""

"""Bytes that a client of a secure aggregation sends and receives, counted on the messages themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct

from offbeat.protocols.federated.secure.messages import (
    AdvertisedKeys,
    DealtShares,
    DeliveredShares,
    KeyRoster,
    MaskedUpdate,
    PeerKeys,
    ReleasedShares,
    SealedShares,
    SecureEnd,
    SecureInvite,
    SharePiece,
    SurvivorList,
    SurvivorSignature,
    SurvivorSignatures,
    SurvivorSigned,
)
from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.primitives import BOX_BYTES, PUBLIC_BYTES, SIGNATURE_BYTES
from offbeat.protocols.federated.secure.sharing import SHARE_BYTES

_DIGEST, _KEY, _SIGNATURE, _BOX, _SHARE = map(bytes, (32, PUBLIC_BYTES, SIGNATURE_BYTES, BOX_BYTES, SHARE_BYTES))


class ClientTraffic(Struct, frozen=True):
    """Bytes of one client in one round, without what the transport adds to each message."""

    down: int  # From the server.
    up: int  # To the server, with the masked update.


def client_traffic(
    plan: SecureRound, client: int, neighbours: Sequence[int], survivors: Collection[int] | None = None
) -> ClientTraffic:
    """The bytes of a client that stays to the end, if each is asked once.

    Args:
        plan: The round.
        client: Its number.
        neighbours: Its neighbours, all of whom have dealt shares.
        survivors: Those of them whose updates came; None: all.

    """
    alive = {client, *(neighbours if survivors is None else survivors)}
    around = sorted((client, *neighbours))
    seeds = tuple(SharePiece(each, _SHARE) for each in around if each in alive)
    keys = tuple(SharePiece(each, _SHARE) for each in around if each not in alive)
    boxes = tuple(SealedShares(each, _BOX) for each in neighbours)
    down: list[Struct] = [
        SecureInvite(_DIGEST),
        KeyRoster(_DIGEST, tuple(PeerKeys(each, _KEY, _KEY, _KEY, _SIGNATURE) for each in neighbours)),
        DeliveredShares(_DIGEST, boxes),
        SurvivorList(_DIGEST, tuple(sorted(alive))),
        SecureEnd(_DIGEST),
    ]
    up: list[Struct] = [
        AdvertisedKeys(_DIGEST, _KEY, _KEY, _SIGNATURE),
        DealtShares(_DIGEST, _DIGEST, boxes),
        MaskedUpdate(_DIGEST),
        ReleasedShares(_DIGEST, seeds, keys),
    ]
    if plan.signed:
        down.append(SurvivorSignatures(_DIGEST, tuple(SurvivorSigned(each, _SIGNATURE) for each in sorted(alive))))
        up.append(SurvivorSignature(_DIGEST, _SIGNATURE))
    return ClientTraffic(_encoded(down), _encoded(up) + plan.encoding.nbytes)


def _encoded(messages: Sequence[Struct]) -> int:
    return sum(len(msgspec.msgpack.encode(message)) for message in messages)

"""Everything that clients and the server of a secure aggregation say to each other.

The server asks, and asks again until it is answered; a client answers the same question with the same answer. Fields
are bounded where they are decoded, and checked again by whoever receives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from offbeat.protocols.federated.secure.plan import MOST_NEIGHBOURS, Client, Digest
from offbeat.protocols.federated.secure.primitives import BOX_BYTES, PUBLIC_BYTES, SIGNATURE_BYTES, purpose
from offbeat.protocols.federated.secure.sharing import SHARE_BYTES
from offbeat.protocols.machine import Name

MOST_TEXT = 500

PublicKey = Annotated[bytes, Meta(min_length=PUBLIC_BYTES, max_length=PUBLIC_BYTES)]
SignatureBytes = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Box = Annotated[bytes, Meta(min_length=BOX_BYTES, max_length=BOX_BYTES)]
Share = Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Text = Annotated[str, Meta(max_length=MOST_TEXT)]
SERVER: Name = "server"


def client_name(client: int) -> Name:
    """The name of a client's machine."""
    return f"client {client}"


def keys_text(digest: bytes, client: int, sealing: bytes, masking: bytes) -> bytes:
    """What a client signs of its keys."""
    return purpose("keys", digest, client) + sealing + masking


def survivors_text(digest: bytes, survivors: Sequence[int]) -> bytes:
    """What clients sign of the list of survivors."""
    return purpose("survivors", digest, *survivors)


class PeerKeys(Struct, frozen=True, array_like=True):
    """A client's keys, as its neighbours get them."""

    client: Client
    identity: PublicKey  # Its long-term Ed25519 key.
    sealing: PublicKey  # X25519, of this round: for the boxes of shares.
    masking: PublicKey  # X25519, of this round: for the masks.
    signature: SignatureBytes  # By its identity, of this round and its two keys.


class SealedShares(Struct, frozen=True, array_like=True):
    """A share of the seed and one of the masking key, in a box that only one client can open."""

    client: Client  # The other one: to whom, where shares are dealt; from whom, where they are delivered.
    box: Box


class SharePiece(Struct, frozen=True, array_like=True):
    """A share of a secret of one client."""

    client: Client
    share: Share


class SurvivorSigned(Struct, frozen=True, array_like=True):
    """A client's signature under the list of those who are left."""

    client: Client
    signature: SignatureBytes


Peers = Annotated[tuple[PeerKeys, ...], Meta(max_length=MOST_NEIGHBOURS)]
Boxes = Annotated[tuple[SealedShares, ...], Meta(max_length=MOST_NEIGHBOURS)]
Pieces = Annotated[tuple[SharePiece, ...], Meta(max_length=MOST_NEIGHBOURS + 1)]
Clients = Annotated[tuple[Client, ...], Meta(max_length=MOST_NEIGHBOURS + 1)]
Signatures = Annotated[tuple[SurvivorSigned, ...], Meta(max_length=MOST_NEIGHBOURS + 1)]


class SecureInvite(Struct, frozen=True, tag=True):
    """Server: take part in this round; send your keys."""

    round: Digest


class AdvertisedKeys(Struct, frozen=True, tag=True):
    """Client: my keys of this round."""

    round: Digest
    sealing: PublicKey
    masking: PublicKey
    signature: SignatureBytes


class KeyRoster(Struct, frozen=True, tag=True):
    """Server: the keys of your neighbours; deal them shares of your secrets."""

    round: Digest
    peers: Peers


class DealtShares(Struct, frozen=True, tag=True):
    """Client: shares of my secrets, one box for each neighbour."""

    round: Digest
    commitment: Digest  # Of the seed, so that the recovered seed can be checked.
    boxes: Boxes


class DeliveredShares(Struct, frozen=True, tag=True):
    """Server: the boxes for you, of the neighbours that are left; mask your update with them, and send it."""

    round: Digest
    boxes: Boxes


class MaskedUpdate(Struct, frozen=True, tag=True):
    """Client: my masked update, as payload."""

    round: Digest


class SurvivorList(Struct, frozen=True, tag=True):
    """Server: those of your neighbours, and yourself, whose updates came. Sign this, or release your shares."""

    round: Digest
    clients: Clients


class SurvivorSignature(Struct, frozen=True, tag=True):
    """Client: my signature under the list of survivors."""

    round: Digest
    signature: SignatureBytes


class SurvivorSignatures(Struct, frozen=True, tag=True):
    """Server: what the others signed; release your shares."""

    round: Digest
    signatures: Signatures


class ReleasedShares(Struct, frozen=True, tag=True):
    """Client: of every survivor a share of its seed, of every other a share of its masking key."""

    round: Digest
    seeds: Pieces
    keys: Pieces


class SecureLeave(Struct, frozen=True, tag=True):
    """Client: I take no further part, and why."""

    round: Digest
    reason: Text


class SecureRefusal(Struct, frozen=True, tag=True):
    """Server: what you sent was refused, and why."""

    round: Digest
    reason: Text


class SecureEnd(Struct, frozen=True, tag=True):
    """Server: the round is over; forget its keys."""

    round: Digest
    failure: Text = ""  # Empty: the sum is known.


SecureRequest = (
    SecureInvite | KeyRoster | DeliveredShares | SurvivorList | SurvivorSignatures | SecureRefusal | SecureEnd
)
"""What a server sends."""
SecureAnswer = AdvertisedKeys | DealtShares | MaskedUpdate | SurvivorSignature | ReleasedShares | SecureLeave
"""What a client sends."""

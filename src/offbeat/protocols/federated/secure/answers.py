"""Which answers of clients the server of a secure aggregation refuses, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offbeat.protocols.federated.secure.messages import (
    AdvertisedKeys,
    DealtShares,
    MaskedUpdate,
    ReleasedShares,
    SealedShares,
    SurvivorSignature,
    keys_text,
    survivors_text,
)
from offbeat.protocols.federated.secure.primitives import BOX_BYTES, is_signed
from offbeat.protocols.federated.secure.records import PHASES, SecureRecords
from offbeat.protocols.federated.secure.sharing import is_share
from offbeat.protocols.machine import Payload

_PHASE_OF = {
    AdvertisedKeys: "keys",
    DealtShares: "shares",
    MaskedUpdate: "masks",
    SurvivorSignature: "signatures",
    ReleasedShares: "release",
}
STALE = ""
"""What `fault` returns of an answer that is only late or has come before: it is ignored."""


def fault(records: SecureRecords, client: int, message: Any, payload: Payload) -> str | None:
    """Why an answer is refused, or `STALE`; None: it is right."""
    phase, current = _PHASE_OF.get(type(message)), records.state.phase
    if phase is None:
        return f"{type(message).__name__} is not an answer of a client"
    if PHASES.index(phase) < PHASES.index(current) or (phase == current and client in records.answers()):
        return STALE
    if phase != current or client not in records.asked():
        return f"it was not asked for {type(message).__name__}"
    match message:
        case AdvertisedKeys():
            return _fault_of_keys(records, client, message)
        case DealtShares(_, commitment, boxes):
            return _fault_of_boxes(records.around[client], commitment, boxes)
        case MaskedUpdate():
            return _fault_of_update(records.plan.encoding.nbytes, payload)
        case SurvivorSignature(_, signature):
            text = survivors_text(records.digest, sorted(records.alive))
            right = is_signed(records.members[client], signature, text)
            return None if right else "its signature is not for this list of survivors"
        case _:
            return _fault_of_shares(records, client, message)


def _fault_of_keys(records: SecureRecords, client: int, message: AdvertisedKeys) -> str | None:
    text = keys_text(records.digest, client, message.sealing, message.masking)
    if not is_signed(records.members[client], message.signature, text):
        return "its keys are not signed with the long-term key that it is known by"
    keys = {message.sealing, message.masking}
    taken = (key for other in records.state.keys.values() for key in (other.sealing, other.masking))
    if len(keys) < 2 or not keys.isdisjoint(taken):
        return "a key is used twice"
    return None


def _fault_of_boxes(around: Sequence[int], commitment: bytes, boxes: Sequence[SealedShares]) -> str | None:
    receivers = sorted(box.client for box in boxes)
    if receivers != sorted(around):
        return f"it dealt {len(boxes)} boxes of shares, but not one to each of its {len(around)} neighbours"
    if any(len(box.box) != BOX_BYTES for box in boxes) or len(commitment) != 32:
        return f"a box of shares has another size than {BOX_BYTES} bytes, or the commitment than 32"
    return None


def _fault_of_update(nbytes: int, payload: Payload) -> str | None:
    if payload.nbytes != nbytes or memoryview(payload.handle).nbytes != nbytes:
        return f"its update has {payload.nbytes:,} bytes, and the round is for {nbytes:,}"
    return None


def _fault_of_shares(records: SecureRecords, client: int, message: ReleasedShares) -> str | None:
    holders = records.holders(client)
    for pieces, able in ((message.seeds, holders & records.alive), (message.keys, holders - records.alive)):
        clients = [piece.client for piece in pieces]
        if len(set(clients)) < len(clients) or not set(clients) <= able:
            return "it released shares for which it was not asked, or one twice"
        if not all(is_share(piece.share) for piece in pieces):
            return "a share is not a number of the size that shares have"
    return None

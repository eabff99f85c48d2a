"""What the server of a secure aggregation has been told, whom it asks what in each phase, and who is left after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
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
    SecureInvite,
    SurvivorList,
    SurvivorSignature,
    SurvivorSignatures,
    SurvivorSigned,
)
from offbeat.protocols.federated.secure.plan import SecureRound, neighbourhoods, short_of_holders
from offbeat.protocols.federated.secure.recovery import Unmasking
from offbeat.protocols.machine import Payload

PHASES: Final = ("keys", "shares", "masks", "signatures", "release", "unmask", "over")
"""Keys are advertised, shares dealt, masked updates sent, survivors signed for, shares released, the sum unmasked."""


class SecureServerState(Struct):
    """All that a server knows, so that another process can go on."""

    phase: str = "keys"  # One of `PHASES`.
    keys: dict[int, AdvertisedKeys] = {}
    dealt: dict[int, DealtShares] = {}
    included: list[int] = []  # Clients whose shares are delivered: the masks are those between any two of them.
    masked: list[int] = []  # Clients whose masked updates are in the total.
    total: bytes = b""  # The sum of these; in the end, without masks. Empty: nothing was added yet.
    signatures: dict[int, bytes] = {}
    released: dict[int, ReleasedShares] = {}
    liars: list[int] = []  # Clients that released wrong shares.
    unrecovered: list[int] = []  # Clients a secret of which could not be recovered.
    failure: str = ""  # Why the round has ended without a sum.


class SecureRecords:
    """A server's state, and what follows from it."""

    def __init__(self, plan: SecureRound, members: Mapping[int, bytes], state: SecureServerState) -> None:
        self.plan, self.members, self.state = plan, members, state
        self.digest = plan.digest
        self.total = np.zeros(plan.encoding.words, plan.encoding.dtype)
        """The sum of masked updates."""
        self.around: dict[int, tuple[int, ...]] = {}
        """The neighbours of each client."""
        self._boxes: dict[int, dict[int, bytes]] = {}
        if state.total:
            self.total[:] = np.frombuffer(state.total, plan.encoding.dtype)
        if state.phase != "keys":
            self._seat()
        if state.included:
            self._sort_boxes()
        self.alive = set(state.masked)
        """Clients whose masked updates are in the total."""

    def snapshot(self) -> SecureServerState:
        """A copy of the state."""
        known = self.state
        return SecureServerState(
            phase=known.phase,
            keys=dict(known.keys),
            dealt=dict(known.dealt),
            included=list(known.included),
            masked=list(known.masked),
            total=self.total.tobytes() if known.masked else b"",
            signatures=dict(known.signatures),
            released=dict(known.released),
            liars=list(known.liars),
            unrecovered=list(known.unrecovered),
            failure=known.failure,
        )

    # Who is asked, and what.

    def asked(self) -> Collection[int]:
        """Clients that are asked in this phase."""
        known = self.state
        match known.phase:
            case "keys":
                return self.members
            case "shares":
                return known.keys
            case "masks":
                return known.included
            case "signatures":
                return known.masked
            case "release":
                return known.signatures if self.plan.signed else known.masked
            case _:
                return ()

    def answers(self) -> Mapping[int, Any]:
        """The answers of this phase so far, by client."""
        known = self.state
        match known.phase:
            case "keys":
                return known.keys
            case "shares":
                return known.dealt
            case "masks":
                return dict.fromkeys(self.alive)
            case "signatures":
                return known.signatures
            case "release":
                return known.released
            case _:
                return {}

    def question(self, client: int) -> Struct:
        """What a client is asked in this phase."""
        known, digest = self.state, self.digest
        match known.phase:
            case "keys":
                return SecureInvite(digest)
            case "shares":
                peers = ((other, self.members[other], known.keys[other]) for other in self.around[client])
                return KeyRoster(digest, tuple(_peer(*peer) for peer in peers))
            case "masks":
                boxes = ((other, self._boxes[other][client]) for other in self.left(client))
                return DeliveredShares(digest, tuple(SealedShares(*box) for box in boxes))
            case "release" if self.plan.signed:
                signed = (SurvivorSigned(each, known.signatures[each]) for each in sorted(known.signatures))
                return SurvivorSignatures(digest, tuple(signed))
            case _:
                return SurvivorList(digest, tuple(sorted(self.holders(client) & self.alive)))

    def left(self, client: int) -> list[int]:
        """Its neighbours among the included."""
        return [other for other in self.around[client] if other in self._boxes]

    def holders(self, client: int) -> set[int]:
        """Those who hold shares of its secrets, and whose shares it holds."""
        return {*self.left(client), client}

    # Answers.

    def accept(self, client: int, message: Any, payload: Payload) -> None:
        """Enter an answer that was checked."""
        known = self.state
        match message:
            case AdvertisedKeys():
                known.keys[client] = message
            case DealtShares():
                known.dealt[client] = message
            case MaskedUpdate():
                self.total += self.plan.encoding.unpacked(payload.handle)
                known.masked.append(client)
                self.alive.add(client)
            case SurvivorSignature(_, signature):
                known.signatures[client] = signature
            case _:
                known.released[client] = message

    def close(self) -> str:
        """Go to the next phase with those who have answered; why not, if they are too few."""
        closing = {
            "keys": self._close_keys,
            "shares": self._close_shares,
            "masks": self._close_masks,
            "signatures": self._close_signatures,
            "release": self._close_release,
        }
        short = closing[self.state.phase]()
        if not short:
            following = PHASES[PHASES.index(self.state.phase) + 1]
            self.state.phase = "release" if following == "signatures" and not self.plan.signed else following
        return short

    def _close_keys(self) -> str:
        self._seat()
        return self._short("advertised keys", len(self.state.keys))

    def _close_shares(self) -> str:
        """Include those who have enough neighbours that are included themselves."""
        included = set(self.state.dealt)
        while True:
            lonely = {
                client
                for client in included
                if 1 + sum(other in included for other in self.around[client]) < self.plan.threshold
            }
            included -= lonely
            if not lonely:
                break
        self.state.included = sorted(included)
        self._sort_boxes()
        return self._short("dealt shares to enough neighbours", len(included))

    def _close_masks(self) -> str:
        """Go on only if all secrets can be recovered that the sum needs, before any share is released."""
        self.state.masked.sort()
        around = {client: self.left(client) for client in self.state.included}
        short = short_of_holders(around, self.alive, self.plan.threshold)
        if short:
            return short
        return self._short("sent a masked update", len(self.alive))

    def _close_signatures(self) -> str:
        return self._short("signed the list of survivors", len(self.state.signatures))

    def _close_release(self) -> str:
        for name, shares in (("seed", self._seeds()), ("masking key", self._keys())):
            for client, held in shares.items():
                if len(held) < self.plan.threshold:
                    return (
                        f"{len(held)} shares of client {client}'s {name} were released, and {self.plan.threshold} are "
                        f"needed to recover it"
                    )
        return ""

    def _short(self, what: str, count: int) -> str:
        # Of those who sign, not all are needed: the updates of the others are in the sum.
        least = self.plan.threshold if self.state.phase == "signatures" else self.plan.fewest
        return "" if count >= least else f"{count} of {self.plan.clients} clients {what}, and {least} are needed"

    # The end of the round.

    def unmasking(self) -> Unmasking:
        """The work that takes the masks off the sum."""
        known, keys = self.state, self._keys()
        return Unmasking(
            digest=self.digest,
            threshold=self.plan.threshold,
            total=self.total,
            commitments={client: known.dealt[client].commitment for client in known.masked},
            masking={client: known.keys[client].masking for client in known.included},
            seeds=self._seeds(),
            keys=keys,
            neighbours={client: tuple(o for o in self.around[client] if o in self.alive) for client in keys},
        )

    def _seeds(self) -> dict[int, dict[int, bytes]]:
        """Released shares of the survivors' seeds."""
        shares: dict[int, dict[int, bytes]] = {client: {} for client in self.state.masked}
        for holder, released in self.state.released.items():
            for piece in released.seeds:
                shares[piece.client][holder] = piece.share
        return shares

    def _keys(self) -> dict[int, dict[int, bytes]]:
        """Released shares of the masking keys of those whose masks are still in the sum."""
        absent = (client for client in self.state.included if client not in self.alive)
        shares: dict[int, dict[int, bytes]] = {
            client: {} for client in absent if not self.alive.isdisjoint(self.around[client])
        }
        for holder, released in self.state.released.items():
            for piece in released.keys:
                shares[piece.client][holder] = piece.share
        return shares

    def _seat(self) -> None:
        self.around = neighbourhoods(sorted(self.state.keys), self.plan.degree, self.plan.id)

    def _sort_boxes(self) -> None:
        dealt = self.state.dealt
        self._boxes = {client: {b.client: b.box for b in dealt[client].boxes} for client in self.state.included}


def _peer(client: int, identity: bytes, keys: AdvertisedKeys) -> PeerKeys:
    """A client's keys, as its neighbours get them."""
    return PeerKeys(client, identity, keys.sealing, keys.masking, keys.signature)

"""The client of a secure aggregation: it deals shares of its secrets, masks its update, and releases others' shares.

It answers each question of the server once and keeps the answer: to the same question, asked again, it gives the same
answer; to another one of the same kind it gives none, and leaves. So it never releases both kinds of share of a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from msgspec import Struct

from offbeat.errors import SecureAggregationError, UsageError
from offbeat.limits import seconds
from offbeat.protocols.federated.secure.integers import Row
from offbeat.protocols.federated.secure.masks import Masks
from offbeat.protocols.federated.secure.messages import (
    MOST_TEXT,
    SERVER,
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
    SecureLeave,
    SecureRefusal,
    SecureWait,
    SharePiece,
    SurvivorList,
    SurvivorSignature,
    SurvivorSignatures,
    client_name,
    keys_text,
    survivors_text,
)
from offbeat.protocols.federated.secure.plan import SecureRound
from offbeat.protocols.federated.secure.primitives import (
    agreement,
    agreement_public,
    commitment,
    identity_public,
    is_signed,
    opened,
    own_mask_key,
    pair_mask_key,
    purpose,
    require_cryptography,
    sealed,
    sign,
)
from offbeat.protocols.federated.secure.shamir import (
    SECRET_BYTES,
    SHARE_BYTES,
    SecretBytes,
    ShamirSharing,
    is_share,
)
from offbeat.protocols.machine import Done, Effect, Effects, Event, Name, Payload, Received, Timer

UPDATE: Final = "secure update"
"""`Done(UPDATE, row)`: the client's encoded update; its memory must not change until the machine has masked it."""
GIVE_UP: Final = "secure give up"
"""`Done(GIVE_UP, reason)`: the client has no update, and takes no further part."""
PATIENCE: Final = 120.0
"""Seconds without a word of the server after which a client ends."""


@dataclass(frozen=True)
class MaskWork:
    """Work of a client: call it, and give the client the result as `Done`."""

    row: Row
    adding: Sequence[bytes]
    """Keys of the masks that are added."""
    subtracting: Sequence[bytes]

    def __call__(self) -> Row:
        """The masked update."""
        row, masks = self.row.copy(), Masks()
        for key in self.adding:
            masks.add(row, key)
        for key in self.subtracting:
            masks.subtract(row, key)
        return row


@dataclass
class ClientSecrets:
    """What a client must keep to itself, until the end of the round."""

    sealing: bytes
    """The private key that opens boxes."""
    masking: bytes
    """The private key of the masks that it has in common with others."""
    seed: bytes
    """Of the mask that it has alone."""
    held: dict[int, tuple[bytes, bytes]] = field(default_factory=dict[int, tuple[bytes, bytes]])
    """Shares that it holds, of its own secrets, too: of the seed and of the masking key of each client."""


class SecureClient:
    """One client in one round.

    Args:
        plan: What was agreed.
        client: Its number.
        identity: Its long-term Ed25519 private key, 32 bytes.
        known: The long-term public keys of clients, by number, from a source that the server cannot change. None: keys
            are taken from the server, which is then trusted not to invent clients.
        random: Draws secret bytes.
        patience: Seconds without a word of the server after which it ends.
        name: The name of this machine; by default from its number.
        server: The name of the server's.

    """

    def __init__(
        self,
        plan: SecureRound,
        client: int,
        identity: bytes,
        known: Mapping[int, bytes] | None,
        random: SecretBytes,
        patience: float = PATIENCE,
        name: Name | None = None,
        server: Name = SERVER,
    ) -> None:
        require_cryptography()
        seconds("patience", patience)
        if plan.signed and known is None:
            raise UsageError(
                "a signed round needs the clients' long-term keys from a source that the server cannot change (known), "
                "as a server that lies would sign for clients that it has invented."
            )
        self.name: Name = client_name(client) if name is None else name
        self._server = server
        self.ended = False
        self.failure = ""
        """Why the round has ended for this client without a sum; empty: it has not, or there is a sum."""
        self.accusation = ""
        """What the server has done that one which follows the protocol never does; empty: nothing."""
        self.refusals: list[str] = []
        """Messages that were ignored, and what the server has refused."""
        self.number = client
        """The client's number."""
        self._plan, self._digest = plan, plan.digest
        self._identity, self._known = identity, known
        self._random, self._patience = random, patience
        self._public = identity_public(identity)
        self._secrets: ClientSecrets | None = ClientSecrets(random(32), random(32), random(SECRET_BYTES))
        self._peers: dict[int, PeerKeys] = {}
        self._partners: tuple[int, ...] = ()
        self._survivors: tuple[int, ...] = ()
        self._row: Row | None = None
        self._questions: dict[type[Struct], Struct] = {}
        self._answers: dict[type[Struct], tuple[Struct, Payload]] = {}

    def begin(self, now: float) -> Sequence[Effect]:  # noqa: ARG002
        """Wait for the server's invitation."""
        effects = Effects()
        effects.timer(self._patience, ("secure silence", self._digest))
        return effects.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:  # noqa: ARG002
        """Handle a message of the server, the update, or the server's silence."""
        effects = Effects()
        if self.ended:
            return ()
        match event:
            case Received(sender, message, _):
                self._on_message(sender, message, effects)
            case Done("secure update", row):
                self._on_update(row, effects)
            case Done("secure give up", reason):
                self._leave(str(reason), effects)
            case Done(("secure masked", digest), row) if digest == self._digest:
                self._row = row  # The update itself is not needed any more.
                content = self._plan.encoding.packed(row)
                self._answer(DeliveredShares, MaskedUpdate(self._digest), effects, Payload(content.nbytes, content))
            case Timer(("secure silence", digest)) if digest == self._digest:
                self._end(f"the server was silent for {self._patience:g} s")
            case _:
                pass
        return effects.done

    def _on_message(self, sender: Name, message: Any, effects: Effects) -> None:
        if sender != self._server:
            self._ignore(f"{type(message).__name__} from {sender}, who is not the server")
        elif getattr(message, "round", None) != self._digest:
            self._ignore(f"{type(message).__name__} of another round")
        else:
            effects.timer(self._patience, ("secure silence", self._digest))
            match message:
                case SecureEnd(_, failure):
                    self._end(failure)
                case SecureWait():
                    pass
                case SecureRefusal(_, reason):
                    self._ignore(f"the server refused: {reason}")
                case SecureInvite() | KeyRoster() | DeliveredShares() | SurvivorList() | SurvivorSignatures():
                    try:
                        self._on_question(message, effects)
                    except SecureAggregationError as error:
                        self.accusation = str(error)
                        self._leave(str(error), effects)
                case _:
                    self._ignore(f"{type(message).__name__}, which a server never sends")

    def _on_question(self, message: Struct, effects: Effects) -> None:
        """Answer a question: the first of its kind once, the same one alike, and no other."""
        kind = type(message)
        before = self._questions.get(kind)
        if before is not None:
            if before != message:
                raise SecureAggregationError(f"the server sent two different {kind.__name__}")
            if kind in self._answers:
                effects.send(self._server, *self._answers[kind])
            return
        match message:
            case SecureInvite():
                self._advertise(effects)
            case KeyRoster(_, peers):
                self._deal(peers, effects)
            case DeliveredShares(_, boxes):
                self._open(boxes)
            case SurvivorList(_, clients):
                self._check_survivors(clients, effects)
            case SurvivorSignatures(_, signatures):
                self._on_signatures({each.client: each.signature for each in signatures}, effects)
            case _:
                pass
        self._questions[kind] = message
        if kind is DeliveredShares:
            self._mask(effects)

    def _advertise(self, effects: Effects) -> None:
        secrets = self._own()
        sealing, masking = agreement_public(secrets.sealing), agreement_public(secrets.masking)
        signature = sign(self._identity, keys_text(self._digest, self.number, sealing, masking))
        self._answer(SecureInvite, AdvertisedKeys(self._digest, sealing, masking, signature), effects)

    def _deal(self, peers: Sequence[PeerKeys], effects: Effects) -> None:
        """Check the neighbours' keys, and deal them shares of the two secrets."""
        self._after(SecureInvite)
        plan, secrets = self._plan, self._own()
        own = {agreement_public(secrets.sealing), agreement_public(secrets.masking)}
        _check_peers(plan, self.number, own, self._known, peers)
        self._peers = {peer.client: peer for peer in peers}
        holders = sorted([*self._peers, self.number])
        sharing = ShamirSharing(plan.threshold)
        seeds, keys = (sharing.split(secret, holders, self._random) for secret in (secrets.seed, secrets.masking))
        secrets.held[self.number] = seeds[self.number], keys[self.number]
        boxes = tuple(
            _sealed_for(peer, secrets, self._digest, self.number, seeds[peer.client] + keys[peer.client])
            for peer in peers
        )
        known = commitment(secrets.seed, self._digest, self.number)
        self._answer(KeyRoster, DealtShares(self._digest, known, boxes), effects)

    def _open(self, boxes: Sequence[SealedShares]) -> None:
        """Open the boxes of the neighbours that are left; one that does not open leaves its share missing."""
        self._after(KeyRoster)
        partners = tuple(box.client for box in boxes)
        if len(set(partners)) < len(partners) or not set(partners) <= set(self._peers):
            raise SecureAggregationError("the server delivered shares of clients that are not neighbours, or twice")
        if len(partners) + 1 < self._plan.threshold:
            raise SecureAggregationError(
                f"{len(partners)} neighbours are left, too few for the threshold of {self._plan.threshold}"
            )
        secrets = self._own()
        for box in boxes:
            shares = _opened(box, self._peers[box.client], secrets, self._digest, self.number)
            if shares is None:
                self._ignore(f"shares of client {box.client}, which are not what they should be")
            else:
                secrets.held[box.client] = shares
        self._partners = partners

    def _on_update(self, row: Any, effects: Effects) -> None:
        if self._row is not None:
            self._ignore("a second update")
            return
        words, dtype = self._plan.encoding.words, self._plan.encoding.dtype
        if not isinstance(row, np.ndarray) or row.dtype != dtype or row.shape != (words,):
            wanted = f"{words:,} integers of {8 * dtype.itemsize} bits without sign"
            raise UsageError(f"an update for this round must be encoded: {wanted}.")
        self._row = row
        self._mask(effects)

    def _mask(self, effects: Effects) -> None:
        """Mask the update, as soon as there are an update and the neighbours that are left."""
        if self._row is None or DeliveredShares not in self._questions:
            return
        secrets, own = self._own(), self.number
        adding, subtracting = [own_mask_key(secrets.seed, self._digest, own)], list[bytes]()
        for partner in self._partners:
            key = pair_mask_key(secrets.masking, self._peers[partner].masking, self._digest, own, partner)
            (adding if own < partner else subtracting).append(key)
        effects.start(MaskWork(self._row, adding, subtracting), ("secure masked", self._digest))

    def _check_survivors(self, clients: tuple[int, ...], effects: Effects) -> None:
        """Accept the list of survivors, once and for all."""
        self._after(DeliveredShares)
        if list(clients) != sorted(set(clients)) or not set(clients) <= {*self._partners, self.number}:
            raise SecureAggregationError("the server's list of survivors has clients that are not neighbours, or twice")
        if self.number not in clients:
            raise SecureAggregationError("the server's list of survivors lacks this client, whose update it has")
        if len(clients) < (least := self._plan.least_seen):
            raise SecureAggregationError(
                f"the server's list has {len(clients)} survivors, and {least} are the fewest that were agreed"
            )
        self._survivors = clients
        if self._plan.signed:
            signature = sign(self._identity, survivors_text(self._digest, clients))
            self._answer(SurvivorList, SurvivorSignature(self._digest, signature), effects)
        else:
            self._release(SurvivorList, effects)

    def _on_signatures(self, signatures: Mapping[int, bytes], effects: Effects) -> None:
        """Release shares only if enough clients have the same list."""
        self._after(SurvivorList)
        if not self._plan.signed:
            raise SecureAggregationError("the server sent signatures, but a round without them was agreed")
        text = survivors_text(self._digest, self._survivors)
        keys = {self.number: self._public, **{client: peer.identity for client, peer in self._peers.items()}}
        _check_signatures(signatures, {client: keys[client] for client in self._survivors}, text, self._plan.threshold)
        self._release(SurvivorSignatures, effects)

    def _release(self, question: type[Struct], effects: Effects) -> None:
        """Of each client one share: of its seed if its update came, of its masking key if not."""
        answer = _released(self._digest, self._own().held, set(self._survivors))
        self._answer(question, answer, effects)

    def _answer(self, question: type[Struct], answer: Struct, effects: Effects, payload: Payload | None = None) -> None:
        self._answers[question] = answer, payload or Payload(0)
        effects.send(self._server, *self._answers[question])

    def _after(self, question: type[Struct]) -> None:
        """Refuse a question that comes before the answer to an earlier one."""
        if question not in self._answers:
            raise SecureAggregationError(f"the server asked out of order: {question.__name__} was not answered yet")

    def _own(self) -> ClientSecrets:
        if self._secrets is None:
            raise SecureAggregationError("this client has left the round, and forgotten its secrets")
        return self._secrets

    def _ignore(self, what: str) -> None:
        if len(self.refusals) < MOST_TEXT:
            self.refusals.append(what)

    def _leave(self, reason: str, effects: Effects) -> None:
        effects.send(self._server, SecureLeave(self._digest, reason[:MOST_TEXT]))
        self._end(reason)

    def _end(self, failure: str) -> None:
        """Forget all secrets."""
        self.ended, self.failure = True, failure
        self._secrets, self._row = None, None
        self._answers.clear()


def _sealed_for(peer: PeerKeys, secrets: ClientSecrets, digest: bytes, client: int, shares: bytes) -> SealedShares:
    """A box that only this neighbour can open."""
    common = agreement(secrets.sealing, peer.sealing)
    return SealedShares(peer.client, sealed(common, purpose("shares", digest, client, peer.client), shares))


def _opened(
    box: SealedShares, peer: PeerKeys, secrets: ClientSecrets, digest: bytes, client: int
) -> tuple[bytes, bytes] | None:
    """The shares in a neighbour's box; None if they are not from it, for this client and of this round."""
    common = agreement(secrets.sealing, peer.sealing)
    content = opened(common, purpose("shares", digest, box.client, client), box.box) or b""
    seed, key = content[:SHARE_BYTES], content[SHARE_BYTES:]
    return (seed, key) if is_share(seed) and is_share(key) else None


def _released(digest: bytes, held: Mapping[int, tuple[bytes, bytes]], alive: set[int]) -> ReleasedShares:
    """Of each client one share, and never both."""
    return ReleasedShares(
        digest,
        seeds=tuple(SharePiece(client, held[client][0]) for client in sorted(held) if client in alive),
        keys=tuple(SharePiece(client, held[client][1]) for client in sorted(held) if client not in alive),
    )


def _check_signatures(
    signatures: Mapping[int, bytes], survivors: Mapping[int, bytes], text: bytes, threshold: int
) -> None:
    """Refuse signatures that are too few, or not for the list of survivors, whose keys are given."""
    agreeing = {
        client
        for client, signature in signatures.items()
        if client in survivors and is_signed(survivors[client], signature, text)
    }
    if len(agreeing) < max(threshold, len(signatures)):
        raise SecureAggregationError(
            f"{len(agreeing)} of {len(signatures)} signatures are for the list of survivors that this client has, and "
            f"{threshold} are needed, all of them for it"
        )


def _check_peers(
    plan: SecureRound, client: int, own: set[bytes], known: Mapping[int, bytes] | None, peers: Sequence[PeerKeys]
) -> None:
    """Refuse neighbours that are too few or too many, and keys that are not theirs or come twice."""
    if not plan.threshold <= len(peers) + 1 <= plan.degree + 1:
        agreed = f"between {plan.threshold - 1} and {plan.degree} were agreed"
        raise SecureAggregationError(f"the server gave {len(peers)} neighbours, but {agreed}")
    keys = {*own, *(key for peer in peers for key in (peer.sealing, peer.masking))}
    if len({client, *(peer.client for peer in peers)}) <= len(peers) or len(keys) < 2 * len(peers) + 2:
        raise SecureAggregationError("the server gave a client or a key twice")
    for peer in peers:
        if known is not None and known.get(peer.client) != peer.identity:
            raise SecureAggregationError(f"the long-term key of client {peer.client} is not the one that is known")
        text = keys_text(plan.digest, peer.client, peer.sealing, peer.masking)
        if not is_signed(peer.identity, peer.signature, text):
            raise SecureAggregationError(f"the keys of client {peer.client} are not signed by it")

"""Whom an endpoint knows: by name, by the identity of their sockets, and by the sockets to them."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import UsageError
from offbeat.runtime.messages.frames import FrameError
from offbeat.runtime.messages.lending import Borrowed
from offbeat.runtime.messages.sockets import Socket

MOST_PEERS = 16_384
"""Names that an endpoint gets to know; messages of further ones are refused."""
LONGEST_NAME = 200
"""Bytes of a name."""


@dataclass(slots=True)
class PeerTraffic:
    """What has gone over the link with one peer."""

    sent: int = 0
    """Messages."""
    received: int = 0
    bytes_sent: int = 0
    """Of payloads, lent ones too."""
    bytes_received: int = 0
    bytes_lent: int = 0
    """How many of those sent stayed where they were."""
    dropped: int = 0
    """Messages that could not be sent: the queue was full, or nobody of that name is known."""


@dataclass(slots=True)
class Peer:
    """What is known of somebody else."""

    name: str
    identity: bytes
    traffic: PeerTraffic
    dealer: Socket | None = None
    incarnation: int | None = None
    """Of its greeting; None before that came."""
    asked: bool = False
    """Whether it was asked for its greeting."""
    shares: bool = False
    """Whether it can read memory that we lend."""
    borrowed: Borrowed | None = None
    """Memory that it has lent us; None if it is on another host."""


class Peers:
    """Everybody that an endpoint has connected to or heard of, and not forgotten."""

    def __init__(self) -> None:
        self.by_name: dict[str, Peer] = {}
        self.by_identity: dict[bytes, Peer] = {}
        self.by_dealer: dict[Socket, Peer] = {}
        self.traffic: dict[str, PeerTraffic] = {}
        """By name; kept when a peer is forgotten."""

    def find(self, name: str) -> Peer | None:
        """What is known of somebody, at first nothing; None if there are too many."""
        peer = self.by_name.get(name)
        if peer is None:
            identity = identity_of(name)
            traffic = self.traffic_of(name)
            if traffic is not None:
                peer = self.by_name[name] = self.by_identity[identity] = Peer(name, identity, traffic)
        return peer

    def traffic_of(self, name: str) -> PeerTraffic | None:
        """What is counted of somebody; None if there are too many."""
        if name not in self.traffic and len(self.traffic) >= MOST_PEERS:
            return None
        return self.traffic.setdefault(name, PeerTraffic())

    def admit(self, identity: bytes) -> Peer:
        """A newcomer, whose first message was well-formed."""
        try:
            peer = self.find(identity.decode())
        except (UnicodeDecodeError, UsageError) as error:
            raise FrameError("a sender without a name") from error
        if peer is None:
            raise FrameError(f"more than {MOST_PEERS:,} senders")
        return peer

    def forget(self, name: str) -> Peer | None:
        """Let go of somebody; who that was, if anybody."""
        peer = self.by_name.pop(name, None)
        if peer is not None:
            del self.by_identity[peer.identity]
            if peer.dealer is not None:
                del self.by_dealer[peer.dealer]
        return peer

    def clear(self) -> None:
        """Let go of everybody."""
        self.by_name.clear()
        self.by_identity.clear()
        self.by_dealer.clear()


def identity_of(name: str) -> bytes:
    """A name as the identity of a socket."""
    identity = name.encode()
    if not name.isprintable() or not 0 < len(identity) <= LONGEST_NAME:
        raise UsageError(f"{name!r} cannot be a name: it must be printable, and have 1 to {LONGEST_NAME} bytes.")
    return identity

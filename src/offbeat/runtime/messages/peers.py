"""The peers of an endpoint: by name, by the identity of their sockets, and by the sockets to them."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.errors import UsageError
from offbeat.runtime.messages.frames import FrameError
from offbeat.runtime.messages.lending import Borrowed
from offbeat.runtime.messages.sockets import Socket

MOST_PEERS = 16_384  # Peers that an endpoint remembers; messages from more are refused.
LONGEST_NAME = 200  # In bytes.


@dataclass(slots=True)
class PeerTraffic:
    """Traffic with one peer."""

    sent: int = 0  # Messages.
    received: int = 0
    bytes_sent: int = 0  # Payload bytes, including lent memory.
    bytes_received: int = 0
    bytes_lent: int = 0  # The part of `bytes_sent` that was lent instead of copied.
    dropped: int = 0  # Messages that could not be sent: full queue, or unknown peer.


@dataclass(slots=True)
class Peer:
    """Another endpoint."""

    name: str
    identity: bytes
    traffic: PeerTraffic
    dealer: Socket | None = None
    incarnation: int | None = None  # From its greeting; None before that came.
    asked: bool = False  # Whether a greeting was requested from it.
    shares: bool = False  # Whether it can read memory lent by us.
    borrowed: Borrowed | None = None  # Memory lent by it; None if it is on another host.


class Peers:
    """All peers that an endpoint has connected to or heard from, and not forgotten."""

    def __init__(self) -> None:
        self.by_name: dict[str, Peer] = {}
        self.by_identity: dict[bytes, Peer] = {}
        self.by_dealer: dict[Socket, Peer] = {}
        self.traffic: dict[str, PeerTraffic] = {}  # By name; kept when a peer is forgotten.

    def find(self, name: str) -> Peer | None:
        """The peer of this name, new if need be; None if there are too many."""
        peer = self.by_name.get(name)
        if peer is None:
            identity, traffic = identity_of(name), self.traffic_of(name)
            if traffic is not None:
                peer = self.by_name[name] = self.by_identity[identity] = Peer(name, identity, traffic)
        return peer

    def traffic_of(self, name: str) -> PeerTraffic | None:
        """The traffic with a peer; None if there are too many."""
        if name not in self.traffic and len(self.traffic) >= MOST_PEERS:
            return None
        return self.traffic.setdefault(name, PeerTraffic())

    def admit(self, identity: bytes) -> Peer:
        """A new peer, whose first message was well-formed."""
        try:
            peer = self.find(identity.decode())
        except (UnicodeDecodeError, UsageError) as error:
            raise FrameError("a sender without a name") from error
        if peer is None:
            raise FrameError(f"more than {MOST_PEERS:,} senders")
        return peer

    def forget(self, name: str) -> Peer | None:
        """Remove a peer and return it, if it was known."""
        peer = self.by_name.pop(name, None)
        if peer is not None:
            del self.by_identity[peer.identity]
            if peer.dealer is not None:
                del self.by_dealer[peer.dealer]
        return peer

    def clear(self) -> None:
        """Remove all peers."""
        self.by_name.clear()
        self.by_identity.clear()
        self.by_dealer.clear()


def identity_of(name: str) -> bytes:
    """A name as a socket identity."""
    identity = name.encode()
    if not name.isprintable() or not 0 < len(identity) <= LONGEST_NAME:
        raise UsageError(f"{name!r} cannot be a name: it must be printable, and have 1 to {LONGEST_NAME} bytes.")
    return identity

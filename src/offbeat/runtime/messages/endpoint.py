"""One process's end of the message plane.

A process that is to be found binds one ROUTER socket; whoever wants to speak to it connects a DEALER. Both may speak
first then. Messages of one sender come in order, or not at all: a full queue, a broken line or a dead peer lose them,
and machines ask again.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import secrets
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import zmq

from offbeat.errors import UsageError
from offbeat.runtime.messages.addresses import PRIVATE, address_in, check_address
from offbeat.runtime.messages.frames import (
    BULK,
    CHUNK,
    Buffer,
    Bytes,
    Codec,
    FrameError,
    Hello,
    Reference,
    as_bytes,
)
from offbeat.runtime.messages.keys import DOMAIN, Keys, for_socket, guard
from offbeat.runtime.messages.lending import Borrowed, LendingError, Loans

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

    from offbeat.runtime.shared.segment import Segment

MOST_PEERS = 16_384
"""Names that an endpoint gets to know; messages of further ones are refused."""
LONGEST_NAME = 200
"""Bytes of a name."""
HIGH_WATER = 1_000
"""Messages that wait for a peer before further ones are dropped."""
TRIES = 30
"""How often sockets are looked at, letting others run in between, before a wait sleeps: waking up takes longer."""
_ENCRYPTION = 1024
"""Bytes, and some to spare, by which a frame is longer under CURVE."""
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # Plain numbers: the enumeration is slow.

M = TypeVar("M")


class Incoming(NamedTuple, Generic[M]):
    """A message that has come."""

    sender: str
    message: M
    payload: Bytes | None
    """Read-only. If the sender has lent the memory, this is that memory: valid until the protocol's answer."""


@dataclass(slots=True)
class Traffic:
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
class _Peer:
    """What is known of somebody else."""

    name: str
    identity: bytes
    traffic: Traffic
    dealer: zmq.Socket[bytes] | None = None
    incarnation: int | None = None
    """Of its greeting; None before that came."""
    asked: bool = False
    """Whether it was asked for its greeting."""
    shares: bool = False
    """Whether it can read memory that we lend."""
    borrowed: Borrowed | None = None
    """Memory that it has lent us; None if it is on another host."""


@dataclass(slots=True)
class _Wake:
    """Lets another thread end a wait."""

    descriptor: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True

    def ring(self) -> None:
        with self.lock:
            if self.is_open:
                os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        with self.lock:
            if self.is_open:
                self.is_open = False
                os.close(self.descriptor)


class Endpoint(Generic[M]):
    """Sends and receives messages under one name. Of one thread, but for `wake`.

    The name is the identity of the socket, so a message carries no sender that could be wrong. Of two live endpoints
    with one name, the one that connected last has it (a restarted process is not locked out by its former self).
    """

    def __init__(
        self,
        name: str,
        codec: Codec[M],
        bind: str | None = None,
        keys: Keys | None = None,
        high_water: int = HIGH_WATER,
    ) -> None:
        from offbeat.runtime.shared.segment import host_identity  # It imports torch, which keys do not need.

        self.name = name
        self._identity = _identity(name)
        self._codec = codec
        self._keys = keys
        self._high_water = high_water
        self._host = host_identity()
        self._incarnation = secrets.randbits(63)
        self._loans = Loans()
        self._peers: dict[str, _Peer] = {}
        self._by_identity: dict[bytes, _Peer] = {}
        self._by_dealer: dict[zmq.Socket[bytes], _Peer] = {}
        self.traffic: dict[str, Traffic] = {}
        """By peer; kept when a peer is forgotten."""
        self.refused = 0
        """Messages that were malformed, of an impossible sender, or named memory that is not the sender's."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake = _Wake()
        self._ready: list[zmq.Socket[bytes]] = []
        self._polled: list[tuple[Any, int]] = [(self._wake.descriptor, zmq.POLLIN)]
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._door: ThreadAuthenticator | None = None
        self._router: zmq.Socket[bytes] | None = None
        self.address: str | None = None
        """Where others connect to, if this one binds."""
        try:
            if bind is not None:
                self._bind(bind)
        except BaseException:
            self.close()
            raise

    # --- who is there

    def connect(self, peer: str, address: str, public: str | None = None) -> None:
        """Reach this peer at this address; with keys, `public` is its public key (unless it has the same file)."""
        check_address(address, self._keys is not None)
        known = self._known(peer)
        if known is None:
            raise UsageError(f"{self.name} knows {MOST_PEERS:,} peers already, and cannot connect to {peer!r}.")
        if known.dealer is not None:
            raise UsageError(f"{self.name} is connected to {peer!r} already: forget it first.")
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, self._identity)
        if self._keys is not None:
            dealer.curve_serverkey = for_socket(public or self._keys.public)
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            dealer.close(0)
            raise UsageError(f"{self.name} cannot connect to {peer!r} at {address}: {error}.") from error
        known.dealer = dealer
        self._by_dealer[dealer] = known
        self._polled.append((dealer, zmq.POLLIN))
        self._greet(known, answer=True)

    def forget(self, peer: str) -> None:
        """Let go of a peer: its connection, what waits to be sent to it, and its memory."""
        known = self._peers.pop(peer, None)
        if known is None:
            return
        del self._by_identity[known.identity]
        if known.dealer is not None:
            del self._by_dealer[known.dealer]
            self._polled = [entry for entry in self._polled if entry[0] is not known.dealer]
            self._ready = [socket for socket in self._ready if socket is not known.dealer]
            known.dealer.close(0)

    @property
    def peers(self) -> tuple[str, ...]:
        """Those whom we have connected to or heard of, and not forgotten."""
        return tuple(self._peers)

    def has_met(self, peer: str) -> bool:
        """Whether this peer has greeted us: each can hear the other."""
        known = self._peers.get(peer)
        return known is not None and known.incarnation is not None

    def shares_memory_with(self, peer: str) -> bool:
        """Whether lent memory can be read by this peer: it has greeted us, and from this host."""
        known = self._peers.get(peer)
        return known is not None and known.shares

    def lend(self, segment: Segment) -> None:
        """Payloads that lie in this memory are from now on not sent to peers on this host, but referred to.

        They must not change until the receiver has answered. The segment must not be sealed while it is lent.
        """
        self._loans.add(segment)

    def reclaim(self, segment: Segment) -> None:
        """Lend this memory no longer. Peers that have it mapped keep it until they forget us."""
        self._loans.remove(segment)

    # --- messages

    def send(self, to: str, message: M, payload: Buffer | None = None) -> bool:
        """Put a message into the queue to a peer; never waits. False if it was dropped, which is counted.

        A payload of 64 KiB or more is not copied: like lent memory, it must not change until the receiver has
        answered, or the receiver refuses it for its checksum.
        """
        peer = self._peers.get(to)
        if peer is None:
            if to in self.traffic or len(self.traffic) < MOST_PEERS:
                self.traffic.setdefault(to, Traffic()).dropped += 1
            return False
        reference = None if payload is None or not peer.shares else self._loans.reference(payload)
        nbytes = 0
        if reference is None:
            flat = None if payload is None else as_bytes(payload)
            nbytes = 0 if flat is None else flat.nbytes
            frames = self._codec.encode(message, flat)
        else:
            nbytes = reference.nbytes
            frames = [self._codec.encode_reference(message, reference)]
        traffic = peer.traffic
        if not self._put(peer, frames):
            traffic.dropped += 1
            return False
        traffic.sent += 1
        traffic.bytes_sent += nbytes
        traffic.bytes_lent += 0 if reference is None else nbytes
        return True

    def receive(self, timeout: float | None) -> Incoming[M] | None:
        """The next message; None if none came in so many seconds (None: any number), or if `wake` was called."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        is_last = False
        while True:
            while self._ready:
                incoming = self._take(self._ready.pop())
                if incoming is not None:
                    return incoming
            if is_last:
                return None
            rest = deadline - time.monotonic()
            is_last = rest <= 0
            if self._poll(-1 if rest == math.inf else max(0, math.ceil(rest * 1000))):
                is_last = True

    def wake(self) -> None:
        """End the wait of `receive`, or its next one. The only method for other threads."""
        self._wake.ring()

    def close(self, linger: float = 0.0) -> None:
        """Close all sockets; what still waits to be sent has so many seconds."""
        if self._door is not None:
            self._door.stop()
            self._door = None
        self._context.destroy(linger=int(linger * 1000))
        self._peers.clear()
        self._by_identity.clear()
        self._by_dealer.clear()
        self._ready.clear()
        self._loans = Loans()
        self._wake.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Endpoint[M]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- sockets

    def _bind(self, address: str) -> None:
        if address == PRIVATE:
            self._folder = tempfile.TemporaryDirectory(prefix="offbeat-")
            address = address_in(Path(self._folder.name), self.name)
        check_address(address, self._keys is not None)
        router = self._router = self._socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._keys is not None:
            self._door = guard(self._context, self._keys)
            router.curve_server = True
            router.zap_domain = DOMAIN.encode()
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise UsageError(f"{self.name} cannot listen at {address}: {error}.") from error
        self.address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._polled.append((router, zmq.POLLIN))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.setsockopt(zmq.SNDHWM, self._high_water)
        socket.setsockopt(zmq.RCVHWM, self._high_water)
        socket.setsockopt(zmq.MAXMSGSIZE, CHUNK + _ENCRYPTION)
        if self._keys is not None:
            socket.curve_publickey = for_socket(self._keys.public)
            socket.curve_secretkey = for_socket(self._keys.secret)
        return socket

    def _put(self, peer: _Peer, frames: list[Any]) -> bool:
        """Queue frames for a peer, all or none; False if there is no room, or no way to it."""
        socket = peer.dealer
        last = frames[-1]
        try:
            if socket is None:
                socket = self._router
                if socket is None:
                    return False
                socket.send(peer.identity, _MORE)
            for frame in frames[:-1]:
                socket.send(frame, _MORE, len(frame) < BULK)
            socket.send(last, _NOBLOCK, len(last) < BULK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def _poll(self, milliseconds: int) -> bool:
        """Wait until a socket has something; True if another thread has rung."""
        rung = False
        found: list[tuple[Any, int]] = []
        for _ in range(TRIES if milliseconds else 0):
            found = zmq.zmq_poll(self._polled, 0)  # pyright: ignore[reportAssignmentType]
            if found:
                break
            os.sched_yield()
        if not found:
            found = zmq.zmq_poll(self._polled, milliseconds)  # pyright: ignore[reportAssignmentType]
        for entry, _ in found:
            if isinstance(entry, int):
                os.eventfd_read(entry)
                rung = True
            else:
                self._ready.append(entry)
        return rung

    def _take(self, socket: zmq.Socket[bytes]) -> Incoming[M] | None:
        """One message from a socket; None if there is none, or none for the caller."""
        try:
            if socket is self._router:
                identity = socket.recv(_NOBLOCK)
                peer = self._by_identity.get(identity, identity)
            else:
                peer = self._by_dealer[socket]
            frames = self._frames(socket)
        except zmq.Again:
            return None
        try:
            return self._accept(peer, frames)
        except (FrameError, LendingError):
            self.refused += 1
            return None

    def _frames(self, socket: zmq.Socket[bytes]) -> list[Any]:
        """All frames of one message: small ones copied, which is quicker and aligns them; not more than may be."""
        limit = self._codec.most_frames + 2
        frames: list[Any] = []
        more = True
        while more:
            frame = socket.recv(_NOBLOCK, False)
            more = frame.more
            if len(frames) < limit:
                frames.append(frame.bytes if len(frame) < BULK else frame.buffer)
        return frames

    # --- what messages mean

    def _accept(self, peer: _Peer | bytes, frames: list[Any]) -> Incoming[M] | None:
        """A message from a peer, or from a newcomer of this identity; None if it was meant for the endpoint itself."""
        message, payload = self._codec.decode(frames)
        peer = self._admitted(peer) if isinstance(peer, bytes) else peer
        if isinstance(message, Hello):
            self._greeted(peer, message)
            return None
        if isinstance(payload, Reference):
            payload = self._read(peer, payload)
        traffic = peer.traffic
        traffic.received += 1
        if payload is not None:
            traffic.bytes_received += payload.nbytes
        if peer.incarnation is None and not peer.asked:
            self._greet(peer, answer=True)
        return Incoming(peer.name, message, payload)

    def _admitted(self, identity: bytes) -> _Peer:
        """A newcomer, whose first message was well-formed."""
        try:
            name = identity.decode()
            _identity(name)
        except (UnicodeDecodeError, UsageError) as error:
            raise FrameError("a sender without a name") from error
        peer = self._known(name)
        if peer is None:
            raise FrameError(f"more than {MOST_PEERS:,} senders")
        return peer

    def _known(self, name: str) -> _Peer | None:
        """What is known of somebody, at first nothing; None if there are too many."""
        peer = self._peers.get(name)
        if peer is None:
            if name not in self.traffic and len(self.traffic) >= MOST_PEERS:
                return None
            peer = _Peer(name, _identity(name), self.traffic.setdefault(name, Traffic()))
            self._peers[name] = self._by_identity[peer.identity] = peer
        return peer

    def _greet(self, peer: _Peer, answer: bool, host: str | None = None) -> None:
        """Say who we are; with an empty host, that we cannot read the peer's memory."""
        host = self._host_as(self._incarnation) if host is None else host
        frame = self._codec.encode_hello(Hello(host, os.getpid(), self._incarnation, answer))
        peer.asked = peer.asked or answer
        self._put(peer, [frame])

    def _greeted(self, peer: _Peer, hello: Hello) -> None:
        is_near = hello.incarnation != self._incarnation and hello.host == self._host_as(hello.incarnation)
        if hello.incarnation != peer.incarnation:
            peer.incarnation = hello.incarnation
            peer.borrowed = Borrowed(hello.process) if is_near else None
        peer.shares = is_near
        if hello.answer:
            self._greet(peer, answer=False)

    def _host_as(self, incarnation: int) -> str:
        """How an endpoint of this host proves that it is: others do not know the identity, nor can they echo this."""
        return hashlib.blake2b(f"{incarnation} {self._host}".encode(), digest_size=16).hexdigest()

    def _read(self, peer: _Peer, reference: Reference) -> Bytes:
        """Memory that a peer refers to. If it cannot be had, the peer is told, and will send the numbers instead."""
        try:
            if peer.borrowed is None:
                raise LendingError(f"{peer.name} is not known to be on this host")
            return peer.borrowed.view(reference)
        except LendingError:
            self._greet(peer, answer=peer.incarnation is None, host="" if peer.incarnation is not None else None)
            raise


def _identity(name: str) -> bytes:
    """A name as the identity of a socket."""
    identity = name.encode()
    if not name.isprintable() or not 0 < len(identity) <= LONGEST_NAME:
        raise UsageError(f"{name!r} cannot be a name: it must be printable, and have 1 to {LONGEST_NAME} bytes.")
    return identity

"""One process's end of the message plane.

A process that others connect to binds one ROUTER socket; each of them connects a DEALER, and then either side may send
first. Messages of one sender arrive in order or not at all: a full queue, a broken connection or a dead peer loses
them, and machines send again.

On one host, payloads may be passed by reference: memory that one process lends and another maps read-only. The message
is then only the doorbell. Lent memory must not change until the reader has said, in the protocol's own way, that it is
done.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import zmq
from numpy.typing import NDArray

from offbeat.errors import OffbeatError, UsageError
from offbeat.runtime.collectives.one_sided.tickets import TICKET, SegmentError, host_identity, open_ticket
from offbeat.runtime.messages.frames import Buffer, Bytes, Codec, EndpointHello, FrameError, MemoryReference, as_bytes
from offbeat.runtime.messages.keys import Keys
from offbeat.runtime.messages.sockets import Socket, Sockets, check_address

if TYPE_CHECKING:
    from offbeat.runtime.collectives.one_sided.segment import Segment

MOST_PEERS = 16_384  # Peers that an endpoint remembers; messages from more are refused.
LONGEST_NAME = 200  # In bytes.


def named(public: str) -> str:
    """The name of an endpoint that is called by its public key."""
    return f"key {public}"


class LendingError(OffbeatError):
    """The memory that a reference names is missing, not ours to read, or too short."""


class _Loan(NamedTuple):
    start: int
    stop: int
    ticket: str
    serial: int
    segment: Segment


class Loans:
    """The memory that this process lends."""

    def __init__(self) -> None:
        self._loans: list[_Loan] = []
        self._last = 0

    def add(self, segment: Segment) -> None:
        """Lend this memory; its descriptor must stay open."""
        if not TICKET.fullmatch(segment.ticket):
            raise UsageError(f"Memory that is sealed (ticket {segment.ticket}) cannot be lent: lend it before.")
        self._last += 1
        start = segment.address
        self._loans.append(_Loan(start, start + segment.size, segment.ticket, self._last, segment))

    def remove(self, segment: Segment) -> None:
        """Stop lending it."""
        self._loans = [loan for loan in self._loans if loan.segment is not segment]

    def reference(self, payload: Buffer) -> MemoryReference | None:
        """The reference for a payload, if all of it is in lent memory."""
        if not self._loans:
            return None
        array = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, dtype=np.uint8)
        nbytes = array.nbytes
        if nbytes and array.flags.c_contiguous:
            start = _address(array)
            for loan in self._loans:
                if loan.start <= start and start + nbytes <= loan.stop:
                    return MemoryReference(loan.ticket, loan.serial, start - loan.start, nbytes)
        return None


def _address(array: NDArray[Any]) -> int:
    """The address of a contiguous array."""
    if array.flags.writeable:
        # Five times as fast as the other way.
        return ctypes.addressof(ctypes.c_char.from_buffer(cast("Any", array)))
    return int(array.__array_interface__["data"][0])


class Borrowed:
    """Memory of one peer, mapped by this process."""

    MOST = 64  # Segments mapped per peer; one more unmaps the oldest.

    def __init__(self, process: int) -> None:
        self._process = process
        self._mapped: dict[tuple[str, int], Bytes] = {}

    def view(self, reference: MemoryReference) -> Bytes:
        """The referenced bytes, read-only; raises `LendingError` if the reference is wrong."""
        key = (reference.ticket, reference.serial)
        memory = self._mapped.get(key)
        if memory is None:
            memory = _map(reference.ticket, self._process)
            if len(self._mapped) >= self.MOST:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[key] = memory
        stop = reference.offset + reference.nbytes
        if not 0 <= reference.offset <= stop <= memory.nbytes:
            raise LendingError(f"bytes {reference.offset:,} to {stop:,} of {memory.nbytes:,}")
        return memory[reference.offset : stop]


def _map(ticket: str, process: int) -> Bytes:
    """The memory of a ticket, if it really is memory that that process made to be shared."""
    try:
        descriptor = open_ticket(ticket, os.O_RDONLY, process)
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return np.frombuffer(mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ), dtype=np.uint8)
        finally:
            os.close(descriptor)
    except (SegmentError, OSError, ValueError, OverflowError) as error:
        raise LendingError(f"the memory of ticket {ticket!r} cannot be read: {error}") from error


@dataclass(slots=True)
class PeerTraffic:
    """Traffic with one peer."""

    sent: int = 0  # Messages.
    received: int = 0
    bytes_sent: int = 0  # Payload bytes, including lent memory.
    bytes_received: int = 0
    bytes_lent: int = 0  # The part of `bytes_sent` that was lent instead of copied.
    dropped: int = 0  # Messages that could not be sent: full queue, or unknown peer.
    refused: int = 0  # Malformed messages from it.


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


HIGH_WATER = 1_000  # Messages queued for a peer before further ones are dropped.

M = TypeVar("M")


class Incoming(NamedTuple, Generic[M]):
    """A received message."""

    sender: str
    message: M
    payload: Bytes | None  # Read-only. If the sender lent memory, it is that memory: valid until the reply.


class Endpoint(Generic[M]):
    """Sends and receives messages under one name. Single-threaded except for `wake`.

    The name is the socket's identity, so messages carry no sender that could be wrong. Of two live endpoints with the
    same name, the last to connect wins (a restarted process is not locked out by its former self).

    With `named_by_key`, a peer that connects must be called `named(its public key)`, so that those who are admitted
    cannot take each other's names.
    """

    def __init__(
        self,
        name: str,
        codec: Codec[M],
        bind: str | None = None,
        keys: Keys | None = None,
        high_water: int = HIGH_WATER,
        *,
        named_by_key: bool = False,
    ) -> None:
        self.name = name
        self._codec = codec
        self._has_keys = keys is not None
        self._named_by_key = named_by_key
        self._host = host_identity()
        self._incarnation = secrets.randbits(63)
        self._loans = Loans()
        self.known = Peers()
        self.traffic: dict[str, PeerTraffic] = self.known.traffic  # By peer; kept when a peer is forgotten.
        self.refused = 0  # Messages malformed, from an impossible sender, or naming another's memory.
        self._sockets = Sockets(name, identity_of(name), keys, high_water, codec.most_frames)
        self.wake = self._sockets.wake  # Ends the current or next wait of `receive`; the only method for other threads.
        self.address: str | None = None  # Where others connect, if this endpoint binds.
        try:
            if bind is not None:
                self.address = self._sockets.bind(bind)
        except BaseException:
            self.close()
            raise

    def connect(self, peer: str, address: str, public: str | None = None) -> None:
        """Connect to a peer; with keys, `public` is its public key (unless it has the same key file)."""
        check_address(address, self._has_keys)
        known = self.known.find(peer)
        if known is None:
            raise UsageError(f"{self.name} knows {MOST_PEERS:,} peers already, and cannot connect to {peer!r}.")
        if known.dealer is not None:
            raise UsageError(f"{self.name} is connected to {peer!r} already: forget it first.")
        known.dealer = self._sockets.connect(peer, address, public)
        self.known.by_dealer[known.dealer] = known
        self._greet(known, answer=True)

    def forget(self, peer: str) -> None:
        """Drop a peer: its connection, its queue and its memory."""
        known = self.known.forget(peer)
        if known is not None and known.dealer is not None:
            self._sockets.disconnect(known.dealer)

    @property
    def strangers(self) -> int:
        """How many keys that are not allowed have tried to connect."""
        return len(self._sockets.strangers)

    def has_met(self, peer: str) -> bool:
        """Whether this peer has greeted us: the connection works both ways."""
        known = self.known.by_name.get(peer)
        return known is not None and known.incarnation is not None

    def lend(self, segment: Segment) -> None:
        """From now on pass payloads in this memory to peers on this host by reference.

        They must not change until the receiver has replied. The segment must not be sealed while it is lent.
        """
        self._loans.add(segment)

    def reclaim(self, segment: Segment) -> None:
        """Stop lending this memory. Peers that have mapped it keep it until they forget us."""
        self._loans.remove(segment)

    def send(self, to: str, message: M, payload: Buffer | None = None) -> bool:
        """Queue a message for a peer; never waits. False if it was dropped, which is counted.

        A payload of 64 KiB or more is not copied: like lent memory, it must not change until the receiver has
        replied, or the receiver refuses it for its checksum.
        """
        peer = self.known.by_name.get(to)
        if peer is None:
            counted = self.known.traffic_of(to)
            if counted is not None:
                counted.dropped += 1
            return False
        reference = None if payload is None or not peer.shares else self._loans.reference(payload)
        if reference is None:
            flat = None if payload is None else as_bytes(payload)
            nbytes = 0 if flat is None else flat.nbytes
            frames = self._codec.encode(message, flat)
        else:
            nbytes = reference.nbytes
            frames = [self._codec.encode_reference(message, reference)]
        traffic = peer.traffic
        if not self._sockets.put(peer.dealer, peer.identity, frames):
            traffic.dropped += 1
            return False
        traffic.sent += 1
        traffic.bytes_sent += nbytes
        traffic.bytes_lent += 0 if reference is None else nbytes
        return True

    def receive(self, timeout: float | None) -> Incoming[M] | None:
        """The next message; None after `timeout` seconds (None: never) or if `wake` was called."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        is_last, sockets = False, self._sockets
        while True:
            while sockets.ready:
                incoming = self._take(sockets.ready.pop())
                if incoming is not None:
                    return incoming
            if is_last:
                return None
            rest = deadline - time.monotonic()
            is_last = rest <= 0
            if sockets.poll(-1 if rest == math.inf else max(0, math.ceil(rest * 1000))):
                is_last = True

    def close(self) -> None:
        """Close all sockets."""
        self._sockets.close()
        self.known.clear()
        self._loans = Loans()

    def __enter__(self) -> Endpoint[M]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, socket: Socket) -> Incoming[M] | None:
        try:
            identity, frames = self._sockets.take(socket)
        except zmq.Again:
            return None
        known = self.known
        peer = known.by_dealer[socket] if identity is None else known.by_identity.get(identity, identity)
        try:
            if self._named_by_key and identity is not None and identity != identity_of(named(self._sockets.owner)):
                raise FrameError("a sender with another's name")
            return self._accept(peer, frames)
        except (FrameError, LendingError):
            self.refused += 1
            if isinstance(peer, Peer):
                peer.traffic.refused += 1
            return None

    def _accept(self, peer: Peer | bytes, frames: list[Any]) -> Incoming[M] | None:
        """A message from a peer, or from a new one of this identity; None if it was for the endpoint itself."""
        message, payload = self._codec.decode(frames)
        peer = self.known.admit(peer) if isinstance(peer, bytes) else peer
        if isinstance(message, EndpointHello):
            self._greeted(peer, message)
            return None
        if isinstance(payload, MemoryReference):
            payload = self._read(peer, payload)
        traffic = peer.traffic
        traffic.received += 1
        if payload is not None:
            traffic.bytes_received += payload.nbytes
        if peer.incarnation is None and not peer.asked:
            self._greet(peer, answer=True)
        return Incoming(peer.name, message, payload)

    def _greet(self, peer: Peer, answer: bool, host: str | None = None) -> None:
        """Introduce ourselves; an empty host says that we cannot read the peer's memory."""
        host = self._host_as(self._incarnation) if host is None else host
        frame = self._codec.encode_hello(EndpointHello(host, os.getpid(), self._incarnation, answer))
        peer.asked = peer.asked or answer
        self._sockets.put(peer.dealer, peer.identity, [frame])

    def _greeted(self, peer: Peer, hello: EndpointHello) -> None:
        is_near = hello.incarnation != self._incarnation and hello.host == self._host_as(hello.incarnation)
        if hello.incarnation != peer.incarnation:
            peer.incarnation = hello.incarnation
            peer.borrowed = Borrowed(hello.process) if is_near else None
        peer.shares = is_near
        if hello.answer:
            self._greet(peer, answer=False)

    def _host_as(self, incarnation: int) -> str:
        """Proof of being on this host: others do not know the identity, and cannot echo this."""
        return hashlib.blake2b(f"{incarnation} {self._host}".encode(), digest_size=16).hexdigest()

    def _read(self, peer: Peer, reference: MemoryReference) -> Bytes:
        """The memory that a peer refers to; if it cannot be mapped, the peer is told to send the numbers instead."""
        try:
            if peer.borrowed is None:
                raise LendingError(f"{peer.name} is not known to be on this host")
            return peer.borrowed.view(reference)
        except LendingError:
            self._greet(peer, answer=peer.incarnation is None, host="" if peer.incarnation is not None else None)
            raise

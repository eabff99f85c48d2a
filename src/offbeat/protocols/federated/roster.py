"""The clients of a federated deployment: who may join, under which number, and who is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.protocols.federated.messages import MembershipRequest
from offbeat.protocols.federated.peers import PeerList
from offbeat.protocols.federated.secure.primitives import PUBLIC_BYTES
from offbeat.protocols.machine import Name

_ROUNDING: Final = 1e-3  # Seconds by which timers are early.


class JoinedClient(Struct):
    """A client that has joined."""

    client: int  # Its number, from 0.
    label: str
    examples: int | None = None  # None until its data is ready.
    gone: bool = False  # Whether it said that it ends.
    identity: bytes = b""  # Its long-term Ed25519 public key, if it has one.


class Roster:
    """Clients by name, with the rules for joining.

    Args:
        members: Those that have joined; kept up to date in place.
        clients: How many there may be.
        enrolled: Names of those that may join, by number; None: anybody may.
        patience: Seconds without a sign of life after which a client is absent.
        signing: Whether clients need a long-term key, as secure sums do.
        peers: The long-term keys of all clients, by which rounds are signed; None: they are not.

    """

    def __init__(
        self,
        members: dict[Name, JoinedClient],
        clients: int,
        enrolled: Sequence[Name] | None,
        patience: float,
        *,
        signing: bool = False,
        peers: PeerList | None = None,
    ) -> None:
        self.members: Mapping[Name, JoinedClient] = members
        self._members, self._clients, self._enrolled = members, clients, enrolled
        self._names = {member.client: name for name, member in members.items()}
        self._heard: dict[int, float] = {}
        self.stuck: set[int] = set()
        """Clients that go on with a task that is over: they get no new one until they have ended it."""
        self.patience, self._signing, self._peers = patience, signing, peers

    def why_not(self, name: Name, join: MembershipRequest) -> str:
        """Why a client may not join; empty if it may."""
        fixed, before = self._fixed_number(name, join), self._members.get(name)
        if self._signing and len(join.identity) != PUBLIC_BYTES:
            return "secure=True needs the cryptography package at every client: pip install 'offbeat[federated]'"
        if self._signing and before is not None and before.identity != join.identity:
            return "its signing key is not the one it joined with: start it with the same --out, where its key is kept"
        if why := self._why_not_among_peers(name, join):
            return why
        if fixed is not None:
            return "" if join.client in (None, fixed) else f"it is client {fixed}, not {join.client}"
        if self._enrolled is not None:
            return "its key is not enrolled (on the server: offbeat keys allow SERVER.keys PUBLIC)"
        if join.client is not None and not 0 <= join.client < self._clients:
            return f"there is no client {join.client}: the {self._clients:,} clients are numbered from 0"
        if join.client in self._names:
            return _taken(join.client, self.label(join.client))
        return f"all {self._clients:,} clients have joined" if len(self._members) >= self._clients else ""

    def admit(self, name: Name, join: MembershipRequest, now: float) -> int:
        """Let a client join, or join again; returns its number."""
        client = self._fixed_number(name, join)
        if client is None:
            free = (number for number in range(self._clients) if number not in self._names)
            client = next(free) if join.client is None else join.client
        before = self._members.get(name)
        self._members[name] = JoinedClient(
            client, join.label, None if before is None else before.examples, identity=join.identity
        )
        self._names[client] = name
        self.stuck.discard(client)
        self.hear(client, now)
        return client

    @property
    def signs(self) -> bool:
        """Whether clients sign the rounds of secure sums."""
        return self._peers is not None

    def hear(self, client: int, now: float) -> None:
        """A client has given a sign of life."""
        self._heard[client] = now

    def lose(self, client: int, now: float) -> None:
        """A client's timer has expired: if it was silent that long, it is absent until it is heard from."""
        # Not left to `present`: by rounding, the timer may expire just before the patience ends.
        if now - self._heard.get(client, now) > self.patience - _ROUNDING:
            del self._heard[client]

    def hear_all(self, now: float) -> None:
        """Assume that all clients are there, as after a restart of the server."""
        self._heard = dict.fromkeys(self._names, now)

    def present(self, now: float) -> list[JoinedClient]:
        """Clients that are there and have their data ready."""
        return [
            member
            for member in self._members.values()
            if member.examples is not None
            and not member.gone
            and now - self._heard.get(member.client, -np.inf) < self.patience
        ]

    def sizes(self, now: float) -> NDArray[np.int64]:
        """The examples of each client; 0 for those who are not there, or still at work for an earlier round."""
        sizes = np.zeros(self._clients, np.int64)
        for member in self.present(now):
            sizes[member.client] = 0 if member.client in self.stuck else member.examples or 0
        return sizes

    def name_of(self, client: int) -> Name:
        """The name of a client that has joined."""
        return self._names[client]

    def label(self, client: int) -> str:
        """What people call a client."""
        return self._members[self._names[client]].label

    def _why_not_among_peers(self, name: Name, join: MembershipRequest) -> str:
        """Why a client may not take part in signed rounds, or insists on them in vain; empty: it may."""
        digest = b"" if self._peers is None else self._peers.digest
        if join.peers != digest:
            both = tuple(each.hex()[:12] or "none" for each in (join.peers, digest))
            return (
                f"its list of all clients' keys ({both[0]}) is not the server's ({both[1]}): give both the same --peers"
            )
        if self._peers is None:
            return ""
        number, enrolled = self._peers.number_of(join.identity), self._enrolled or ()
        if number is None:
            return "its signing key is not in the list of peers (`offbeat federated identity` prints it)"
        if name in enrolled and enrolled.index(name) != number:
            return f"it is client {number} in the list of peers, and {enrolled.index(name)} among the server's keys"
        if self._names.get(number, name) != name:
            return _taken(number, self.label(number))
        return ""

    def _fixed_number(self, name: Name, join: MembershipRequest) -> int | None:
        """The number of a client that has joined before, is enrolled, or is in the list of peers."""
        if name in self._members:
            return self._members[name].client
        if self._enrolled is not None and name in self._enrolled:
            return self._enrolled.index(name)
        return None if self._peers is None else self._peers.number_of(join.identity)


def _taken(client: int, label: str) -> str:
    """Why a number is not free."""
    return (
        f"client {client} has joined already, under the name {label!r}: start this one under that name if it is the "
        f"same client, or else with a number of its own"
    )

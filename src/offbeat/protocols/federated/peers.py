"""The clients' long-term public keys, in the order of their numbers, from a source that the server cannot change."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from offbeat.errors import UsageError
from offbeat.protocols.federated.secure.plan import FEWEST_CLIENTS


class PeerList(NamedTuple):
    """The keys of all clients; who has the same list has the same digest."""

    keys: tuple[bytes, ...]
    """Ed25519 public keys, that of client 0 first."""

    @classmethod
    def parse(cls, text: str) -> PeerList:
        """A list from text: a key of 64 hexadecimal digits a line, and a name or a comment behind it if you like."""
        keys: list[bytes] = []
        for number, line in enumerate(text.splitlines(), start=1):
            key, *_ = [*line.split("#")[0].split(), ""]
            if not key:
                continue
            if not re.fullmatch("[0-9a-f]{64}", key):
                raise UsageError(
                    f"line {number} of the list of peers begins with {key[:70]!r}, which is not a key of 64 "
                    f"hexadecimal digits. `offbeat federated identity` prints a client's."
                )
            if bytes.fromhex(key) in keys:
                raise UsageError(
                    f"line {number} of the list of peers has the key of client {keys.index(bytes.fromhex(key))} once "
                    f"more: each client has a key of its own."
                )
            keys.append(bytes.fromhex(key))
        if len(keys) < FEWEST_CLIENTS:
            raise UsageError(
                f"the list of peers has {len(keys)} keys, and secure sums need {FEWEST_CLIENTS} clients: give one key "
                f"a line, client 0's first."
            )
        return cls(tuple(keys))

    @property
    def digest(self) -> bytes:
        """Stands for the whole list."""
        return hashlib.sha256(b"offbeat peers" + b"".join(self.keys)).digest()

    @property
    def known(self) -> Mapping[int, bytes]:
        """The keys by client number."""
        return dict(enumerate(self.keys))

    def number_of(self, key: bytes) -> int | None:
        """The client that has a key; None: it is not in the list."""
        return self.keys.index(key) if key in self.keys else None

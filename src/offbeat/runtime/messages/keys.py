"""CURVE keys: which processes on other machines may connect.

The simplest use is one file per run, copied to all its machines: whoever has it is trusted. With one file per machine,
the servers' files list the public keys that may connect.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from offbeat.errors import UsageError

_LARGEST = 2**20  # Largest key file, in bytes.
MOST_STRANGERS = 10_000  # Refused keys that are remembered.
DOMAIN = "offbeat"  # Our sockets' name for the authenticator.


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    public: str
    secret: str
    allowed: list[str]


@dataclass(frozen=True)
class Keys:
    """A key pair, and the public keys of others who may connect."""

    public: str  # Not secret: 64 hexadecimal digits, as all keys here.
    secret: str  # Whoever has it can act as us.
    allowed: tuple[str, ...] = ()  # Public keys that may connect; our own always may.

    def __post_init__(self) -> None:
        if not all(re.fullmatch("[0-9a-f]{64}", key) for key in (self.public, self.secret, *self.allowed)):
            raise UsageError(
                "A key has 64 hexadecimal digits, as `offbeat keys show FILE` prints them; this one has not."
            )
        if zmq.curve_public(for_socket(self.secret)) != for_socket(self.public):
            raise UsageError(f"The secret key does not belong to the public key {self.public!r}.")

    def __repr__(self) -> str:
        return f"Keys(public={self.public!r}, allowed={self.allowed!r})"

    @classmethod
    def generate(cls, allowed: Iterable[str] = ()) -> Keys:
        """A new pair."""
        public, secret = (z85.decode(key).hex() for key in zmq.curve_keypair())
        return cls(public, secret, tuple(allowed))

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Keys from a file, which no other user may be able to read."""
        try:
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"Other users can read {path}, so the keys in it are not secret: chmod 600 it.")
            with path.open("rb") as file:
                stored = msgspec.json.decode(file.read(_LARGEST), type=_KeyFile)
        except OSError as error:
            raise UsageError(f"The keys in {path} cannot be read: {error}. Make some: offbeat keys new FILE") from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path} is not a key file: {error}. Make one: offbeat keys new FILE") from error
        return cls(stored.public, stored.secret, tuple(stored.allowed))

    def save(self, path: Path, overwrite: bool = False) -> None:
        """Write them to a file that only this user can read, atomically."""
        text = msgspec.json.format(msgspec.json.encode(_KeyFile(self.public, self.secret, list(self.allowed)))) + b"\n"
        try:
            descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".keys-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                Path(draft).replace(path) if overwrite else os.link(draft, path)
            finally:
                Path(draft).unlink(missing_ok=True)
        except FileExistsError as error:
            raise UsageError(
                f"{path} exists, and overwritten keys cannot be recovered: choose another name."
            ) from error
        except OSError as error:
            raise UsageError(f"The keys cannot be written to {path}: {error}.") from error

    def allow(self, public: str) -> Keys:
        """The same keys, with one more public key that may connect."""
        return self if public in self.allowed else replace(self, allowed=(*self.allowed, public))

    def admits(self, public: str) -> bool:
        """Whether the owner of this public key may connect."""
        return public == self.public or public in self.allowed


def guard(context: zmq.Context[zmq.Socket[bytes]], keys: Keys, strangers: set[str]) -> ThreadAuthenticator:
    """Start a thread that admits, on all sockets of a context, only the owners of allowed keys.

    The public keys of others that tried are put into `strangers`, up to a limit.
    """

    def callback(domain: str, key: bytes) -> bool:
        public = z85.decode(key).hex()
        admitted = domain == DOMAIN and keys.admits(public)
        if not admitted and len(strangers) < MOST_STRANGERS:
            strangers.add(public)
        return admitted

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(DOMAIN, SimpleNamespace(callback=callback))
    return authenticator


def owner_of(frame: zmq.Frame) -> str:
    """The public key of a frame's sender, as the handshake proved it; empty without keys."""
    try:
        return z85.decode(str(frame.get("User-Id")).encode()).hex()
    except (zmq.ZMQError, ValueError):
        return ""


def for_socket(key: str) -> bytes:
    """A key in ZeroMQ's encoding, Z85; ours are hexadecimal, which needs no shell quoting."""
    return z85.encode(bytes.fromhex(key))

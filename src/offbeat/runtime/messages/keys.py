"""CURVE keys: who may speak to us from other machines.

The simplest use is one file for a run, copied to all its machines: whoever has it is one of us. With a file for each
machine, the servers' files list the public keys of those who may come.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from offbeat.errors import UsageError

_LARGEST = 2**20
"""Bytes of a file of keys."""
DOMAIN = "offbeat"
"""What the authenticator calls our sockets."""


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    public: str
    secret: str
    allowed: list[str]


@dataclass(frozen=True)
class Keys:
    """A pair of keys, and the public keys of others who may connect."""

    public: str
    """May be shown to anybody: 64 hexadecimal digits, as all keys here."""
    secret: str
    """Whoever has it is taken for us."""
    allowed: tuple[str, ...] = ()
    """Public keys that are let in; our own always is."""

    def __post_init__(self) -> None:
        for key in (self.public, self.secret, *self.allowed):
            _check(key)
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
        """Keys from a file, which nobody else may be able to read."""
        try:
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"Other users can read {path}, so the keys in it are not secret: chmod 600 it.")
            with path.open("rb") as file:
                found = msgspec.json.decode(file.read(_LARGEST), type=_KeyFile)
        except OSError as error:
            raise UsageError(f"The keys in {path} cannot be read: {error}. Make some: offbeat keys new FILE") from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path} is not a file of keys: {error}. Make one: offbeat keys new FILE") from error
        return cls(found.public, found.secret, tuple(found.allowed))

    def save(self, path: Path, overwrite: bool = False) -> None:
        """Write them to a file that only this user can read, all or nothing."""
        text = msgspec.json.format(msgspec.json.encode(_KeyFile(self.public, self.secret, list(self.allowed)))) + b"\n"
        try:
            descriptor, made = tempfile.mkstemp(dir=path.parent, prefix=".keys-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(text)
                Path(made).replace(path) if overwrite else os.link(made, path)
            finally:
                Path(made).unlink(missing_ok=True)
        except FileExistsError as error:
            raise UsageError(f"{path} exists, and keys cannot be had back: choose another name.") from error
        except OSError as error:
            raise UsageError(f"The keys cannot be written to {path}: {error}.") from error

    def allow(self, public: str) -> Keys:
        """The same keys, with one more who may connect."""
        return self if public in self.allowed else replace(self, allowed=(*self.allowed, public))

    def admits(self, public: str) -> bool:
        """Whether the owner of this public key may connect."""
        return public == self.public or public in self.allowed


class _Admission:
    """What pyzmq's authenticator asks about those who connect."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this public key, in Z85, may connect."""
        return domain == DOMAIN and self._keys.admits(z85.decode(key).hex())


def guard(context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> ThreadAuthenticator:
    """Start a thread that lets in, on all sockets of a context, only those whom the keys admit."""
    door = ThreadAuthenticator(context)
    door.start()
    door.configure_curve_callback(DOMAIN, _Admission(keys))
    return door


def for_socket(key: str) -> bytes:
    """A key as ZeroMQ wants it, in Z85: ours are hexadecimal, so that a shell leaves them alone."""
    return z85.encode(bytes.fromhex(key))


def _check(key: str) -> None:
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise UsageError("A key has 64 hexadecimal digits, as `offbeat keys show FILE` prints them; this one has not.")

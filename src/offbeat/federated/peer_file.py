"""Files of signing keys: a client's own private one, and the public ones of all clients."""

from __future__ import annotations

import re
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from offbeat.errors import OutputError, UsageError
from offbeat.protocols.federated.peers import PeerList
from offbeat.protocols.federated.secure.primitives import identity_public, require_cryptography

_KEY_BYTES: Final = 32
_LARGEST: Final = 2**20  # Largest list of peers, in bytes.


def client_folder(out: Path, label: str) -> Path:
    """Where a client keeps what it keeps."""
    return out / re.sub(r"[^A-Za-z0-9._-]+", "-", f"client-{label}")


def read_peers(path: Path) -> PeerList:
    """The keys of all clients, from a file that each of them has."""
    require_cryptography()
    try:
        with path.open("rb") as file:
            return PeerList.parse(file.read(_LARGEST).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the list of peers in {path} cannot be read: {error}.") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def signing_key(folder: Path) -> bytes | None:
    """A client's long-term signing key, made when it is first needed; None without the package that uses it."""
    if find_spec("cryptography") is None:
        return None
    path = folder / "identity.key"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            draft = path.with_suffix(".draft")
            draft.unlink(missing_ok=True)
            draft.touch(0o600, exist_ok=False)
            draft.write_bytes(secrets.token_bytes(_KEY_BYTES))
            draft.replace(path)
        private = path.read_bytes()
    except OSError as error:
        raise OutputError(f"this client's signing key cannot be kept in {path}: {error}.") from error
    if len(private) != _KEY_BYTES:
        raise UsageError(f"{path} is not a signing key: it has {len(private)} bytes, and a key has {_KEY_BYTES}.")
    return private


def public_key(folder: Path) -> str:
    """The public half of a client's signing key, as lists of peers have it."""
    require_cryptography()
    private = signing_key(folder)
    return "" if private is None else identity_public(private).hex()

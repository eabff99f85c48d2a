"""The cryptography of secure aggregation, all of it from the `cryptography` package: keys, signatures, boxes, masks."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from typing import Final

from offbeat.errors import SecureAggregationError, UsageError
from offbeat.protocols.federated.secure.sharing import SHARE_BYTES

PUBLIC_BYTES: Final = 32
"""Of an X25519 or Ed25519 public key."""
SIGNATURE_BYTES: Final = 64
MASK_KEY_BYTES: Final = 16
"""AES-128."""
BOX_BYTES: Final = 2 * SHARE_BYTES + 16
"""Two shares and AES-GCM's tag."""
_NONCE: Final = bytes(12)  # Each key seals one box, so the nonce may be fixed.


def require_cryptography() -> None:
    """Refuse secure aggregation where the package is missing."""
    if find_spec("cryptography") is None:
        raise UsageError("secure aggregation needs the cryptography package: pip install 'offbeat[federated]'.")


def agreement_public(private: bytes) -> bytes:
    """The public key of an X25519 private key."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreement(private: bytes, public: bytes) -> bytes:
    """The secret that two X25519 keys have in common; a key without one is refused."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise SecureAggregationError("a public key is degenerate: no secret can be agreed with it.") from error


def identity_public(identity: bytes) -> bytes:
    """The public key of an Ed25519 private key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()


def sign(identity: bytes, text: bytes) -> bytes:
    """An Ed25519 signature."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(identity).sign(text)


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Whether a signature is that of this key for this text."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def derived(secret: bytes, purpose: bytes, nbytes: int) -> bytes:
    """A key for one purpose, by HKDF-SHA256."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=nbytes, salt=None, info=purpose).derive(secret)


def sealed(secret: bytes, purpose: bytes, content: bytes) -> bytes:
    """Content in a box (AES-256-GCM) that only the two who share the secret can open, bound to its purpose."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(derived(secret, purpose, 32)).encrypt(_NONCE, content, purpose)


def opened(secret: bytes, purpose: bytes, box: bytes) -> bytes | None:
    """The content of a box; None if it was made with another secret, for another purpose, or changed."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(derived(secret, purpose, 32)).decrypt(_NONCE, box, purpose)
    except InvalidTag:
        return None


def purpose(label: str, digest: bytes, *clients: int) -> bytes:
    """What a key or a signature is for: a label, a round, and clients in order."""
    return b"offbeat " + label.encode() + digest + b"".join(client.to_bytes(8, "big") for client in clients)


def commitment(seed: bytes, digest: bytes, client: int) -> bytes:
    """What a client publishes of its mask's seed, by which the recovered seed is checked."""
    return hashlib.sha256(purpose("seed commitment", digest, client) + seed).digest()


def pair_mask_key(private: bytes, public: bytes, digest: bytes, one: int, other: int) -> bytes:
    """The key of the mask that two clients have in common."""
    text = purpose("pair mask", digest, min(one, other), max(one, other))
    return derived(agreement(private, public), text, MASK_KEY_BYTES)


def own_mask_key(seed: bytes, digest: bytes, client: int) -> bytes:
    """The key of the mask that a client has alone."""
    return derived(seed, purpose("own mask", digest, client), MASK_KEY_BYTES)

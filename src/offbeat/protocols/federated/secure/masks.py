"""Masks: pseudorandom integers by AES-128 in counter mode, added to a row or subtracted, as wide as its own."""

from __future__ import annotations

from typing import Final

import numpy as np

from offbeat.protocols.federated.secure.integers import Row

CHUNK: Final = 256 * 1024
"""Bytes of a mask made at once: they are still in the cache when they are added."""
_BLOCK: Final = 16


class Masks:
    """Adds masks to rows through one small buffer, so that a mask is never in memory as a whole."""

    def __init__(self) -> None:
        self._zeros = memoryview(bytes(CHUNK))
        self._buffer = bytearray(CHUNK + _BLOCK - 1)

    def add(self, row: Row, key: bytes) -> None:
        """Add the mask of a key."""
        self._apply(row, key, np.add)

    def subtract(self, row: Row, key: bytes) -> None:
        """Take the mask of a key away."""
        self._apply(row, key, np.subtract)

    def _apply(self, row: Row, key: bytes, operation: np.ufunc) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES128
        from cryptography.hazmat.primitives.ciphers.modes import CTR

        stream = Cipher(AES128(key), CTR(bytes(_BLOCK))).encryptor()
        step = CHUNK // row.itemsize
        numbers = np.frombuffer(self._buffer, row.dtype.newbyteorder("<"), step)
        for start in range(0, len(row), step):
            part = row[start : start + step]
            stream.update_into(self._zeros[: part.nbytes], self._buffer)
            operation(part, numbers[: len(part)], out=part)

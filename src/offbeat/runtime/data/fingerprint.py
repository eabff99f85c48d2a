"""A short hash of data, by which two runs can be shown to have had the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

HEAD = 1 << 16  # Bytes read of each tensor where reading all would take too long.


def fingerprint(value: Any, most: int | None = HEAD) -> str:
    """Hash of nested plain data and tensors: dtypes, shapes, and the first `most` bytes of each tensor (None: all)."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value, most)
    return digest.hexdigest()


def _feed(digest: hashlib.blake2b, value: Any, most: int | None) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        if value.layout is torch.strided and not value.is_meta:
            # Cut before copying: a slice of a large batch need not be read whole.
            rows = value.detach()
            if most is not None and rows.dim() and rows.shape[0]:
                each = max(1, rows[0].numel() * rows.element_size())
                rows = rows[: max(1, -(-most // each))]
            digest.update(rows.reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes()[:most])
    elif isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        digest.update(f"array {array.dtype} {array.shape}".encode() + array.tobytes()[:most])
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            digest.update(f"key {key!r}".encode())
            _feed(digest, item, most)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(cast('list[Any]', value))} items".encode())
        for item in cast("list[Any]", value):
            _feed(digest, item, most)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        digest.update(repr(value).encode())
    else:
        digest.update(type(value).__qualname__.encode())  # Its content is unknown, and its address would differ.

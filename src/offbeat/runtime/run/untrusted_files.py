"""Reading files from untrusted sources (regular, bounded, plain data); raises OSError or ValueError."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Generator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, cast

LARGEST: Final = 32 * 2**20  # Default limit on the bytes read from a file.
DEEPEST: Final = 100  # Nesting limit for JSON: our own files have fewer than ten levels.
_BRACKETS: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"|[^\[\]{}"]++', re.DOTALL)
"""Everything in JSON that is not a bracket."""


@contextmanager
def regular_file(path: Path) -> Generator[BufferedReader]:
    """A file open for reading. Links, pipes and devices are refused: a downloaded folder may contain any of them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a link, not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)  # A file object would refuse a folder's descriptor and not close it.
        raise ValueError("it is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def is_file(path: Path) -> bool:
    """Whether it is a file; Path's method raises if access is denied or the name is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Whether it is a folder; never raises."""
    return os.path.isdir(path)  # noqa: PTH112


def is_there(path: Path) -> bool:
    """Whether it exists; never raises."""
    return os.path.exists(path)  # noqa: PTH110


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """The bytes of a file; a larger one is refused."""
    with regular_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def read_object(path: Path, most: int = LARGEST) -> dict[str, Any]:
    """The JSON object in a file."""
    data = parse_json(read_bytes(path, most).decode())
    if not isinstance(data, dict):
        raise ValueError("it does not hold a JSON object")
    return cast("dict[str, Any]", data)


def parse_json(text: str) -> Any:
    """The data in a JSON text; refused if nested too deeply for recursion."""
    if text.count("[") + text.count("{") > DEEPEST:
        depth = 0
        for bracket in _BRACKETS.sub("", text):
            depth += 1 if bracket in "[{" else -1
            if depth > DEEPEST:
                raise ValueError(f"its JSON is nested more than {DEEPEST} deep")
    return json.loads(text)


def plain_name(name: str) -> str:
    """A file name read from untrusted data; refused if it leads out of its folder."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name[:200]!r} is not the name of a file in the same folder")
    return name

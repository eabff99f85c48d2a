"""Reading files that somebody else may have written: regular files only, a bounded number of bytes, plain data.

Everything here raises OSError or ValueError, which callers turn into an error of theirs that names the file.
"""

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

LARGEST: Final = 32 * 2**20
"""Bytes that are read of a file at most, unless the caller says otherwise."""
DEEPEST: Final = 100
"""Brackets inside brackets in JSON: our own files have fewer than ten."""
_BRACKETS: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"|[^\[\]{}"]++', re.DOTALL)
"""Everything in JSON that is not a bracket."""


@contextmanager
def regular_file(path: Path) -> Generator[BufferedReader]:
    """A file, open for reading. Links, pipes and devices are refused: a folder from elsewhere may name any of them."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a link, not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)  # A folder's cannot be handed to a file object, which would close it.
        raise ValueError("it is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def is_file(path: Path) -> bool:
    """Whether it is a file; Path's method raises where nobody may look, or the name is too long."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path) -> bool:
    """Whether it is a folder, in the same way."""
    return os.path.isdir(path)  # noqa: PTH112


def is_there(path: Path) -> bool:
    """Whether there is something of that name, in the same way."""
    return os.path.exists(path)  # noqa: PTH110


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """What a file holds; one that is larger is refused."""
    with regular_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def read_json(path: Path, most: int = LARGEST) -> Any:
    """The JSON in a file."""
    return parse_json(read_bytes(path, most).decode())


def read_object(path: Path, most: int = LARGEST) -> dict[str, Any]:
    """The JSON object in a file."""
    data = read_json(path, most)
    if not isinstance(data, dict):
        raise ValueError("it does not hold a JSON object")
    return cast("dict[str, Any]", data)


def parse_json(text: str) -> Any:
    """The data in a JSON text; one that is nested too deep to be walked by recursion is refused."""
    if text.count("[") + text.count("{") > DEEPEST:
        depth = 0
        for bracket in _BRACKETS.sub("", text):
            depth += 1 if bracket in "[{" else -1
            if depth > DEEPEST:
                raise ValueError(f"its JSON is nested more than {DEEPEST} deep")
    return json.loads(text)


def plain_name(name: str) -> str:
    """The name of a file in a folder, as a file in that folder gives it; one that leads out of it is refused."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name[:200]!r} is not the name of a file in the same folder")
    return name

"""Permitted addresses of endpoints: a private folder, loopback, or anywhere with keys."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.errors import UsageError

PRIVATE = "ipc://*"  # Bind to this for a socket in a new private folder, which is removed with the endpoint.
_PREFIX = "offbeat-sockets-"
_LONGEST_PATH = 107
_TCP = re.compile(r"tcp://(?P<host>[^;/]+):(?P<port>\d+|\*)")


@contextmanager
def private_directory() -> Generator[Path]:
    """A temporary folder that only this user can enter, for the sockets of one run.

    Folders that killed processes left behind are removed first.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        process = left.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            if process.isdigit() and left.stat().st_uid == os.getuid() and not Path(f"/proc/{process}").exists():
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        yield Path(folder)


def address_in(directory: Path, name: str) -> str:
    """The address of an endpoint in a private folder."""
    return f"ipc://{directory / re.sub(r'[^A-Za-z0-9._-]', '-', name)}"


def check_address(address: str, has_keys: bool) -> None:
    """Refuse an invalid address, and one at which strangers could listen or connect."""
    if address.startswith("ipc://"):
        _check_path(Path(address.removeprefix("ipc://")))
        return
    parts = _TCP.fullmatch(address)
    if parts is None:
        raise UsageError(f"{address!r} is not an address: write ipc:///folder/socket or tcp://host:port.")
    if not has_keys and not _is_loopback(parts["host"]):
        raise UsageError(
            f"{address} can be reached from other machines, and without keys anyone who reaches it is trusted. Give "
            "keys (`offbeat keys new FILE`, the same file on all machines), or use tcp://127.0.0.1:port."
        )


def _check_path(path: Path) -> None:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise UsageError(f"ipc://{path} is too long: Linux allows {_LONGEST_PATH} bytes. Use a shorter folder.")
    try:
        mode = path.parent.stat().st_mode
    except OSError as error:
        raise UsageError(f"ipc://{path} cannot be used: {error}.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"Other users can enter {path.parent}, and could connect to what listens there. "
            "Use a private folder (chmod 700), such as `private_directory()` makes."
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

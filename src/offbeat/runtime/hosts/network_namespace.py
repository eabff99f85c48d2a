"""Entering a network namespace: sockets opened from then on are in it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from offbeat.errors import RunError

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter(network: Path) -> None:
    """Move this thread, and what it starts, into the network namespace of this file."""
    with network.open("rb") as opened:
        _set(opened.fileno(), str(network))


@contextmanager
def inside(network: Path) -> Generator[None]:
    """Move this thread there for the body, and then back."""
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        enter(network)
        try:
            yield
        finally:
            _set(before.fileno(), "of this thread before")


def _set(descriptor: int, name: str) -> None:
    # os.setns exists only from Python 3.12 on.
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        problem = os.strerror(ctypes.get_errno())
        raise RunError(f"the network {name} could not be entered: {problem}. That needs root.")

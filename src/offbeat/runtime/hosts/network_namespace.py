"""Entering another network of this machine: what a process or a thread opens from then on is there."""

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
    """Let this thread, and what it starts, be in a network namespace, given by its file, from now on."""
    with network.open("rb") as opened:
        _set(opened.fileno(), str(network))


@contextmanager
def inside(network: Path) -> Generator[None]:
    """Let this thread be there in the body, and then again where it was."""
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        enter(network)
        try:
            yield
        finally:
            _set(before.fileno(), "that this came from")


def _set(descriptor: int, name: str) -> None:
    # Python has os.setns from 3.12 on only.
    if _LIBC.setns(descriptor, _CLONE_NEWNET):
        problem = os.strerror(ctypes.get_errno())
        raise RunError(f"the network {name} could not be entered: {problem}. That needs root.")

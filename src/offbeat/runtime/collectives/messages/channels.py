"""Channels: point-to-point messages between the ranks of an arena, through shared memory.

The work is done by channels.c; without that library, messages go over Gloo.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from offbeat.runtime.collectives.one_sided import signals

VERSION = 2
LIBRARY = Path(__file__).with_name("_channels.so")
DONE, LATE, WRONG_SIZE = range(3)
"""What a wait returns."""
_MOST_BYTES = 8 << 20
"""Bytes of all channels of an arena, at most; many ranks get smaller slots."""
_BELL, _ENDS, _HEAD = 256, 128, 64
"""Bytes, at most, for waking a process, for the two ends of a channel, and before the data of a slot."""
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
_CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lay_out": (None, (_POINTER, _INT)),
    "open": (_POINTER, (_POINTER, *(_INT,) * 7)),
    "send": (_POINTER, (_POINTER, _INT, _INT, _POINTER, _INT, _INT)),
    "receive": (_POINTER, (_POINTER, _INT, _INT, _POINTER, _INT)),
    "wait": (_INT, (_POINTER, _POINTER, _INT)),
    "test": (_INT, (_POINTER, _POINTER)),
    "free": (None, (_POINTER, _POINTER)),
    "nudge": (None, (_POINTER, _INT)),
    "help": (None, (_POINTER,)),
    "close": (None, (_POINTER,)),
    "source": (_INT, (_POINTER,)),
    "mark": (_INT, (_POINTER,)),
    "arrived": (_INT, (_POINTER,)),
    "free_all": (None, (_POINTER,)),
}


@cache
def library() -> Any:
    """The library; None where it was not built, was built from another version of its source, or is switched off."""
    if os.environ.get("OFFBEAT_NATIVE") == "0" or not LIBRARY.exists():
        return None
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        loaded.offbeat_mail_version.restype = _INT
        if loaded.offbeat_mail_version() != VERSION:
            return None
        for name, (result, arguments) in _CALLS.items():
            call = getattr(loaded, f"offbeat_mail_{name}")
            call.restype, call.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return loaded


@cache
def slots_for(size: int) -> tuple[int, int]:
    """Slots of a channel and bytes in each, for an arena of this many ranks."""
    slots, room = 8, 65536
    while room > 256 and size * size * slots * room > _MOST_BYTES:
        room //= 2
    return slots if size <= 32 else 4, room


def bytes_for(size: int) -> int:
    """Bytes of shared memory for the channels of this many ranks."""
    slots, room = slots_for(size)
    return size * (_BELL + size * (_ENDS + slots * (_HEAD + room)))


def lay_out(address: int, size: int) -> None:
    """Prepare new shared memory for channels; called once, by the process that created it."""
    if library() is not None:
        library().offbeat_mail_lay_out(address, size)


class Channels:
    """One rank's ends of the channels to and from all ranks of its arena."""

    def __init__(self, address: int, rank: int, size: int, keep: object) -> None:
        loaded: Any = library()
        patience = (signals.TRIES, signals.YIELDS, signals.STARVED)
        self._mail: int = loaded.offbeat_mail_open(address, rank, size, *slots_for(size), *patience)
        if not self._mail:
            raise MemoryError("there is no memory for channels")
        self._keep = keep
        """Whatever owns the shared memory."""
        self._library = loaded
        self._helper: threading.Thread | None = None
        self._closed = False
        # Only when nothing refers to the channels any more: a thread may still be in a call when they are closed.
        weakref.finalize(self, loaded.offbeat_mail_free_all, self._mail).atexit = False
        self.send: Callable[[int, int, int, int, int], int | None] = partial(loaded.offbeat_mail_send, self._mail)
        """Begin a send: target, tag, address, bytes, mark; None if it is done, otherwise the operation."""
        self.receive: Callable[[int, int, int, int], int | None] = partial(loaded.offbeat_mail_receive, self._mail)
        """The same for a receive, without a mark; source -1 means any rank. A marked message is never None."""
        self.wait: Callable[[int, int], int] = partial(loaded.offbeat_mail_wait, self._mail)
        """Wait for an operation, for some nanoseconds at most: `DONE`, `LATE` or `WRONG_SIZE`."""

    def over(self, op: int) -> bool:
        """Whether an operation is over; makes progress."""
        return bool(self._library.offbeat_mail_test(self._mail, op))

    def source(self, op: int) -> int:
        """The rank whose message a finished receive got."""
        return self._library.offbeat_mail_source(op)

    def mark(self, op: int) -> int:
        """What the sender has marked the message of a finished receive with."""
        return self._library.offbeat_mail_mark(op)

    def arrived(self, op: int) -> int:
        """Bytes of the message that a finished receive got."""
        return self._library.offbeat_mail_arrived(op)

    def free(self, op: int) -> None:
        """Forget an operation, finished or not."""
        self._library.offbeat_mail_free(self._mail, op)

    def nudge(self, peer: int) -> None:
        """Ask the background thread of a peer to make progress on what that peer has begun."""
        self._library.offbeat_mail_nudge(self._mail, peer)

    def help_in_background(self) -> None:
        """From now on, make progress when a peer asks for it, even if no thread here waits."""
        if self._helper is None:
            name = "offbeat messages"
            self._helper = threading.Thread(target=self._library.offbeat_mail_help, args=(self._mail,), name=name)
            self._helper.daemon = True
            self._helper.start()

    def close(self) -> None:
        """End the background thread; nothing more may be begun."""
        if self._closed:
            return
        self._closed = True
        self._library.offbeat_mail_close(self._mail)
        if self._helper is not None:
            self._helper.join()

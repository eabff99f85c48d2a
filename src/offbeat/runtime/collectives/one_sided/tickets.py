"""Tickets: text by which another process of this host opens shared memory, and what is checked before it does."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path
from typing import Final

from offbeat.errors import OffbeatError

NAME: Final = "offbeat"
"""What `Segment.create` calls its memory."""
TICKET: Final = re.compile(r"([1-9][0-9]{0,9}):([0-9]{1,9}):([0-9]{1,18})")
"""The process that made it, its descriptor there, and bytes."""
FIXED_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Seals by which whoever has it mapped can rely on every byte being there."""
_LINK = f"/memfd:{NAME} (deleted)"
"""What Linux calls a descriptor of it."""


class SegmentError(OffbeatError, RuntimeError):
    """Memory could not be shared; say why, so that another way can be taken."""


def open_ticket(ticket: str, flags: int, process: int | None = None, size: int | None = None) -> int:
    """A descriptor of the memory of a ticket, after checking that a process of this user made it with `Segment.create`.

    A ticket comes from somebody else, who may be mistaken or hostile: whatever it names that is not such memory, of
    that process and of that size where they are given, is refused with a `SegmentError`.
    """
    fields = TICKET.fullmatch(ticket)
    if fields is None:
        raise SegmentError(f"{ticket[:100]!r} is not a ticket for shared memory")
    owner, number, told = (int(field) for field in fields.groups())
    if (process is not None and owner != process) or (size is not None and told != size):
        raise SegmentError(f"ticket {ticket!r} is not for {size} bytes of process {process}")
    try:
        # Through its folder, which stays that process's even if its number is given to another meanwhile.
        folder = os.open(f"/proc/{owner}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid != os.geteuid():
                raise SegmentError(f"process {owner} of ticket {ticket!r} belongs to another user")
            # Looked at before it is opened: opening a pipe or a device may block or do something.
            _check_link(os.readlink(f"fd/{number}", dir_fd=folder), ticket)
            opened = os.open(f"fd/{number}", flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            _check_link(str(Path(f"/proc/self/fd/{opened}").readlink()), ticket)
            _check_memory(opened, told, ticket)
        except BaseException:
            os.close(opened)
            raise
    except (OSError, ValueError, OverflowError) as error:
        raise SegmentError(f"the shared memory of ticket {ticket!r} could not be opened: {error}") from error
    return opened


def _check_link(target: str, ticket: str) -> None:
    if target != _LINK:
        raise SegmentError(f"what ticket {ticket!r} names is not shared memory of ours")


def _check_memory(descriptor: int, size: int, ticket: str) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise SegmentError(f"the shared memory of ticket {ticket!r} belongs to another user")
    if found.st_size != size or size == 0:
        raise SegmentError(f"the shared memory of ticket {ticket!r} has {found.st_size:,} bytes, not {size:,}")
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & FIXED_SIZE != FIXED_SIZE:
        raise SegmentError(f"the shared memory of ticket {ticket!r} could still change its size")

"""Tickets: text by which another process of this host opens a segment, with the checks before it does."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path
from typing import Final

from offbeat.errors import OffbeatError

NAME: Final = "offbeat"
"""Name of the memfd of a segment."""
TICKET: Final = re.compile(r"([1-9][0-9]{0,9}):([0-9]{1,9}):([0-9]{1,18})")
"""The process that created it, its descriptor there, and its bytes."""
FIXED_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Seals that guarantee every process that has it mapped that all bytes stay."""
_LINK = f"/memfd:{NAME} (deleted)"
"""Where Linux's link of its descriptor points."""


class SegmentError(OffbeatError, RuntimeError):
    """Memory could not be shared, and why; callers fall back to messages."""


def open_ticket(ticket: str, flags: int, process: int | None = None, size: int | None = None) -> int:
    """Open a ticket's segment, after checking that a process of this user created it with `Segment.create`.

    A ticket may be mistaken or hostile: anything else that it names, or another process or size than the given ones,
    is refused with a `SegmentError`.
    """
    fields = TICKET.fullmatch(ticket)
    if fields is None:
        raise SegmentError(f"{ticket[:100]!r} is not a ticket for shared memory")
    owner, number, nbytes = (int(field) for field in fields.groups())
    if (process is not None and owner != process) or (size is not None and nbytes != size):
        raise SegmentError(f"ticket {ticket!r} is not for {size} bytes of process {process}")
    try:
        # Through its folder, which stays that process's even if its number is reused meanwhile.
        folder = os.open(f"/proc/{owner}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid != os.geteuid():
                raise SegmentError(f"process {owner} of ticket {ticket!r} belongs to another user")
            # Checked before it is opened: opening a pipe or a device may block or have effects.
            _check_link(os.readlink(f"fd/{number}", dir_fd=folder), ticket)
            opened = os.open(f"fd/{number}", flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            _check_link(str(Path(f"/proc/self/fd/{opened}").readlink()), ticket)
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise SegmentError(f"the shared memory of ticket {ticket!r} belongs to another user")
            if status.st_size != nbytes or nbytes == 0:
                raise SegmentError(
                    f"the shared memory of ticket {ticket!r} has {status.st_size:,} bytes, not {nbytes:,}"
                )
            if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & FIXED_SIZE != FIXED_SIZE:
                raise SegmentError(f"the shared memory of ticket {ticket!r} could still change its size")
        except BaseException:
            os.close(opened)
            raise
    except (OSError, ValueError, OverflowError) as error:
        raise SegmentError(f"the shared memory of ticket {ticket!r} could not be opened: {error}") from error
    return opened


def _check_link(target: str, ticket: str) -> None:
    if target != _LINK:
        raise SegmentError(f"ticket {ticket!r} does not name shared memory of offbeat")


def host_identity() -> str:
    """Equal in processes that can share segments and count as one host: same boot, user, PID and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [Path("/proc/self/ns") / kind for kind in ("pid", "net", "user")]
    return ":".join([boot, *(str(space.stat().st_ino) for space in spaces), str(os.getuid())])

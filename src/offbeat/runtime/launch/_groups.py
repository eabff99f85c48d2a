"""Process groups seen from outside, for when the fork server can no longer be asked."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from offbeat.runtime.run.procfs import stat_fields


def kill(groups: Sequence[int], seconds: float) -> None:
    """End process groups and wait until nothing of them runs, or the time is over."""
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while any(_runs(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    # A zombie still counts as a member; it is for whoever inherited it to reap.
    return any(
        fields[2] == str(group) and fields[0] not in "ZX"
        for fields in (stat_fields(entry.name) for entry in Path("/proc").glob("[0-9]*"))
        if fields
    )


def is_stopped(process: int) -> bool:
    """Whether a process stands still by SIGSTOP; one that a debugger holds does not count."""
    return stat_fields(process)[:1] == ["T"]

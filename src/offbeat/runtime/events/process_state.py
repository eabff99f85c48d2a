"""What the kernel says of a process whose events are recorded, and its stack."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from offbeat.runtime.events.worker import ask
from offbeat.runtime.run.procfs import stat_fields

ANSWER: Final = 0.5  # Seconds for a worker to write its stack.
LONGEST_STACK: Final = 1 << 16  # In characters.


class ProcessState(NamedTuple):
    """What the kernel says of a process."""

    main: str  # What its main thread does: R, S, T …
    ticks: int  # Processor time of its main thread.
    stopped: bool  # Whether all of it is stopped.


def state_of(pid: int) -> ProcessState | None:
    """The state of a process of this machine; None if it has none."""
    whole, main = stat_fields(pid), stat_fields(f"{pid}/task/{pid}")
    if not whole or not main:
        return None
    return ProcessState(main[0], int(main[11]) + int(main[12]), whole[0] in ("T", "t"))


def seconds_without_core(pid: int) -> float | None:
    """Seconds that a process's live threads have waited for a core; None if the kernel does not say."""
    try:
        counts = [path.read_text().split()[1] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except (OSError, IndexError):
        return None
    return sum(map(int, counts)) / 1e9 if counts else None


def stacks_of(processes: Mapping[str, tuple[int, Path]]) -> dict[str, str]:
    """The stacks that workers of this machine dump on request, from their PIDs and the files that they dump into."""
    files = {name: file for name, (_, file) in processes.items() if file.exists()}
    for name in files:
        ask(processes[name][0])
    deadline = time.monotonic() + ANSWER
    while not all(file.stat().st_size for file in files.values()) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.05)  # A stack is written line by line.
    stacks: dict[str, str] = {}
    for name, file in files.items():
        with suppress(OSError):
            stacks[name] = file.read_text(errors="replace")[:LONGEST_STACK]
    return stacks

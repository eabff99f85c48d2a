"""How long each worker has waited for a core: what the machine cost it, and not its program.

A worker that gets too little of a busy machine is late as one is whose input is slow. The kernel counts how long the
threads of a process were ready and had no core; whoever looks on writes that down now and then, beside the
events. A process that was stopped, sleeps or computes does not wait for a core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from offbeat.runtime.events.recorder import FOLDER
from offbeat.runtime.run.untrusted_files import read_bytes

FILE: Final = "cores-waited.jsonl"
EVERY: Final = 0.4
"""Seconds between two lines, at least …"""
RARELY: Final = 0.01
"""… and at least this share of the time since the first: a long run does not fill the disk with it."""

Queues = Mapping[int, Sequence[tuple[float, float]]]
"""Of each worker, at some times, for how many seconds it had waited for a core by then."""


class QueueWriter:
    """Writes it down while a run goes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FOLDER / FILE
        self._began: float | None = None
        self._next = 0.0

    def note(self, now: float, processes: Mapping[int, int]) -> None:
        """Look at the processes of these workers, if the last look is a while ago."""
        if now < self._next:
            return
        self._began = now if self._began is None else self._began
        self._next = now + max(EVERY, RARELY * (now - self._began))
        waited = {rank: found for rank, pid in processes.items() if (found := _waited(pid)) is not None}
        with suppress(OSError), self._path.open("ab") as file:  # Without it, verdicts are only more careful.
            file.write(msgspec.json.encode((now, waited)) + b"\n")


def read_queues(folder: Path) -> Queues:
    """What was written down of a run; nothing, if nothing was or it cannot be read."""
    found = defaultdict[int, list[tuple[float, float]]](list)
    with suppress(OSError, ValueError, msgspec.MsgspecError):
        for line in read_bytes(folder / FOLDER / FILE).splitlines():
            now, waited = msgspec.json.decode(line, type=tuple[float, dict[int, float]])
            for rank, seconds in waited.items():
                found[rank].append((now, seconds))
    return found


def queued(queues: Queues, rank: int, start: float, stop: float) -> float | None:
    """For how long a worker waited for a core between two times; None if that is not known."""
    known = queues.get(rank, ())
    if len(known) < 2:
        return None
    times, waited = (np.array(column) for column in zip(*known, strict=True))
    if not (np.diff(times) > 0).all():
        return None
    began, ended = np.interp([start, stop], times, waited)
    return max(0.0, float(ended - began))


def _waited(pid: int) -> float | None:
    """How long the threads of a process have waited for a core, those that live; None if the kernel does not say."""
    try:
        counts = [path.read_text().split()[1] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except (OSError, IndexError):
        return None
    return sum(map(int, counts)) / 1e9 if counts else None

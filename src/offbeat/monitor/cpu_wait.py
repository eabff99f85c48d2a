"""How long each worker has waited for a core: delay caused by the machine, not by the worker's program.

A worker that gets too little of a busy machine is late just like one whose input is slow. The kernel counts how long
the threads of a process were ready to run and had no core; the monitor records that now and then, beside the events. A
process that was stopped, sleeps or computes does not wait for a core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from offbeat.runtime.events.recorder import FOLDER
from offbeat.runtime.run.untrusted_files import read_bytes

FILE: Final = "cores-waited.jsonl"
EVERY: Final = 0.4  # Minimum seconds between two lines …
RARELY: Final = 0.01  # … and minimum share of the time since the first, so that a long run does not fill the disk.

Queues = Mapping[int, Sequence[tuple[float, float]]]  # Of each worker: times, and its seconds without a core by then.


class QueueWriter:
    """Records waits for cores while a run is going."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FOLDER / FILE
        self._began: float | None = None
        self._next = 0.0

    def note(self, now: float, ranks: Iterable[int], waited: Callable[[int], float | None]) -> None:
        """Record the waits of these workers, if the last record is old enough."""
        if now < self._next:
            return
        self._began = now if self._began is None else self._began
        self._next = now + max(EVERY, RARELY * (now - self._began))
        waits = {rank: seconds for rank in ranks if (seconds := waited(rank)) is not None}
        with suppress(OSError), self._path.open("ab") as file:  # Without it, verdicts are only more careful.
            file.write(msgspec.json.encode((now, waits)) + b"\n")


def read_queues(folder: Path) -> Queues:
    """The recorded waits of a run; empty if there are none or they cannot be read."""
    queues = defaultdict[int, list[tuple[float, float]]](list)
    with suppress(OSError, ValueError, msgspec.MsgspecError):
        for line in read_bytes(folder / FOLDER / FILE).splitlines():
            now, waits = msgspec.json.decode(line, type=tuple[float, dict[int, float]])
            for rank, seconds in waits.items():
                queues[rank].append((now, seconds))
    return queues


def queued(queues: Queues, rank: int, start: float, stop: float) -> float | None:
    """Seconds that a worker waited for a core between two times; None if unknown."""
    known = queues.get(rank, ())
    if len(known) < 2:
        return None
    times, waited = (np.array(column) for column in zip(*known, strict=True))
    if not (np.diff(times) > 0).all():
        return None
    began, ended = np.interp([start, stop], times, waited)
    return max(0.0, float(ended - began))

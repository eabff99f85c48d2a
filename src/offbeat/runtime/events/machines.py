"""What a run folder says of the machines whose events came over links: processes, clocks, and the links' state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, to_builtins

from offbeat.errors import UsageError
from offbeat.protocols.causality.clock_offset import ClockOffset
from offbeat.protocols.machine import Name
from offbeat.runtime.events.recorder import FOLDER
from offbeat.runtime.run.untrusted_files import read_bytes

FILE: Final = "machines.json"


class MachineRecord(Struct, frozen=True):
    """A machine of a run: its processes, its clock, and its link to the monitor."""

    name: str
    processes: tuple[Name, ...]
    comparable: bool  # Whether it reads the same clock as the monitor.
    offset: float  # Seconds by which its clock was ahead, as estimated at last …
    error: float | None  # … and by how much that may be wrong; None: unknown.
    delay: float | None  # Seconds that its last pulse took.
    waiting: int  # Number of records that had not come.
    received: int
    lost: int
    restarts: int
    silent: float  # Seconds since it was last heard from.

    @property
    def known_offset(self) -> ClockOffset:
        """How far its clock was ahead of the monitor's, as its link showed."""
        return ClockOffset(self.offset, float("inf") if self.error is None else self.error)

    @property
    def shift(self) -> float:
        """What is subtracted from its times to get the launcher's."""
        return 0.0 if self.comparable else self.offset

    def shown(self) -> dict[str, Any]:
        """As a table shows it."""
        clock = f"{self.known_offset}{', the same clock' if self.comparable else ''}"
        return {**to_builtins(self), "processes": list(self.processes), "clock": clock}

    def __str__(self) -> str:
        clock = f"clock {self.known_offset}{' (the same clock)' if self.comparable else ''}"
        delay = "" if self.delay is None else f", delay {1e3 * self.delay:.2g} ms"
        trouble = f", {self.waiting:,} missing" if self.waiting else ""
        trouble += f", its forwarder was started again {self.restarts} times" if self.restarts else ""
        return f"{self.name}: {clock}{delay}, {self.received:,} events came, {self.lost:,} lost{trouble}"


def machines_of(folder: Path) -> list[MachineRecord]:
    """The machines of a run whose events came over links; empty if there are none."""
    try:
        return msgspec.json.decode(read_bytes(folder / FOLDER / FILE), type=list[MachineRecord])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"{folder / FOLDER / FILE} is damaged: {error}. Remove it to do without.") from error

"""Events of other machines: copies of their files, and what their forwarders say of their processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from offbeat.monitor.intake.sources import EventBatch, FolderSource
from offbeat.protocols.causality.forwarder import ProcessPulse
from offbeat.protocols.machine import Name
from offbeat.runtime.events.collection import Collection
from offbeat.runtime.events.mirror import boot
from offbeat.runtime.events.process_state import ProcessState


class LinkedSource(FolderSource):
    """The copies of a run's events that a `Collection` writes into the run folder."""

    def __init__(self, folder: Path, homes: Mapping[Name, Name], collection: Collection) -> None:
        super().__init__(folder, len(homes))
        self._homes, self._collection = homes, collection

    def batches(self) -> Iterator[EventBatch]:
        """What has come since the last call, with times by the monitor's clock."""
        self._collection.save(time.monotonic())
        own = boot()
        for state in self._collection.links():
            if state.clock not in ("", own):
                self.shifts |= dict.fromkeys(self._collection.machine.processes(state.machine), state.offset.seconds)
        return super().batches()

    def state(self, process: Name) -> ProcessState | None:
        """What the kernel of its machine said of a process."""
        pulse = self._pulse(process)
        return None if pulse is None or pulse.ended else ProcessState(pulse.main, pulse.ticks, pulse.stopped)

    def without_core(self, process: Name) -> float | None:
        """Seconds that the threads of a process had no core."""
        pulse = self._pulse(process)
        return None if pulse is None else pulse.without_core

    def stacks(self, processes: Sequence[Name]) -> dict[Name, str]:
        """The stacks that the machines of these processes send."""
        return self._collection.stacks(processes)

    def known_until(self, process: Name, now: float) -> float:
        """The time up to which everything that a process has recorded has come."""
        home = self._home(process)
        return now if home is None else self._collection.machine.known_until(home, process, now)

    def is_complete(self, process: Name) -> bool:
        """Whether everything that a process that has ended had recorded is here, or is lost."""
        home = self._home(process)
        return home is None or self._collection.machine.is_complete(home, process, time.monotonic())

    def _home(self, process: Name) -> Name | None:
        return self._homes.get(process) or self._collection.home_of(process)

    def _pulse(self, process: Name) -> ProcessPulse | None:
        home = self._home(process)
        return None if home is None else self._collection.machine.pulse(home, process)

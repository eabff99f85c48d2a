"""Events of other machines, collected over their links into this machine's run folder."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import structs

from offbeat.protocols.causality.forwarder import HOME, Collector, LinkState, StackReply, StackRequest, WriteRecords
from offbeat.protocols.machine import Done, Name
from offbeat.runtime.events.forward import link_codec
from offbeat.runtime.events.machines import FILE, MachineRecord
from offbeat.runtime.events.mirror import Mirror, MirrorError, boot
from offbeat.runtime.events.recorder import FIELDS, FOLDER
from offbeat.runtime.messages import Endpoint, Inbox, Keys, drive

SAVED_EVERY: Final = 1.0  # Seconds between two writings of the links' state.
ANSWER: Final = 1.5  # Seconds for a machine to send the stacks of its processes.
MOST_PROCESSES: Final = 16_384  # Whose events are collected; those of more are refused.
_PROCESS: Final = re.compile(r"(?:worker (?P<rank>\d{1,9})|server (?P<shard>\d{1,9})\.\d{1,9})")


class Collection:
    """Drives the collector in a thread of its own; a context manager."""

    def __init__(self, folder: Path, machines: Sequence[Name], address: str, keys: Keys) -> None:
        self.machine = Collector(machines)
        self._folder = folder
        self._mirrors: dict[Name, Mirror] = {}
        self._stacks: dict[Name, str] = {}
        self._answered = threading.Condition()
        self._over = False
        self._endpoint: Endpoint[Any] = Endpoint(HOME, link_codec(), bind=address, keys=keys)
        self.address = self._endpoint.address or address
        self._inbox = Inbox(self._endpoint)
        self._thread = threading.Thread(target=self._drive, name="offbeat collector", daemon=True)
        self._saved_at = 0.0
        self.problem: BaseException | None = None

    def __enter__(self) -> Collection:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._endpoint.wake()
        self._thread.join(timeout=5.0)
        self._endpoint.close()
        self.save(time.monotonic(), always=True)

    def links(self) -> list[LinkState]:
        """The state of all links."""
        return [structs.replace(state) for state in self.machine.links()]

    def home_of(self, process: Name) -> Name | None:
        """The machine that a process is on, as far as it has said so."""
        return self.machine.home_of(process)

    def stacks(self, processes: Sequence[Name]) -> dict[Name, str]:
        """The stacks of processes on other machines, of those that answer in time."""
        homes = {process: self.home_of(process) for process in processes}
        self._stacks = {}
        for machine in {home for home in homes.values() if home is not None}:
            wanted = tuple(process for process, home in homes.items() if home == machine)
            self._inbox.put(Done(machine, StackRequest(wanted)))
        wanted = {process for process, home in homes.items() if home is not None}
        with self._answered:
            self._answered.wait_for(lambda: wanted <= self._stacks.keys(), ANSWER if wanted else 0.0)
            return dict(self._stacks)

    def save(self, now: float, always: bool = False) -> None:
        """Write the state of the machines into the run folder, now and then."""
        if not always and now - self._saved_at < SAVED_EVERY:
            return
        self._saved_at = now
        records = [self._record(state, now) for state in self.links()]
        draft = self._folder / FOLDER / f".{FILE}"
        draft.write_bytes(msgspec.json.encode(records))
        draft.replace(self._folder / FOLDER / FILE)

    def _record(self, state: LinkState, now: float) -> MachineRecord:
        error = state.offset.error if state.offset.error < float("inf") else None
        return MachineRecord(
            name=state.machine,
            processes=self.machine.processes(state.machine),
            comparable=state.clock in ("", boot()),
            offset=state.offset.seconds,
            error=error,
            delay=state.delay,
            waiting=state.waiting,
            received=state.received,
            lost=state.lost,
            restarts=state.restarts,
            silent=max(0.0, now - state.heard),
        )

    def _drive(self) -> None:
        try:
            drive(self.machine, self._endpoint, self._do, until=lambda: self._over, inbox=self._inbox)
        except BaseException as error:
            self.problem = error
            print(f"events of other machines are no longer collected: {error!r}", file=sys.stderr, flush=True)

    def _do(self, work: Any, _token: Any) -> None:
        if isinstance(work, WriteRecords):
            self._write(work)
        elif isinstance(work, StackReply):
            with self._answered:
                self._stacks.update(work.stacks)
                self._answered.notify_all()

    def _write(self, work: WriteRecords) -> None:
        batch, name = work.batch, work.batch.process
        match = _PROCESS.fullmatch(name)
        if match is None or (len(self._mirrors) >= MOST_PROCESSES and name not in self._mirrors):
            return
        try:
            if work.is_new or name not in self._mirrors:
                path = self._folder / FOLDER / f"{name.replace(' ', '-')}.events"
                self._mirrors[name] = Mirror(path, batch.birth, int(match["rank"] or match["shard"]))
            self._mirrors[name].write(bytes(work.payload.handle)[work.skip * FIELDS.itemsize :], batch.names)
        except MirrorError as error:
            print(f"events of {name} from {work.machine} are refused: {error}", file=sys.stderr, flush=True)

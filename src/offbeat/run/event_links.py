"""How the events of a run's hosts reach its monitor: by a forwarder on each, over the hosts' own links."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Container, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from offbeat.monitor.intake.links import LinkedSource
from offbeat.monitor.intake.sources import EventSource
from offbeat.monitor.verdicts import worker_name
from offbeat.run.job import Job
from offbeat.runtime.events.collection import Collection
from offbeat.runtime.hosts import Placed
from offbeat.runtime.launch import Role, RoleOutcome
from offbeat.runtime.messages import Keys
from offbeat.runtime.run.folder import RunFolder

FORWARDER: Final = "forwarder"  # The kind of their roles.
MOST_RESTARTS: Final = 16  # Forwarders of a run that are started again after their death.


class EventLinks:
    """The forwarders of a run; a run on one machine has none."""

    def __init__(self) -> None:
        self.roles: list[Role] = []
        self.source: EventSource | None = None  # Where the monitor's events come from; None: the run folder.
        self.folder: Path | None = (
            None  # What the hosts' folders of events are in; on machines, a folder of the agent's.
        )
        self._folders: dict[tuple[Path | None, str], Path] = {}  # The folder of each host's events, by where it is.
        self._restarts = 0

    def connect(
        self, job: Job, folder: RunFolder, placed: Placed, collection: Collection, keys: Keys, at: Path
    ) -> None:
        """Prepare a forwarder for each host, whose processes record into a folder of their own."""
        homes = {worker_name(rank): placed.seat(rank).host.host.name for rank in range(job.workers)}
        self.source, self.folder = LinkedSource(folder.path, homes, collection), at
        for number, there in enumerate(placed.hosts):
            events = self._folders[there.network, there.machine] = at / there.host.name
            self.roles.append(
                Role(
                    kind=FORWARDER,
                    rank=number,
                    entry="offbeat.runtime.events.forward:forward",
                    config={
                        "name": there.host.name,
                        "folder": str(events),
                        "address": collection.address,
                        "pair": [keys.public, keys.secret],
                    },
                    environment={},
                    log=folder.log(FORWARDER, there.host.name),
                    threads=1,
                    serves=True,
                    expendable=True,
                    network=there.network,
                    machine=there.machine,
                    name=f"{FORWARDER} {there.host.name}",
                )
            )

    def on_its_host(self, role: Role) -> Role:
        """A worker or server that records its events where the forwarder of its host finds them."""
        events = self._folders.get((role.network, role.machine))
        if events is None or role.kind not in ("worker", "server"):
            return role
        return dataclasses.replace(role, config={**role.config, "events": str(events)})

    def replacement(self, outcome: RoleOutcome, lost: Container[str]) -> Role | None:
        """Another forwarder for one that has ended before the run has, unless its machine is lost."""
        role = outcome.role
        if role.kind != FORWARDER or role.machine in lost or self._restarts >= MOST_RESTARTS:
            return None
        self._restarts += 1
        return role


@contextmanager
def event_links(job: Job, folder: RunFolder, placed: Placed | None) -> Generator[EventLinks]:
    """What brings the events of a run's hosts to its monitor, while the run lasts."""
    links = EventLinks()
    if placed is None or not job.goal.watch:
        yield links
        return
    keys = Keys.generate()
    names = [there.host.name for there in placed.hosts]
    with placed.inside():
        collection = Collection(folder.path, names, f"tcp://{placed.address}:*", keys)
    with tempfile.TemporaryDirectory(prefix="offbeat-events-") as at:
        links.connect(job, folder, placed, collection, keys, Path(at))
        with collection:
            yield links

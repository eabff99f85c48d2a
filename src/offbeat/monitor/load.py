"""The events of a run that is over, read from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from offbeat.errors import UsageError
from offbeat.monitor.cpu_wait import Queues, read_queues
from offbeat.monitor.verdicts import worker_name
from offbeat.runtime.events.recorder import FOLDER, Reader, Stamp, events_file

_SERVERS = "server-*.events"


class RecordedRun(Struct, frozen=True):
    """What the workers of a run have written down."""

    stamps: Mapping[int, Sequence[Stamp]]
    """Each worker's events, in their order."""
    dropped: int
    """How many older ones were written over."""
    servers: Mapping[str, Sequence[Stamp]] = {}
    """Each server's events, by its name."""
    queues: Queues = {}
    """How long each worker had waited for a core, as far as that was written down."""


def recorded(folder: Path) -> RecordedRun:
    """Read the events of a run; one that has none is refused with the way to get them."""
    files = sorted((folder / FOLDER).glob("worker-*.events"))
    if not files:
        raise UsageError(
            f"{folder} has no events, so nothing can be said about who waited for whom. Run it again with "
            f"`offbeat run --monitor`, which writes them down."
        )
    readers = [Reader(file, kept=True) for file in files]
    for file, reader in zip(files, readers, strict=True):
        if file != events_file(folder, reader.rank):
            raise UsageError(f"{file} is damaged: it says that its events are of {worker_name(reader.rank)}.")
    stamps = {reader.rank: reader.new() for reader in readers}
    served = {file.stem.replace("-", " "): Reader(file, kept=True) for file in sorted((folder / FOLDER).glob(_SERVERS))}
    told = {name: reader.new() for name, reader in served.items()}
    dropped = sum(reader.dropped for reader in (*readers, *served.values()))
    return RecordedRun(dict(sorted(stamps.items())), dropped, told, read_queues(folder))

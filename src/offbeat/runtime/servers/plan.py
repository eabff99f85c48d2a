"""The server processes of a run: shards, replicas, consistency rule and addresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from offbeat.protocols.machine import Name
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import ClusterView, Message, Timeouts
from offbeat.runtime.messages import Codec, Endpoint, Keys, address_in

PAYLOAD_LIMIT = 64 * 1024**3  # Largest payload in bytes; memory is allocated only for what arrives.


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of one run, as plain data that is sent to every process."""

    workers: int
    shards: int  # Of all parts of the model together.
    replicas: int
    rule: Rule
    folder: str  # A private folder with all sockets.
    timing: Timeouts = msgspec.field(default_factory=Timeouts)
    addresses: dict[Name, str] = {}  # Addresses in a run over several hosts; by default in the folder.
    parts: tuple[int, ...] = ()  # The part of the model that each worker has; empty: every worker has a whole one.
    vectors: bool = False
    """Whether these are Sandblaster's: the last one commands the others, and workers have own connections to them."""
    pair: tuple[str, str] | None = None  # Public and secret key of the run; not needed in a private folder.

    def __repr__(self) -> str:
        return f"Plan({self.workers} workers, {self.shards} shards, {self.replicas} further copies, {self.rule})"

    @property
    def keys(self) -> Keys | None:
        """Keys that admit only the processes of this run."""
        return None if self.pair is None else Keys(*self.pair)

    @property
    def view(self) -> ClusterView:
        """The initial view."""
        return ClusterView.of(self.workers, self.shards, self.replicas, self.parts)

    def partners(self, view: ClusterView) -> tuple[Name, ...]:
        """The servers that a worker's client asks."""
        return () if self.vectors else view.servers

    def address(self, name: Name) -> str:
        """The address of a process."""
        return self.addresses.get(name) or address_in(Path(self.folder), name)

    def codec(self) -> Codec[Any]:
        """The codec of this run; a payload may be a whole large shard with its optimizer state."""
        return Codec(Message, payload_limit=PAYLOAD_LIMIT)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> ServerPlan:
        """From JSON data."""
        return msgspec.convert(data, cls)


class Lines:
    """The connections of an endpoint to the processes that views name."""

    def __init__(self, plan: ServerPlan, endpoint: Endpoint[Any]) -> None:
        self._plan, self._endpoint = plan, endpoint
        self._connected: set[Name] = {endpoint.name}

    def reach(self, names: Iterable[Name]) -> None:
        """Connect to new names."""
        for name in names:
            if name not in self._connected:
                self._connected.add(name)
                self._endpoint.connect(name, self._plan.address(name))

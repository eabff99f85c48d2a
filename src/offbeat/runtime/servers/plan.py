"""Which processes serve the parameters of a run, by which rule, and where they are found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from offbeat.protocols.machine import Name
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.messages import ClusterView, Message, Timeouts
from offbeat.runtime.messages import Codec, Keys, address_in

PAYLOAD_LIMIT = 64 * 1024**3
"""Bytes of the largest payload: memory is taken for what arrives, not for what a header claims."""


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of one run. All of it is plain data, so that every process can be told."""

    workers: int
    shards: int
    replicas: int
    rule: Rule
    folder: str
    """A private folder with everybody's sockets."""
    timing: Timeouts = msgspec.field(default_factory=Timeouts)
    addresses: dict[Name, str] = {}
    """Where those who bind are found, in a run over several hosts; by default they are in the folder."""
    pair: tuple[str, str] | None = None
    """The public and the secret key of this run, which everybody in it has; none is needed in a private folder."""

    def __repr__(self) -> str:
        return f"Plan({self.workers} workers, {self.shards} shards, {self.replicas} further copies, {self.rule})"

    @property
    def keys(self) -> Keys | None:
        """What lets the processes of this run in, and nobody else."""
        return None if self.pair is None else Keys(*self.pair)

    @property
    def view(self) -> ClusterView:
        """Who takes part in the beginning."""
        return ClusterView.of(self.workers, self.shards, self.replicas)

    def address(self, name: Name) -> str:
        """Where somebody is found."""
        return self.addresses.get(name) or address_in(Path(self.folder), name)

    def codec(self) -> Codec[Any]:
        """What is said on this run's lines; a payload may be all of a large shard, with its optimizer."""
        return Codec(Message, payload_limit=PAYLOAD_LIMIT)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> ServerPlan:
        """From JSON data."""
        return msgspec.convert(data, cls)

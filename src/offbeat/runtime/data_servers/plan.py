"""The data servers of a run, as plain data for every process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from offbeat.protocols.data_servers.messages import DataMessage, data_server_name
from offbeat.protocols.machine import Name
from offbeat.runtime.messages import Codec, Keys, address_in
from offbeat.runtime.servers.plan import PAYLOAD_LIMIT


class DataServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How many data servers, and where they listen."""

    count: int
    folder: str
    """A private folder with all sockets."""
    addresses: dict[Name, str] = {}
    """Addresses in a run over several hosts; by default in the folder."""
    pair: tuple[str, str] | None = None
    """Public and secret key of the run; not needed in a private folder."""

    @property
    def keys(self) -> Keys | None:
        """Keys that admit only the processes of this run."""
        return None if self.pair is None else Keys(*self.pair)

    @property
    def names(self) -> list[Name]:
        """The names of all data servers."""
        return [data_server_name(number) for number in range(self.count)]

    def address(self, name: Name) -> str:
        """The address of a data server."""
        return self.addresses.get(name) or address_in(Path(self.folder), name)

    def codec(self) -> Codec[Any]:
        """The codec of all messages about batches."""
        return Codec(DataMessage, payload_limit=PAYLOAD_LIMIT)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> DataServerPlan:
        """From JSON data."""
        return msgspec.convert(data, cls)

"""The shards and the coordinator of a run of Sandblaster, as plain data for every process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from offbeat.protocols.machine import Name
from offbeat.protocols.sandblaster.messages import SandblasterMessage
from offbeat.runtime.messages import Codec, address_in
from offbeat.runtime.servers.plan import PAYLOAD_LIMIT


class SandblasterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How many shards and portions, and where the processes listen."""

    folder: str
    """A private folder with all sockets."""
    shards: int
    """Processes that hold the vectors."""
    portions: int
    """Portions of the training data in each evaluation."""
    history: int
    """Steps that L-BFGS remembers."""
    tolerance: float
    """The largest number of the gradient at which the run ends."""

    def address(self, name: Name) -> str:
        """The address of a shard or of the coordinator."""
        return address_in(Path(self.folder), name)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> SandblasterPlan:
        """From JSON data."""
        return msgspec.convert(data, cls)


class CountingCodec(Codec[Any]):
    """A codec that counts the bytes of all messages, headers and payloads."""

    def __init__(self) -> None:
        super().__init__(SandblasterMessage, payload_limit=PAYLOAD_LIMIT)
        self.sent = self.received = 0

    def encode(self, message: Any, payload: Any = None) -> list[Any]:
        """The frames of a message."""
        frames = super().encode(message, payload)
        self.sent += sum(memoryview(frame).nbytes for frame in frames)
        return frames

    def decode(self, frames: Any) -> Any:
        """The message in these frames."""
        self.received += sum(memoryview(frame).nbytes for frame in frames)
        return super().decode(frames)

"""The shards and the coordinator of a run of Sandblaster, as plain data for every process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from offbeat.protocols.sandblaster.messages import SandblasterMessage
from offbeat.runtime.messages import Codec
from offbeat.runtime.servers.plan import PAYLOAD_LIMIT, ServerPlan


class SandblasterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of a run of Sandblaster, and what its coordinator decides by."""

    servers: ServerPlan
    """Shards and, as the last server, the coordinator; with copies of each, and where they listen."""
    portions: int
    """Portions of the training data in each evaluation."""
    history: int
    """Steps that L-BFGS remembers."""
    tolerance: float
    """The largest number of the gradient at which the run ends."""

    @property
    def shards(self) -> int:
        """Parts of the vectors, each on a server and its copies."""
        return self.servers.shards - 1

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

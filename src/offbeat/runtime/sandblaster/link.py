"""A worker's connection to shards and coordinator: it drives the worker's machine until what it asked for is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from offbeat.errors import CheckpointError
from offbeat.protocols.machine import Effect, Event, Payload, Received
from offbeat.protocols.partition import share
from offbeat.protocols.sandblaster.messages import PARAMETERS, IterationEnd
from offbeat.protocols.sandblaster.worker import Compute, Computed, PortionWorker, Ready, TakeMemory, TakePart
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, Viewed
from offbeat.runtime.messages import Driver, Endpoint, Inbox
from offbeat.runtime.sandblaster.plan import CountingCodec, SandblasterPlan
from offbeat.runtime.servers.plan import Lines
from offbeat.runtime.state.checkpoint import write_tensors

Row = NDArray[Any]
Portion = Callable[[int, Row], tuple[float, Row]]
"""A portion's share of loss and gradient at these parameters."""
MEMORIES = "shards.msgpack"
"""The file of a checkpoint with what shards know beside their registers."""
_NUMBERS = "numbers"
_SLICE = 0.5


def _file_of(register: str) -> str:
    return f"register-{register}.safetensors"


class ShardLink:
    """What a worker does with shards and coordinator; `check` is called meanwhile and may raise."""

    def __init__(self, plan: SandblasterPlan, rank: int, check: Callable[[], None]) -> None:
        self._plan, self._check = plan, check
        self._machine = PortionWorker(rank, plan.servers.view)
        self._endpoint: Endpoint[Any] = Endpoint(self._machine.name, CountingCodec(), keys=plan.servers.keys)
        self._lines = Lines(plan.servers, self._endpoint)
        self._lines.reach(plan.servers.view.servers)
        self._inbox = Inbox(self._endpoint)
        self._driver = Driver(self._machine, self._endpoint, self._work, self._inbox, self._meet)
        self._ready: Ready | None = None
        self._memories: dict[int, TakeMemory] = {}
        self._row: Row = np.empty(0)
        self._compute: Portion | None = None

    @property
    def payload(self) -> int:
        """Bytes of vectors that were sent."""
        return sum(traffic.bytes_sent for traffic in self._endpoint.traffic.values())

    def load(self, row: Row) -> None:
        """Start from these parameters; called by one worker."""
        self._row = row.copy()
        self._wait(self._machine.load(row.dtype.name, self._parts(self._row)))

    def read(self, register: str = PARAMETERS) -> Row:
        """A register as the last iteration has left it: by default the parameters."""
        self._row = np.empty_like(self._row)
        self._wait(self._machine.read(register))
        return self._row

    def write_files(self, folder: Path) -> None:
        """Write all that shards and coordinator go on from: a file for each register, so that one is held at a time."""
        self._memories = {}
        self._wait(self._machine.inspect())
        memories = [bytes(self._memories[shard].memory.handle) for shard in range(self._plan.shards)]
        (folder / MEMORIES).write_bytes(msgspec.msgpack.encode(memories))
        for register in self._memories[0].registers:
            row = torch.from_numpy(self.read(register))
            write_tensors(folder / _file_of(register), {_NUMBERS: row}, {"register": register})

    def restore(self, folder: Path) -> None:
        """Give the shards all that was written; called by one worker."""
        memories = msgspec.msgpack.decode((folder / MEMORIES).read_bytes(), type=list[bytes])
        if len(memories) != self._plan.shards:
            raise CheckpointError(
                f"{folder} has the history of {len(memories)} shards, and sums over other parts of vectors round "
                f"otherwise, so that it cannot go on to the same bits on {self._plan.shards}. Resume with "
                f"shards={len(memories)}."
            )
        files = {file.name: file for file in folder.glob(_file_of("*"))}
        first = files.pop(_file_of(PARAMETERS))
        for file in (first, *(files[name] for name in sorted(files))):
            with safe_open(file, "numpy") as content:
                register, row = content.metadata()["register"], content.get_tensor(_NUMBERS)
            self._row = row
            self._wait(self._machine.load(row.dtype.name, self._parts(row), register))
        self._wait(self._machine.restore([Payload(len(data), data) for data in memories]))

    def begin(self, like: Row, iteration: int) -> None:
        """Vectors are like this one, and so many iterations are over: those of an earlier part of the run."""
        self._row = np.empty_like(like)
        self._machine.go_on_from(iteration)

    def iterate(self, compute: Portion) -> IterationEnd:
        """Compute portions until the iteration is over."""
        self._compute = compute
        end = self._wait(self._machine.iterate()).end
        if end is None:
            raise RuntimeError("an iteration ended without its figures")
        return end

    def viewed(self, view: ClusterView) -> None:
        """The members have changed, or servers have other primaries; from any thread."""
        self._inbox.put(Received(COORDINATOR, Viewed(view)))

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def _meet(self, event: Event, effects: Sequence[Effect]) -> None:
        """Connect to servers that have come later, before anything is sent to them."""
        del effects
        if isinstance(event, Received) and isinstance(event.message, Viewed):
            self._lines.reach(event.message.view.servers)

    def _wait(self, effects: Sequence[Effect]) -> Ready:
        self._ready = None
        self._driver.perform(effects)
        while self._ready is None:
            self._check()
            self._driver.turn(_SLICE)
        return self._ready

    def _parts(self, row: Row) -> list[Payload]:
        count = self._plan.shards
        pieces = [row[slice(*share(len(row), shard, count))] for shard in range(count)]
        return [Payload(piece.nbytes, piece) for piece in pieces]

    def _work(self, work: Any, token: Any) -> Any:
        del token
        match work:
            case TakePart(shard, part):
                piece = self._row[slice(*share(len(self._row), shard, self._plan.shards))]
                piece[:] = np.frombuffer(part.handle, dtype=self._row.dtype)
            case Compute(_, portion) if self._compute is not None:
                loss, gradient = self._compute(portion, self._row)
                return Computed(loss, self._parts(gradient))
            case TakeMemory(shard):
                self._memories[shard] = work
            case Ready():
                self._ready = work
            case _:
                pass
        return None

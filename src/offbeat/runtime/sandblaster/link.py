"""A worker's connection to shards and coordinator: it drives the worker's machine until what it asked for is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.protocols.machine import Effect, Event, Payload, Received
from offbeat.protocols.partition import share
from offbeat.protocols.sandblaster.messages import IterationEnd
from offbeat.protocols.sandblaster.worker import Compute, Computed, PortionWorker, Ready, TakePart
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, Viewed
from offbeat.runtime.messages import Driver, Endpoint, Inbox
from offbeat.runtime.sandblaster.plan import CountingCodec, SandblasterPlan
from offbeat.runtime.servers.plan import Lines

Row = NDArray[Any]
Portion = Callable[[int, Row], tuple[float, Row]]
"""A portion's share of loss and gradient at these parameters."""
_SLICE = 0.5


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

    def read(self, like: Row) -> Row:
        """The parameters that the last iteration ended with."""
        self._row = np.empty_like(like)
        self._wait(self._machine.read())
        return self._row

    def iterate(self, like: Row, compute: Portion) -> IterationEnd:
        """Compute portions until the iteration is over."""
        if self._row.shape != like.shape:
            self._row = np.empty_like(like)
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
            case Ready():
                self._ready = work
            case _:
                pass
        return None

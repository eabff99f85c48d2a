"""The coordinator of a run, in the launching process."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError, RunError
from offbeat.protocols.machine import Ended, Name, Payload
from offbeat.protocols.servers.coordinator import Add, Changed, CoordinatorMachine, Total
from offbeat.protocols.servers.messages import COORDINATOR, Lost
from offbeat.protocols.servers.snapshots import GivenUp, Snapshot
from offbeat.runtime.messages import Endpoint, Inbox, drive
from offbeat.runtime.servers.plan import ServerPlan

Publish = Callable[[Snapshot | GivenUp], None]  # Publishes a whole snapshot, or removes the parts of a failed one.


class Publisher:
    """Publishes snapshots in a thread, so that the coordinator keeps receiving heartbeats."""

    def __init__(self, act: Publish) -> None:
        self._act = act
        self._queue: SimpleQueue[Snapshot | GivenUp | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="offbeat snapshots", daemon=True)
        self._thread.start()
        self.put = self._queue.put

    def _run(self) -> None:
        while (news := self._queue.get()) is not None:
            try:
                self._act(news)
            except (OSError, OffbeatError) as error:
                print(f"snapshot {news.colour} could not be published: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Finish what is queued."""
        self._queue.put(None)
        self._thread.join(timeout=30.0)


class Coordination:
    """Drives the coordinator in its own thread; a context manager."""

    def __init__(self, plan: ServerPlan, publish: Publish | None = None) -> None:
        self._plan = plan
        self._publisher = Publisher(publish) if publish is not None else None
        self.machine = CoordinatorMachine(plan.view, timing=plan.timing)
        self.changes: deque[Changed] = deque(maxlen=1000)  # The latest views.
        self._lost: list[int] = []
        self._sums: dict[str, NDArray[Any]] = {}
        self._over = False
        self._failure: BaseException | None = None
        self._endpoint: Endpoint[Any] = Endpoint(
            COORDINATOR, plan.codec(), bind=plan.address(COORDINATOR), keys=plan.keys
        )
        self._inbox = Inbox(self._endpoint)
        self._thread = threading.Thread(target=self._drive, name="offbeat coordinator", daemon=True)

    @property
    def address(self) -> str:
        """Its address, with the actual port."""
        return self._endpoint.address or self._plan.address(COORDINATOR)

    def __enter__(self) -> Coordination:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._endpoint.wake()
        self._thread.join(timeout=5.0)
        self._endpoint.close()
        if self._publisher is not None:
            self._publisher.close()

    def ended(self, name: Name) -> None:
        """Report that a process has ended."""
        self._inbox.put(Ended(name))

    def check(self) -> None:
        """Raise if the run cannot go on: a shard is lost, or the coordinator failed."""
        if self._failure is not None:
            raise RunError(f"the coordinator of the run failed: {self._failure!r}") from self._failure
        if (lost := self.loss()) is not None:
            raise lost

    def loss(self) -> RunError | None:
        """The error for a lost shard, if one is lost."""
        if not self._lost:
            return None
        shard, plan = self._lost[0], self._plan
        what = f"shard {shard} is lost: no server is left that holds this part of the parameters"
        if plan.vectors and shard == plan.shards - 1:
            what = f"the coordinator of sandblaster is lost: no copy of it (server {shard}) is left"
        kind = "sandblaster" if plan.vectors else "server"
        return RunError(
            f"{what}. Continue from the last checkpoint with --resume, or keep a copy on another server: "
            f"{kind}(..., replicas=1)."
        )

    def _drive(self) -> None:
        try:
            drive(self.machine, self._endpoint, self._on_notice, until=lambda: self._over, inbox=self._inbox)
        except BaseException as error:
            self._failure = error

    def _on_notice(self, notice: Any, _token: Any) -> Any:
        if isinstance(notice, Add):
            self._add(notice)
        elif isinstance(notice, Total):
            total = self._sums.pop(notice.what)
            return Payload(total.nbytes, total)
        elif isinstance(notice, Changed):
            self.changes.append(notice)
        elif isinstance(notice, Lost):
            self._lost.append(notice.shard)
        elif isinstance(notice, Snapshot | GivenUp) and self._publisher is not None:
            self._publisher.put(notice)
        return None

    def _add(self, brought: Add) -> None:
        row = np.frombuffer(brought.row.handle, dtype=brought.kind)
        known = self._sums.get(brought.what)
        if known is None:
            self._sums[brought.what] = row.copy()
        elif known.shape != row.shape or known.dtype != row.dtype:
            raise RunError(
                f"workers came to {brought.what} with different rows: {known.size:,} numbers of {known.dtype}, and "
                f"{row.size:,} of {row.dtype}. All workers must train the same model."
            )
        else:
            known += row

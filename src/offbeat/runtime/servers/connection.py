"""A worker's connection to the servers and the coordinator, driven by the thread that waits.

One thread at a time enters it as a context. While none does, its own thread polls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from offbeat.errors import RunError
from offbeat.protocols.machine import Machine, Name
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, place_of
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.messages import Driver, Endpoint
from offbeat.runtime.servers.plan import ServerPlan

_POLL = 0.05  # Seconds between polls while nobody waits.


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


class ServerConnection:
    """A machine and its endpoint, until an error breaks them."""

    def __init__(self, machine: Machine, plan: ServerPlan, notice: Callable[[Any, Any], Any]) -> None:
        self.broken: BaseException | None = None  # Why no more requests can be made.
        self.over = False  # Whether it is being closed.
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._endpoint: Endpoint[Any] = Endpoint(machine.name, plan.codec(), keys=plan.keys)
        self._lines = Lines(plan, self._endpoint)
        self._lines.reach([COORDINATOR, *plan.view.servers])
        self.close = self._endpoint.close
        self.driver = Driver(machine, self._endpoint, notice)
        self._thread = threading.Thread(target=self._poll, name="offbeat client", daemon=True)

    def start(self) -> None:
        """Start the machine and the polling."""
        self.driver.begin()
        self._thread.start()

    def __enter__(self) -> ServerConnection:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def reach(self, view: ClusterView) -> None:
        """Connect to all servers of a view: a new one may be the next primary."""
        self._lines.reach(view.servers)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent to servers, including lent memory."""
        return sum(traffic.bytes_sent for traffic in self._endpoint.traffic.values())

    def links(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Payload bytes sent to and received from each server, by shard and replica, including lent memory."""
        with self:
            known = {place_of(peer): traffic for peer, traffic in self._endpoint.traffic.items()}
        return {place: (t.bytes_sent, t.bytes_received) for place, t in known.items() if place is not None}

    def lend(self, segment: Segment) -> None:
        """Let servers on this host read this memory instead of sending its contents."""
        with self:
            self._endpoint.lend(segment)

    def catch_up(self) -> None:
        """Handle all pending events."""
        while self.driver.turn(0.0):
            pass

    def check(self) -> None:
        """Raise if no more requests can be made."""
        if self.broken is not None:
            raise self.broken

    def break_off(self, error: BaseException) -> None:
        """End the current wait, and all later ones, with an error."""
        self.broken = self.broken or error

    def _poll(self) -> None:
        while not self._over.wait(_POLL):
            if self._lock.acquire(blocking=False):
                try:
                    self.catch_up()
                except Exception as error:
                    self.break_off(RunError(f"the connection to the servers broke: {error!r}"))
                    return
                finally:
                    self._lock.release()

    def stop(self) -> None:
        """Stop polling."""
        self.over = True
        self._over.set()
        self._thread.join(timeout=5.0)

"""A worker's connection to the servers and the coordinator, driven by whoever waits.

It is entered as a context, by one thread at a time. While nobody is in it, a thread of its own looks in.
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

_LOOK_IN = 0.05
"""Seconds between two looks while nobody waits."""


class Lines:
    """Whom an endpoint is connected with, of those that views name."""

    def __init__(self, plan: ServerPlan, endpoint: Endpoint[Any]) -> None:
        self._plan, self._endpoint = plan, endpoint
        self._connected: set[Name] = {endpoint.name}

    def reach(self, names: Iterable[Name]) -> None:
        """Connect to those who are new."""
        for name in names:
            if name not in self._connected:
                self._connected.add(name)
                self._endpoint.connect(name, self._plan.address(name))


class ServerConnection:
    """A machine, its endpoint, and why they are of no use any more, if so."""

    def __init__(self, machine: Machine, plan: ServerPlan, told: Callable[[Any, Any], Any]) -> None:
        self.broken: BaseException | None = None
        """Why nothing more can be asked for."""
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._endpoint: Endpoint[Any] = Endpoint(machine.name, plan.codec(), keys=plan.keys)
        self._lines = Lines(plan, self._endpoint)
        self._lines.reach([COORDINATOR, *plan.view.servers])
        self.driver = Driver(machine, self._endpoint, told)
        self._thread = threading.Thread(target=self._look_in, name="offbeat client", daemon=True)

    def start(self) -> None:
        """Let the machine begin, and look in from now on."""
        self.driver.begin()
        self._thread.start()

    def __enter__(self) -> ServerConnection:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def reach(self, view: ClusterView) -> None:
        """Reach all servers of a view: one that is new there may be the next to serve."""
        self._lines.reach(view.servers)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that went to servers, lent ones too."""
        return sum(traffic.bytes_sent for traffic in self._endpoint.traffic.values())

    def links(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Payload bytes that went to each server and came from it, lent ones too, by shard and replica."""
        with self:
            known = {place_of(peer): traffic for peer, traffic in self._endpoint.traffic.items()}
        return {place: (one.bytes_sent, one.bytes_received) for place, one in known.items() if place is not None}

    def lend(self, segment: Segment) -> None:
        """Let servers of this host read this memory instead of sending them what lies there."""
        with self:
            self._endpoint.lend(segment)

    def catch_up(self) -> None:
        """Tell the machine of all that has happened."""
        while self.driver.turn(0.0):
            pass

    def check(self) -> None:
        """Raise if nothing more can be asked for."""
        if self.broken is not None:
            raise self.broken

    def break_off(self, error: BaseException) -> None:
        """End the wait that somebody is in, and all later ones, with an error."""
        self.broken = self.broken or error

    @property
    def over(self) -> bool:
        """Whether it is being closed."""
        return self._over.is_set()

    def _look_in(self) -> None:
        while not self._over.wait(_LOOK_IN):
            if self._lock.acquire(blocking=False):
                try:
                    self.catch_up()
                except Exception as error:
                    self.break_off(RunError(f"the line to the servers broke: {error!r}"))
                    return
                finally:
                    self._lock.release()

    def stop(self) -> None:
        """Look in no more."""
        self._over.set()
        self._thread.join(timeout=5.0)

    def close(self) -> None:
        """Close the endpoint."""
        self._endpoint.close()

"""Runs a protocol's machine on an endpoint and a real clock."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.protocols.machine import (
    NOTHING,
    Done,
    Effect,
    Event,
    Machine,
    Payload,
    Received,
    Send,
    Start,
    Timer,
)
from offbeat.runtime.messages.endpoint import Endpoint

After = Callable[[Event, Sequence[Effect]], None]
"""Told of each event, and of what the machine wants done about it, before that is done."""
LONGEST_SLEEP = 0.5
"""Seconds after which `until` is asked again even if nothing has happened."""


class Inbox:
    """Where other threads put events for a machine that is being driven."""

    def __init__(self, endpoint: Endpoint[Any]) -> None:
        self._endpoint = endpoint
        self._events: deque[Event] = deque()

    def put(self, event: Event) -> None:
        """Hand over an event, from any thread; the machine is told at once."""
        self._events.append(event)
        self._endpoint.wake()

    def take(self) -> Event | None:
        """The oldest event that was not taken yet."""
        return self._events.popleft() if self._events else None


class Timers:
    """Times that a machine has asked for, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._valid: dict[Any, int] = {}
        self._count = 0

    def set(self, due: float, token: Any) -> None:
        """Ask for a time; one asked for with the same token before is void."""
        self._count += 1
        self._valid[token] = self._count
        heapq.heappush(self._heap, (due, self._count, token))

    def due(self) -> float | None:
        """The earliest time asked for."""
        while self._heap and self._valid.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> Timer | None:
        """A time that has come."""
        due = self.due()
        if due is None or due > now:
            return None
        token = heapq.heappop(self._heap)[2]
        del self._valid[token]
        return Timer(token)


def drive(
    machine: Machine,
    endpoint: Endpoint[Any],
    work: Callable[[Any, Any], Any],
    until: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    inbox: Inbox | None = None,
    after: After | None = None,
) -> None:
    """Tell a machine what happens and do what it says, until `until()`, which is asked between events.

    Effects are done in order. `work(item, token)` does the work of a `Start`, here and now; what it returns comes back
    as `Done(token, result)` if there is a token, after the other effects of the same event. While it works, nothing
    else happens: heartbeats must bear the longest piece of work.
    """
    driver = Driver(machine, endpoint, work, clock, inbox, after)
    driver.begin()
    while not until():
        driver.turn(LONGEST_SLEEP)


class Driver:
    """A machine, an endpoint and a clock, for those who want to drive a little at a time."""

    def __init__(
        self,
        machine: Machine,
        endpoint: Endpoint[Any],
        work: Callable[[Any, Any], Any],
        clock: Callable[[], float] = time.monotonic,
        inbox: Inbox | None = None,
        after: After | None = None,
    ) -> None:
        self._after = after
        self._machine = machine
        self._endpoint = endpoint
        self._work = work
        self._clock = clock
        self._inbox = inbox or Inbox(endpoint)
        self._timers = Timers()
        self._done: deque[Done] = deque()

    def begin(self) -> None:
        """Let the machine begin."""
        self.perform(self._machine.begin(self._clock()))

    def turn(self, longest: float) -> bool:
        """Tell the machine of one thing that has happened; False if nothing did in so many seconds."""
        event: Event | None = self._done.popleft() if self._done else self._inbox.take()
        if event is None:  # Other threads' events come first, then timers, then messages.
            event = self._timers.take(self._clock())
        if event is None:
            due = self._timers.due()
            rest = LONGEST_SLEEP if due is None else min(LONGEST_SLEEP, max(0.0, due - self._clock()))
            incoming = self._endpoint.receive(min(longest, rest))
            if incoming is None:
                return False
            payload = incoming.payload
            numbers = NOTHING if payload is None else Payload(payload.nbytes, payload)
            event = Received(incoming.sender, incoming.message, numbers)
        while event is not None:
            effects = self._machine.on(event, self._clock())
            if self._after is not None:
                self._after(event, effects)
            self.perform(effects)
            event = self._done.popleft() if self._done else None
        return True

    def perform(self, effects: Sequence[Effect]) -> None:
        """Do what a machine says, in order."""
        for effect in effects:  # By kind, not by pattern: this is done for every message.
            if isinstance(effect, Send):
                self._endpoint.send(effect.to, effect.message, effect.payload.handle)
            elif isinstance(effect, Start):
                result = self._work(effect.work, effect.token)
                if effect.token is not None:
                    self._done.append(Done(effect.token, result))
            else:
                self._timers.set(self._clock() + effect.after, effect.token)

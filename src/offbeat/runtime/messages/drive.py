"""Runs a protocol's machine on an endpoint and a real clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.protocols.machine import NOTHING, Done, Effect, Event, Machine, Payload, Received, Send, Start, Timer
from offbeat.runtime.messages.endpoint import Endpoint

Work = Callable[[Any, Any], Any]  # Does the work of a `Start` effect, given the work and its token; returns the result.
After = Callable[[Event, Sequence[Effect]], None]  # Called with each event and its effects, before those.
LATER = object()
"""What `Work` returns when its `Done` comes through the inbox, as from another thread."""
LONGEST_SLEEP = 0.5  # Seconds after which `until` is asked again even if nothing has happened.


class Inbox:
    """Events from other threads for a machine that is being driven."""

    def __init__(self, endpoint: Endpoint[Any]) -> None:
        self._endpoint = endpoint
        self._events: deque[Event] = deque()

    def put(self, event: Event) -> None:
        """Hand over an event, from any thread; wakes the driver."""
        self._events.append(event)
        self._endpoint.wake()

    def take(self) -> Event | None:
        """The oldest event not taken yet."""
        return self._events.popleft() if self._events else None


class Timers:
    """A machine's pending timers, by token."""

    def __init__(self) -> None:
        self._pending: dict[Any, float] = {}

    def set(self, due: float, token: Any) -> None:
        """Set a timer; an earlier one with the same token is cancelled."""
        self._pending.pop(token, None)
        self._pending[token] = due

    def due(self) -> float | None:
        """When the next timer is due."""
        return min(self._pending.values(), default=None)

    def take(self, now: float) -> Timer | None:
        """A timer that is due."""
        due = self.due()
        if due is None or due > now:
            return None
        token = next(token for token, at in self._pending.items() if at == due)
        del self._pending[token]
        return Timer(token)


def drive(
    machine: Machine,
    endpoint: Endpoint[Any],
    work: Work,
    until: Callable[[], bool],
    inbox: Inbox | None = None,
    after: After | None = None,
) -> None:
    """Feed a machine its events and perform its effects until `until()`, which is asked between events.

    Effects are performed in order. `work(item, token)` does the work of a `Start` synchronously; its result comes back
    as `Done(token, result)` if there is a token, after the other effects of the same event. Nothing else happens
    meanwhile, so heartbeat timeouts must exceed the longest piece of work.
    """
    driver = Driver(machine, endpoint, work, inbox, after)
    driver.begin()
    while not until():
        driver.turn(LONGEST_SLEEP)


class Driver:
    """A machine, an endpoint and a clock, driven one event at a time."""

    def __init__(
        self,
        machine: Machine,
        endpoint: Endpoint[Any],
        work: Work,
        inbox: Inbox | None = None,
        after: After | None = None,
    ) -> None:
        self._machine, self._endpoint, self._work, self._after = machine, endpoint, work, after
        self._inbox = inbox or Inbox(endpoint)
        self._timers = Timers()
        self._done: deque[Done] = deque()

    def begin(self) -> None:
        """Start the machine."""
        self.perform(self._machine.begin(time.monotonic()))

    def turn(self, longest: float) -> bool:
        """Handle one event; False if none came within the given seconds."""
        event: Event | None = self._done.popleft() if self._done else self._inbox.take()
        if event is None:  # Other threads' events come first, then timers, then messages.
            event = self._timers.take(time.monotonic())
        if event is None:
            due = self._timers.due()
            rest = LONGEST_SLEEP if due is None else min(LONGEST_SLEEP, max(0.0, due - time.monotonic()))
            incoming = self._endpoint.receive(min(longest, rest))
            if incoming is None:
                return False
            payload = incoming.payload
            numbers = NOTHING if payload is None else Payload(payload.nbytes, payload)
            event = Received(incoming.sender, incoming.message, numbers)
        while event is not None:
            effects = self._machine.on(event, time.monotonic())
            if self._after is not None:
                self._after(event, effects)
            self.perform(effects)
            event = self._done.popleft() if self._done else None
        return True

    def perform(self, effects: Sequence[Effect]) -> None:
        """Perform a machine's effects in order."""
        for effect in effects:  # isinstance instead of match: this runs for every message.
            if isinstance(effect, Send):
                self._endpoint.send(effect.to, effect.message, effect.payload.handle)
            elif isinstance(effect, Start):
                result = self._work(effect.work, effect.token)
                if effect.token is not None and result is not LATER:
                    self._done.append(Done(effect.token, result))
            else:
                self._timers.set(time.monotonic() + effect.after, effect.token)

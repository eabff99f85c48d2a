"""Machines, driven on real endpoints and a real clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from frame_support import Push, Reply
from message_support import Endpoints, pair
from message_support import endpoints as endpoints
from message_support import nothing_is_left as nothing_is_left

from conftest import DEADLINE
from offbeat.protocols.machine import Done, Effect, Ended, Event, Payload, Received, Send, SetTimer, Start, Timer
from offbeat.runtime.messages import Inbox, drive
from offbeat.runtime.messages.drive import Timers

pytestmark = pytest.mark.usefixtures("nothing_is_left")


class Scripted:
    """A machine that answers every event by a script, and remembers them."""

    def __init__(self, name: str, begin: Sequence[Effect], script: Callable[[Event], Sequence[Effect]]) -> None:
        self.name = name
        self._begin = begin
        self._script = script
        self.seen: list[Event] = []

    def begin(self, now: float) -> Sequence[Effect]:
        return self._begin

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        self.seen.append(event)
        return self._script(event)


def quiet(event: Event) -> Sequence[Effect]:
    return []


def no_work(item: Any, token: Any) -> None:
    raise AssertionError((item, token))


def test_effects_are_done_in_order_and_work_is_answered(endpoints: Endpoints) -> None:
    log: list[Any] = []

    def work(item: Any, token: Any) -> Any:
        log.append((item, token))
        return item * 2

    begin = [Start(1, "a"), Start(2), Start(3, "b")]
    machine = Scripted("m", begin, lambda event: [Start(4, "c")] if event == Done("a", 2) else [])
    drive(machine, endpoints("m"), work, until=lambda: len(machine.seen) == 3)
    assert log == [(1, "a"), (2, None), (3, "b"), (4, "c")]
    assert machine.seen == [Done("a", 2), Done("b", 6), Done("c", 8)]


def test_timers_come_in_order_and_the_same_token_replaces(endpoints: Endpoints) -> None:
    begin = [SetTimer(0.001, "x"), SetTimer(0.04, "late"), SetTimer(0.02, "soon"), SetTimer(0.06, "x")]
    machine = Scripted("m", begin, quiet)
    drive(machine, endpoints("m"), no_work, until=lambda: len(machine.seen) == 3)
    assert machine.seen == [Timer("soon"), Timer("late"), Timer("x")]


def test_timers_keep_no_rubbish() -> None:
    timers = Timers()
    for number in range(100):
        timers.set(float(number), "x")
        timers.set(1000.0 - number, number)
    assert timers.take(98.9) is None
    assert timers.take(99.0) == Timer("x")
    assert timers.due() == 901.0
    assert [timers.take(2000.0) for _ in range(101)] == [*(Timer(number) for number in range(99, -1, -1)), None]


def test_two_machines_talk_with_payloads(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    numbers = np.arange(1000.0)

    def answer(event: Event) -> Sequence[Effect]:
        assert isinstance(event, Received)
        return [Send(event.sender, Reply(event.message.number), event.payload)]  # pyright: ignore[reportAttributeAccessIssue]

    serving = Scripted("server 0.0", [], answer)
    asking = Scripted(
        "worker 1",
        [Send("server 0.0", Push("worker 1", 1), Payload(8000, numbers)), Send("server 0.0", Push("worker 1", 2))],
        quiet,
    )
    stop = threading.Event()
    thread = threading.Thread(target=drive, args=(serving, server, no_work, stop.is_set))
    thread.start()
    drive(asking, worker, no_work, until=lambda: len(asking.seen) == 2)
    stop.set()
    server.wake()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    first, second = asking.seen
    assert isinstance(first, Received)
    assert (first.sender, first.message, first.payload.nbytes) == ("server 0.0", Reply(1), 8000)
    np.testing.assert_array_equal(first.payload.handle.view(np.float64), numbers)
    assert second == Received("server 0.0", Reply(2))


def test_another_thread_hands_over_events(endpoints: Endpoints) -> None:
    endpoint = endpoints("m")
    inbox = Inbox(endpoint)
    machine = Scripted("m", [], quiet)
    thread = threading.Timer(0.05, inbox.put, (Ended("worker 1"),))
    thread.start()
    drive(machine, endpoint, no_work, until=lambda: bool(machine.seen), inbox=inbox)
    thread.join()
    assert machine.seen == [Ended("worker 1")]

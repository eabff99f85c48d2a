"""A process that forwards the events of its machine to the run's monitor."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.protocols.causality.forwarder import HOME, Forwarder, LinkMessage
from offbeat.runtime.events.machine_events import MachineEvents
from offbeat.runtime.events.mirror import boot
from offbeat.runtime.launch import Control
from offbeat.runtime.messages import Codec, Driver, Endpoint, Keys

FLUSH: Final = 0.9  # Seconds after the end of all others in which the last events are sent.
PAYLOAD_LIMIT: Final = 1 << 20  # Bytes of the largest batch that is accepted.


def link_codec() -> Codec[Any]:
    """The wire format between machines and the monitor."""
    return Codec(LinkMessage, PAYLOAD_LIMIT)


def forward(config: Mapping[str, Any], control: Control) -> None:  # noqa: ARG001
    """The entry function of a forwarder: ends when it is interrupted, and has sent what there was."""
    interrupted: list[float] = []

    def interrupt(_number: int, _frame: object) -> None:
        interrupted.append(time.monotonic())

    signal.signal(signal.SIGINT, interrupt)
    public, secret = config["pair"]
    machine = Forwarder(config["name"], secrets.randbits(48), boot())
    with Endpoint(config["name"], link_codec(), keys=Keys(public, secret)) as endpoint:
        endpoint.connect(HOME, config["address"])
        driver = Driver(machine, endpoint, MachineEvents(Path(config["folder"])).do)
        driver.begin()
        while not interrupted:
            driver.turn(0.1)
        # What was recorded before the interruption is read within two looks, and then acknowledged.
        soonest = interrupted[0] + 0.25
        while time.monotonic() < soonest or (machine.waiting and time.monotonic() < interrupted[0] + FLUSH):
            driver.turn(0.05)

"""A round of secure aggregation played message by message, with a hand in between that may change what is sent."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offbeat.protocols.federated.secure.messages import SecureAnswer, SecureRequest
from offbeat.protocols.federated.secure.server import SecureFailure, SecureSum
from offbeat.protocols.machine import Done, Effect, Machine, Name, Received, Send, SetTimer, Start, Timer
from offbeat.simulate.secure_rounds import SecureWorld, fault_in

Hand = Callable[[Name, Send], Iterator[Send] | list[Send]]
ANSWERS: Any = msgspec.msgpack.Decoder(SecureAnswer)
REQUESTS: Any = msgspec.msgpack.Decoder(SecureRequest)


def unchanged(sender: Name, send: Send) -> list[Send]:
    return [send]


@dataclass
class Table:
    """Delivers messages in order, encoded and decoded on the way; when all are silent, the earliest timer rings."""

    world: SecureWorld
    hand: Hand = unchanged
    bytes_up: Counter[Name] = field(default_factory=Counter)
    bytes_down: Counter[Name] = field(default_factory=Counter)
    sent: list[tuple[Name, Send]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machines: dict[Name, Machine] = {machine.name: machine for machine in self.world.machines}
        self._queue: deque[tuple[Name, Send]] = deque()
        self._timers: dict[tuple[Name, Any], float] = {}
        self.now = 0.0

    def play(self) -> SecureSum | SecureFailure:
        """To the end: the outcome, after what must never be was looked for."""
        for name, machine in list(self.machines.items()):
            self.carry_out(name, machine.begin(self.now))
        while self.world.server.outcome is None or self._queue:
            self.step()
        assert fault_in(self.world.machines) is None
        return self.world.server.outcome

    def step(self) -> None:
        if self._queue:
            sender, send = self._queue.popleft()
            self.deliver(sender, send)
            return
        (name, token), at = min(self._timers.items(), key=lambda timer: timer[1])
        del self._timers[name, token]
        self.now = max(self.now, at)
        self.carry_out(name, self.machines[name].on(Timer(token), self.now))

    def deliver(self, sender: Name, send: Send) -> None:
        if send.to not in self.machines:
            return
        decoder = ANSWERS if send.to == self.world.server.name else REQUESTS
        message = decoder.decode(msgspec.msgpack.encode(send.message))
        event = Received(sender, message, send.payload)
        self.carry_out(send.to, self.machines[send.to].on(event, self.now))

    def carry_out(self, name: Name, effects: Any) -> None:
        for effect in effects:
            self._carry_out(name, effect)

    def _carry_out(self, name: Name, effect: Effect) -> None:
        match effect:
            case Send():
                for send in self.hand(name, effect):
                    nbytes = len(msgspec.msgpack.encode(send.message)) + send.payload.nbytes
                    self.bytes_up[name] += nbytes
                    self.bytes_down[send.to] += nbytes
                    self.sent.append((name, send))
                    self._queue.append((name, send))
            case SetTimer(after, token):
                self._timers[name, token] = self.now + after
            case Start(work, token):
                self.carry_out(name, self.machines[name].on(Done(token, work()), self.now))

"""A worker of Sandblaster as a machine: it reads parameters from shards, computes portions, and sends gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Done, Effect, Effects, Ended, Event, Name, Payload, Received, Timer
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster.minimizer import RETRY


class Compute(Struct, frozen=True):
    """Work: the loss and gradient of a portion; the result is `Computed`."""

    evaluation: int
    portion: int


class Computed(Struct, frozen=True):
    """A portion's share of the loss, and its share of the gradient as a payload for each shard."""

    loss: float
    parts: Sequence[Payload]


class TakePart(Struct, frozen=True):
    """Work: a shard's part of the parameters is here."""

    shard: int
    part: Payload


class Ready(Struct, frozen=True):
    """Work: what was asked for is done: parameters are loaded or read, or the iteration has ended."""

    end: msg.IterationEnd | None = None


class PortionWorker:
    """One worker. Of its requests one is open at a time; it is repeated until all that it went to have answered."""

    def __init__(self, name: Name, shards: int) -> None:
        self.name = name
        self._shards = [msg.shard_name(shard) for shard in range(shards)]
        self._number = self._iteration = 0
        self._known = 0  # The evaluation whose parameters this worker has.
        self._open: dict[Name, tuple[Any, Payload]] = {}  # Messages that are not answered.
        self._assigned: msg.Assigned | None = None
        self._loss = 0.0
        self._dead: tuple[Name, ...] = ()
        self._out = Effects()

    def begin(self, now: float) -> Sequence[Effect]:
        """Nothing to do."""
        del now
        return ()

    def load(self, kind: str, parts: Sequence[Payload]) -> Sequence[Effect]:
        """Send parameters of this type to the shards; `Ready` follows."""
        self._out = Effects()
        loads = {shard: (msg.LoadVector, part) for shard, part in zip(self._shards, parts, strict=True)}
        self._assigned = None
        self._request(loads, kind=kind)
        return self._out.done

    def read(self) -> Sequence[Effect]:
        """Read the parameters that the last iteration ended with; `Ready` follows."""
        self._out, self._known, self._assigned = Effects(), 0, None
        self._request(dict.fromkeys(self._shards, (msg.Read, NOTHING)))
        return self._out.done

    def iterate(self) -> Sequence[Effect]:
        """Take part in the next iteration; `Ready` follows with its end."""
        self._out = Effects()
        self._iteration += 1
        self._ask()
        return self._out.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle a message, a timer, the end of a computation, or the death of another worker."""
        del now
        self._out = Effects()
        match event:
            case Received(sender, message, payload) if self._awaits(sender, message):
                self._answered(sender, message, payload)
            case Done("computed", Computed() as computed):
                self._push(computed)
            case Timer(("request", int(number))) if number == self._number:
                self._send()
            case Ended(name):
                self._dead = (*self._dead, name)
                if msg.MINIMIZER in self._open:
                    self._send()
            case _:
                pass
        return self._out.done

    def _awaits(self, sender: Name, message: Any) -> bool:
        return sender in self._open and message.number == self._number

    def _request(self, to: Mapping[Name, tuple[Any, Payload]], **fields: Any) -> None:
        self._number += 1
        self._open = {name: (kind(number=self._number, **fields), payload) for name, (kind, payload) in to.items()}
        self._send()

    def _send(self) -> None:
        for name, (message, payload) in self._open.items():
            asks = isinstance(message, msg.WorkRequest) and message.dead != self._dead
            self._out.send(name, _with_dead(message, self._dead) if asks else message, payload)
        if self._open:
            self._out.timer(RETRY, ("request", self._number))

    def _ask(self, finished: msg.FinishedPortion | None = None) -> None:
        self._assigned = None
        self._request(
            {msg.MINIMIZER: (msg.WorkRequest, NOTHING)}, iteration=self._iteration, finished=finished, dead=self._dead
        )

    def _answered(self, sender: Name, message: Any, payload: Payload) -> None:
        del self._open[sender]
        match message:
            case msg.Assigned():
                self._begin(message)
            case msg.IterationEnd():
                self._out.start(Ready(message))
            case msg.Values(_, True):
                self._ask()  # The evaluation is over: others were faster.
            case msg.Values():
                self._out.start(TakePart(self._shards.index(sender), payload))
                if not self._open:
                    self._have_parameters()
            case msg.Accepted() if not self._open:
                self._accepted()
            case _:
                pass

    def _begin(self, assigned: msg.Assigned) -> None:
        self._assigned = assigned
        if assigned.evaluation == self._known:
            self._compute(assigned)
            return
        self._known = 0
        self._request(dict.fromkeys(self._shards, (msg.Read, NOTHING)), evaluation=assigned.evaluation)

    def _have_parameters(self) -> None:
        if self._assigned is None:
            self._out.start(Ready())
            return
        self._known = self._assigned.evaluation
        self._compute(self._assigned)

    def _compute(self, assigned: msg.Assigned) -> None:
        self._out.start(Compute(assigned.evaluation, assigned.portion), "computed")

    def _push(self, computed: Computed) -> None:
        if (assigned := self._assigned) is None:
            return
        self._loss = computed.loss
        pushes = {shard: (msg.Gradient, part) for shard, part in zip(self._shards, computed.parts, strict=True)}
        self._request(pushes, evaluation=assigned.evaluation, portion=assigned.portion)

    def _accepted(self) -> None:
        if (assigned := self._assigned) is None:
            self._out.start(Ready())
        else:
            self._ask(msg.FinishedPortion(assigned.evaluation, assigned.portion, self._loss))


def _with_dead(ask: msg.WorkRequest, dead: tuple[Name, ...]) -> msg.WorkRequest:
    return msg.WorkRequest(ask.number, ask.iteration, ask.finished, dead)

"""A worker of Sandblaster as a machine: it reads parameters from shards, computes portions, and sends gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Done, Effect, Effects, Event, Name, Payload, Received, Timer
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster.minimizer import RETRY
from offbeat.protocols.servers.messages import COORDINATOR, ClusterView, Viewed, worker_name


class Compute(Struct, frozen=True):
    """Work: the loss and gradient of a portion; the result is `Computed`."""

    evaluation: int
    portion: int


class Computed(Struct, frozen=True):
    """A portion's share of the loss, and its share of the gradient as a payload for each shard."""

    loss: float
    parts: Sequence[Payload]


class TakePart(Struct, frozen=True):
    """Work: a shard's part of a register is here."""

    shard: int
    part: Payload


class TakeMemory(Struct, frozen=True):
    """Work: a shard's memory is here, and the names of its registers."""

    shard: int
    memory: Payload
    registers: tuple[str, ...]


class Ready(Struct, frozen=True):
    """Work: what was asked for is done: a register is loaded or read, or the iteration has ended."""

    end: msg.IterationEnd | None = None


class PortionWorker:
    """One worker. Of its requests one is open at a time; it is repeated until all that it went to have answered.

    It asks servers by their numbers, and whichever copy is the primary in the newest view that it knows.
    """

    def __init__(self, rank: int, view: ClusterView) -> None:
        self.name = worker_name(rank)
        self._view = view
        self._minimizer = len(view.primaries) - 1
        self._shards = range(self._minimizer)
        self._number = self._iteration = self._batch = 0
        self._known = 0  # The evaluation whose parameters this worker has.
        self._open: dict[int, tuple[Any, Payload]] = {}  # Messages that are not answered, by server.
        self._assigned: msg.Assigned | None = None
        self._loss = 0.0
        self._out = Effects()

    def begin(self, now: float) -> Sequence[Effect]:
        """Nothing to do."""
        del now
        return ()

    def load(self, kind: str, parts: Sequence[Payload], register: str = msg.PARAMETERS) -> Sequence[Effect]:
        """Send a register of this type to the shards, that of the parameters first; `Ready` follows."""
        return self._ask_shards(msg.LoadVector, parts, kind=kind, register=register, epoch=self._view.epoch)

    def go_on_from(self, iteration: int) -> None:
        """So many iterations are over: those of an earlier part of the run."""
        self._iteration = iteration

    def restore(self, memories: Sequence[Payload]) -> Sequence[Effect]:
        """Send the shards their memories, after all registers; `Ready` follows."""
        return self._ask_shards(msg.LoadMemory, memories, epoch=self._view.epoch)

    def read(self, register: str = msg.PARAMETERS) -> Sequence[Effect]:
        """Read a register as the last iteration has left it; `Ready` follows."""
        self._known = 0
        return self._ask_shards(msg.Read, register=register, after=self._batch)

    def inspect(self) -> Sequence[Effect]:
        """Read the shards' memories; `Ready` follows."""
        return self._ask_shards(msg.Recover)

    def iterate(self) -> Sequence[Effect]:
        """Take part in the next iteration; `Ready` follows with its end."""
        self._out = Effects()
        self._iteration += 1
        self._ask()
        return self._out.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle a message, a timer, the end of a computation, or a view in which shards have other primaries."""
        del now
        self._out = Effects()
        match event:
            case Received(sender, Viewed(view)) if sender == COORDINATOR:
                if view.epoch > self._view.epoch:
                    changed = view.primaries != self._view.primaries
                    self._view = view
                    if changed and self._open:
                        self._send()
            case Received(sender, message, payload) if (server := self._asked(sender, message)) is not None:
                self._answered(server, message, payload)
            case Done("computed", Computed() as computed):
                self._push(computed)
            case Timer(("request", int(number))) if number == self._number:
                self._send()
            case _:
                pass
        return self._out.done

    def _asked(self, sender: Name, message: Any) -> int | None:
        """The server whose answer this is, if it is awaited: one that is no longer the primary is not."""
        awaited = (server for server in self._open if self._view.primaries[server] == sender)
        server = next(awaited, None)
        return server if getattr(message, "number", None) == self._number else None

    def _ask_shards(self, request: type[Any], payloads: Sequence[Payload] = (), **fields: Any) -> Sequence[Effect]:
        self._out, self._assigned = Effects(), None
        brought = payloads or [NOTHING] * len(self._shards)
        self._request({shard: (request, part) for shard, part in zip(self._shards, brought, strict=True)}, **fields)
        return self._out.done

    def _request(self, to: Mapping[int, tuple[Any, Payload]], **fields: Any) -> None:
        self._number += 1
        self._open = {place: (kind(number=self._number, **fields), payload) for place, (kind, payload) in to.items()}
        self._send()

    def _send(self) -> None:
        for server, (message, payload) in self._open.items():
            self._out.send(self._view.primaries[server], message, payload)
        if self._open:
            self._out.timer(RETRY, ("request", self._number))

    def _ask(self, finished: msg.FinishedPortion | None = None) -> None:
        self._assigned = None
        asks = {self._minimizer: (msg.WorkRequest, NOTHING)}
        self._request(asks, iteration=self._iteration, finished=finished)

    def _answered(self, server: int, message: Any, payload: Payload) -> None:
        del self._open[server]
        match message:
            case msg.Assigned():
                self._begin(message)
            case msg.IterationEnd():
                self._batch = message.batch
                self._out.start(Ready(message))
            case msg.Values(_, True):
                self._ask()  # The evaluation is over: others were faster.
            case msg.Values():
                self._out.start(TakePart(server, payload))
                if not self._open:
                    self._have_parameters()
            case msg.Recovered():
                self._out.start(TakeMemory(server, payload, message.registers))
                if not self._open:
                    self._out.start(Ready())
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
        self._request(pushes, evaluation=assigned.evaluation, portion=assigned.portion, loss=computed.loss)

    def _accepted(self) -> None:
        if (assigned := self._assigned) is None:
            self._out.start(Ready())
        else:
            self._ask(msg.FinishedPortion(assigned.evaluation, assigned.portion, self._loss))

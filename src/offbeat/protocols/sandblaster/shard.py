"""A shard of Sandblaster as a machine: it carries out batches of commands, serves registers and adds up gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Done, Effect, Effects, Event, Name, Payload, Received
from offbeat.protocols.sandblaster import messages as msg


class CarryOut(Struct, frozen=True):
    """Work: carry out commands; the result is their numbers."""

    commands: tuple[msg.Command, ...]


class LoadParameters(Struct, frozen=True):
    """Work: start from these parameters."""

    kind: str
    parameters: Payload


class AddGradient(Struct, frozen=True):
    """Work: add the gradient of a portion to the sum."""

    portion: int
    gradient: Payload


class FetchRegister(Struct, frozen=True):
    """Work: the result is a register, as a payload."""

    register: str


class VectorShard:
    """One shard. Each batch is carried out once, and each portion's gradient is added once, whoever sends it again."""

    def __init__(self, shard: int) -> None:
        self.name = msg.shard_name(shard)
        self._batch, self._reply = 0, msg.Scalars(0, ())
        self._evaluation = 0  # The evaluation whose gradients are being added; 0: none.
        self._portions: set[int] = set()
        self._loaded: set[tuple[Name, int]] = set()

    def begin(self, now: float) -> Sequence[Effect]:
        """Nothing to do."""
        del now
        return ()

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle a message, or the end of work."""
        del now
        out = Effects()
        match event:
            case Received(sender, msg.CommandBatch() as batch):
                self._carry_out(sender, batch, out)
            case Received(sender, msg.LoadVector(number, kind), payload):
                if (sender, number) not in self._loaded:
                    self._loaded.add((sender, number))
                    out.start(LoadParameters(kind, payload))
                out.send(sender, msg.Accepted(number))
            case Received(sender, msg.Read() as read):
                self._read(sender, read, out)
            case Received(sender, msg.Gradient() as gradient, payload):
                if gradient.evaluation == self._evaluation and gradient.portion not in self._portions:
                    self._portions.add(gradient.portion)
                    out.start(AddGradient(gradient.portion, payload))
                out.send(sender, msg.Accepted(gradient.number))
            case Done(("batch", str(sender), int(number)), result):
                self._reply = msg.Scalars(number, tuple(result))
                out.send(sender, self._reply)
            case Done(("read", str(sender), int(number)), Payload() as row):
                out.send(sender, msg.Values(number), row)
            case _:
                pass
        return out.done

    def _carry_out(self, sender: Name, batch: msg.CommandBatch, out: Effects) -> None:
        if batch.number == self._reply.number:
            out.send(sender, self._reply)
        if batch.number <= self._batch:
            return
        self._batch = batch.number
        for command in batch.commands:
            if isinstance(command, msg.Gather | msg.Gathered):
                self._evaluation = command.evaluation if isinstance(command, msg.Gather) else 0
                self._portions = set()
        token: Any = ("batch", sender, batch.number)
        out.start(CarryOut(batch.commands), token)

    def _read(self, sender: Name, read: msg.Read, out: Effects) -> None:
        if read.evaluation < 0:
            out.start(FetchRegister(msg.PARAMETERS), ("read", sender, read.number))
        elif read.evaluation == self._evaluation:
            out.start(FetchRegister(msg.POINT), ("read", sender, read.number))
        else:
            out.send(sender, msg.Values(read.number, stale=True), NOTHING)

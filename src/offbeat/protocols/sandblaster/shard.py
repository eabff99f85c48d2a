"""A shard of Sandblaster as what it does with the entries of its log: the same entries, the same shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, msgpack, structs

from offbeat.protocols.machine import NOTHING, Effects, Name, Payload
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.servers.messages import Fenced

_MEMORY = msgpack.Decoder(msg.ShardMemory)


class CarryOut(Struct, frozen=True):
    """Work: carry out commands; the result is their numbers."""

    commands: tuple[msg.Command, ...]


class LoadRegister(Struct, frozen=True):
    """Work: this is a register; that of the parameters is the first, and there are no others yet."""

    register: str
    kind: str
    numbers: Payload


class AddGradient(Struct, frozen=True):
    """Work: add the gradient of a portion to the sum."""

    portion: int
    gradient: Payload


class FetchRegister(Struct, frozen=True):
    """Work: the result is a register, as a payload."""

    register: str


class ListRegisters(Struct, frozen=True):
    """Work: the result is the names of all registers."""


def packed(memory: msg.ShardMemory) -> Payload:
    """A memory as a payload: with many portions it is too long for a header."""
    data = msgpack.encode(memory)
    return Payload(len(data), data)


def unpacked(payload: Payload) -> msg.ShardMemory:
    """A memory from a payload."""
    return _MEMORY.decode(payload.handle)


class CommandedShard:
    """One copy of a shard. Each batch is carried out once, and each portion's gradient is added once."""

    def __init__(self) -> None:
        self.memory = msg.ShardMemory()
        self._loaded: set[tuple[Name, int]] = set()
        self._loader = 0  # The epoch of the newest load.
        self._pending = 0  # The batch that is being carried out.

    @property
    def searched(self) -> int | None:
        """The iteration in whose line search gradients are being added, from 0; None between two searches."""
        memory = self.memory
        searching = memory.saved is not None and memory.evaluation > memory.saved.evaluation and memory.portions
        return memory.saved.iteration if memory.saved is not None and searching else None

    # What changes the shard: entries of the log.

    def apply(self, entry: msg.LogEntry, payload: Payload, out: Effects) -> None:
        """Carry out an entry; copies do the same."""
        match entry.request:
            case msg.CommandBatch() as batch:
                self._carry_out(entry.sender, batch, out)
            case msg.Recover(_, term):
                self._change(term=max(term, self.memory.term))
            case msg.LoadVector() | msg.LoadMemory() as load if (entry.sender, load.number) not in self._loaded:
                self._loaded.add((entry.sender, load.number))
                if not self.memory.batch and load.epoch >= self._loader:
                    self._load(load, payload, out)
            case msg.Gradient() as gradient if self._wants(gradient):
                self.memory.portions[gradient.portion] = gradient.loss
                out.start(AddGradient(gradient.portion, payload))
            case _:
                pass

    def _load(self, load: msg.LoadVector | msg.LoadMemory, payload: Payload, out: Effects) -> None:
        """Take what the shard begins with; void once there was a command, or a successor of who loads it."""
        self._loader = load.epoch
        if isinstance(load, msg.LoadMemory):
            self.memory = structs.replace(unpacked(payload), term=self.memory.term)
        else:
            out.start(LoadRegister(load.register, load.kind, payload))

    def carried_out(self, number: int, values: Sequence[float]) -> None:
        """A batch has given its numbers."""
        self._change(batch=number, values=tuple(values))

    def _carry_out(self, sender: Name, batch: msg.CommandBatch, out: Effects) -> None:
        if batch.term < self.memory.term or batch.number <= max(self.memory.batch, self._pending):
            return
        self._pending = batch.number
        answers = () if batch.saved is not None else self.memory.answers
        self._change(
            term=batch.term,
            saved=batch.saved or self.memory.saved,
            answers=answers if batch.answer is None else (*answers, batch.answer),
        )
        for command in batch.commands:
            if isinstance(command, msg.Gather):
                self._change(evaluation=command.evaluation, gathering=True, portions={})
            elif isinstance(command, msg.Gathered):
                self._change(gathering=False)
        token: Any = ("batch", sender, batch.number)
        out.start(CarryOut(batch.commands), token)

    def _wants(self, gradient: msg.Gradient) -> bool:
        memory = self.memory
        return memory.gathering and gradient.evaluation == memory.evaluation and gradient.portion not in memory.portions

    def _change(self, **fields: Any) -> None:
        self.memory = structs.replace(self.memory, **fields)

    # Answers of the primary.

    def answer(self, sender: Name, request: Any, out: Effects) -> bool:
        """Answer a request that changes nothing, or nothing any more; False if it is for the log."""
        memory = self.memory
        match request:
            case msg.CommandBatch(number, term=term):
                if term < memory.term:
                    out.send(sender, Fenced(memory.term))
                elif number == memory.batch:
                    out.send(sender, msg.Scalars(number, memory.values))
                return term < memory.term or number <= memory.batch
            case msg.Recover(number, term):
                if 0 <= term < memory.term:
                    out.send(sender, Fenced(memory.term))
                elif term in (-1, memory.term):
                    out.start(ListRegisters(), ("memory", sender, number))
                return term <= memory.term
            case msg.LoadVector(number) | msg.LoadMemory(number):
                if (sender, number) not in self._loaded:
                    return False
                out.send(sender, msg.Accepted(number))
            case msg.Gradient():
                if self._wants(request):
                    return False
                if request.evaluation <= memory.evaluation:
                    out.send(sender, msg.Accepted(request.number))
            case msg.Read():
                self._read(sender, request, out)
            case _:
                pass
        return True

    def _read(self, sender: Name, read: msg.Read, out: Effects) -> None:
        """Send a register. Without an answer, the reader asks whoever is the primary then."""
        memory = self.memory
        if read.evaluation < 0:
            if memory.batch >= read.after:
                out.start(FetchRegister(read.register), ("read", sender, read.number))
        elif read.evaluation == memory.evaluation and memory.gathering:
            out.start(FetchRegister(msg.POINT), ("read", sender, read.number))
        elif read.evaluation <= memory.evaluation:
            out.send(sender, msg.Values(read.number, stale=True), NOTHING)

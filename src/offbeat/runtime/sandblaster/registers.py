"""The registers of a shard: named vectors, and the programs that work on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import NonFiniteError, RunError
from offbeat.protocols.machine import Payload
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster import shard
from offbeat.protocols.sandblaster.commands import MOST_REGISTERS, KnownPrograms
from offbeat.protocols.sandblaster.pairwise import PairwiseSum
from offbeat.runtime.programs.compile import CompiledProgram, compiled

Row = NDArray[Any]


class Registers:
    """One shard's part of every vector. Sums of products are made in float64, whatever the vectors are of."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}
        self._sum: PairwiseSum[Row] = PairwiseSum(0, _added)
        self._programs = KnownPrograms()
        self._compiled: dict[object, CompiledProgram] = {}  # By program, and which of its registers are the same.

    def do(self, work: object, token: object = None) -> object:
        """Do the work of a shard's machine."""
        del token
        match work:
            case shard.CarryOut(commands):
                return self.carry_out(commands)
            case shard.AddGradient(portion, gradient):
                self.gather(portion, np.frombuffer(gradient.handle, dtype=self.row(msg.PARAMETERS).dtype))
            case shard.LoadRegister(register, kind, numbers):
                self.load(np.frombuffer(numbers.handle, dtype=kind), register)
            case shard.ListRegisters():
                return tuple(self._rows)
            case shard.FetchRegister(register):
                row = self.row(register)
                return Payload(row.nbytes, row)
            case _:
                pass
        return None

    def load(self, numbers: Row, register: str = msg.PARAMETERS) -> None:
        """Fill a register; with that of the parameters everything begins anew."""
        kept = {} if register == msg.PARAMETERS else self._rows
        self._rows = kept | {register: _aligned(numbers)}

    def row(self, name: str) -> Row:
        """A register."""
        return self._vector(name).numpy()

    def gather(self, portion: int, gradient: Row) -> None:
        """Add a portion's gradient to the sum of its evaluation, unless it is there already."""
        self._sum.put(portion, gradient.copy())

    def carry_out(self, commands: Sequence[msg.Command]) -> tuple[float, ...]:
        """Carry out commands in order; returns their numbers."""
        numbers: list[float] = []
        for command in commands:
            match command:
                case msg.DefineProgram(vectors, text):
                    self._programs.define(vectors, text)
                case msg.RunProgram():
                    numbers += self._run(command)
                case msg.Gather(_, portions):
                    self._sum = PairwiseSum(portions, _added)
                case msg.Gathered(into):
                    self._rows[into] = _aligned(self._sum.total())
                    self._sum = PairwiseSum(0, _added)
        return tuple(numbers)

    def _run(self, call: msg.RunProgram) -> tuple[float, ...]:
        program, scalars = self._programs[call.program], self._programs.scalars_of(call)
        distinct = list(dict.fromkeys(call.registers))
        same = tuple(map(distinct.index, call.registers))
        key = call.program, same, tuple(distinct.index(name) if name in distinct else name for name in call.into)
        if key not in self._compiled:
            self._compiled[key] = compiled(program.plan(call.registers, call.into))
        vectors = [self._vector(name) for name in distinct]
        numbers = self._compiled[key].run(vectors, scalars, [self._room(name) for name in call.into], check=False)
        if not np.isfinite(numbers).all():
            raise NonFiniteError(
                f"A command's results over a shard are {', '.join(map(str, numbers))}: a gradient or parameters are "
                f"not finite. The command is {program.text} of {', '.join(call.registers)}."
            )
        return numbers

    def _vector(self, name: str) -> Tensor:
        if name not in self._rows:
            raise RunError(f"this shard has no register {name!r}; it has {', '.join(sorted(self._rows)) or 'none'}")
        return self._rows[name]

    def _room(self, name: str) -> Tensor:
        if name not in self._rows:
            if len(self._rows) >= MOST_REGISTERS:
                raise RunError(
                    f"this shard has {MOST_REGISTERS:,} registers, the limit, and {name!r} would be one more"
                )
            self._rows[name] = torch.empty_like(self._vector(msg.PARAMETERS))
        return self._rows[name]


def _aligned(row: Row) -> Tensor:
    """A copy in torch's own memory, whose addresses are multiples of 64: sums then have the same bits in every run."""
    return torch.tensor(row)


def _added(left: Row, right: Row) -> Row:
    left += right
    return left

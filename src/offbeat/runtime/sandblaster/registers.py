"""The registers of a shard: named vectors, and the commands that work on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import RunError
from offbeat.protocols.machine import Payload
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster import shard
from offbeat.protocols.sandblaster.pairwise import PairwiseSum

Row = NDArray[Any]


class Registers:
    """One shard's part of every vector. DotProduct products are summed in float64, whatever the vectors are of."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self._sum: PairwiseSum[Row] = PairwiseSum(0, _added)

    def do(self, work: object, token: object = None) -> object:
        """Do the work of a shard's machine."""
        del token
        match work:
            case shard.CarryOut(commands):
                return self.carry_out(commands)
            case shard.AddGradient(portion, gradient):
                self.gather(portion, np.frombuffer(gradient.handle, dtype=self.row(msg.PARAMETERS).dtype))
            case shard.LoadParameters(kind, parameters):
                self.load(np.frombuffer(parameters.handle, dtype=kind))
            case shard.FetchRegister(register):
                row = self.row(register)
                return Payload(row.nbytes, row)
            case _:
                pass
        return None

    def load(self, parameters: Row) -> None:
        """Start from these parameters."""
        self._rows = {msg.PARAMETERS: parameters.copy()}

    def row(self, name: str) -> Row:
        """A register."""
        if name not in self._rows:
            raise RunError(f"this shard has no register {name!r}; it has {', '.join(sorted(self._rows)) or 'none'}")
        return self._rows[name]

    def gather(self, portion: int, gradient: Row) -> None:
        """Add a portion's gradient to the sum of its evaluation, unless it is there already."""
        self._sum.put(portion, gradient.copy())

    def carry_out(self, commands: Sequence[msg.Command]) -> tuple[float, ...]:
        """Carry out commands in order; returns their numbers."""
        numbers = (self._carry_out(command) for command in commands)
        return tuple(number for number in numbers if number is not None)

    def _carry_out(self, command: msg.Command) -> float | None:
        match command:
            case msg.DotProduct(left, right):
                return float(np.dot(*(self.row(name).astype(np.float64, copy=False) for name in (left, right))))
            case msg.AbsoluteSum(name):
                return float(np.abs(self.row(name)).sum(dtype=np.float64))
            case msg.Largest(name):
                return float(np.abs(self.row(name)).max(initial=0.0))
            case msg.Copy(source, into):
                np.copyto(self._room(into), self.row(source))
            case msg.Scale(name, factor):
                self.row(name)[:] *= factor
            case msg.Axpy(name, factor, addend):
                self.row(name)[:] += factor * self.row(addend)
            case msg.Multiply(name, by):
                self.row(name)[:] *= self.row(by)
            case msg.Gather(_, portions):
                self._sum = PairwiseSum(portions, _added)
            case msg.Gathered(into):
                self._rows[into] = self._sum.total()
                self._sum = PairwiseSum(0, _added)
        return None

    def _room(self, name: str) -> Row:
        if name not in self._rows:
            self._rows[name] = np.empty_like(self.row(msg.PARAMETERS))
        return self._rows[name]


def _added(left: Row, right: Row) -> Row:
    left += right
    return left

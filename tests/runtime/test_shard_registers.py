"""The registers of a shard: commands in order, numbers in float64, and gradients added once."""

from __future__ import annotations

import numpy as np
import pytest

from offbeat.errors import RunError
from offbeat.protocols.sandblaster import messages as msg
from offbeat.runtime.sandblaster.registers import Registers


def test_commands_are_carried_out_in_order_and_give_their_numbers() -> None:
    registers = Registers()
    registers.load(np.array([1.0, -2.0, 3.0], dtype=np.float32))
    numbers = registers.carry_out(
        [
            msg.Copy("x", "d"),
            msg.Scale("d", 2.0),
            msg.DotProduct("x", "d"),
            msg.Axpy("d", -1.0, "x"),
            msg.Multiply("d", "x"),
            msg.AbsoluteSum("d"),
            msg.Largest("x"),
        ]
    )
    assert numbers == (28.0, 14.0, 3.0)
    assert registers.row("d").tolist() == [1.0, 4.0, 9.0]
    assert registers.row("d").dtype == np.float32
    assert registers.row("x").tolist() == [1.0, -2.0, 3.0]


def test_each_portion_is_added_once() -> None:
    registers = Registers()
    registers.load(np.zeros(2))
    registers.carry_out([msg.Gather(1, 2)])
    for portion in (1, 0, 1):
        registers.gather(portion, np.array([1.0, portion]))
    registers.carry_out([msg.Gathered("g0")])
    assert registers.row("g0").tolist() == [2.0, 1.0]


def test_a_register_that_does_not_exist_is_named() -> None:
    registers = Registers()
    registers.load(np.zeros(2))
    with pytest.raises(RunError, match="no register 'y3'; it has x"):
        registers.carry_out([msg.DotProduct("x", "y3")])

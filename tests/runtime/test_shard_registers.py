"""The registers of a shard: programs in order, numbers in float64, and gradients added once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from offbeat.errors import NonFiniteError, ProgramError, RunError
from offbeat.protocols.sandblaster import messages as msg
from offbeat.protocols.sandblaster.commands import ProgramCall, command, encoded
from offbeat.runtime.sandblaster.registers import Registers

BACK = command(3, r"\d y s weight. let d = d - weight * y in (d, dot s d)")


def loaded(numbers: Sequence[float], kind: type = np.float32) -> Registers:
    registers = Registers()
    registers.load(np.array(numbers, dtype=kind))
    return registers


def run(registers: Registers, *calls: ProgramCall) -> tuple[float, ...]:
    return registers.carry_out(encoded(calls, set()))


def test_programs_run_in_order_and_return_their_numbers() -> None:
    registers = loaded([1.0, -2.0, 3.0])
    numbers = run(
        registers,
        ProgramCall(command(1, r"\x. (2 * x, dot x x)"), ("x",), into=("d",)),
        ProgramCall(
            command(2, r"\d x a. let d = x * (d - a * x) in (d, sum (abs d), largest x)"), ("d", "x"), (1.0,), ("d",)
        ),
        ProgramCall(command(1, r"\x. largest (abs x)"), ("x",)),
    )
    assert numbers == (14.0, 14.0, 3.0, 3.0)
    assert registers.row("d").tolist() == [1.0, 4.0, 9.0]
    assert registers.row("d").dtype == np.float32
    assert registers.row("x").tolist() == [1.0, -2.0, 3.0]


@pytest.mark.parametrize(
    ("text", "names", "into", "expected"),
    [
        (r"\a b. (b, a)", "xy", "xy", {"x": "y", "y": "x"}),  # Swapped: neither is overwritten too early.
        (r"\a b. (a + b, a - b)", "xy", "xy", {"x": "x + y", "y": "x - y"}),
        (r"\a b. (a + b, a - b)", "xx", "zx", {"z": "2 * x", "x": "0 * x"}),  # One register as two arguments.
        (r"\a b c. (c + a, b)", "xyx", "yz", {"y": "2 * x", "z": "y"}),
        (r"\a. (a, a, 2 * a)", "x", "zyx", {"z": "x", "y": "x", "x": "2 * x"}),
    ],
)
def test_registers_are_replaced_in_place_only_when_nothing_reads_them_any_more(
    text: str, names: str, into: str, expected: dict[str, str]
) -> None:
    registers, length = loaded(np.arange(200_000.0)), 200_000  # More than a chunk.
    run(registers, ProgramCall(command(1, r"\x. 1 - x * x"), ("x",), into=("y",)))
    before = {name: registers.row(name).copy() for name in "xy"}
    run(registers, ProgramCall(command(len(names), text), tuple(names), into=tuple(into)))
    for name, formula in expected.items():
        np.testing.assert_array_equal(registers.row(name), eval(formula, {}, before))  # noqa: S307 (our own text)
    assert len(registers.row("x")) == length


def test_sums_of_float32_are_made_in_float64() -> None:
    numbers = np.full(300_000, 1.1, dtype=np.float32)
    (product,) = run(loaded(numbers), ProgramCall(command(1, r"\x. dot x x"), ("x",)))
    assert product == pytest.approx(float(np.float32(1.1)) ** 2 * 300_000, rel=1e-11)


def test_a_program_is_sent_once_and_then_named_by_its_hash() -> None:
    sent: set[str] = set()
    calls = [ProgramCall(BACK, ("d", "y", "s"), (0.5,), ("d",))] * 2
    kinds = [type(each) for batch in (calls, calls) for each in encoded(batch, sent)]
    assert kinds == [msg.DefineProgram, *[msg.RunProgram] * 4]
    assert BACK.hash != command(2, r"\d y s weight. d + s * weight * y").hash
    unknown = encoded(calls, sent)
    with pytest.raises(ProgramError, match="was never sent the program"):
        loaded([0.0]).carry_out(unknown)


@pytest.mark.parametrize(
    ("vectors", "text", "words"),
    [
        (1, r"\x. norm x", "nothing can be computed from it here"),
        (2, r"\x y. x - dot x y * y", "'dot' is known for each shard's part only"),
        (1, r"\x. x - mean x", "each shard's part only"),
        (1, r"\x a. (x, a)", "a scalar that is not dot, sum, largest"),
        (1, r"\x. x - lr", "'lr' is not an argument"),
        (1, r"\x a. sum a", "A vector is expected here, not a scalar"),
        (2, r"\x. x", "a function of 2 registers"),
        (0, r"\x. x", "a function of 1 registers"),
        (2, r"\x x. x", "all of different names"),
        (1, r"\x. (x, \y. y)", "returns vectors and scalars"),
        (1, r"\x. x +", "line 1, column"),
        (1, r"\x. x * 1e999", "larger than any number"),
        (1, r"\x. " + " + ".join(f"exp ({n} * x)" for n in range(1, 150)), "at most 200"),
    ],
)
def test_a_command_that_shards_could_not_carry_out_is_refused(vectors: int, text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        loaded([1.0]).carry_out([msg.DefineProgram(vectors, text)])


@pytest.mark.parametrize(
    ("registers", "scalars", "into", "words"),
    [
        (("x", "x"), (1.0,), ("d",), "takes 3 registers and has 1 vectors"),
        (("x", "x", "x"), (1.0,), (), "takes 3 registers and has 1 vectors"),
        (("x", "x", "x"), (), ("d",), "takes 1 scalars, not 0"),
        (("x", "x", "x"), (float("nan"),), ("d",), "scalar 'weight' is nan"),
        (("x", "y3", "x"), (1.0,), ("d",), "no register 'y3'; it has x"),
    ],
)
def test_a_call_that_does_not_fit_its_program_is_refused(
    registers: tuple[str, ...], scalars: tuple[float, ...], into: tuple[str, ...], words: str
) -> None:
    with pytest.raises((ProgramError, RunError, NonFiniteError), match=words):
        run(loaded([1.0]), ProgramCall(BACK, registers, scalars, into))


def test_a_gradient_that_is_not_finite_is_named_by_the_command_that_meets_it() -> None:
    with pytest.raises(NonFiniteError, match=r"a gradient or parameters are not finite.*largest"):
        run(loaded([1.0, float("nan"), 2.0]), ProgramCall(command(1, r"\x. largest (abs x)"), ("x",)))


def test_each_portion_is_added_once() -> None:
    registers = loaded([0.0, 0.0], np.float64)
    registers.carry_out([msg.Gather(1, 2)])
    for portion in (1, 0, 1):
        registers.gather(portion, np.array([1.0, portion]))
    registers.carry_out([msg.Gathered("g0")])
    assert registers.row("g0").tolist() == [2.0, 1.0]

"""Bounds of what a program computes, by interval arithmetic: a proof that no result can be infinite or NaN.

Given between which numbers each vector lies, this follows a plan's last pass and says between which its results lie; or
that it cannot say, because something might overflow, divide by zero, or have no real value. Bounds are widened by the
rounding of the vectors' type at every instruction, so what is proved holds for every order in which torch computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from offbeat.protocols.programs.plan import ChunkPlace, Instruction, Plan

Interval = tuple[float, float]
_MARGIN: Final = 1024.0
"""How far from the largest and the smallest number bounds must stay."""


class _UnknownError(Exception):
    """Nothing can be said about a result."""


@dataclass(frozen=True, slots=True)
class NumberType:
    """What rounds numbers of a type."""

    largest: float
    """The largest finite number."""
    smallest: float
    """The smallest normal number above 0."""
    rounding: float
    """The distance from 1 to the next number."""


def bounds_of(
    plan: Plan, vectors: Sequence[Interval], scalars: Mapping[int, float], type_: NumberType
) -> dict[int, Interval] | None:
    """Bounds of the results by the vector they replace, all finite; None if that cannot be proved."""
    held = {ChunkPlace("input", number): interval for number, interval in enumerate(vectors)}
    try:
        for interval in vectors:
            _checked(interval, type_)
        for step in plan.passes[-1].instructions:
            if step.target is not None:
                values = [held[place] for place in step.vectors]
                held[step.target] = _result(step, values, [scalars[scalar] for scalar in step.scalars], type_)
    except (_UnknownError, OverflowError, ZeroDivisionError):
        return None
    return {output: held.get(ChunkPlace("output", output), vectors[output]) for output in plan.outputs}


def _checked(interval: Interval, type_: NumberType) -> Interval:
    """An interval, widened by rounding; refused if it reaches far."""
    low, high = interval
    most = type_.largest / _MARGIN
    if not (-most < low <= high < most):  # False for NaN as well.
        raise _UnknownError
    wide = 4 * type_.rounding
    return low - abs(low) * wide, high + abs(high) * wide


def _result(step: Instruction, vectors: list[Interval], scalars: list[float], type_: NumberType) -> Interval:
    """Bounds of an instruction's result; every product and quotient in it is finite, too."""

    def product(a: Interval, b: Interval, same: bool = False) -> Interval:
        if same:
            ends = a[0] * a[0], a[1] * a[1]
            return _checked((0.0 if a[0] <= 0 <= a[1] else min(ends), max(ends)), type_)
        ends = [x * y for x in a for y in b]
        return _checked((min(ends), max(ends)), type_)

    def multiple(a: Interval, b: Interval, factor: float, same: bool = False) -> Interval:
        # In whichever order torch multiplies the three.
        product(a, scalar(factor))
        product(b, scalar(factor))
        return product(product(a, b, same), scalar(factor))

    def total(a: Interval, b: Interval) -> Interval:
        return _checked((a[0] + b[0], a[1] + b[1]), type_)

    def inverse(a: Interval) -> Interval:
        least = type_.smallest * _MARGIN
        if a[0] < least and a[1] > -least:
            raise _UnknownError
        return _checked((1 / a[1], 1 / a[0]), type_)

    def scalar(number: float) -> Interval:
        return _checked((number, number), type_)

    places = step.vectors
    match step.operation, vectors, scalars:
        case "copy", [a], _:
            return a
        case "fill", _, [s]:
            return scalar(s)
        case "scale", [a], [s]:
            return product(a, scalar(s))
        case "shift", [a], [s]:
            return total(a, scalar(s))
        case "add", [a, b], _:
            return total(a, b)
        case "axpy", [a, b], [s]:
            return total(a, product(b, scalar(s)))
        case "mul", [a, b], _:
            return product(a, b, places[0] == places[1])
        case "div", [a, b], _:
            return product(a, inverse(b))
        case "addcmul", [a, b, c], [s]:
            return total(a, multiple(b, c, s, places[1] == places[2]))
        case "addcdiv", [a, b, c], [s]:
            return total(a, multiple(b, inverse(c), s))
        case "lerp", [a, b], [s] if 0 <= s <= 1:
            return _checked((min(a[0], b[0]), max(a[1], b[1])), type_)
        case "reciprocal", [a], _:
            return inverse(a)
        case _:
            return _other(step.operation, vectors, scalars, type_)


def _other(operation: str, vectors: list[Interval], scalars: list[float], type_: NumberType) -> Interval:
    intervals = [*vectors, *((s, s) for s in scalars)]
    low, high = intervals[0]
    match operation:
        case "sqrt" if low >= 0:
            return _checked((math.sqrt(low), math.sqrt(high)), type_)
        case "exp":
            return _checked((math.exp(low), math.exp(high)), type_)
        case "log" if low > type_.smallest * _MARGIN:
            return _checked((math.log(low), math.log(high)), type_)
        case "abs":
            return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))
        case "sign":
            return -1.0, 1.0
        case "<" | "<=" | ">" | ">=" | "==" | "!=":
            return 0.0, 1.0
        case "min":
            return min(low, intervals[1][0]), min(high, intervals[1][1])
        case "max":
            return max(low, intervals[1][0]), max(high, intervals[1][1])
        case "where":
            return min(intervals[1][0], intervals[2][0]), max(intervals[1][1], intervals[2][1])
        case "**" if low > type_.smallest * _MARGIN:
            ends = [base**exponent for base in (low, high) for exponent in intervals[1]]
            return _checked((min(ends), max(ends)), type_)
        case _:
            raise _UnknownError

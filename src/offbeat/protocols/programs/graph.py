"""Evaluation of a program over symbolic vectors: every function is applied away, and every value computed once.

What is left is a graph of vector and scalar operations. Values that are equal are one value. Factors that are scalars
are collected in front of vectors, so that `lr * g / d` is one division and one factor, however it is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from offbeat.errors import ProgramError
from offbeat.protocols.programs.operations import OPERATIONS, Operation
from offbeat.protocols.programs.program import Program
from offbeat.protocols.programs.recursion import Call, run
from offbeat.protocols.programs.term import (
    Abstraction,
    Application,
    BoundVariable,
    Let,
    Number,
    Primitive,
    Term,
    TupleTerm,
    Variable,
)

STEPS: Final = 20_000
"""Steps of an evaluation."""
VALUES: Final = 1_000
"""Values of a program, all of its operations among them."""
REDUCTIONS: Final = ("dot", "sum", "largest")
"""Operations of a graph that make a scalar of vectors; `norm` and `mean` are made of them."""
_FLIPPED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A value of a graph: an operation and the numbers of the values that it is applied to."""

    operation: str
    """`number`, `scalar` or `vector` for what a program starts from; else what is computed."""
    arguments: tuple[int, ...] = ()
    """Values it is computed from; they come before it."""
    vector: bool = False
    """Whether it is a vector."""
    name: str = ""
    """Of a vector or scalar that a program starts from."""
    number: float = 0.0
    """Of a number."""


class ValueGraph:
    """All values of a program, each once, in an order in which they can be computed."""

    def __init__(self) -> None:
        self.values: list[GraphValue] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def add(self, value: GraphValue) -> int:
        """The number of a value, which is new or has been there."""
        key = (value.operation, value.arguments, value.name, repr(value.number))
        if key not in self._numbers:
            if len(self.values) == VALUES:
                raise ProgramError(f"The program has more than {VALUES:,} operations, the limit.")
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]

    def is_vector(self, value: int) -> bool:
        """Whether a value is a vector."""
        return self.values[value].vector

    def number(self, number: float) -> int:
        """A number."""
        return self.add(GraphValue("number", number=number))

    def constant(self, value: int) -> float | None:
        """The number that a value is, if the program has it in its text."""
        found = self.values[value]
        return found.number if found.operation == "number" else None

    def apply(self, operation: Operation, arguments: list[int]) -> int:
        """An operation of the language applied to values."""
        name = operation.name
        if operation.reduces:
            return self._reduced(name, arguments)
        if not any(self.is_vector(argument) for argument in arguments):
            return self.scalar(name, *arguments)
        match name, arguments:
            case "neg", [a]:
                return self.scaled(a, self.number(-1.0))
            case "+", [a, b]:
                return self._sum(a, b)
            case "-", [a, b]:
                return self._sum(a, self.apply(OPERATIONS["neg"], [b]))
            case "*", [a, b]:
                return self._product(a, b)
            case "/", [a, b]:
                return self._quotient(a, b)
            case "**", [a, b]:
                return self._power(a, b)
            case (("<" | "<=" | ">" | ">=" | "==" | "!="), [a, b]):
                return self.vector(name, a, b) if self.is_vector(a) else self.vector(_FLIPPED[name], b, a)
            case (("min" | "max"), [a, b]):
                return self.vector(name, a, b) if self.is_vector(a) else self.vector(name, b, a)
            case "clip", [a, least, most]:
                return self.apply(OPERATIONS["min"], [self.apply(OPERATIONS["max"], [a, least]), most])
            case "where", _:
                return self._choice(*arguments)
            case _:
                return self.vector(name, *arguments)

    def vector(self, operation: str, *arguments: int) -> int:
        """A vector computed element by element."""
        return self.add(GraphValue(operation, arguments, vector=True))

    def scalar(self, operation: str, *arguments: int) -> int:
        """A scalar computed from scalars: now, if they are numbers."""
        numbers = [self.constant(argument) for argument in arguments]
        if operation == "where" and numbers[0] is not None:
            return arguments[1] if numbers[0] else arguments[2]
        if operation == "*" and 1.0 in numbers:
            return arguments[1 - numbers.index(1.0)]
        if operation == "/" and numbers[1] == 1.0:
            return arguments[0]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers):
            return self.number(compute(operation, *known))
        return self.add(GraphValue(operation, arguments))

    def filled(self, value: int) -> int:
        """A value as a vector."""
        return value if self.is_vector(value) else self.vector("fill", value)

    def scaled(self, value: int, factor: int) -> int:
        """A vector times a scalar."""
        inner = self.values[value]
        if inner.operation == "scale":
            value, factor = inner.arguments[0], self.scalar("*", inner.arguments[1], factor)
        return value if self.constant(factor) == 1.0 else self.vector("scale", value, factor)

    def _parts(self, value: int) -> tuple[int, int]:
        """A vector without its factor, and the factor."""
        found = self.values[value]
        if found.operation == "scale":
            return found.arguments[0], found.arguments[1]
        return value, self.number(1.0)

    def _sum(self, a: int, b: int) -> int:
        if self.is_vector(a) and self.is_vector(b):
            return self.vector("add", *sorted((a, b)))
        return self.vector("shift", a, b) if self.is_vector(a) else self.vector("shift", b, a)

    def _product(self, a: int, b: int) -> int:
        if self.is_vector(a) and self.is_vector(b):
            (a, s), (b, t) = self._parts(a), self._parts(b)
            for factor, other in ((a, b), (b, a)):
                if self.values[other].operation == "reciprocal":
                    quotient = self.vector("div", factor, *self.values[other].arguments)
                    return self.scaled(quotient, self.scalar("*", s, t))
            return self.scaled(self.vector("mul", *sorted((a, b))), self.scalar("*", s, t))
        return self.scaled(a, b) if self.is_vector(a) else self.scaled(b, a)

    def _quotient(self, a: int, b: int) -> int:
        one = self.number(1.0)
        if not self.is_vector(b):
            return self.scaled(a, self.scalar("/", one, b))
        b, t = self._parts(b)
        if not self.is_vector(a):
            return self.scaled(self.vector("reciprocal", b), self.scalar("/", a, t))
        a, s = self._parts(a)
        return self.scaled(self.vector("div", a, b), self.scalar("/", s, t))

    def _power(self, a: int, b: int) -> int:
        match self.constant(b):
            case 2.0:
                return self._product(a, a)
            case 1.0:
                return a
            case 0.5:
                return self.vector("sqrt", a)
            case -1.0:
                return self._quotient(self.number(1.0), a)
            case _:
                return self.vector("**", self.filled(a), b)

    def _choice(self, condition: int, yes: int, no: int) -> int:
        if not self.is_vector(condition):
            number = self.constant(condition)
            if number is not None:
                return self.filled(yes if number else no)
        return self.vector("where", self.filled(condition), self.filled(yes), self.filled(no))

    def _reduced(self, name: str, arguments: list[int]) -> int:
        match name:
            case "length":
                return self.add(GraphValue("scalar", name="length"))
            case "mean":
                return self.scalar("/", self._reduced("sum", arguments), self._reduced("length", arguments))
            case "norm":
                return self.scalar("sqrt", self._reduced("dot", arguments * 2))
            case _:
                return self.add(GraphValue(name, tuple(sorted(arguments))))


def join_reductions(operation: str, parts: Sequence[float], nothing: float = -math.inf) -> float:
    """A reduction over all numbers, from those of their parts; `nothing` is the largest of none."""
    if operation != "largest":
        return float(sum(parts))
    return max(parts, default=nothing) if all(part == part for part in parts) else math.nan


def compute(operation: str, *numbers: float) -> float:
    """A scalar operation on numbers; raises ProgramError where the result is not a finite real number."""
    function = OPERATIONS[operation].compute
    try:
        result = function(*numbers) if function is not None else math.nan
    except (ZeroDivisionError, ValueError, OverflowError):
        result = math.nan
    if isinstance(result, complex) or not math.isfinite(result):
        shown = f" {operation} ".join(map(repr, numbers)) if len(numbers) == 2 else f"{operation} {numbers}"
        raise ProgramError(f"{shown} is not a finite real number, so the program has no result.")
    return float(result)


@dataclass(frozen=True, slots=True)
class _Closure:
    """A function, and what the variables around it mean."""

    body: Term
    scope: _Meaning | None


@dataclass(frozen=True, slots=True)
class _Partial:
    """A primitive operation with some of its arguments."""

    operation: Operation
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a bound variable means, and the variables around it."""

    value: _Result
    around: _Meaning | None


_Result = int | tuple[int, ...] | _Closure | _Partial


def evaluate(program: Program) -> tuple[ValueGraph, tuple[int, ...]]:
    """The graph of a program, and the values in it that are its results."""
    return evaluate_term(program.applied, program.vectors)


def evaluate_term(term: Term, vectors: Sequence[str]) -> tuple[ValueGraph, tuple[int, ...]]:
    """The graph of a term in which these names are vectors and all others scalars, and the values of its results."""
    evaluation = _Evaluation(vectors)
    result = run(evaluation.of(term, None))
    results = result if isinstance(result, tuple) else (result,)
    return evaluation.graph, tuple(value for value in results if isinstance(value, int))


class _Evaluation:
    """Call by value, with what variables mean kept beside the term."""

    def __init__(self, vectors: Sequence[str]) -> None:
        self.graph = ValueGraph()
        self.vectors = {name: self.graph.add(GraphValue("vector", name=name, vector=True)) for name in vectors}
        self.steps = 0

    def count(self, term: Term) -> None:
        self.steps += 1
        if self.steps > STEPS:
            raise ProgramError(f"The program needs more than {STEPS:,} steps to be compiled, the limit.", term.at)

    def of(self, term: Term, scope: _Meaning | None) -> Call[_Result]:
        self.count(term)
        match term:
            case Number(value=value):
                return self.graph.number(value)
            case Primitive(operation=operation):
                return _Partial(operation, ())
            case Variable(name=name):
                return self.vectors[name] if name in self.vectors else self.graph.add(GraphValue("scalar", name=name))
            case BoundVariable(index=index):
                for _ in range(index):
                    scope = scope.around if scope else None
                return scope.value if scope else 0
            case Abstraction(body=body):
                return _Closure(body, scope)
            case Let(value=value, body=body):
                named = yield self.of(value, scope)
                return (yield self.of(body, _Meaning(named, scope)))
            case TupleTerm(children=items):
                values: tuple[int, ...] = ()
                for item in items:
                    values += ((yield self.of(item, scope)),)
                return values
            case Application(function=function, argument=argument):
                applied = yield self.of(function, scope)
                value = yield self.of(argument, scope)
                return (yield self.applied(applied, value, term))
            case _:
                raise TypeError(type(term).__name__)

    def applied(self, function: _Result, argument: _Result, term: Application) -> Call[_Result]:
        if isinstance(function, _Closure):
            return (yield self.of(function.body, _Meaning(argument, function.scope)))
        if not isinstance(function, _Partial) or not isinstance(argument, int):
            raise TypeError("the program has not been checked")
        partial = _Partial(function.operation, (*function.arguments, argument))
        if len(partial.arguments) < partial.operation.arguments:
            return partial
        try:
            return self.graph.apply(partial.operation, list(partial.arguments))
        except ProgramError as error:
            if error.line or term.at is None:
                raise
            raise ProgramError(str(error), term.at) from None

"""Types of terms, inferred by unification, so that a wrong program is refused before it reaches a server.

A number is a scalar or a vector; all vectors of a program have one length. Operations on numbers work element by
element, and make a vector if any argument is one; reductions make a scalar of vectors. Functions are simply typed;
functions named by `let` may be used at several types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from offbeat.errors import ProgramError, did_you_mean
from offbeat.protocols.programs.operations import OPERATIONS
from offbeat.protocols.programs.recursion import Call, run
from offbeat.protocols.programs.term import (
    Abstraction,
    Application,
    BoundVariable,
    Let,
    Number,
    Position,
    Primitive,
    Term,
    TupleTerm,
    Variable,
)

WORK: Final = 100_000
"""Nodes that a check may visit: a function named by `let` is checked anew at each use."""
DEEPEST: Final = 500
"""Types inside each other."""
SHOWN: Final = 200
"""Parts of a type that are described; the rest is cut off."""


@dataclass(frozen=True, slots=True)
class Plain:
    """The type of numbers: `scalar` or `vector`."""

    name: str


SCALAR: Final = Plain("scalar")
VECTOR: Final = Plain("vector")


@dataclass(frozen=True, slots=True)
class Function:
    """The type of functions."""

    argument: Type
    result: Type


@dataclass(frozen=True, slots=True)
class Several:
    """The type of a program's results."""

    items: tuple[Type, ...]


class UnknownType:
    """A type that is not known yet; `is_number` once it can only be a scalar or a vector."""

    __slots__ = ("is_number", "value")

    def __init__(self, is_number: bool = False) -> None:
        self.value: Type | None = None
        self.is_number = is_number


Type = Plain | Function | Several | UnknownType


def function_type(*types: Type) -> Type:
    """The type of a function of all types but the last, which is its result's."""
    result = types[-1]
    for argument in reversed(types[:-1]):
        result = Function(argument, result)
    return result


def check(term: Term, types: Mapping[str, Type] | None = None) -> Type:
    """The type of a term whose free variables have these types; raises ProgramError with the position otherwise."""
    inference = _Inference(types or {})
    result = run(inference.infer(term, None))
    inference.settle()
    return run(_resolved(result, {}))


def describe(type_: Type) -> str:
    """A type in words, such as `vector -> scalar`; `a`, `b` are any type."""
    return run(_describe(type_, False, {}, [0]))


def _describe(type_: Type, bracket: bool, names: dict[int, str], count: list[int]) -> Call[str]:
    type_ = _value(type_)
    count[0] += 1
    if count[0] > SHOWN:
        return "…"
    match type_:
        case Plain(name=name):
            return name
        case Function(argument=argument, result=result):
            left = yield _describe(argument, True, names, count)
            right = yield _describe(result, False, names, count)
            return f"({left} -> {right})" if bracket else f"{left} -> {right}"
        case Several(items=items):
            text = ""
            for item in items:
                text += (", " if text else "(") + (yield _describe(item, False, names, count))
            return f"{text})"
        case UnknownType():
            if type_.is_number:
                return "number"
            name = chr(ord("a") + len(names) % 26) + "'" * (len(names) // 26)
            return names.setdefault(id(type_), name)


def _value(type_: Type) -> Type:
    while isinstance(type_, UnknownType) and type_.value is not None:
        type_ = type_.value
    return type_


def _resolved(type_: Type, seen: dict[int, Type]) -> Call[Type]:
    """A type with no unknown in it that has a value; what is shared in it stays shared."""
    type_ = _value(type_)
    if id(type_) in seen:
        return seen[id(type_)]
    result = type_
    if isinstance(type_, Function):
        left = yield _resolved(type_.argument, seen)
        right = yield _resolved(type_.result, seen)
        result = Function(left, right)
    elif isinstance(type_, Several):
        parts: tuple[Type, ...] = ()
        for item in type_.items:
            parts += ((yield _resolved(item, seen)),)
        result = Several(parts)
    seen[id(type_)] = result
    return result


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """Numbers that an operation works on element by element, and its result: a vector if any of them is."""

    arguments: tuple[Type, ...]
    result: Type
    at: Position | None


@dataclass(frozen=True, slots=True)
class _Scope:
    """A bound variable's type, or the function that it names; and the scope around it."""

    type: Type
    function: Term | None
    around: _Scope | None


class _Inference:
    """Infers types, and collects what is to hold between numbers."""

    def __init__(self, types: Mapping[str, Type]) -> None:
        self.types = types
        self.broadcasts: list[_Broadcast] = []
        self.work = 0

    def count(self, at: Position | None) -> None:
        """One more step of work."""
        self.work += 1
        if self.work > WORK:
            raise ProgramError(
                f"The program needs more than {WORK:,} steps to be checked, the limit. Functions that `let` names are "
                "checked at each use, and types may grow with every application: use fewer functions of functions.",
                at,
            )

    def infer(self, term: Term, scope: _Scope | None) -> Call[Type]:
        self.count(term.at)
        match term:
            case Number():
                return SCALAR
            case Primitive():
                return self.primitive(term)
            case Variable():
                return self.variable(term)
            case BoundVariable(index=index):
                entry = scope
                for _ in range(index):
                    entry = entry.around if entry else None
                if entry is None:
                    raise ProgramError("The term is a part of another one: a variable's binder is missing.", term.at)
                if entry.function is not None:
                    return (yield self.infer(entry.function, entry.around))
                return entry.type
            case Abstraction(body=body):
                argument = UnknownType()
                result = yield self.infer(body, _Scope(argument, None, scope))
                return Function(argument, result)
            case Let(value=value, body=body):
                type_ = yield self.infer(value, scope)
                named = value if isinstance(value, Abstraction) else None
                return (yield self.infer(body, _Scope(type_, named, scope)))
            case TupleTerm(children=items):
                parts: tuple[Type, ...] = ()
                for item in items:
                    parts += ((yield self.infer(item, scope)),)
                return Several(parts)
            case Application():
                return (yield self.application(term, scope))
            case _:
                raise TypeError(type(term).__name__)

    def variable(self, term: Variable) -> Type:
        if term.name not in self.types:
            hint = did_you_mean(term.name, (*self.types, *(name for name in OPERATIONS if name.isalpha())))
            raise ProgramError(f"{term.name!r} is not defined.{hint}", term.at)
        return self.types[term.name]

    def primitive(self, term: Primitive) -> Type:
        operation = term.operation
        if operation.reduces:
            return function_type(*[VECTOR] * operation.arguments, SCALAR)
        arguments = [UnknownType(is_number=True) for _ in range(operation.arguments)]
        result = UnknownType(is_number=True)
        self.broadcasts.append(_Broadcast(tuple(arguments), result, term.at))
        return function_type(*arguments, result)

    def application(self, term: Application, scope: _Scope | None) -> Call[Type]:
        function = _value((yield self.infer(term.function, scope)))
        argument = yield self.infer(term.argument, scope)
        if isinstance(function, UnknownType) and not function.is_number:
            result: Type = UnknownType()
            self.unify(function, Function(argument, result), term.at)
            return result
        if not isinstance(function, Function):
            raise ProgramError(
                f"A {describe(function)} is applied to an argument, but only functions take arguments. "
                "Is an operator missing between the two?",
                term.argument.at or term.at,
            )
        self.unify(function.argument, argument, term.argument.at or term.at)
        return function.result

    def unify(self, expected: Type, actual: Type, at: Position | None) -> None:
        """Make two types one."""
        pairs: list[tuple[Type, Type]] = [(expected, actual)]
        while pairs:
            self.count(at)
            a, b = map(_value, pairs.pop())
            if a is b or (isinstance(a, Plain) and a == b):
                continue
            if isinstance(a, UnknownType):
                self.bind(a, b, at)
            elif isinstance(b, UnknownType):
                self.bind(b, a, at)
            elif isinstance(a, Function) and isinstance(b, Function):
                pairs += [(a.result, b.result), (a.argument, b.argument)]
            elif isinstance(a, Several) and isinstance(b, Several) and len(a.items) == len(b.items):
                pairs += zip(a.items, b.items, strict=True)
            else:
                raise ProgramError(
                    f"{_capital(_article(expected))} is expected here, not {_article(actual)}{_why(a, b)}.", at
                )

    def bind(self, unknown: UnknownType, other: Type, at: Position | None) -> None:
        if isinstance(other, UnknownType):
            other.is_number = other.is_number or unknown.is_number
        elif unknown.is_number and not isinstance(other, Plain):
            raise ProgramError(f"A number is expected here, not {_article(other)}.", at)
        elif not isinstance(other, Plain):
            for part, depth in _parts(other):
                self.count(at)
                if part is unknown:
                    raise ProgramError(
                        "A function is applied to itself here, which no type allows: such a program may never end.", at
                    )
                if depth > DEEPEST:
                    raise ProgramError(f"The type of this is nested more than {DEEPEST} deep, the limit.", at)
        unknown.value = other

    def settle(self) -> None:
        """Work out which numbers are vectors; raises ProgramError where a vector stands for a scalar."""
        pending = self.broadcasts
        while True:
            left = [broadcast for broadcast in pending if not self.settled(broadcast)]
            if len(left) == len(pending):
                return  # What is left may be either, and all of it may be vectors.
            pending = left

    def settled(self, broadcast: _Broadcast) -> bool:
        arguments = [_value(argument) for argument in broadcast.arguments]
        result = _value(broadcast.result)
        unknown = [argument for argument in arguments if isinstance(argument, UnknownType)]
        if VECTOR in arguments or not unknown:
            kind = VECTOR if VECTOR in arguments else SCALAR
            if isinstance(result, Plain) and result != kind:
                raise ProgramError(f"The result here is a {kind.name}, but a {result.name} is expected.", broadcast.at)
            self.unify(broadcast.result, kind, broadcast.at)
            return True
        if result == SCALAR:
            for argument in unknown:
                self.unify(argument, SCALAR, broadcast.at)
            return True
        if result == VECTOR and len({id(argument) for argument in unknown}) == 1:
            self.unify(unknown[0], VECTOR, broadcast.at)
            return True
        return False


def _parts(type_: Type) -> Iterator[tuple[Type, int]]:
    todo: list[tuple[Type, int]] = [(type_, 0)]
    seen: set[int] = set()
    while todo:
        part, depth = todo.pop()
        part = _value(part)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part, depth
        inner: Sequence[Type] = ()
        if isinstance(part, Function):
            inner = (part.argument, part.result)
        elif isinstance(part, Several):
            inner = part.items
        todo.extend((each, depth + 1) for each in inner)


def _article(type_: Type) -> str:
    value = _value(type_)
    if isinstance(value, Function):
        return f"a function ({describe(value)})"
    if isinstance(value, Several):
        return f"a tuple {describe(value)}"
    return f"a {describe(value)}"


def _why(a: Type, b: Type) -> str:
    if a == VECTOR and b == SCALAR:
        return ": write `s + 0 * w` to make a scalar s as long as a vector w"
    if a == SCALAR and b == VECTOR:
        return ": `sum`, `mean`, `norm` and `dot` make scalars of vectors"
    return ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

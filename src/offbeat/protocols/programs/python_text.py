"""Terms as Python lambdas, the form in which a strategy's text has them: `lambda w, g: w - lr * g`.

Reading that text back (`from_python_text`) gives a term that means the same, and writing it again the same text. `let`
becomes a lambda that is called at once, because Python has no other plain expression that names a value.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Sequence
from typing import Final

from offbeat.errors import ProgramError
from offbeat.protocols.programs.operations import RESERVED
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
    arguments_of,
    free_variables,
)

_NAMES: Final = {
    "+": "add", "-": "subtract", "*": "multiply", "/": "divide", "**": "power", "<": "less", "<=": "less_equal",
    ">": "greater", ">=": "greater_equal", "==": "equal", "!=": "not_equal", "neg": "negative",
}  # fmt: skip
"""Operators as functions, by the names that numpy has for them."""
_TAKEN: Final = frozenset({*RESERVED, *_NAMES.values(), *keyword.kwlist, "torch", "numpy", "np", "math"})
_BINARY: Final[dict[str, type[ast.operator]]] = {
    "+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div, "**": ast.Pow,
}  # fmt: skip
_COMPARISONS: Final[dict[str, type[ast.cmpop]]] = {
    "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE, "==": ast.Eq, "!=": ast.NotEq,
}  # fmt: skip


def python_text(term: Term) -> str:
    """A term as the text of a Python expression, on one line."""
    try:
        return ast.unparse(run(_expression(term, (), free_variables(term))))
    except RecursionError:
        raise ProgramError("The program is too deeply nested to be written as a Python lambda.") from None


def _expression(term: Term, names: tuple[str, ...], free: frozenset[str]) -> Call[ast.expr]:
    match term:
        case Number(value=value):
            return _number(value)
        case Variable(name=name):
            return ast.Name(name)
        case BoundVariable(index=index):
            return ast.Name(names[-1 - index])
        case Primitive(operation=operation):
            return ast.Name(_NAMES.get(operation.name, operation.name))
        case TupleTerm(children=items):
            return ast.Tuple((yield _each(items, names, free)), ast.Load())
        case Abstraction():
            own: list[str] = []
            body: Term = term
            while isinstance(body, Abstraction):
                own.append(_fresh(body.name, (*names, *own), free))
                body = body.body
            return _lambda(own, (yield _expression(body, (*names, *own), free)))
        case Let(name=name, value=value, body=body):
            bound = yield _expression(value, names, free)
            name = _fresh(name, names, free)
            inner = yield _expression(body, (*names, name), free)
            return ast.Call(_lambda([name], inner), [bound], [])
        case Application():
            return (yield _application(term, names, free))
        case _:
            raise TypeError(type(term).__name__)


def _application(term: Application, names: tuple[str, ...], free: frozenset[str]) -> Call[ast.expr]:
    function: Term = term
    while isinstance(function, Application):
        function = function.function
    arguments = yield _each(arguments_of(term), names, free)
    name = function.operation.name if isinstance(function, Primitive) else ""
    match name, arguments:
        case "neg", [operand]:
            return ast.UnaryOp(ast.USub(), operand)
        case _, [left, right] if name in _BINARY:
            return ast.BinOp(left, _BINARY[name](), right)
        case _, [left, right] if name in _COMPARISONS:
            return ast.Compare(left, [_COMPARISONS[name]()], [right])
        case _:
            return ast.Call((yield _expression(function, names, free)), arguments, [])


def _each(terms: Sequence[Term], names: tuple[str, ...], free: frozenset[str]) -> Call[list[ast.expr]]:
    written: list[ast.expr] = []
    for term in terms:
        written += [(yield _expression(term, names, free))]
    return written


def _number(value: float) -> ast.expr:
    negative = repr(value).startswith("-")
    size = abs(value)
    number = ast.Constant(int(size) if size.is_integer() and size < 1e15 else size)
    return ast.UnaryOp(ast.USub(), number) if negative else number


def _lambda(names: Sequence[str], body: ast.expr) -> ast.expr:
    arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
    return ast.Lambda(arguments, body)


def _fresh(hint: str, names: Sequence[str], free: frozenset[str]) -> str:
    """The hint, or with a number, so that it is a Python name that nothing else has."""
    hint = hint.replace("'", "_")
    name, number = hint, 1
    while name in names or name in free or name in _TAKEN:
        number += 1
        name = f"{hint}{number}"
    return name

"""A library of closed terms: the combinators S, K, I, B, C, truth values, pairs and Church's numerals."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

from offbeat import limits
from offbeat.protocols.programs.parser import parse
from offbeat.protocols.programs.term import (
    Abstraction,
    Application,
    BoundVariable,
    Term,
    Variable,
    free_variables,
    rewrite,
)

COMBINATORS: Final = MappingProxyType(
    {
        "S": r"\x y z. x z (y z)",
        "K": r"\x y. x",
        "I": r"\x. x",
        "B": r"\x y z. x (y z)",
        "C": r"\x y z. x z y",
    }
)
"""Combinators (Schönfinkel 1924, Curry 1930), and what they mean."""
LIBRARY: Final = MappingProxyType(
    {
        **COMBINATORS,
        "true": r"\x y. x",
        "false": r"\x y. y",
        "pair": r"\a b f. f a b",
        "first": r"\p. p (\a b. a)",
        "second": r"\p. p (\a b. b)",
        "zero": r"\f x. x",
        "succ": r"\n f x. f (n f x)",
        "add": r"\m n f x. m f (n f x)",
        "mul": r"\m n f. m (n f)",
        "pow": r"\m n. n m",
        "pred": r"\n f x. n (\g h. h (g f)) (\u. x) (\u. u)",
        "iszero": r"\n. n (\x y z. z) (\x y. x)",
        "count": r"\n. n (\x. x + 1) 0",
    }
)
"""All terms of the library by name; `count` makes a number of one of Church's."""
LARGEST_NUMERAL: Final = 900


@cache
def definition(name: str) -> Term:
    """The term of this name in the library."""
    return parse(LIBRARY[name])


def with_library(term: Term, more: Mapping[str, Term] | None = None) -> Term:
    """A term with the library's terms, and others that are closed, in place of free variables of their names."""
    definitions = {name: definition(name) for name in free_variables(term) & LIBRARY.keys()} | dict(more or {})

    def leaf(node: Term, _: int) -> Term:
        return definitions.get(node.name, node) if isinstance(node, Variable) else node

    return rewrite(term, leaf)


def numeral(n: int) -> Term:
    """Church's numeral of n: the function that applies another n times."""
    limits.whole("A numeral", n, LARGEST_NUMERAL, least=0)
    body: Term = BoundVariable(0)
    for _ in range(n):
        body = Application(BoundVariable(1), body)
    return Abstraction("f", Abstraction("x", body))


def numeral_value(term: Term) -> int | None:
    """The number that a numeral in normal form stands for, or None."""
    if not (isinstance(term, Abstraction) and isinstance(term.body, Abstraction)):
        return None
    body, count = term.body.body, 0
    while isinstance(body, Application) and body.function == BoundVariable(1):
        body, count = body.argument, count + 1
    return count if body == BoundVariable(0) else None


def name_of(term: Term) -> str | None:
    """The library's name of a term in normal form, if it has one."""
    return next((name for name in COMBINATORS if definition(name) == term), None)

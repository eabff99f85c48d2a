"""The primitive operations of the language: their names, how many arguments they take, and what they do to numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Operation:
    """A primitive operation."""

    name: str
    """As it is written."""
    arguments: int
    """How many arguments it takes."""
    compute: Callable[..., float] | None
    """Its value for numbers; None for reductions, which take vectors."""
    infix: int = 0
    """Precedence between its two arguments; 0 if it is written before them."""

    @property
    def reduces(self) -> bool:
        """Whether it makes a scalar of vectors."""
        return self.compute is None


def _negative(x: float) -> float:
    return -x


def _sign(x: float) -> float:
    return 0.0 if x == 0 else math.copysign(1.0, x)


def _where(condition: float, yes: float, no: float) -> float:
    return yes if condition else no


def _clip(x: float, least: float, most: float) -> float:
    return min(max(x, least), most)


def _truth(compare: Callable[[Any, Any], bool]) -> Callable[[float, float], float]:
    return lambda a, b: 1.0 if compare(a, b) else 0.0


COMPARISON, SUM, PRODUCT, UNARY, POWER, APPLICATION, ATOM = range(1, 8)
"""Precedences, from loosest to tightest."""

OPERATIONS: Final = {
    operation.name: operation
    for operation in (
        Operation("+", 2, operator.add, SUM),
        Operation("-", 2, operator.sub, SUM),
        Operation("*", 2, operator.mul, PRODUCT),
        Operation("/", 2, operator.truediv, PRODUCT),
        Operation("**", 2, operator.pow, POWER),
        Operation("<", 2, _truth(operator.lt), COMPARISON),
        Operation("<=", 2, _truth(operator.le), COMPARISON),
        Operation(">", 2, _truth(operator.gt), COMPARISON),
        Operation(">=", 2, _truth(operator.ge), COMPARISON),
        Operation("==", 2, _truth(operator.eq), COMPARISON),
        Operation("!=", 2, _truth(operator.ne), COMPARISON),
        Operation("neg", 1, _negative),
        Operation("where", 3, _where),
        Operation("sqrt", 1, math.sqrt),
        Operation("exp", 1, math.exp),
        Operation("log", 1, math.log),
        Operation("abs", 1, math.fabs),
        Operation("sign", 1, _sign),
        Operation("min", 2, min),
        Operation("max", 2, max),
        Operation("clip", 3, _clip),
        Operation("dot", 2, None),
        Operation("norm", 1, None),
        Operation("sum", 1, None),
        Operation("largest", 1, None),
        Operation("mean", 1, None),
        Operation("length", 1, None),
    )
}
"""All operations by name. Comparisons are 1 where they hold and 0 elsewhere."""
KEYWORDS: Final = frozenset({"let", "in"})
"""Words that cannot be names."""
RESERVED: Final = KEYWORDS | {name for name in OPERATIONS if name.isalpha()}
"""Words that are not free variables."""

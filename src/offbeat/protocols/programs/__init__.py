"""Programs for servers: a pure functional language that is parsed, checked, reduced and compiled on arrival.

term = parse("let s = s + g * g in (w - lr * g / sqrt (s + 1e-10), s)")
check(term, {"w": VECTOR, "g": VECTOR, "s": VECTOR, "lr": SCALAR})
"""

from offbeat.protocols.programs.parser import parse
from offbeat.protocols.programs.printer import show
from offbeat.protocols.programs.reduction import Budget, equal, reduce, steps
from offbeat.protocols.programs.term import Term, bound_variables, free_variables, substitute
from offbeat.protocols.programs.types import SCALAR, VECTOR, Type, check, describe, function_type

__all__ = [
    "SCALAR",
    "VECTOR",
    "Budget",
    "Term",
    "Type",
    "bound_variables",
    "check",
    "describe",
    "equal",
    "free_variables",
    "function_type",
    "parse",
    "reduce",
    "show",
    "steps",
    "substitute",
]

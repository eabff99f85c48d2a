"""Random typed terms of the language for servers, and random and mutated texts of programs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

from offbeat.errors import ProgramError
from offbeat.protocols.programs import SCALAR, Budget, Term, Type, check, function_type, parse, reduce
from offbeat.protocols.programs.combinators import LIBRARY
from offbeat.protocols.programs.library import RECIPES
from offbeat.protocols.programs.plan import plan_of
from offbeat.protocols.programs.program import Program
from offbeat.protocols.programs.reduction import STRATEGIES
from offbeat.protocols.programs.sources import from_python_text
from offbeat.protocols.programs.term import Abstraction, Application, BoundVariable, Let, Number, Variable, operate
from offbeat.protocols.programs.types import Function

BUDGET = Budget(steps=400, size=4_000, work=20_000)
TYPES = (SCALAR, function_type(SCALAR, SCALAR), function_type(SCALAR, SCALAR, SCALAR))
FREE = {"a": SCALAR, "f": TYPES[1]}
PIECES = [
    *"\\.()+-*/<>=,# \nλxywgsSKI012",
    *("let ", " in ", "let f x = ", "\\x. ", "\\w g s. ", "where ", "sqrt ", "dot ", "norm ", "**", "==", "1e-8", "lr"),
    *("lambda w, g: ", "lambda ", ":", "[", "]", " if ", " else ", "é", "\0", "'", '"', "step", "read", "min(w, 1)"),
]


def typed_term(seed: int) -> Term:
    """A term of a type in `TYPES`, over the free variables in `FREE`."""
    dice = random.Random(seed)
    return _term(dice, dice.choice(TYPES), (), 6)


def _term(dice: random.Random, wanted: Type, scope: tuple[Type, ...], depth: int) -> Term:
    fitting = [Variable(name) for name, type_ in FREE.items() if type_ == wanted]
    fitting += [BoundVariable(index) for index, type_ in enumerate(reversed(scope)) if type_ == wanted]
    if depth <= 0 and fitting and (wanted != SCALAR or dice.random() < 0.7):
        return dice.choice(fitting)
    if isinstance(wanted, Function) and (depth <= 0 or dice.random() < 0.6):
        return Abstraction(dice.choice("xyz"), _term(dice, wanted.result, (*scope, wanted.argument), depth - 1))
    if depth <= 0:
        return Number(dice.randrange(-2, 4))
    kind = dice.random()
    if kind < 0.35:
        argument = dice.choice(TYPES)
        function = _term(dice, Function(argument, wanted), scope, depth - 1)
        return Application(function, _term(dice, argument, scope, depth - 1))
    if kind < 0.5:
        argument = dice.choice(TYPES)
        value = _term(dice, argument, scope, depth - 1)
        return Let(dice.choice("xyz"), value, _term(dice, wanted, (*scope, argument), depth - 1))
    if wanted != SCALAR:
        return Abstraction(dice.choice("xyz"), _term(dice, wanted.result, (*scope, wanted.argument), depth - 1))
    name = dice.choice(["+", "-", "*", "min", "max", "<", "neg", "where", "sign"])
    count = {"neg": 1, "sign": 1, "where": 3}.get(name, 2)
    return operate(name, *(_term(dice, SCALAR, scope, depth - 1) for _ in range(count)))


def disagreement(term: Term) -> str:
    """How strategies that end disagree about a term, or an empty text."""
    ends: dict[str, Term] = {}
    for strategy in STRATEGIES:
        try:
            # What leaves functions as they are is reduced to the end afterwards.
            ends[strategy] = reduce(reduce(term, strategy, BUDGET), "normal", BUDGET)
        except ProgramError:
            continue
    different = {name: end for name, end in ends.items() if end != next(iter(ends.values()))}
    return f"{term!r}: {ends}" if different else ""


def texts(seed: int) -> Iterator[str]:
    """Random texts, and programs that were mutated."""
    dice = random.Random(seed)
    programs = [recipe.text for recipe in RECIPES.values()] + list(LIBRARY.values())
    programs += ["lambda w, g, s, eps=1e-8: (w - lr * g / sqrt(s + eps), s + g * g)", "lambda w, g: w - lr * g"]
    while True:
        if dice.random() < 0.4:
            yield "".join(dice.choices(PIECES, k=dice.randrange(1, 40)))
            continue
        text = list(dice.choice(programs))
        for _ in range(dice.randrange(1, 6)):
            place = dice.randrange(len(text) + 1)
            text[place : place + dice.randrange(3)] = dice.choice(PIECES) if dice.random() < 0.7 else ""
        yield "".join(text)


def knock(text: str) -> bool:
    """What a server does with a text that reaches it: whether it is accepted; raises only what is not ProgramError."""
    try:
        term = from_python_text(text) if text.lstrip().startswith("lambda") else parse(text)
    except ProgramError:
        return False
    with suppress(ProgramError):
        reduce(term, "normal", Budget(steps=50, size=500, work=1_000))
    try:
        check(term)
        plan_of(Program.of(term))
    except ProgramError:
        return False
    return True

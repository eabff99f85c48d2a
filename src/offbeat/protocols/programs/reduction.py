r"""Reduction of terms: one step in any context, four strategies, and budgets that end what would not end.

A redex is `(\x. body) value`, a `let`, or a primitive operation whose arguments are numbers. By the theorem of Church
and Rosser all strategies that end agree; normal order ends whenever there is a normal form (Curry and Feys 1958).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from offbeat.errors import ProgramError, did_you_mean
from offbeat.protocols.programs.printer import Path, show
from offbeat.protocols.programs.term import (
    LARGEST,
    Abstraction,
    Application,
    Let,
    Number,
    Term,
    TupleTerm,
    arguments_of,
    opened,
)


@dataclass(frozen=True)
class Budget:
    """How much a reduction may cost. Running out of it is an error."""

    steps: int = 10_000
    """Steps."""
    size: int = LARGEST
    """Nodes of the term, at any time."""
    work: int = 200_000
    """Nodes that all steps together make, which bounds the time."""


DEFAULT_BUDGET: Final = Budget()


def _normal(term: Term) -> Path | None:
    """The leftmost outermost redex, also inside functions."""
    path: list[int] = []
    while term.reducible:
        if term.redex:
            return tuple(path)
        number = next(number for number, child in enumerate(term.children) if child.reducible)
        path.append(number)
        term = term.children[number]
    return None


def _applicative(term: Term) -> Path | None:
    """The leftmost innermost redex, also inside functions."""
    path: list[int] = []
    while term.reducible:
        number = next((number for number, child in enumerate(term.children) if child.reducible), None)
        if number is None:
            return tuple(path)
        path.append(number)
        term = term.children[number]
    return None


def _value(term: Term) -> Path | None:
    """The leftmost innermost redex outside of functions: arguments are values before they are passed."""
    path: list[int] = []
    while term.weak:
        # The body of a `let` waits for its value.
        children = term.children[:1] if isinstance(term, Let) else term.children
        number = next((number for number, child in enumerate(children) if child.weak), None)
        if number is None:
            return tuple(path)
        path.append(number)
        term = term.children[number]
    return None


def _name(term: Term) -> Path | None:
    """The redex at the head, outside of functions: arguments are passed as they are."""
    todo: list[tuple[Term, Path]] = [(term, ())]
    while todo:
        node, path = todo.pop()
        steps_down = 0
        while isinstance(node, Application) and not node.redex and node.operation is None:
            node, steps_down = node.function, steps_down + 1
        path += (0,) * steps_down
        if not node.weak:
            continue
        if node.redex:
            return path
        if isinstance(node, TupleTerm):
            todo.extend((child, (*path, number)) for number, child in reversed([*enumerate(node.children)]))
        elif isinstance(node, Application) and not node.missing:
            todo.extend(reversed(_strict(node, path)))
    return None


def _strict(term: Application, path: Path) -> list[tuple[Term, Path]]:
    """The arguments that a primitive operation needs, with their paths."""
    arguments = arguments_of(term)
    paths = [(*path, *(0,) * (len(arguments) - 1 - number), 1) for number in range(len(arguments))]
    needed = 1 if term.operation is not None and term.operation.name == "where" else len(arguments)
    return list(zip(arguments, paths, strict=True))[:needed]


STRATEGIES: Final[dict[str, Callable[[Term], Path | None]]] = {
    "normal": _normal,
    "applicative": _applicative,
    "value": _value,
    "name": _name,
}
"""Where each strategy takes its next step: the path to a redex, or None at the end."""


@dataclass(frozen=True)
class ReductionStep:
    """One step of a reduction."""

    before: Term
    """The term."""
    path: Path
    """Where its redex is."""
    after: Term
    """The term after the step."""


def subterm(term: Term, path: Path) -> Term:
    """The term at a path."""
    for number in path:
        term = term.children[number]
    return term


def step_at(term: Term, path: Path, largest: int = LARGEST) -> Term:
    """A term after one step at a redex."""
    above: list[Term] = []
    node = term
    for number in path:
        above.append(node)
        node = node.children[number]
    node = _contracted(node, largest)
    for parent, number in zip(reversed(above), reversed(path), strict=True):
        children = list(parent.children)
        children[number] = node
        node = parent.rebuilt(children)
    if node.size > largest:
        raise ProgramError(
            f"The term grows beyond {largest:,} nodes, the limit of its size, so its reduction was stopped."
        )
    return node


def _contracted(redex: Term, largest: int) -> Term:
    match redex:
        case Let(value=value, body=body):
            return opened(body, value, largest)
        case Application(function=Abstraction(body=body), argument=argument):
            return opened(body, argument, largest)
        case Application(operation=operation) if redex.redex and operation is not None:
            arguments = arguments_of(redex)
            if operation.name == "where":
                condition, yes, no = arguments
                return yes if isinstance(condition, Number) and condition.value else no
            return _computed(redex, [argument.value for argument in arguments if isinstance(argument, Number)])
        case _:
            raise ProgramError(f"{show(redex)!r} is not a redex: no rule applies to it.", redex.at)


def _computed(redex: Application, values: list[float]) -> Term:
    """The number that a primitive operation makes of numbers."""
    compute = redex.operation.compute if redex.operation else None
    if compute is None:
        raise TypeError("not an operation on numbers")
    try:
        result = compute(*values)
    except ZeroDivisionError:
        raise ProgramError(f"{show(redex)} divides by zero.", redex.at) from None
    except (ValueError, OverflowError):
        result = math.nan
    if isinstance(result, complex) or not math.isfinite(result):
        raise ProgramError(f"{show(redex)} is not a finite real number.", redex.at)
    return Number(result, redex.at)


def strategy_of(name: str) -> Callable[[Term], Path | None]:
    """The strategy of this name."""
    if name not in STRATEGIES:
        raise ProgramError(f"{name!r} is not a reduction strategy.{did_you_mean(name, STRATEGIES)}")
    return STRATEGIES[name]


def steps(term: Term, strategy: str = "normal", budget: Budget = DEFAULT_BUDGET) -> Iterator[ReductionStep]:
    """The steps of a term to the end of a strategy; raises ProgramError when the budget is used up before."""
    next_redex = strategy_of(strategy)
    count = work = 0
    while (path := next_redex(term)) is not None:
        if count == budget.steps or work > budget.work:
            what = f"{budget.steps:,} steps" if count == budget.steps else f"{budget.work:,} nodes made by its steps"
            raise ProgramError(
                f"The reduction is not at its end after its budget of {what} ({strategy} strategy). The term may have "
                "no normal form; if it has one, normal order finds it with a large enough budget.",
            )
        redex = subterm(term, path)
        after = step_at(term, path, budget.size)
        # A step makes at most the nodes on the way to the redex, its body's, and where the argument goes.
        work += 1 + len(path) + max(redex.size, after.size - term.size + redex.size)
        yield ReductionStep(term, path, after)
        term, count = after, count + 1


def reduce(term: Term, strategy: str = "normal", budget: Budget = DEFAULT_BUDGET) -> Term:
    """A term reduced to the end of a strategy; raises ProgramError when the budget is used up before."""
    for step in steps(term, strategy, budget):
        term = step.after
    return term


def equal(a: Term, b: Term, budget: Budget = DEFAULT_BUDGET) -> bool:
    """Whether two terms have the same normal form, up to the names of bound variables."""
    return a == b or reduce(a, budget=budget) == reduce(b, budget=budget)

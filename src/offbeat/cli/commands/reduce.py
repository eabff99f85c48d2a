"""`offbeat reduce`: a term of the language for servers, reduced step by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from offbeat import limits
from offbeat.cli.options import ReduceOptions
from offbeat.cli.output import print_json
from offbeat.draw import term_picture
from offbeat.errors import OutputError, ProgramError
from offbeat.monitor.diagram.svg import check_name, write
from offbeat.protocols.programs import Budget, Term, check, describe, equal, free_variables, parse, reduce, show
from offbeat.protocols.programs.combinators import LIBRARY, name_of, numeral_value, with_library
from offbeat.protocols.programs.parser import LONGEST
from offbeat.protocols.programs.printer import marked
from offbeat.protocols.programs.reduction import ReductionStep, steps, strategy_of

SHOWN = 100
"""Steps that are printed; the result counts all."""
WIDTH = 400
"""Characters of a step that are printed, around its redex."""
MOST_STEPS = 1_000_000
WORK_PER_STEP = 20
"""Nodes that a step of the budget may make on average, which bounds the time."""
NAMES = {
    "normal": "normal order (leftmost outermost)",
    "applicative": "applicative order (leftmost innermost)",
    "value": "call by value",
    "name": "call by name",
}


def reduce_term(options: ReduceOptions) -> None:
    """Print each step with its redex marked, the result, the strategy and the number of steps."""
    limits.whole("--budget", options.budget, MOST_STEPS)
    if options.draw is not None:
        check_name(options.draw)
    budget = Budget(options.budget, work=WORK_PER_STEP * options.budget)
    written = parse(_text(options.term))
    used = sorted(free_variables(written) & LIBRARY.keys())
    term = with_library(written)
    if not options.as_json:
        print(f"{show(written)}    by {NAMES[options.strategy]}")
        for name in used:
            print(f"  where {name} is {LIBRARY[name]}")
    result, count, shown = _reduced(term, options, budget)
    other = None if options.equal is None else with_library(parse(_text(options.equal)))
    same = None if other is None else equal(term, other, budget)
    if options.draw is not None:
        next_redex = strategy_of(options.strategy)(term)
        write(
            term_picture([("before, with the first step marked", term, next_redex), ("result", result, None)]),
            options.draw,
        )
    if options.as_json:
        print_json(
            {
                "term": show(written),
                "strategy": str(options.strategy),
                "steps": count,
                "shown": shown,
                "result": show(result),
                "normal_form": not result.reducible,
                "name": _name(result),
                "type": _type(term),
                "equal": same,
                "picture": None if options.draw is None else str(options.draw),
            }
        )
    else:
        _print_result(result, count, same, options, budget, other)
    if same is False:
        raise typer.Exit(1)


def _text(term: str) -> str:
    """The text of a term, or of the file that it names."""
    if not term.endswith(".lam"):
        return term
    try:
        with Path(term).open(encoding="utf-8") as file:
            # One more than is allowed, so that the parser refuses what is longer.
            return file.read(LONGEST + 1)
    except OSError as error:
        raise OutputError(f"{term} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError:
        raise ProgramError(f"{term} is not a text in UTF-8, so it is not a program.") from None


def _reduced(term: Term, options: ReduceOptions, budget: Budget) -> tuple[Term, int, list[Mapping[str, object]]]:
    """The result, how many steps it took, and the first of them."""
    count = 0
    shown: list[Mapping[str, object]] = []
    for step in steps(term, options.strategy, budget):
        if count < SHOWN:
            text, start, stop = _window(step)
            shown.append({"term": text, "start": start, "stop": stop})
            if not options.as_json:
                print(f"{count + 1:5}  {text}\n       {' ' * start}{'^' * (stop - start)}")
        term, count = step.after, count + 1
    return term, count, shown


def _window(step: ReductionStep) -> tuple[str, int, int]:
    """The text of a step, and where its redex is; what is too long is cut off."""
    text, start, stop = marked(step.before, step.path)
    left = max(0, min(start - WIDTH // 4, len(text) - WIDTH))
    cut = text[left : left + WIDTH]
    before, after = "… " if left else "", " …" if left + WIDTH < len(text) else ""
    moved = start - left + len(before)
    return before + cut + after, moved, min(stop - left, len(cut)) + len(before)


def _print_result(
    result: Term, count: int, same: bool | None, options: ReduceOptions, budget: Budget, other: Term | None
) -> None:
    if count > SHOWN:
        print(f"… {count - SHOWN:,} more steps")
    kind = "normal form" if not result.reducible else "no step outside of functions is left"
    name = _name(result)
    print(f"{kind}: {show(result)}" + (f"    which is {name}" if name else ""))
    print(f"{count:,} step{'' if count == 1 else 's'}")
    if other is not None:
        print("equal" if same else f"not equal: the other's normal form is {show(reduce(other, budget=budget))}")
    if options.draw is not None:
        print(f"Drawn: {options.draw}")


def _name(term: Term) -> str | None:
    """What a normal form is known as: a combinator, or Church's numeral."""
    value = numeral_value(term)
    return name_of(term) or (f"Church's numeral {value}" if value is not None else None)


def _type(term: Term) -> str | None:
    """The type of a term that has one."""
    try:
        return describe(check(term))
    except ProgramError:
        return None

"""Programs for servers: their form, the plans made of them, their library, and programs written in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.errors import ProgramError
from offbeat.protocols.programs import parse, show
from offbeat.protocols.programs.library import RECIPES, recipe_program
from offbeat.protocols.programs.plan import plan_of
from offbeat.protocols.programs.program import Program
from offbeat.protocols.programs.sources import from_function, from_python_text, program_from, sqrt


def balanced(terms: list[str]) -> str:
    """A sum that is not deep."""
    if len(terms) == 1:
        return terms[0]
    return f"({balanced(terms[: len(terms) // 2])} + {balanced(terms[len(terms) // 2 :])})"


ADAGRAD = r"\w g s. let s = s + g * g in (w - lr * g / (sqrt s + 1e-10), s)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("w - g", "'w' is not defined|two arguments"),
        (r"\w. w", "has 1 of the two arguments"),
        (r"\w g. 1", "result is of type scalar"),
        (r"\w g s. (w, 1)", r"\(vector, scalar\).* or a tuple \(w, s\)"),
        (r"\w g. (w, g)", "the new parameters, vectors all"),
        (r"\w g s t. (w, s)", r"\(w, s, t\)"),
        (r"\lr g. lr", "'lr' is the name of what a server knows"),
        (r"\w w. w", "Two arguments of the program are named 'w'"),
        (r"\w g. w + eps", "'eps' is not defined"),
        (r"\w g " + " ".join(f"s{n}" for n in range(17)) + ". w", "17 states; 16 are allowed"),
        (r"\w g. w / (1 - 1)", "not a finite real number"),
        (r"\w g. " + balanced([f"{n} / (g + {n})" for n in range(1, 600)]), "more than 1,000 operations"),
    ],
)
def test_a_program_that_a_server_cannot_run_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        plan_of(Program.parse(text))


def test_arguments_after_the_second_are_states_or_what_a_server_knows() -> None:
    program = Program.parse(r"\w g lr m read v step. (w - lr * g * step * (w - read), m, v)")
    assert program.states == ("m", "v")
    assert program.vectors == ("w", "g", "m", "v", "read")
    assert program.uses_read
    assert plan_of(program).scalars == ("lr", "step")
    assert Program.parse(r"\w g. w - staleness * (g - read)").vectors == ("w", "g", "read")
    assert not Program.parse(ADAGRAD).uses_read


def test_values_are_computed_once_in_place_and_in_few_buffers() -> None:
    plan = plan_of(Program.parse(ADAGRAD))
    assert [step.operation for step in plan.passes[0].instructions] == ["addcmul", "sqrt", "shift", "addcdiv"]
    assert (plan.cost.operations, plan.cost.passes, plan.cost.reads, plan.cost.writes) == (4, 1, 3, 2)
    assert plan.cost.buffers == 1
    twice = plan_of(Program.parse(r"\w g. sqrt (g * g + 1) + w * sqrt (1 + g * g)"))
    assert [step.operation for step in twice.passes[0].instructions].count("sqrt") == 1


def test_functions_are_applied_away_however_a_program_is_written() -> None:
    spellings = (
        ADAGRAD,
        r"let square = \x. x * x in \w g s. (\s. (w - lr / (sqrt s + 1e-10) * g, s)) (s + square g)",
        r"\w g s. let step_by = \d. w - lr * d in let s = g ** 2 + s in (step_by (g / (sqrt s + 1e-10)), s)",
    )
    operations = [
        [[step.operation for step in part.instructions] for part in plan_of(Program.parse(text)).passes]
        for text in spellings
    ]
    assert operations[0] == operations[1] == operations[2]


def test_plans_are_deterministic_and_their_hashes_tell_programs_apart() -> None:
    assert plan_of(Program.parse(ADAGRAD)) == plan_of(Program.parse(ADAGRAD))
    hashes = {plan_of(recipe_program(name)).hash for name in RECIPES}
    assert len(hashes) == len(RECIPES)
    assert plan_of(recipe_program("adagrad", eps=1e-3)).hash != plan_of(recipe_program("adagrad")).hash


def test_reductions_come_before_what_uses_them() -> None:
    plan = plan_of(Program.parse(r"\w g. w - g * norm (g / norm w)"))
    assert [[step.operation for step in part.instructions] for part in plan.passes] == [
        ["dot"],
        ["scale", "dot"],
        ["axpy"],
    ]
    assert (plan.cost.reductions, plan.cost.passes) == (2, 3)


def test_sharing_by_let_does_not_multiply_work() -> None:
    text = r"\w g. let a = g + 1 / g in " + "let a = a * a + a in " * 30 + "w - a"
    assert plan_of(Program.parse(text)).cost.operations < 70


def test_programs_of_the_library_say_what_they_have() -> None:
    assert recipe_program("adam", beta1=0.5).states == ("m", "v")
    with pytest.raises(ProgramError, match="Did you mean 'adagrad'"):
        recipe_program("adagrd")
    with pytest.raises(ProgramError, match="has no setting 'epsilon'"):
        recipe_program("adagrad", epsilon=1.0)


def adam(w: Any, g: Any, m: Any, v: Any, *, lr: Any, step: Any, beta1: float = 0.9, beta2: float = 0.999) -> Any:
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    size = lr / (1 - beta1**step)
    return w - size * m / (sqrt(v) / sqrt(1 - beta2**step) + 1e-8), m, v


def test_a_function_is_traced_to_the_program_that_it_is() -> None:
    assert program_from(adam).states == ("m", "v")
    traced, written = plan_of(program_from(adam)), plan_of(recipe_program("adam"))
    assert traced.cost == written.cost
    assert [step.operation for step in traced.passes[0].instructions] == [
        step.operation for step in written.passes[0].instructions
    ]


@pytest.mark.parametrize(
    "source",
    [
        lambda w, g, s, lr: (w - lr * g / (sqrt(s2 := s + g * g) + 1e-10), s2),
        lambda w, g, s, lr: (w - lr * g / (torch.sqrt(s + g * g) + 1e-10), s + g * g),
        lambda w, g, s, lr: (w - lr * g / (np.sqrt(s + g * g) + 1e-10), s + g * g),
        lambda w, g, s, lr: (w - lr * g / ((s + g**2).sqrt() + 1e-10), s + g**2),
        "lambda w, g, s, eps=1e-10: (lambda s: (w - lr * g / (sqrt(s) + eps), s))(s + g * g)",
        "lambda w, g, s: (w - lr * g / (torch.sqrt(s + g * g) + 1e-10), s + g ** 2)",
    ],
)
def test_python_describes_the_same_program(source: str | Callable[..., object]) -> None:
    steps = plan_of(program_from(source)).passes[0].instructions
    assert [step.operation for step in steps] == ["addcmul", "sqrt", "shift", "addcdiv"]


def test_a_program_survives_being_printed() -> None:
    for source in (adam, "lambda w, g, s, eps=1e-8: w - lr * g / sqrt(s + eps)", ADAGRAD):
        program = program_from(source)
        assert plan_of(Program.parse(program.text)) == plan_of(program)
        assert parse(show(program.term)) == program.term


def nothing(w: Any, g: Any) -> None:
    del w, g


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda w, g: w if w > g else g, "an `if`"),
        (lambda w, g: max(w, g), "`max` of Python"),
        (lambda w, g: float(w) * g, "a number of Python"),
        (lambda w, g: w[0] * g, "an index"),
        (lambda w, g: [x * g for x in w], "a loop"),
        (lambda w, g: unknown * w * g, "'unknown' is not defined.*are arguments too"),  # noqa: F821  # type: ignore
        (lambda w, g: w.relu() * g, "no 'relu'"),
        (lambda w, g: torch.relu(w) * g, "cannot have 'relu'"),
        (lambda w, g: torch.sum(w, dim=0) * g, r"sum\(dim=…\)"),
        (lambda w, g: float("nan") * w * g, "only finite numbers"),
        (lambda *vectors: vectors[0], "by name, not as"),
        (nothing, "cannot have None"),
    ],
)
def test_what_cannot_be_traced_is_refused(function: Callable[..., object], words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        Program.of(from_function(function))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lambda w, g: w if w > g else g", "write `where"),
        ("lambda w, g: __import__('os')", "Constant"),
        ("lambda w, g: w.data", "Attribute"),
        ("lambda w, g: [w]", "List"),
        ("lambda *w: 1", "by name, at least one"),
        ("lambda w, g: w < g < w", "two values at a time"),
        ("lambda w, g: min(w, key=g)", "in order, without names"),
        ("lambda w, g: (x := w)", r"\(lambda s: …\)\(value\)"),
        ("lambda w, g: f(w)", "'f' is not defined"),
        ("lambda w, g: w * 10 ** 400", "not a finite real number"),
        ("lambda w, g: " + "9" * 400, "larger than any"),
        ("lambda w, g: w +", "cannot be read as Python"),
        ("lambda w, g, s=w: w", "must be a number"),
        ("lambda let, g: let", "words of the language"),
        ("lambda w, g: " + "(" * 5_000, "cannot be read"),
        ("lambda w, g: " + "-" * 15_000 + "w", "too deeply nested"),
        ("lambda w, g: w" + "+w" * 9_000, "too deeply nested"),
        ("lambda w, g: w" + " " * 30_000, "too long"),
    ],
)
def test_text_in_python_is_never_evaluated_and_what_is_no_program_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        plan_of(Program.of(from_python_text(text)))

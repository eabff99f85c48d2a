"""Reduction: laws of combinators and numerals, strategies that agree, and budgets that end what would not end."""

from __future__ import annotations

import time

import pytest

from offbeat.errors import ProgramError
from offbeat.protocols.programs import Budget, Term, equal, parse, reduce, show, steps
from offbeat.protocols.programs.combinators import COMBINATORS, definition, numeral, numeral_value, with_library
from offbeat.protocols.programs.printer import marked
from offbeat.protocols.programs.reduction import STRATEGIES, step_at

OMEGA = r"(\x. x x) (\x. x x)"


def term(text: str) -> Term:
    return with_library(parse(text))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("S x y z", "x z (y z)"),
        ("K x y", "x"),
        ("I x", "x"),
        ("B x y z", "x (y z)"),
        ("C x y z", "x z y"),
        ("S K y", r"\z. z"),
        ("S K K", "I"),
        ("S(KS)K", "B"),
        ("S(BBS)(KK)", "C"),
        ("first (pair a b)", "a"),
        ("second (pair a b)", "b"),
        ("count (add (succ zero) (succ (succ zero)))", "3"),
        ("iszero zero a b", "a"),
        ("count (pred (succ (succ (succ zero))))", "2"),
    ],
)
def test_laws_of_the_library_hold(left: str, right: str) -> None:
    assert equal(term(left), term(right))
    assert not equal(term(left), term(r"\q. unheard q"))


def test_all_combinators_have_the_normal_forms_of_their_definitions() -> None:
    for name in COMBINATORS:
        assert reduce(term(name)) == definition(name)


@pytest.mark.parametrize(("m", "n"), [(0, 0), (2, 3), (3, 2), (5, 4)])
def test_churchs_numerals_compute(m: int, n: int) -> None:
    numerals = {"a": numeral(m), "b": numeral(n)}
    for text, value in (("add a b", m + n), ("mul a b", m * n), ("succ a", m + 1), ("pred b", max(0, n - 1))):
        assert numeral_value(reduce(with_library(parse(text), numerals))) == value
    if n:
        assert numeral_value(reduce(with_library(parse("pow a b"), numerals))) == m**n


def test_normal_order_finds_a_normal_form_that_other_strategies_miss() -> None:
    for text in (f"K y ({OMEGA})", rf"(\x. y) ({OMEGA})"):
        assert reduce(term(text)) == parse("y")
        assert reduce(term(text), "name") == parse("y")
        for strategy in ("applicative", "value"):
            with pytest.raises(ProgramError, match="budget of 10,000 steps"):
                reduce(term(text), strategy)
    # Weak call by name leaves functions as they are, so it does not find every normal form.
    assert reduce(term(r"\x. I x"), "name") != reduce(term(r"\x. I x"), "normal") == parse(r"\x. x")


def test_each_strategy_takes_its_own_redex() -> None:
    marks = {}
    for strategy, redex in STRATEGIES.items():
        text, start, stop = marked(start_term := parse(r"(\x. (\z. z) x) ((\y. y) 1)"), redex(start_term))
        marks[strategy] = text[start:stop]
    assert marks == {
        "normal": r"(\x. (\z. z) x) ((\y. y) 1)",
        "name": r"(\x. (\z. z) x) ((\y. y) 1)",
        "applicative": r"(\z. z) x",
        "value": r"(\y. y) 1",
    }


def test_a_step_may_be_taken_in_any_context() -> None:
    start = parse(r"\f. f ((\x. x) 1) (2 + 3)")
    assert step_at(start, (0, 0, 1)) == parse(r"\f. f 1 (2 + 3)")
    assert step_at(start, (0, 1)) == parse(r"\f. f ((\x. x) 1) 5")
    with pytest.raises(ProgramError, match="is not a redex"):
        step_at(start, (0,))


def test_reduction_captures_nothing() -> None:
    assert reduce(parse(r"(\x y. x) y")) == parse(r"\z. y")
    assert show(reduce(parse(r"\y. (\x y. x) y"))) == r"\y y'. y"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3 ** 2 - -4", "23"),
        ("sqrt 16 / 2", "2"),
        ("min 1 2 + max 3 4", "5"),
        ("clip 5 0 3", "3"),
        ("where (1 < 2) a b", "a"),
        ("where (1 == 2) a b", "b"),
        ("sign (-3) * abs (-2)", "-2"),
        ("let x = 2 in let y = x * x in x + y", "6"),
        (r"(\n. where (n < 1) 1 (n * 2)) 0", "1"),
        ("x + (1 + 2)", "x + 3"),
    ],
)
def test_arithmetic_is_computed(text: str, value: str) -> None:
    for strategy in STRATEGIES:
        assert show(reduce(parse(text), strategy)) == value


def test_recursion_by_a_fixed_point_ends_in_normal_order() -> None:
    factorial = r"let y = \f. (\x. f (x x)) (\x. f (x x)) in y (\f n. where (n < 1) 1 (n * f (n - 1))) 10"
    assert show(reduce(parse(factorial))) == "3628800"
    assert show(reduce(parse(factorial), "name")) == "3628800"


@pytest.mark.parametrize("text", ["1 / 0", "(-8) ** 0.5", "log 0", "exp 1000", "10 ** 300 * 10 ** 300", "sqrt (-1)"])
def test_what_is_not_a_finite_number_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ProgramError, match=r"line 1, column \d+: .*(divides by zero|is not a finite real number)"):
        reduce(parse(text))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "text",
    [
        OMEGA,
        r"(\x. x x x) (\x. x x x)",
        r"(\x. x (x x)) (\x. x (x x))",
        "let a = \\x. (x, x) in " + "a (" * 40 + "1" + ")" * 40,
    ],
)
def test_what_does_not_end_or_grows_without_bound_ends_in_an_error(text: str, strategy: str) -> None:
    begin = time.process_time()
    with pytest.raises(ProgramError, match=r"budget of|nodes, the limit of its size"):
        reduce(parse(text), strategy)
    assert time.process_time() - begin < (1 if text == OMEGA else 30), "a budget bounds the time"


def test_a_smaller_budget_ends_sooner() -> None:
    with pytest.raises(ProgramError, match="budget of 5 steps"):
        reduce(parse(OMEGA), budget=Budget(steps=5))
    assert len(list(steps(parse("1 + 2 + 3"), budget=Budget(steps=2)))) == 2


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ProgramError, match="Did you mean 'normal'"):
        reduce(parse("x"), "norml")

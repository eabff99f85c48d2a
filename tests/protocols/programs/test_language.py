"""The language for servers: its parser, its printer, and what terms are equal."""

from __future__ import annotations

import time

import pytest
import random_terms

from offbeat.errors import ProgramError
from offbeat.protocols.programs import bound_variables, free_variables, parse, show, substitute
from offbeat.protocols.programs.parser import DEEPEST, LONGEST
from offbeat.protocols.programs.term import Number


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("f x y", "f x y"),
        ("f (x y)", "f (x y)"),
        (r"\x y. x y", r"\x y. x y"),
        ("λx.λy. x y", r"\x y. x y"),
        ("S(KS)K", "S (K S) K"),
        ("1+2*3**-2-4-5", "1 + 2 * 3 ** -2 - 4 - 5"),
        ("a-(b-c)-d", "a - (b - c) - d"),
        ("-2**2", "-2 ** 2"),
        ("(-2)**2", "(-2) ** 2"),
        ("a**b**c", "a ** b ** c"),
        ("(a**b)**c", "(a ** b) ** c"),
        ("1 - -x", "1 - -x"),
        ("a*-b", "a * -b"),
        ("f(-2)(a, b)", "f (-2) a b"),
        ("(a, b)", "(a, b)"),
        ("(+) 1", "(+) 1"),
        ("where(a < b, 1, sqrt x)", "where (a < b) 1 (sqrt x)"),
        (r"1 + \x. x + 2", r"1 + (\x. x + 2)"),
        ("let f x y = x + y in f 1 2", r"let f = \x y. x + y in f 1 2"),
        ("x # a comment", "x"),
        ("1e-8 + 2.50", "1e-08 + 2.5"),
    ],
)
def test_text_is_read_with_the_usual_precedence(text: str, shown: str) -> None:
    assert show(parse(text)) == shown
    assert parse(shown) == parse(text)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("(", 1, 2, "a number, a name"),
        ("x +\n  *", 2, 3, "was expected, not '*'"),
        (r"\. x", 1, 2, "the name of an argument"),
        (r"\x y", 1, 5, "'.' after the arguments"),
        ("let x = 1", 1, 10, "'in' after the value"),
        ("a < b < c", 1, 7, "a bracket around one of two comparisons"),
        ("x\n  @", 2, 3, "'@' is not a part of the language"),
        ("f )", 1, 3, "an operator, an argument or the end"),
        ("(a, b", 1, 6, "for the bracket of line 1, column 1"),
        ("let in", 1, 5, "a name was expected"),
        ("", 1, 1, "not the end"),
        ("2 + 1e999", 1, 5, "larger than any number"),
    ],
)
def test_a_wrong_text_is_refused_with_its_place_and_what_was_expected(
    text: str, line: int, column: int, words: str
) -> None:
    with pytest.raises(ProgramError, match=f"line {line}, column {column}: ") as refusal:
        parse(text)
    assert words in str(refusal.value)
    assert (refusal.value.line, refusal.value.column) == (line, column)


@pytest.mark.parametrize("opening", ["(", "\\x. ", "-", "f (", "let x = ", "1 + ("])
def test_deep_texts_are_refused_and_never_crash(opening: str) -> None:
    with pytest.raises(ProgramError, match=f"characters is too long: {LONGEST:,}"):
        parse(opening * 100_000)
    with pytest.raises(ProgramError):
        parse(opening * (LONGEST // len(opening)))
    deep = parse("(" * (DEEPEST - 1) + "x" + ")" * (DEEPEST - 1))
    assert deep == parse("x")


def test_printed_terms_are_read_back_as_the_same_terms() -> None:
    for seed in range(200):
        term = random_terms.typed_term(seed)
        assert parse(show(term)) == term
        assert show(parse(show(term))) == show(term)


def test_terms_that_differ_in_bound_names_only_are_equal() -> None:
    assert parse(r"\x y. x") == parse(r"\a b. a")
    assert hash(parse(r"\x. f x")) == hash(parse(r"\z. f z"))
    assert parse(r"\x y. x") != parse(r"\x y. y")
    assert parse(r"\x. y") != parse(r"\x. z")
    assert Number(0.0) != Number(-0.0)


def test_variables_are_free_or_bound() -> None:
    term = parse(r"(\x y. x z) (let u = w in u) + sqrt x")
    assert free_variables(term) == {"z", "w", "x"}
    assert bound_variables(term) == {"x", "y", "u"}


def test_substitution_captures_nothing() -> None:
    replaced = substitute(parse(r"\x. x y"), "y", parse("x"))
    assert replaced == parse(r"\z. z x")
    assert show(replaced) == r"\x'. x' x"
    assert substitute(parse(r"\y. y"), "y", parse("1")) == parse(r"\y. y")
    inner = substitute(parse(r"\x. \x. f x y"), "y", parse("x"))
    assert inner == parse(r"\a b. f b x")


def test_two_comparisons_of_large_shared_terms_take_no_time() -> None:
    a = b = parse("x")
    for _ in range(200):
        a, b = parse(r"\p. p").rebuilt([a]), parse(r"\p. p").rebuilt([b])
    begin = time.perf_counter()
    assert a == b
    assert time.perf_counter() - begin < 1

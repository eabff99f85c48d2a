"""The type check: what a program's terms may be, and where a wrong one is refused."""

from __future__ import annotations

import pytest
import random_terms

from offbeat.errors import ProgramError
from offbeat.protocols.programs import SCALAR, VECTOR, check, describe, function_type, parse, reduce
from offbeat.protocols.programs.combinators import COMBINATORS, definition

TYPES = {"w": VECTOR, "g": VECTOR, "lr": SCALAR, "f": function_type(SCALAR, SCALAR)}


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("1 + 2", "scalar"),
        ("w - lr * g", "vector"),
        ("lr * dot w g", "scalar"),
        ("norm w + sum g + mean g + length w", "scalar"),
        ("where (w < g) 1 0", "vector"),
        ("where (lr < 1) 1 0", "scalar"),
        (r"\x y. x", "a -> b -> a"),
        (r"\f. f (f w)", "(vector -> vector) -> vector"),
        (r"\x. x * x", "number -> number"),
        (r"\x. sum (x + lr)", "vector -> scalar"),
        (r"let square = \x. x * x in (square w, square lr)", "(vector, scalar)"),
        ("f (f lr)", "scalar"),
        ("(w, 1)", "(vector, scalar)"),
        ("sqrt", "number -> number"),
    ],
)
def test_terms_have_types(text: str, type_: str) -> None:
    assert describe(check(parse(text), TYPES)) == type_


def test_combinators_have_their_principal_types() -> None:
    assert {name: describe(check(definition(name))) for name in COMBINATORS} == {
        "S": "(a -> b -> c) -> (a -> b) -> a -> c",
        "K": "a -> b -> a",
        "I": "a -> a",
        "B": "(a -> b) -> (c -> a) -> c -> b",
        "C": "(a -> b -> c) -> b -> a -> c",
    }


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("w + h", 5, "'h' is not defined. Valid: "),
        ("w + grad", 5, "is not defined"),
        (r"\x. x x", 5, "applied to itself"),
        ("lr + sum lr", 10, "A vector is expected here, not a scalar"),
        (r"w + \x. x", 5, "A number is expected here, not a function"),
        ("w g", 3, "only functions take arguments"),
        ("f w", 3, "A scalar is expected here, not a vector"),
        ("f (w + 1)", 6, "a scalar is expected"),
        ("sqrt lr w", 9, "A number is applied to an argument"),
        ("let p = (w, g) in p + 1", 19, "A number is expected here, not a tuple"),
    ],
)
def test_a_wrong_type_is_refused_with_its_place(text: str, column: int, words: str) -> None:
    with pytest.raises(ProgramError) as refusal:
        check(parse(text), TYPES)
    assert words in str(refusal.value)
    assert (refusal.value.line, refusal.value.column) == (1, column)


@pytest.mark.parametrize(
    "text",
    [
        "let a = \\x. x in "
        + "".join(f"let {y} = \\x. {x} ({x} ({x} ({x} x))) in " for x, y in zip("abcdefgh", "bcdefghi", strict=True))
        + "i w",
        r"\x. " + "(x " * 200 + "x" + ")" * 200,
    ],
)
def test_types_that_grow_without_bound_are_refused_in_bounded_time(text: str) -> None:
    with pytest.raises(ProgramError, match=r"steps to be checked|nested more than|applied to itself"):
        describe(check(parse(text), TYPES))


def test_a_type_that_doubles_with_every_application_is_cut_off() -> None:
    assert len(describe(check(parse(r"\z. " + r"(\y f. f y y) (" * 60 + "z" + ")" * 60)))) < 2_000


def test_types_survive_reduction_and_typed_terms_end() -> None:
    for seed in range(200):
        term = random_terms.typed_term(seed)
        before = check(term, random_terms.FREE)
        try:
            after = reduce(term, "normal", random_terms.BUDGET)
        except ProgramError:
            continue
        # A step may forget what an argument was used for, so a type can only become more general.
        known = describe(before).replace("number", "scalar")
        assert describe(check(after, random_terms.FREE)).replace("number", "scalar").count("->") == known.count("->")

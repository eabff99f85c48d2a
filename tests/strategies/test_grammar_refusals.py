"""Texts that are not strategies: they are refused, never run, and the error says where and why."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offbeat.errors import StrategyError
from offbeat.protocols.expressions import DEEPEST, LONGEST, RULE
from offbeat.strategies import (
    Strategy,
    expand,
    parse,
)

HOSTILE = [
    "__import__('os').system('x')",
    "__import__",
    "().__class__.__bases__[0].__subclasses__()",
    "ddp.__class__",
    "ddp.__init__(3)",
    "ddp[0]",
    "ddp()(3)",
    "(lambda: ddp)()",
    "lambda:ddp",
    "lambda: ddp",
    "[ddp for ddp in x]",
    "{x for x in y}",
    "accumulate({x for x in y})",
    "accumulate([2])",
    "accumulate((2, 3))",
    "accumulate({2: 3})",
    "accumulate({})",
    "accumulate({*a})",
    "accumulate(x := 3)",
    "accumulate(2 + 3)",
    "accumulate(2 * 3)",
    "accumulate(9 ** 9 ** 9)",
    "accumulate(+2)",
    "accumulate(--2)",
    "accumulate(-True)",
    "accumulate(~2)",
    "accumulate(not 2)",
    "accumulate(2 if 1 else 3)",
    "accumulate(1 < 2)",
    "accumulate(2j)",
    "accumulate(...)",
    "accumulate(b'2')",
    "accumulate(f'{2}')",
    "accumulate(*x)",
    "accumulate(**x)",
    "accumulate(await x)",
    "accumulate(yield)",
    "'ddp'",
    '"ddp"',
    "ddp - accumulate(2)",
    "ddp * 2",
    "ddp | single",
    "2",
    "-ddp",
    "None",
    "True",
    "{ddp, single}",
    "ddp, single",
    "ddp; single",
    "ddp = 3",
    "ddp +",
    "+ ddp",
    "ddp(",
    "ddp)",
    "ddp accumulate(2)",
    "import os",
    "ddp # a comment",
    "ddp \\\n + single",
    "ddp\0",
    "ddp(1or 2)",
    "\uff44\uff44\uff50",
    "accumulate(\u0662)",
    "\ud800",
    "\ud800.py:Push",
    "\0.py:Push",
    "x" * 5000 + ".py:Push",
    "nowhere.py:Push",
    "nowhere.at.all:Push",
    "math:pi",
    "math:Nothing",
    "offbeat.strategies:Strategy",
    "offbeat.strategies:Combined",
    "offbeat.strategies:Setting",
    "accumulate(offbeat.strategies:DDP)",
    ":Push",
    "a:b:c",
    "",
    "   ",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_whatever_is_no_strategy_is_refused_and_never_run(text: str) -> None:
    for read in (parse, expand):
        with pytest.raises(StrategyError):
            read(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000,
        "(" * 4999 + ")" * 4999,
        "a(" * 2000 + ")" * 2000,
        "-" * LONGEST,
        "accumulate(" + "-" * 9000 + "1)",
        "not " * 2000 + "x",
        "lambda:" * 1400 + "x",
        "x" + ".x" * 4000,
        "x" + "**x" * 3000,
        "accumulate(" + "9" * 9000 + ")",
        "accumulate(0x" + "f" * 9000 + ")",
        "+".join(["ddp"] * 2500),
        "+" + " " * 9900 + "x",
        "x" * LONGEST,
        "x" * (LONGEST + 1),
        "{" * 50,
        "accumulate({" + ",".join("123456789") * 400 + "})",
        " + ".join(["accumulate({1,2,3,4,5,6,7,8})"] * 200),
    ],
)
def test_very_long_and_very_deep_texts_are_refused_cleanly(text: str) -> None:
    for read in (parse, expand):
        with pytest.raises(StrategyError) as refusal:
            read(text)
        assert len(str(refusal.value)) < 1500


alphabet = st.sampled_from("ad psingle(){}[]=,+-.:*_'\"#\\019eE\n\t\0é☃")
signs = st.sampled_from("(){}[]=,+-.:*'")
words = st.sampled_from(
    ["ddp", "single", "accumulate", "mine.py:P", "bucket", "find_unused", "2", "0.5", "1e999", "True", "None", "_"]
)


@given(st.text(max_size=60) | st.text(alphabet, max_size=40) | st.lists(words | signs, max_size=15).map(" ".join))
@example("0_:A")
@settings(max_examples=500)
def test_random_text_is_a_strategy_or_a_strategy_error(text: str) -> None:
    with contextlib.suppress(StrategyError):
        assert isinstance(parse(text), Strategy)
    with contextlib.suppress(StrategyError):
        assert all(isinstance(strategy, Strategy) for strategy in expand(text))


def test_a_refusal_can_be_printed_whatever_the_text_was() -> None:
    for text in ("\ud800", "\ud800.py:Push", "ddp(\0)", "ddp(\x1b[2J)"):
        with pytest.raises(StrategyError) as refusal:
            parse(text)
        assert all(line.isprintable() for line in str(refusal.value).splitlines())


# --- how it says so


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ddp(bucket='big')", ["\"'big'\" cannot stand", RULE, "Write big without quotes", "at character 12 of"]),
        ("ddp + os.path", ["'os.path' cannot stand", RULE, "at character 7 of"]),
        ("dpp", ["Unknown strategy 'dpp'. Did you mean 'ddp'?", "at character 1 of"]),
        (
            "ddp(buckt=3)",
            ["no argument 'buckt'. Did you mean 'bucket'?", "ddp(bucket: float = 25.0, find_unused: bool"],
        ),
        ("ddp(1, True, 3)", ["Too many arguments: ddp(bucket: float", "at character 14 of"]),
        ("ddp(1, bucket=3)", ["'bucket' is given twice"]),
        ("ddp(bucket=1, bucket=3)", ["'bucket' is given twice"]),
        ("accumulate", ["accumulate needs steps: accumulate(steps: int)"]),
        ("accumulate()", ["accumulate needs steps: accumulate(steps: int)"]),
        ("accumulate(2.5)", ["steps takes int, not 2.5", "at character 12 of"]),
        ("accumulate(True)", ["steps takes int, not True. True and False are not numbers"]),
        ("accumulate(None)", ["steps takes int, not None"]),
        ("accumulate(two)", ["steps takes int, not two"]),
        ("accumulate(0)", ["steps is 0, but at least 1 batch is needed"]),
        ("accumulate(two(3))", ["steps takes int, not two(...)"]),
        ("accumulate(ddp(3))", ["not ddp(...). Strategies do not stand inside each other; join them with `+`"]),
        ("ddp(bucket=1e999)", ["not inf. It must be finite"]),
        ("ddp(find_unused=1)", ["find_unused takes bool, not 1"]),
        ("ddp + allreduce", ["ddp and allreduce cannot be added: each decides the exchange"]),
        ("ddp(", ["cannot be read: '(' was never closed", RULE, "at character 4 of"]),
        ("accumulate({4,16})", ["'{4,16}' is a set, and a set means a sweep. Sweeps belong to `compare`"]),
        ("(" * (DEEPEST + 1), [f"More than {DEEPEST} brackets", f"at character {DEEPEST + 1} of"]),
        ("x" * (LONGEST + 1), ["10,001 characters is too long"]),
    ],
)
def test_a_refusal_shows_the_piece_its_position_and_the_rule(text: str, pieces: list[str]) -> None:
    with pytest.raises(StrategyError) as refusal:
        parse(text)
    for piece in pieces:
        assert piece in str(refusal.value)


def test_the_carets_stand_under_the_piece() -> None:
    with pytest.raises(StrategyError) as refusal:
        parse("ddp(bucket='big') + accumulate(2)")
    *_, shown, carets = str(refusal.value).splitlines()
    assert shown[carets.index("^") : carets.rindex("^") + 1] == "'big'"

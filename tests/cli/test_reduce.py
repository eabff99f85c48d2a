"""`offbeat reduce`: steps, results, comparisons, pictures and refusals, as a terminal and a program see them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli_support import Offbeat, in_process

offbeat_ = pytest.fixture(in_process)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_every_step_is_printed_with_its_redex_marked(offbeat_: Offbeat) -> None:
    printed = offbeat_("reduce", "S K K").out.splitlines()
    assert printed[0] == "S K K    by normal order (leftmost outermost)"
    assert printed[-2:] == ["normal form: \\z. z    which is I", "4 steps"]
    step, mark = printed[-4:-2]
    assert step[mark.index("^") : mark.rindex("^") + 1] == "(\\y. z) ((\\x y. x) z)"


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["S(KS)K"], "which is B"),
        (["S(BBS)(KK)"], "which is C"),
        (["1 + 2 * 3"], "normal form: 7"),
        (["mul (succ (succ zero)) (succ (succ (succ zero)))"], "which is Church's numeral 6"),
        (["K a ((\\x. x x) (\\x. x x))", "--strategy", "name"], "normal form: a"),
        (["\\x. I x", "--strategy", "value"], "no step outside of functions is left: \\x. (\\x. x) x"),
    ],
)
def test_the_result_is_named(offbeat_: Offbeat, words: list[str], last: str) -> None:
    assert last in offbeat_("reduce", *words).out


def test_terms_are_compared_and_the_exit_code_says_so(offbeat_: Offbeat) -> None:
    assert offbeat_("reduce", "S(KS)K", "--equal", "B").out.splitlines()[-1] == "equal"
    different = offbeat_("reduce", "S K K", "--equal", "K")
    assert different.code == 1
    assert different.out.splitlines()[-1] == "not equal: the other's normal form is \\x y. x"


def test_json_has_steps_result_type_and_nothing_else(offbeat_: Offbeat) -> None:
    result = json.loads(offbeat_("reduce", "(\\x. x + 1) 2", "--format", "json").out)
    assert (result["result"], result["steps"], result["normal_form"], result["type"]) == ("3", 2, True, "scalar")
    first = result["shown"][0]
    assert first["term"][first["start"] : first["stop"]] == "(\\x. x + 1) 2"


def test_a_term_is_drawn_as_trees_and_may_be_in_a_file(offbeat_: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "term.lam").write_text("# twice two\n(\\x. x * 2) 2\n")
    offbeat_("reduce", str(tmp_path / "term.lam"), "--draw", str(tmp_path / "tree.svg"))
    root = ElementTree.fromstring((tmp_path / "tree.svg").read_text())  # noqa: S314 - our own file
    shown = [node.text for node in root.iter() if node.tag.endswith("}text")]
    assert {"λx", "@", "x", "*", "2", "4"} <= set(shown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["(1"], "line 1, column 3"),
        (["(\\x. x x) (\\x. x x)", "--budget", "50"], "budget of 50 steps"),
        (["x", "--budget", "0"], "--budget 0 makes no sense"),
        (["x", "--draw", "tree.gif"], "is not a name for a picture"),
        (["nowhere.lam"], "nowhere.lam cannot be read"),
        (["1 / 0"], "divides by zero"),
        (["(" * 100_000], "100,000 characters is too long"),
    ],
)
def test_what_cannot_be_reduced_is_refused(offbeat_: Offbeat, words: list[str], message: str) -> None:
    refused = offbeat_("reduce", *words)
    assert refused.code in (1, 2)
    assert message in refused.err

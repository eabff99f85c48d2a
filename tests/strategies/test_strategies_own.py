"""People's own strategies in files and modules, and the page that shows how to write one."""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import paths
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat.errors import StrategyError
from offbeat.strategies import (
    Accumulate,
    Strategy,
    combined,
    describe,
    expand,
    parse,
)
from offbeat.strategies.language.registry import BUILT_IN

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from offbeat.strategies import Axis, Setting, Strategy, Traits

@dataclass(frozen=True)
class Peers(Setting):
    count: int

@dataclass(frozen=True)
class Push(Strategy):
    rate: float
    to: Peers | Literal["all"] = "all"
    axis = Axis.EXCHANGE

    def __post_init__(self):
        if self.rate > 1:
            raise ValueError("too fast")

@dataclass(frozen=True)
class Squeeze(Strategy):
    axis = Axis.COMPRESSION

@dataclass(frozen=True)
class Unfinished(Strategy):
    pass

class Thing: ...
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return tmp_path / "mine.py"


def test_a_class_in_a_file_is_a_strategy(mine: Path) -> None:
    made: Any = parse("mine.py:Push(0.5)")
    assert (type(made).__name__, made.rate, made.to) == ("Push", 0.5, "all")
    assert made == parse("./mine.py:Push(0.5)") == parse(f"{mine}:Push(rate=0.5)")
    assert str(made) == f"{mine.resolve()}:Push(0.5)"
    assert parse(str(made)) == made


def test_a_class_in_a_file_stands_in_a_sum(mine: Path) -> None:
    made = combined(parse("mine.py:Push(0.5, peers(3)) + accumulate(2) + mine.py:Squeeze+(mine.py:Squeeze())"))
    assert type(made.exchange).__name__ == "Push"
    assert made.when == Accumulate(2)
    assert [type(part).__name__ for part in made.compressions] == ["Squeeze", "Squeeze"]
    assert parse(str(made)) == made
    assert hash(parse(str(made))) == hash(made)


def test_a_class_in_a_file_can_be_swept(mine: Path) -> None:
    assert [str(s).rpartition(":")[2] for s in expand("mine.py:Push({0.5,1})")] == ["Push(0.5)", "Push(1.0)"]


def test_a_class_in_a_module_is_a_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "offbeat_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "module.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    made = parse("ddp + offbeat_test_package.module:Squeeze")
    assert str(made) == "ddp + offbeat_test_package.module:Squeeze"
    assert parse(str(made)) == made


@pytest.mark.parametrize(
    "folder", ["a b", "c++", "ü", "x(1), {y}=z", "50%", "a%20b", "it's", "tab\there", "a.py", "d:e", "\udcff"]
)
def test_any_folder_is_read_back(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path / folder)
    made = parse("accumulate(2) + mine.py:Push(0.5)")
    monkeypatch.chdir(tmp_path)
    assert parse(str(made)) == made


def test_a_path_with_spaces_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my work").mkdir()
    (tmp_path / "my work" / "mine.py").write_text(MINE, encoding="utf-8")
    assert parse("accumulate(2) + ./my work/mine.py:Squeeze").parts()[1] == Accumulate(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "mine.py:Pusch(1)",
            "'Pusch' does not exist in mine.py. Did you mean 'Push'? Valid: Push, Squeeze, Unfinished.",
        ),
        ("mine.py:Thing", "'Thing' is not an offbeat Strategy in mine.py."),
        ("mine.py:Peers(3)", "'Peers' is not an offbeat Strategy"),
        ("mine.py:Strategy", "'Strategy' is not an offbeat Strategy in mine.py. Valid: Push"),
        ("mine.py:Unfinished", "does not say what it decides"),
        ("mine.py:Push", "mine.py:Push needs rate: mine.py:Push(rate: float, to: peers(count: int) | all = all)"),
        ("mine.py:Push(2.5)", "mine.py:Push refuses: ValueError: too fast"),
        ("mine.py:Push(fast)", "rate takes float, not fast"),
        ("single + other.py:Push", "There is no file 'other.py'"),
        ("broken.py:Push", "broken.py cannot be imported: ZeroDivisionError"),
        ("nonsense.py:Push", "nonsense.py cannot be imported: SyntaxError"),
        ("mine.py:Push(0.5) + ddp", "cannot be added: each decides the exchange"),
    ],
)
def test_what_is_wrong_with_a_class_of_ones_own_is_said(mine: Path, text: str, message: str) -> None:
    mine.with_name("broken.py").write_text("1 / 0", encoding="utf-8")
    mine.with_name("nonsense.py").write_text("def", encoding="utf-8")
    with pytest.raises(StrategyError) as refusal:
        parse(text)
    assert message in str(refusal.value)


@given(st.text(max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_garbage_after_a_class_of_ones_own_is_refused_or_read(mine: Path, text: str) -> None:
    with contextlib.suppress(StrategyError):
        assert isinstance(parse("mine.py:Push" + text), Strategy)


def test_a_class_of_the_running_script_is_read_back(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(MINE)
        + "from offbeat.strategies import parse\n"
        + "if __name__ == '__main__':\n"
        + "    made = Push(0.5)\n"
        + "    assert parse(str(made)) == made, str(made)\n"
        + "    assert str(made) == __file__ + ':Push(0.5)', str(made)\n",
        encoding="utf-8",
    )
    subprocess.run([sys.executable, str(script.resolve())], check=True)


# --- the page in docs/

PAGE = (paths.ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")


def test_the_page_shows_a_strategy_of_ones_own_that_works(mine: Path) -> None:
    [block] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "# mine.py" in block]
    mine.write_text(block, encoding="utf-8")
    [text] = re.findall(r'--strategy "(mine\.py:.*?)"', PAGE)
    assert parse(str(parse(text))) == parse(text)
    assert describe("mine.py:Push").fields[0].doc == "How much of them, above 0 and at most 1."
    with pytest.raises(StrategyError, match=r"share is 1\.5, but"):
        parse("mine.py:Push(1.5)")


def test_the_page_lists_the_strategies_there_are_and_the_errors_they_give() -> None:
    assert re.findall(r"^\| `(\w+)` \| (?:exchange|when|compression|split) \|", PAGE, re.MULTILINE) == [
        cls.name for cls in BUILT_IN
    ]
    table = PAGE.partition("| written | the error says |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(.*?)`[^|]* \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == 8
    for text, message in rows:
        with pytest.raises(StrategyError) as refusal:
            parse(text)
        assert str(refusal.value).startswith(message.rstrip("…"))

"""What the documents say is so: links lead somewhere, figures come from results, commands and options exist."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import paths
import pytest
import typer.main

from offbeat.cli.app import app
from offbeat.strategies import available

ROOT = paths.ROOT
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def heading_anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_in_a_link_is_a_heading(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text())
    local = [(page.parent / link if link else page, anchor) for link, anchor in links if "://" not in link]
    missing = [f"{path.name}#{anchor}" for path, anchor in local if anchor not in heading_anchors(path.read_text())]
    assert missing == []


def test_the_page_of_modules_is_what_they_say_of_themselves() -> None:
    made = runpy.run_path(str(ROOT / "docs/modules.py"))["page"]()
    assert (ROOT / "docs/modules.md").read_text() == made, "run python docs/modules.py"


def test_the_page_of_bars_tells_every_result_and_every_miss() -> None:
    made = runpy.run_path(str(ROOT / "docs/bars.py"))["page"]()
    assert (ROOT / "docs/bars.md").read_text() == made
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        stored = json.loads(path.read_text())
        bars, missing = stored.get("bars", []), stored.get("not measured", [])
        assert not bars or stored["holds"] == (not missing and all(bar["holds"] for bar in bars)), path
        assert not missing or f"not measured yet: {', '.join(missing)}" in made, path
        assert made.count("**missed**") >= sum(not bar["holds"] for bar in bars), path


def test_the_readme_quotes_the_collectives_and_training_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("collectives", "training"):
        for bar in json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["bars"]:
            if bar["bar"] in readme:
                assert f"{bar['found']['median']:.3g}" in readme, bar["bar"]


def test_the_readme_quotes_the_startup_benchmark() -> None:
    readme = (ROOT / "README.md").read_text()
    results = json.loads((ROOT / "benchmarks/results/startup.json").read_text())["results"]
    for name in ("help seconds", "import seconds added to torch", "warm start seconds, 2 workers"):
        assert f"{results[name]:.2f} s" in readme, name


def test_the_page_on_consistency_tells_what_its_runs_came_to() -> None:
    filled = runpy.run_path(str(ROOT / "docs/pictures/consistency.py"))["filled"]
    page = (ROOT / "docs/consistency.md").read_text()
    assert page == filled(page, json.loads((ROOT / "docs/pictures/consistency.json").read_text()))
    assert page.count("| `ssp(3)` | ") == 2


def test_the_session_shows_what_its_program_types() -> None:
    program = runpy.run_path(str(ROOT / "docs/session.py"))
    page = (ROOT / "docs/session.md").read_text()
    assert page.startswith(program["INTRODUCTION"])
    for title, words, command in program["SCENES"]:
        assert f"## {title}\n\n{words}\n\n```text\n$ {command}\n" in page


def documented_commands(text: str) -> list[str]:
    """Lines with a command of ours in shell blocks of a page, or in the docstring of an example."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    shown = [block for language, block in blocks if language in ("", "bash", "console")]
    shown += re.findall(r'\A"""(.*?)"""', text, re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in shown for line in block.splitlines()]
    return [line for line in lines if line.startswith("offbeat ")]


def refusal(line: str, command: Any = None) -> str | None:
    """What of a command line does not exist: a command, one below it, or an option; None if all does."""
    command = command or typer.main.get_group(app)
    words = shlex.split(line, comments=True)[1:]
    words = words[: words.index("--")] if "--" in words else words
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return words[0]
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h", "--version"}
    return next((word for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known), None)


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_commands_and_options_exist(page: Path) -> None:
    wrong = {line: refusal(line) for line in documented_commands(page.read_text()) if refusal(line) is not None}
    assert wrong == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("offbeat bench collectives --simulate --ranks 4 -r 4  # --nothing", None),
        ("offbeat run train.py -w 2 -- --lr 0.1", None),
        ("offbeat bench collectivs --ranks 4", "collectivs"),
        ("offbeat bench collectives --rank 4", "--rank"),
        ("offbeat bench --ranks 4", "--ranks"),
        ("offbeat runn train.py", "runn"),
        ("offbeat run train.py -x", "-x"),
    ],
)
def test_a_command_or_option_that_does_not_exist_is_found_out(line: str, wrong: str | None) -> None:
    page = f"Words.\n\n```python\noffbeat = 1\n```\n\n```console\n$ {line}\n```\n"
    assert documented_commands(page) == [line]
    assert refusal(line) == wrong


def test_every_example_says_how_it_is_run() -> None:
    assert EXAMPLES
    for example in EXAMPLES:
        assert any(f"examples/{example.name}" in line for line in documented_commands(example.read_text())), example


def test_the_readme_names_every_strategy() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in available() if f"`{name}" not in readme and f" {name}(" not in readme] == []


OWN = {"one_by_one.py": "OneByOne", "every_nth.py": "EveryNth(3)", "one_byte.py": "OneByte"}
"""The strategies that docs/strategies.md shows in full: an exchange, a when and a compressor."""


def own_strategies() -> dict[str, str]:
    """The files that the page shows, by their names."""
    page = (ROOT / "docs/strategies.md").read_text()
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    return {name: program for name, program in blocks if name in OWN}


def test_a_strategy_of_ones_own_is_one_small_file() -> None:
    lines = {
        name: sum(bool(line.strip()) for line in program.splitlines()) for name, program in own_strategies().items()
    }
    assert set(lines) == set(OWN)
    assert max(lines.values()) <= 40


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OWN)
def test_a_documented_strategy_keeps_the_contract(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(own_strategies()[name])
    command = [sys.executable, "-m", "offbeat", "check", f"{name}:{OWN[name]}", "--format", "json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcome = json.loads(ended.stdout)
    assert outcome["failed"] == []
    assert len(outcome["checks"]) > 10


def test_the_version_is_said_once_and_quoted_rightly() -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/offbeat/_version.py").read_text())
    assert version is not None
    assert f"version: {version[1]}" in (ROOT / "CITATION.cff").read_text()

"""What the documents say is so: links lead somewhere, figures come from results, commands and options exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer.main

from offbeat.cli.app import app
from offbeat.runtime.launch import Launcher
from offbeat.strategies import available, parse
from offbeat.testing import bench, checks_for

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_the_readme_quotes_the_step_benchmark() -> None:
    readme = (ROOT / "README.md").read_text()
    for name, key in (("step", "offbeat / ddp"), ("step", "ddp again / ddp (noise)"), ("step-again", "offbeat / ddp")):
        results = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["results"]
        for kind in ("mlp", "digits"):
            found = results[kind][key]
            assert f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" in readme, (name, kind, key)


def test_the_readme_quotes_the_startup_benchmark() -> None:
    readme = (ROOT / "README.md").read_text()
    results = json.loads((ROOT / "benchmarks/results/startup.json").read_text())["results"]
    for name in ("help seconds", "import seconds added to torch", "warm start seconds, 2 workers"):
        assert f"{results[name]:.2f} s" in readme, name


def test_every_stored_result_says_that_its_bar_holds() -> None:
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        text = path.read_text()
        assert '"holds": true' in text, path
        assert '"holds": false' not in text, path


def test_documented_commands_and_options_exist() -> None:
    group = typer.main.get_group(app)
    known = {name: {o for p in command.params for o in p.opts} for name, command in group.commands.items()}
    for page in PAGES:
        for block in re.findall(r"```(?:bash)?\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                words = line.strip().removeprefix("$ ").split("#")[0].split(" -- ")[0].split()
                if len(words) > 1 and words[0] == "offbeat" and not words[1].startswith("-"):
                    assert words[1] in known, (page.name, line)
                    assert {w.split("=")[0] for w in words if w.startswith("--")} <= known[words[1]] | {"--help"}, line


def test_the_readme_names_every_strategy() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in available() if f"`{name}" not in readme and f" {name}(" not in readme] == []


@pytest.mark.slow
def test_the_documented_strategy_keeps_the_contract(tmp_path: Path, launcher: Launcher) -> None:
    page = (ROOT / "docs/strategies.md").read_text()
    program = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class OneByOne" in block)
    (tmp_path / "mine.py").write_text(program)
    strategy = parse(f"{tmp_path / 'mine.py'}:OneByOne")
    checks = [check for check in checks_for(strategy) if "Ctrl-C" not in check.name]
    assert len(checks) > 10
    for check in checks:
        with bench(strategy, 2, launcher) as place:
            check.run(place)


def test_the_version_is_said_once_and_quoted_rightly() -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/offbeat/_version.py").read_text())
    assert version is not None
    assert f"version: {version[1]}" in (ROOT / "CITATION.cff").read_text()

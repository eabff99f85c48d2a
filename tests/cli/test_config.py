"""Config files: what they set, what wins, what they may not say; and old names of options."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import paths
import pytest
from cli_support import Offbeat, in_process, points, write

from conftest import Cli
from offbeat.cli.catalog import COMMANDS
from offbeat.cli.old_spellings import RENAMED, respelled
from offbeat.runtime.launch import Launcher


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


def settings(offbeat_: Offbeat, *words: str) -> dict[str, tuple[object, str]]:
    said = offbeat_("config", *words, "--format", "json")
    assert said.code == 0, said.err
    (rows,) = json.loads(said.out)["settings"].values()
    return {name: (row["value"], row["source"]) for name, row in rows.items()}


# --- precedence


def test_each_setting_comes_from_the_file_that_wins(offbeat_: Offbeat, tmp_path: Path) -> None:
    write(
        tmp_path / "pyproject.toml",
        """
        [tool.other]
        workers = "not ours"
        [tool.offbeat]
        workers = 3
        seed = 7
        [tool.offbeat.run]
        epochs = 9
        strategy = "local(4)"
        """,
    )
    write(tmp_path / "offbeat.toml", "workers = 2\nepochs = 5\n[run]\nthreads = 1\n")
    write(tmp_path / "mine.toml", "workers = 4\n")
    found = settings(offbeat_, "run")
    assert found["workers"] == (2, "offbeat.toml")
    assert found["epochs"] == (5, "offbeat.toml"), "a file wins over another, whatever the section"
    assert found["seed"] == (7, "pyproject.toml")
    assert found["strategy"] == ("local(4)", "pyproject.toml")
    assert found["timeout"] == (600.0, "default")
    named = settings(offbeat_, "run", "--config", "mine.toml")
    assert named["workers"] == (4, "--config")
    assert named["threads"] == (None, "default"), "offbeat.toml is not read then"
    assert named["seed"] == (7, "pyproject.toml")


def test_a_section_wins_over_the_top_and_groups_over_all_commands(offbeat_: Offbeat, tmp_path: Path) -> None:
    write(
        tmp_path / "offbeat.toml",
        """
        workers = 2
        seed = 7
        [batch-size]
        workers = 3
        [check]
        seed = 5
        [bench]
        size = "1MB"
        [bench.server]
        consistency = "bsp"
        workers = 64
        """,
    )
    assert settings(offbeat_, "batch-size")["workers"] == (3, "offbeat.toml")
    assert settings(offbeat_, "compare")["workers"] == (2, "offbeat.toml")
    assert settings(offbeat_, "scale")["workers"] == ("2", "offbeat.toml"), "where --workers takes a list as text"
    server = settings(offbeat_, "bench", "server")
    assert (server["workers"][0], server["size"][0], server["consistency"][0]) == (64, "1MB", ["bsp"])
    assert settings(offbeat_, "bench.collectives")["size"] == ("1MB", "offbeat.toml")
    check = settings(offbeat_, "check")
    assert (check["workers"][0], check["seed"][0]) == (None, 5), "it refuses options that do not apply to its subject"
    assert settings(offbeat_, "draw")["size"] == (None, "default"), "the default follows from what is drawn"


def test_a_run_uses_them_and_the_command_line_wins(offbeat_: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "mine.py")
    write(
        tmp_path / "offbeat.toml",
        """
        out = "kept"
        format = "json"
        [run]
        workers = 2
        epochs = 1
        strategy = "local(2)"
        checkpoint_every = 2
        tensorboard = true
        """,
    )
    said = offbeat_("run", "mine.py:Points", "--no-tensorboard", "--strategy", "allreduce")
    assert (said.code, said.err) == (0, "")
    result = json.loads(said.out)
    assert (result["workers"], result["epochs"], result["strategy"]) == (2, 1, "allreduce")
    assert not (tmp_path / "kept/latest/tensorboard").exists()
    config = json.loads((tmp_path / "kept/latest/run.json").read_text())["config"]
    assert config["goal"]["checkpoint_every"] == 2
    resumed = offbeat_("run", "--resume", "kept/latest", "--epochs", "2")
    assert (resumed.code, json.loads(resumed.out)["strategy"]) == (0, "allreduce"), "a run keeps its own settings"


def test_what_config_prints_is_a_config_file_again(offbeat_: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "offbeat.toml", 'strategy = "local(4)"\n[compare]\ndisturb = ["worker 1: pace 5ms"]\n')
    before = settings(offbeat_, "compare")
    shown = offbeat_("config").out
    assert 'strategy = "local(4)"' in shown
    assert "# offbeat.toml [compare]" in shown
    assert "# epochs =" in shown
    assert set(tomllib.loads(shown)) == {command.name.split()[0] for command in COMMANDS if command.configurable()}
    write(tmp_path / "again.toml", shown)
    again = settings(offbeat_, "compare", "--config", "again.toml")
    assert {name: value for name, (value, _) in again.items()} == {name: value for name, (value, _) in before.items()}


# --- refusals


WRONG = [
    ("wrkers = 2", ["offbeat.toml: 'wrkers' is not an option", "'workers'"]),
    ("[run]\nepoch = 2", ["offbeat.toml [run]: 'epoch' is not an option", "'epochs'", "`offbeat run --help`"]),
    ("[runn]\nepochs = 2", ["offbeat.toml: 'runn' is not a command", "'run'"]),
    ("[bench.collective]\nranks = 2", ["offbeat.toml [bench]: 'collective' is not a command", "'collectives'"]),
    ("[keys]\nfile = 'x'", ["'keys' is not a command that has options"]),
    ("workers = 'two'", ['workers = "two", but --workers of `offbeat run` takes a whole number']),
    ("workers = true", ["workers = true, but"]),
    ("[run]\nworkers = 1.5", ["workers = 1.5, but"]),
    ("[run]\nstrategy = 3", ["strategy = 3, but", "text in quotes"]),
    ("[run]\nmonitor = 'yes'", ['monitor = "yes", but', "true or false"]),
    ("[run]\nseed = 2024-01-01", ["seed = 2024-01-01, but"]),
    ("[run]\nformat = 'yaml'", ["one of text, json"]),
    ("[compare]\nstrategy = ['ddp', 4]", ["or a list of such"]),
    ("[run]\nwhat = 'evil.py'", ["what cannot be set in a config file, only on the command line"]),
    ("[run]\narguments = ['--x']", ["arguments cannot be set"]),
    ("[run]\nresume = 'runs/x'", ["resume cannot be set"]),
    ("config = 'other.toml'", ["config cannot be set"]),
    ("[run]\nhelp = true", ["'help' is not an option"]),
    ("[run]\nwatch = true", ["'watch' is not an option"]),
    ("workers = [", ["offbeat.toml cannot be read as TOML"]),
    ("[run]\nepochs = 0", ["--epochs 0 makes no sense", "From config files: epochs = 0 (offbeat.toml [run])"]),
    ("[run]\nstrategy = 'alreduce'", ["'allreduce'", 'From config files: strategy = "alreduce"']),
    ("[run]\ntarget = 'soon'", ["'soon' is not a target", "(offbeat.toml [run])"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "pieces"), WRONG)
def test_what_a_config_file_may_not_say_is_refused(
    offbeat_: Offbeat, tmp_path: Path, text: str, pieces: list[str]
) -> None:
    (tmp_path / "offbeat.toml").write_text(text)
    said = offbeat_("run", "offbeat.tasks.digits")
    assert (said.code, said.out) == (2, "")
    assert all(piece in said.err for piece in pieces), said.err
    assert not (tmp_path / "runs").exists()


def test_files_that_are_no_config_files_are_refused(offbeat_: Offbeat, tmp_path: Path) -> None:
    assert "there is no such file" in offbeat_("config", "--config", "nowhere.toml").err
    assert "there is no such file" in offbeat_("config", "--config", "/dev/zero").err
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "bytes.toml cannot be read as TOML" in offbeat_("config", "--config", "bytes.toml").err
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    assert "deep.toml cannot be read as TOML" in offbeat_("config", "--config", "deep.toml").err
    (tmp_path / "large.toml").write_text("#" * 2**21)
    assert "more than 1,048,576 bytes" in offbeat_("config", "--config", "large.toml").err
    (tmp_path / "pyproject.toml").write_text("[tool]\noffbeat = 3\n")
    said = offbeat_("config")
    assert (said.code, "tool.offbeat is 3" in said.err) == (2, True)


def test_an_unknown_command_of_config_proposes_the_nearest(offbeat_: Offbeat) -> None:
    said = offbeat_("config", "rn")
    assert (said.code, said.out) == (2, "")
    assert "Did you mean 'run'?" in said.err


def test_help_needs_no_config_file_that_is_right(offbeat_: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "offbeat.toml").write_text("[")
    assert offbeat_("run", "--help").code == 0
    assert offbeat_("--version").code == 0


@pytest.mark.slow
def test_a_real_command_refuses_a_wrong_config_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "offbeat.toml").write_text("[run]\nwrkers = 2\n")
    done = cli("run", "offbeat.tasks.digits", "--format", "json")
    assert (done.returncode, json.loads(done.stdout)["error"]["type"]) == (2, "UsageError")
    assert done.stderr.startswith("error: offbeat.toml [run]: 'wrkers' is not an option. Did you mean 'workers'")
    assert "Traceback" not in done.stderr
    (tmp_path / "offbeat.toml").write_text("[run]\nformat = 'json'\nworkers = 0\n")
    done = cli("run", "offbeat.tasks.digits")
    assert "workers = 0 (offbeat.toml [run])" in json.loads(done.stdout)["error"]["message"]
    assert done.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["offbeat.toml"]


# --- old names of options


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("run a.py --watch -w 2 -- --watch", "run a.py --monitor -w 2 -- --watch"),
        ("compare a.py --output=b.html", "compare a.py --report=b.html"),
        ("explain --check runs/latest", "explain --verify-checkpoint runs/latest"),
        ("explain runs/latest --draw a.svg", "explain runs/latest --picture a.svg"),
        ("batch-size a.py --check", "batch-size a.py --per-example"),
        ("draw ring --out a.svg", "draw ring --picture a.svg"),
        ("draw ring --hosts 2x4 --seed 1", "draw ring --seed 1 --workers 8 --per-host 4"),
        ("draw ring --hosts=2x4 -w 8", "draw ring -w 8 --per-host 4"),
        ("bench collectives --hosts 2 --out a", "bench collectives --host-count 2 --report a"),
        ("bench server --rule bsp --rule asp", "bench server --consistency bsp --consistency asp"),
    ],
)
def test_an_old_name_still_works_with_a_warning(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert respelled(old.split()) == new.split()
    said = capsys.readouterr()
    assert (said.out, "warning: --" in said.err, "is now --" in said.err) == ("", True, True)
    assert respelled(new.split()) == new.split()
    assert capsys.readouterr().err == ""


def test_options_that_keep_their_name_are_left_alone() -> None:
    for words in (
        "run a.py --hosts hosts.toml --out runs",
        "check ring --hosts h.toml",
        "stop x --out runs",
        "draw -h",
    ):
        assert respelled(words.split()) == words.split()
    assert respelled([]) == []


def test_new_names_are_options_and_old_ones_are_not_in_the_help(offbeat_: Offbeat) -> None:
    for command, renamed in RENAMED.items():
        said = offbeat_(*command.split(), "--help").out.partition("Example")[0]
        assert all(f"{new} " in said for new in renamed.values()), command
        assert not any(f"{old} " in said for old in renamed), command


@pytest.mark.slow
def test_a_real_command_with_an_old_name_answers_with_one_warning(cli: Cli) -> None:
    done = cli("bench", "server", "--simulate", "--workers", "4", "--steps", "9", "--rule", "bsp", "--format", "json")
    assert (done.returncode, json.loads(done.stdout)["rules"][0]["name"]) == (0, "bsp")
    assert done.stderr == "warning: --rule is now --consistency; the old name goes away with the next release.\n"


# --- help


@pytest.mark.parametrize("command", ["", *(command.name for command in COMMANDS), "bench", "keys"])
def test_the_help_shows_flags_as_flags_and_no_types_of_python(offbeat_: Offbeat, command: str) -> None:
    said = offbeat_(*command.split(), "--help")
    assert said.code == 0
    assert not any(piece in said.out for piece in ("<bool>", "<int>", "<str>", "<path>", "<float>", "list["))
    assert "--no-" not in said.out.replace("--no-FLAG", "").replace("--no-single", "")


# --- the page


def test_the_page_shows_what_is_printed_and_names_every_command(offbeat_: Offbeat, tmp_path: Path) -> None:
    page = (paths.ROOT / "docs/cli.md").read_text()
    example, in_pyproject = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "offbeat.toml").write_text(example)
    assert f"$ offbeat config batch-size\n{offbeat_('config', 'batch-size').out.strip()}\n```" in page
    (tmp_path / "offbeat.toml").unlink()
    (tmp_path / "pyproject.toml").write_text(in_pyproject)
    assert settings(offbeat_, "run")["strategy"] == ("local(8)", "pyproject.toml")
    listed = re.findall(r"`([a-z -]+)`", page[page.index("| command |") : page.index("`offbeat COMMAND")])
    assert {command.name for command in COMMANDS} - set(listed) == {"keys new", "keys show", "keys allow"}
    table = page[page.index("## Renamed options") :]
    assert all(old in table and new in table for renamed in RENAMED.values() for old, new in renamed.items())

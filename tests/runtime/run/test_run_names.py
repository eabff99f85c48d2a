"""What a run is called: by its strategy, or, where a script distributes itself, by that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Offbeat, in_process, write

from offbeat.monitor.page.run_folders import Folder
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import strategy_in_words, strategy_of

STOCK = (
    "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
)
OWN = """\
    import torch, offbeat
    with offbeat.init({strategy}, seed=0) as team:
        model = torch.nn.Linear(1, 1)
        model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step()
    """


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


def kept(folder: str) -> str:
    return strategy_of(json.loads(Path(folder, "run.json").read_text()))


def test_a_stock_script_is_called_by_what_it_is(offbeat_: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "stock.py", STOCK)
    result = json.loads(offbeat_("run", "stock.py", "-w", "2", "--format", "json").out)
    assert (result["strategy"], kept(result["run"])) == ("script", "script")
    assert result["run"].endswith("-stock-script")
    assert "stock.py on 2 workers, distributed by the script itself" in offbeat_("ps", "--all").out
    (told,) = json.loads(offbeat_("ps", "--all", "--format", "json").out)
    assert told["strategy"] == "script"
    (brief,) = Folder(tmp_path / "runs").briefs()
    assert brief.strategy == "script"


def test_a_strategy_that_a_stock_script_does_not_use_is_said(offbeat_: Offbeat, tmp_path: Path) -> None:
    write(tmp_path / "stock.py", STOCK)
    said = offbeat_("run", "stock.py", "-w", "2", "--strategy", "local(4)")
    assert "--strategy local(4) had no effect: the script distributes itself." in said.out
    assert kept("runs/latest") == "script"


@pytest.mark.parametrize(
    ("says", "options", "strategy"),
    [
        ("", (), "allreduce"),
        ("'local(4)'", (), "allreduce + local(4)"),
        ("'local(4)'", ("--strategy", "gossip"), "gossip"),
    ],
)
def test_a_script_runs_under_what_it_says_unless_the_command_says_otherwise(
    offbeat_: Offbeat, tmp_path: Path, says: str, options: tuple[str, ...], strategy: str
) -> None:
    write(tmp_path / "own.py", OWN.format(strategy=says or None))
    said = offbeat_("run", "own.py", "-w", "2", *options, "--format", "json")
    assert said.code == 0, said.err
    result = json.loads(said.out)
    config = json.loads(Path(result["run"], "run.json").read_text())["config"]
    assert result["strategy"].split("(")[0] == strategy.split("(")[0]
    assert config["goal"]["strategy"] == result["strategy"]
    assert result["run"].endswith("-gossip" if options else "-own-script")


def test_words_are_for_people() -> None:
    assert strategy_in_words("script") == "distributed by the script itself"
    assert strategy_in_words("local(4)") == "local(4)"
    assert strategy_of({"config": {"goal": {"strategy": "ddp"}}}) == "ddp"
    assert strategy_of({"config": None}) == "script"

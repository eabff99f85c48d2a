"""Frameworks that ask torch for Gloo by name: the shipped examples, on Gloo and with offbeat in its place."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import paths
import pytest
from cli_support import Offbeat, in_process

from offbeat.runtime.launch import Launcher

EXAMPLES = paths.ROOT / "examples"
SCRIPTS = {"lightning_fabric": "fabric_script.py", "accelerate": "accelerate_script.py"}


@pytest.fixture
def offbeat(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


def printed(offbeat: Offbeat, script: Path, *options: str) -> tuple[list[float], str]:
    """The losses that worker 0 printed, epoch by epoch, and what it said its process group was."""
    said = offbeat("run", *options, script, "--workers", "2")
    log = Path("runs/latest/logs/worker-0.log").read_text()
    assert said.code == 0, said.err + log
    (group,) = re.findall(r"^(\w+ is .*)$", log, re.MULTILINE)
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss (\S+)$", log, re.MULTILINE)], group


def script_for(framework: str) -> str:
    """The name of its example; skips the test where the framework is not installed."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed; requirements-dev.txt has it")
    return SCRIPTS[framework]


@pytest.mark.slow
@pytest.mark.parametrize("framework", SCRIPTS)
def test_a_framework_learns_the_same_when_offbeat_answers_for_gloo(framework: str, offbeat: Offbeat) -> None:
    script = EXAMPLES / script_for(framework)
    stock, on_gloo = printed(offbeat, script)
    ours, in_its_place = printed(offbeat, script, "--backend", "offbeat")
    assert on_gloo == "gloo is ProcessGroup, through sockets"
    assert in_its_place == "gloo is StandIn, through shared memory"
    assert len(stock) == 2
    assert stock[1] < stock[0] / 2, "it learns"
    assert ours == pytest.approx(stock, abs=1e-4)


@pytest.mark.slow
def test_fabric_takes_offbeat_by_its_own_name(offbeat: Offbeat, tmp_path: Path) -> None:
    text = (EXAMPLES / script_for("lightning_fabric")).read_text()
    named = tmp_path / "named.py"
    strategy = 'lightning_fabric.strategies.DDPStrategy(process_group_backend="offbeat")'
    named.write_text(
        text.replace("import torch\n", "import lightning_fabric\nimport torch\n").replace('"ddp"', strategy)
    )
    losses, group = printed(offbeat, named)
    assert group == "offbeat is OffbeatGroup, through shared memory"
    assert losses[1] < losses[0] / 2, "it learns"

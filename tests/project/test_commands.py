"""Every command that README and docs show is run, or stands in `NOT_RUN` with the reason.

Commands are taken out of the pages' shell blocks, made small (few steps, one seed) and run as a user would, in a
folder that has the files they name: the README's loop as `train.py`, the programs of docs/strategies.md, the hosts of
docs/hosts.md. Runs that a command reads (`runs/latest`) are made first, once for all.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import paths
import pytest

from conftest import clean_environment, wait_until

ROOT = paths.ROOT
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]

NOT_RUN = {
    r"offbeat federated (serve|join) ": "server and clients need each other; examples/three_parties runs them together",
    r"offbeat federated identity ": "tests/federated/test_signed_deployment.py runs it, and joins with its key",
    r"make ": "sets up an environment, or runs this suite",
    r".*package\.module:": "a package that only the reader has",
    r".*mine\.py:Push": "the page shows only the value of this strategy; its worker's side is the reader's",
}
"""Commands that no test can run, by pattern, and why."""

EXIT_CODES = {"examples/hanging_ddp.py": 10}
"""Documented exit codes other than 0."""

TRAIN = """
import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

from offbeat.tasks.digits import Digits

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--data")
parser.parse_args()
torch.manual_seed(0)
digits = Digits().data()
train_set = digits.train


def Net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def evaluate(model):
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).float() for x, y in DataLoader(digits.validation, 100)]
    return float(torch.cat(right).mean())

"""
"""What the README's loop leaves to the reader."""

GATHER = '''

def my_gather(view, layout):
    """All-gather: every rank sends its block to all others at once."""
    p, cuts = view.size, layout.blocks(view.size)
    source, target = np.nonzero(~np.eye(p, dtype=bool))
    sent = entries(Op.SEND, source, target, cuts[source], cuts[source + 1], ())
    yield sent
    yield sent.used(Op.COPY, (0,))
'''

LOG = """ask
client {"client":1}
take
server {"client":1, "server":1}
answer
server {"client":1, "server":2}
hear
client {"client":2, "server":2}
end
client {"client":3, "server":2}
"""
"""A log of another program, as ShiViz has them."""


def commands(text: str) -> list[str]:
    """The command lines of a page: all of `bash` blocks, those after a prompt of others."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text.replace("\\\n", " "), re.DOTALL | re.MULTILINE)
    lines = [
        line.removeprefix("$ ").strip()
        for language, block in blocks
        if language in ("", "bash", "console")
        for line in block.splitlines()
        if line.startswith("$ ") or (language == "bash" and line.strip() and not line.startswith("#"))
    ]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


SHOWN = sorted({command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))})
RUN = [command for command in SHOWN if not any(re.match(pattern, command) for pattern in NOT_RUN)]


def shortened(words: list[str]) -> list[str]:
    """The command with few steps and seeds; what it says itself stays."""
    own = words.index("--") if "--" in words else len(words)
    said, rest = words[:own], words[own:]
    killed = [int(step) for step in re.findall(r"at step (\d+)", " ".join(said))]
    small = {
        "run": {"--steps": str(max([12, *(step + 10 for step in killed)]))},
        "compare": {"--steps": "6", "--seeds": "1", "--tune": "none"},
        "scale": {"--steps": "4", "--repeats": "1"},
        "batch-size": {"--steps": "60"},
        "collectives": {"--blocks": "1"},
    }
    kind = next((word for word in said[1:3] if word in small), "")
    if "--resume" in said or "--simulate" in said or "config" in said[1:2]:
        return words
    missing = {option: value for option, value in small.get(kind, {}).items() if option not in said}
    return [*said, *(word for pair in missing.items() for word in pair), *rest]


def program(words: list[str]) -> list[str]:
    """How the tests' own interpreter starts a command."""
    modules = {"offbeat": "offbeat", "torchrun": "torch.distributed.run"}
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    return [sys.executable, "-m", modules[words[0]], *words[1:]]


def environment() -> dict[str, str]:
    return clean_environment() | {"BROWSER": "true", "OMP_NUM_THREADS": "1"}


def ended(words: list[str], folder: Path, timeout: float = 280.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        program(words), cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def write_files(folder: Path) -> None:
    """The files that commands of the pages name, most of them out of the pages themselves."""
    loop = next(block for block in blocks_of("README.md", "diff") if "offbeat.init" in block)
    kept = [line[1:] for line in loop.splitlines() if not line.startswith("-")]
    (folder / "train.py").write_text(TRAIN + "\n".join(kept) + "\n")
    programs = blocks_of("docs/strategies.md", "python")
    for name, mark in [("mine.py", "def my_ring"), ("couriers.py", "class Deliveries")]:
        (folder / name).write_text(next(text for text in programs if mark in text))
    for text in programs:
        if (named := re.match(r"# (one_by_one|every_nth|one_byte)\.py\n", text)) is not None:
            (folder / f"{named[1]}.py").write_text(text)
    with (folder / "mine.py").open("a") as mine:
        mine.write(GATHER)
    hosts = next(text for text in blocks_of("docs/hosts.md", "toml") if "[[host]]" in text)
    for name in ("hosts.toml", "slow.toml"):
        (folder / name).write_text(hosts)
    (folder / "other.log").write_text(LOG)
    (folder / "mine.lam").write_text(next(text for text in blocks_of("docs/servers.md", "text") if "mine.lam" in text))
    for name in ("docs", "examples"):
        (folder / name).symlink_to(ROOT / name)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name."""
    folder = tmp_path_factory.mktemp("pages")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def with_run(earlier: Path) -> Path:
    """The same folder after a watched run with checkpoints."""
    words = ["run", "offbeat.tasks.digits", "--workers", "2", "--monitor", "--disturb", "worker *: pace 20ms"]
    words += ["--strategy", "server(shards=2, consistency=asp)", "--checkpoint-every", "40", "--steps", "100"]
    result = ended(["offbeat", *words], earlier)
    assert result.returncode == 0, result.stderr
    assert ended(["offbeat", "keys", "new", "server.keys"], earlier).returncode == 0
    assert ended(["offbeat", "keys", "new", "run.keys"], earlier).returncode == 0
    return earlier


@pytest.fixture(scope="module")
def with_comparison(with_run: Path) -> Path:
    """The same folder after a comparison."""
    words = ["compare", "offbeat.tasks.digits", "--strategy", "allreduce", "--steps", "4", "--seeds", "1"]
    assert ended(["offbeat", *words, "--tune", "none"], with_run).returncode == 0
    return with_run


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the files that the command needs, so that commands do not see each other's runs."""
    command = str(request.node.callspec.params["command"])
    if "--hosts" in command:
        request.getfixturevalue("networks")
    needed = "with_comparison" if "latest-league" in command else "earlier"
    if needed == "earlier" and re.search(r"runs/latest|logs |watch|keys (show|allow)", command):
        needed = "with_run"
    return Path(shutil.copytree(request.getfixturevalue(needed), tmp_path / "files", symlinks=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", RUN)
def test_a_documented_command_works(command: str, folder: Path) -> None:
    words = shlex.split(command)
    if words[:2] == ["offbeat", "watch"] and "--export" not in words:
        serves_until_interrupted(words, folder)
    elif words[:2] == ["offbeat", "stop"]:
        stops_a_run(words, folder)
    elif words[:3] == ["offbeat", "keys", "new"]:
        (folder / words[3]).unlink(missing_ok=True)
        assert ended(words, folder).returncode == 0
    else:
        result = ended(shortened(words), folder)
        wanted = next((code for text, code in EXIT_CODES.items() if text in command), 0)
        assert result.returncode == wanted, result.stdout + result.stderr


def serves_until_interrupted(words: list[str], folder: Path) -> None:
    log = folder / "printed"
    with (
        log.open("w") as printed,
        subprocess.Popen(program(words), cwd=folder, env=environment(), stdout=printed, stderr=printed) as server,
    ):
        try:
            wait_until(lambda: "http://127.0.0.1" in log.read_text(), "the address of the page")
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130), log.read_text()


def stops_a_run(words: list[str], folder: Path) -> None:
    running = ["offbeat", "run", "offbeat.tasks.digits", "--workers", "2", "--disturb", "worker *: pace 1s"]
    log = folder / "printed"
    shutil.rmtree(folder / "runs", ignore_errors=True)
    with (
        log.open("w") as printed,
        subprocess.Popen(program(running), cwd=folder, env=environment(), stdout=printed, stderr=printed) as run,
    ):
        wait_until(lambda: (folder / "runs/latest/run.json").exists() or run.poll() is not None, "the run's folder")
        assert ended(words, folder).returncode == 0
        assert run.wait(30) == 130, log.read_text()


def test_commands_are_found_in_pages_and_shortened() -> None:
    blocks = ["bash\noffbeat run a.py --workers 2   # why", "console\n$ offbeat ps\nrunning", "python\n$ no"]
    assert commands("".join(f"```{block}\n```\n" for block in blocks)) == ["offbeat run a.py --workers 2", "offbeat ps"]
    run = ["offbeat", "run", "a.py"]
    assert shortened([*run, "--", "--lr", "1"]) == [*run, "--steps", "12", "--", "--lr", "1"]
    assert shortened([*run, "--steps", "3"]) == [*run, "--steps", "3"]
    assert "60" in shortened([*run, "--disturb", "worker 0: kill at step 50"])


def test_every_command_is_run_or_has_a_reason() -> None:
    assert len(RUN) > 60
    unused = [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in SHOWN)]
    assert unused == []
    assert {shlex.split(command)[0] for command in RUN} <= {"offbeat", "python", "torchrun"}

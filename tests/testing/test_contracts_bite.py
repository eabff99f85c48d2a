"""The contract suite can fail: each check finds the strategy that is broken in the way it looks for."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest
from cli_support import in_process, write

from offbeat.errors import OffbeatError
from offbeat.runtime.launch import Launcher
from offbeat.strategies import Strategy, parse
from offbeat.testing import _checks, bench, checks_for, nothing_left, traces

pytestmark = pytest.mark.slow

MINE = """
    import os, subprocess
    from dataclasses import dataclass

    import torch
    import torch.distributed as dist
    from offbeat.strategies import Exchange, Exchanging, Traits

    ALL = Traits(synchronous=True, exact=True, deterministic=True)


    @dataclass(frozen=True)
    class Right(Exchanging):
        '''Averages gradient by gradient, weighted by examples.'''

        traits = ALL

        def connect(self, group, stopwatch):
            return Averaging(group, stopwatch)


    class Averaging(Exchange):
        def __init__(self, group, stopwatch):
            super().__init__(group, stopwatch)
            self.handles, self.held, self.examples, self.all = [], False, 1, group.size

        def install(self, model):
            self.handles += [p.register_post_accumulate_grad_hook(self.ready) for p in model.parameters()]

        def weigh(self, examples, total):
            self.examples = examples
            self.all = total or int(self.group.gather([float(examples)], "the count of examples").sum())

        def suspend(self, held):
            self.held = held

        def ready(self, parameter):
            if not self.held:
                with self.stopwatch.spent_on("communicate"), torch.no_grad():
                    self.average(parameter)

        def average(self, parameter):
            parameter.grad.mul_(self.share())
            self.group.sum(parameter.grad, "the average of a gradient")

        def share(self):
            return self.examples / self.all

        def close(self):
            for handle in self.handles:
                handle.remove()


    def broken(cls):
        '''Make a strategy of a worker's side.'''
        body = {"traits": ALL, "connect": lambda self, group, stopwatch: cls(group, stopwatch), "__module__": __name__}
        return dataclass(frozen=True)(type(cls.__name__, (Exchanging,), body))


    @broken
    class Forgets(Averaging):
        def average(self, parameter):
            pass

    @broken
    class Even(Averaging):
        def share(self):
            return 1 / self.group.size

    @broken
    class Fragile(Averaging):
        def share(self):
            return 1 / (self.all / self.examples)

    @broken
    class Chancy(Averaging):
        def average(self, parameter):
            noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
            parameter.grad.add_(1e-3 * torch.randn(parameter.shape, generator=noise))
            super().average(parameter)

    @broken
    class Amnesic(Averaging):
        def average(self, parameter):
            super().average(parameter)
            self.memory = getattr(self, "memory", {})
            self.memory[id(parameter)] = 0.5 * self.memory.get(id(parameter), 0) + parameter.grad
            parameter.grad.copy_(self.memory[id(parameter)])

    @broken
    class Uncounted(Averaging):
        def payload(self):
            return -self.group.bytes_sent

    @broken
    class Littering(Averaging):
        def install(self, model):
            super().install(model)
            open(f"/dev/shm/{SEGMENT}-{self.group.rank}", "w").close()

    @broken
    class Abandoning(Averaging):
        def install(self, model):
            super().install(model)
            process = subprocess.Popen(["sleep", "271.8"], start_new_session=True)
            open(__file__ + ".pids", "a").write(f"{process.pid}\\n")

    @broken
    class Alone(Averaging):
        def total(self, statistics):
            return dict(statistics)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return write(tmp_path / "mine.py", MINE.replace("{SEGMENT}", f"offbeat-{tmp_path.name}"))


def strategy_of(mine: Path, name: str) -> Strategy:
    return parse(f"{mine}:{name}")


@pytest.mark.parametrize(
    ("name", "check", "finding"),
    [
        ("Forgets", "exact: workers equal one process on the joined batch", "2 workers against a plain loop"),
        ("Forgets", "synchronous: replicas are identical after an exchange", "replicas differ after an exchange"),
        ("Forgets", "exact: the order of data is independent of workers", "parameters differ by"),
        ("Even", "exact: workers equal one process on the joined batch", "parameters differ by"),
        ("Fragile", "uneven parts finish and lose no example", "ZeroDivisionError"),
        ("Chancy", "deterministic: the same seed gives the same bits", "same seed, same bits"),
        ("Amnesic", "deterministic: a resumed run gives the same bits", "bit for bit equal"),
        ("Uncounted", "bytes and times are accounted", "0 bytes sent by 2 workers"),
        ("Littering", "success leaves nothing behind", "segment offbeat-"),
        ("Littering", "a crash is named and leaves nothing behind", "segment offbeat-"),
        ("Littering", "a killed worker is named and leaves nothing behind", "segment offbeat-"),
        ("Abandoning", "success leaves nothing behind", "the end of processes"),
        ("Alone", "exact: statistics are summed over workers", "EM over workers against one"),
    ],
)
def test_a_broken_strategy_is_found(
    mine: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, name: str, check: str, finding: str
) -> None:
    monkeypatch.setattr(_checks, "DEADLINE", 1.0)
    strategy = strategy_of(mine, name)
    (chosen,) = (c for c in checks_for(strategy) if c.name == check)
    try:
        with bench(strategy, 2, launcher) as place, pytest.raises((AssertionError, OffbeatError), match=finding):
            chosen.run(place)
    finally:
        for segment in Path("/dev/shm").glob(f"offbeat-{mine.parent.name}-*"):
            segment.unlink()
        pids = Path(f"{mine}.pids")
        for pid in pids.read_text().split() if pids.exists() else ():
            os.kill(int(pid), signal.SIGKILL)


def test_what_traits_do_not_promise_is_not_demanded(mine: Path) -> None:
    mine.write_text(mine.read_text().replace("ALL = Traits(synchronous=True, exact=True,", "ALL = Traits("))
    names = {check.name.partition(":")[0] for check in checks_for(strategy_of(mine, "Right"))}
    assert "deterministic" in names
    assert not {"exact", "synchronous"} & names


def test_the_command_says_what_fails(
    mine: Path,
    launcher: Launcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    offbeat = in_process(launcher, tmp_path, monkeypatch, capsys)
    monkeypatch.setattr("offbeat.cli.commands.check.Launcher", lambda _preload: nullcontext(launcher))
    monkeypatch.setattr("offbeat.cli.commands.check.checks_for", lambda strategy: checks_for(strategy)[-2:])
    said = offbeat("check", "mine.py:Forgets")
    assert said.code == 1
    assert "FAILS  synchronous: replicas are identical" in said.out
    assert "holds  deterministic: a resumed run" in said.out
    assert "replicas differ after an exchange" in said.out
    assert "1 of 2 hold." in said.out
    answer = json.loads(offbeat("check", "mine.py:Forgets", "--format", "json").out)
    assert answer["failed"] == ["synchronous: replicas are identical after an exchange"]
    refused = offbeat("check", "mine.py:Nothing")
    assert (refused.code, refused.out) == (2, "")
    assert "Nothing" in refused.err


def test_a_port_that_stays_open_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "DEADLINE", 0.2)
    (tmp_path / "pid-0").write_text("999999999")
    before = traces()
    with socket.create_server(("127.0.0.1", 0)), pytest.raises(AssertionError, match="listening 0100007F:"):
        nothing_left(tmp_path, before)
    assert not [left for left in traces() - before if left.startswith("listening")]

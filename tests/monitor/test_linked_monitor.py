"""A run on hosts whose events travel over their own links only: judged live, and complete at the launcher."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cli_support import Offbeat, in_process, write
from sick_scripts.cases import SICK, script_of

import offbeat
from offbeat.monitor import EXIT_CODES, recorded
from offbeat.run.drive import Watcher
from offbeat.runtime.events.machines import machines_of
from offbeat.runtime.events.recorder import Mark
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher

pytestmark = pytest.mark.slow
HOSTS = '[[host]]\nname = "a"\n\n[[host]]\nname = "b"\n'


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    write(tmp_path / "hosts.toml", HOSTS)
    return in_process(launcher, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["early", "cycle"])
def test_a_sick_run_on_hosts_is_named_by_what_came_over_their_links(
    name: str, offbeat_: Offbeat, tmp_path: Path
) -> None:
    case, code = SICK[name], EXIT_CODES[SICK[name].kind]
    said = offbeat_("run", script_of(name), "--hosts", "hosts.toml", "--monitor")
    assert said.code == code, said.err
    explained = offbeat_("explain", "runs/latest")
    assert explained.code == code
    for word in (f"{case.kind}: ", *case.words):
        assert word in said.err
        assert word in explained.out
    machines = machines_of(tmp_path / "runs/latest")
    assert [(machine.name, machine.processes) for machine in machines] == [("a", ("worker 0",)), ("b", ("worker 1",))]
    assert all(machine.received and machine.lost == 0 for machine in machines)
    for machine in machines:
        assert machine.error is not None
        assert abs(machine.offset) <= machine.error, "hosts read the same clock"


class ForwarderKiller(Watcher):
    """Kills a forwarder once, when training is under way."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.killed = False

    def message(self, role: object, message: object) -> None:
        if not self.killed:
            self.killed = True
            self._launcher.kill("forwarder a")


def test_a_forwarder_that_is_killed_is_replaced_and_no_event_is_lost(launcher: Launcher, tmp_path: Path) -> None:
    watcher = ForwarderKiller(launcher)
    result = offbeat.fit(
        "offbeat.tasks.digits",
        "allreduce",
        hosts=Hosts.alike(2),
        steps=60,
        target=2.0,
        disturb="worker *: pace 15ms",
        out=tmp_path,
        watch=True,
        launcher=launcher,
        watcher=watcher,
    )
    assert watcher.killed
    (folder,) = [path.parent for path in tmp_path.glob("*/run.json") if not path.parent.is_symlink()]
    machines = {machine.name: machine for machine in machines_of(folder)}
    assert [machine.restarts for machine in machines.values()] == [1, 0]
    assert [machine.lost for machine in machines.values()] == [0, 0]
    events = recorded(folder)
    assert events.dropped == 0
    for own in events.stamps.values():
        assert [stamp.sequence for stamp in own if stamp.mark is Mark.STEP] == list(range(1, result.steps + 1))
        assert own[-1].mark is Mark.END
    assert msgspec.json.decode((folder / "run.json").read_bytes())["verdict"] is None

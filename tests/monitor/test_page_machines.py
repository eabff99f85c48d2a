"""What the page shows of a run on several machines."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from page_support import run_folder, sums

from offbeat.errors import UsageError
from offbeat.monitor.page.run_view import RunView
from offbeat.runtime.events.machines import FILE, MachineRecord, machines_of


def machine(name: str, *processes: str, ahead: float = 0.0) -> MachineRecord:
    return MachineRecord(name, processes, not ahead, ahead, 0.001, 0.002, 3, 40, 1, 0, 0.2)


def write(folder: Path, *machines: MachineRecord) -> None:
    (folder / "events" / FILE).write_bytes(msgspec.json.encode(machines))


def test_lanes_are_machine_by_machine_and_links_have_a_table(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", sums(5), workers=4)
    write(folder, machine("b", "worker 1", "worker 2"), machine("a", "worker 0", "worker 3"))
    view = RunView("run", folder)
    lanes = view.lanes()
    assert list(zip(lanes.machines, lanes.names, strict=True)) == [
        ("b", "worker 1"), ("b", "worker 2"), ("a", "worker 0"), ("a", "worker 3"),
    ]  # fmt: skip
    first, _ = view.summary()["machines"]
    assert (first["name"], first["clock"], first["waiting"], first["lost"]) == (
        "b",
        "+0 ms ± 1 ms, the same clock",
        3,
        1,
    )


def test_lanes_of_another_clock_are_moved_to_the_launchers(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", sums(5), workers=2)
    plain = RunView("run", folder).lanes()
    write(folder, machine("a", "worker 0"), machine("b", "worker 1", ahead=1000.0))
    moved = RunView("run", folder).lanes()
    assert moved.extents[0] == plain.extents[0]
    assert moved.extents[1][0] == pytest.approx(plain.extents[1][0] - 1000.0)


def test_a_damaged_list_of_machines_is_refused_with_its_name(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", sums(1))
    (folder / "events" / FILE).write_text('[{"name": 3}]')
    with pytest.raises(UsageError, match=r"machines.json is damaged"):
        machines_of(folder)

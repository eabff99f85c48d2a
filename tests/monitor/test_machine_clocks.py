"""Events of machines whose clocks differ, brought to one clock and drawn: no effect comes before its cause."""

from __future__ import annotations

import pytest
from msgspec import structs

from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.layout import lay_out
from offbeat.monitor.diagram.svg import svg
from offbeat.monitor.history import history_of
from offbeat.monitor.intake.clocks import aligned
from offbeat.runtime.events.machines import MachineRecord
from offbeat.runtime.events.recorder import About, Mark, Stamp

AHEAD = {0: 0.0, 1: 1234.5, 2: -77.25}
"""By how many seconds the clock of each worker's machine is ahead."""


def run(steps: int = 20) -> dict[int, list[Stamp]]:
    """Three workers that sum in every step and send a message around, each by its machine's clock."""
    stamps: dict[int, list[Stamp]] = {rank: [] for rank in AHEAD}
    total = About("world", "all_reduce", 3, 4, "float32", "sum")
    for step in range(1, steps + 1):
        for rank, own in stamps.items():
            sends = About("world", "send to", 3, peer=(rank + 1) % 3)
            receives = About("world", "receive from", 3, peer=(rank - 1) % 3)
            own += [
                Stamp(Mark.ENTER, total, step, step / 10 + rank / 1000),
                Stamp(Mark.EXIT, total, step, step / 10 + 0.010 + rank / 1000),
                Stamp(Mark.START, sends, step, step / 10 + 0.020),
                Stamp(Mark.EXIT, receives, step, step / 10 + 0.021 + 0.004 * (rank == 2)),
            ]
    return {
        rank: [structs.replace(stamp, time=stamp.time + AHEAD[rank]) for stamp in own] for rank, own in stamps.items()
    }


def machine(rank: int, error: float = 0.02, wrong: float = 0.015, comparable: bool = False) -> MachineRecord:
    """A machine whose link has shown its offset with that error, and was wrong by so much."""
    return MachineRecord(
        f"m{rank}", (f"worker {rank}",), comparable, AHEAD[rank] + wrong, error, 0.001, 0, 80, 0, 0, 0.1
    )


def test_machines_that_read_the_same_clock_are_left_alone() -> None:
    stamps = run()
    machines = [machine(rank, comparable=True) for rank in AHEAD]
    assert aligned(stamps, {}, machines) == (stamps, {}, machines)


def test_events_come_to_one_clock_and_no_arrow_goes_back_in_time() -> None:
    stamps, _, machines = aligned(run(), {}, [machine(0, comparable=True), machine(1), machine(2, wrong=-0.015)])
    for rank, known in enumerate(machines):
        assert known.error is not None
        assert abs(known.offset - AHEAD[rank]) <= known.error + 1e-9 or known.comparable
    assert all(known.error < 0.01 for known in machines[1:]), "what passed between them says more than the links"
    joined = history_of(stamps, tolerance=1.0)
    assert sum(1 for _ in joined.edges) > 100
    assert all(joined.event(effect).time >= joined.event(cause).time - 1e-9 for cause, effect in joined.edges)


def test_a_picture_says_where_each_lane_is_and_how_its_clock_was_brought_here() -> None:
    stamps, servers, machines = aligned(run(), {}, [machine(0, comparable=True), machine(1), machine(2)])
    diagram = Scene.of(stamps, servers=servers, machines=machines).diagram()
    assert diagram.machines[0] == "m0"
    assert diagram.machines[1].startswith("m1, clock +1,234.")
    assert diagram.arrows
    assert all(arrow.stop >= arrow.start - 1e-9 for arrow in diagram.arrows)
    picture = svg(lay_out(diagram))
    assert "m2, clock -77." in picture


@pytest.mark.parametrize("error", [None])
def test_without_a_known_offset_messages_alone_say_it(error: None) -> None:
    unknown = [structs.replace(machine(rank), offset=0.0, error=error) for rank in (1, 2)]
    _, _, machines = aligned(run(), {}, [machine(0, comparable=True), *unknown])
    for known in machines[1:]:
        rank = int(known.name[1:])
        assert known.error is not None
        assert abs(known.offset - AHEAD[rank]) <= known.error < 0.02

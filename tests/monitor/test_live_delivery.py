"""What is read while a run goes is judged in the order of time, once it is old enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat.monitor import LiveWatch, live
from offbeat.monitor.live import Listener
from offbeat.runtime.events.recorder import About, Mark, Recorder, events_file
from offbeat.runtime.launch import Role, RoleOutcome

WORLD = About("world", "barrier", 2)
OTHER = About("other", "barrier", 2)


def test_what_is_read_later_but_happened_before_comes_first() -> None:
    listener = Listener("ab", 1.0)
    listener.hear("a", 10.3, "effect", 10.5)
    listener.hear("b", 10.1, "cause", 10.5)
    listener.hear("b", 10.2, "another cause", 10.6)
    assert list(listener.due(11.0)) == []
    assert list(listener.due(11.25)) == [("b", "cause"), ("b", "another cause")]
    assert list(listener.due(float("inf"))) == [("a", "effect")]
    listener.hear("b", 10.25, "too late", 11.5)
    assert list(listener.due(11.5)) == [("b", "too late")], "nothing is lost"


class Watched:
    """A run of two workers that this process writes the events of."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(live.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(LiveWatch, "_with_stacks", lambda _, verdict: verdict)
        self.watch = LiveWatch(folder, 2)
        self._workers = [Recorder(events_file(folder, rank), rank) for rank in range(2)]

    def does(self, rank: int, mark: Mark, about: About, number: int = 1) -> None:
        worker = self._workers[rank]
        worker.stamp(int(mark), worker.name(about, lambda: about), number)
        self.now += 0.01

    def looks(self, after: float) -> str | None:
        self.now += after
        found = self.watch.look()
        return None if found is None else found.kind


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_a_deadlock_is_told_once_its_waits_are_old_enough(run: Watched) -> None:
    run.does(0, Mark.ENTER, WORLD)
    run.does(1, Mark.ENTER, OTHER)
    assert run.looks(live.AGE / 2) is None
    assert run.looks(live.EVERY) == "deadlock"


def test_who_has_ended_is_not_missed_where_its_last_entry_is_still_held_back(run: Watched) -> None:
    run.does(0, Mark.ENTER, WORLD)
    assert run.looks(live.EVERY) is None
    assert run.looks(live.EVERY) is None
    run.now += live.EVERY
    run.does(1, Mark.ENTER, WORLD)
    role = Role("worker", 1, entry="a:b", config={}, environment={}, log=Path())
    run.watch.ended(RoleOutcome(role, 0, signal=None, error=None))
    assert run.looks(0.0) is None
    assert run.looks(live.EVERY) is None, "it had come"
    run.does(0, Mark.EXIT, WORLD)
    run.does(0, Mark.ENTER, WORLD, 2)
    assert run.looks(live.EVERY) is None
    assert run.looks(live.EVERY) == "ended"


def test_after_a_failure_everything_is_judged_at_once(run: Watched) -> None:
    run.does(0, Mark.ENTER, WORLD)
    run.does(1, Mark.ENTER, OTHER)
    verdict, _ = run.watch.after_failure()
    assert verdict is not None
    assert verdict.kind == "deadlock"

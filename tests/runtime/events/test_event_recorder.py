"""Events in a mapped ring: what is written is read back, also after a kill, and what is lost is counted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.errors import UsageError
from offbeat.runtime.events.recorder import COMPUTING, INPUT, NAMES, RECORDS, UNKNOWN, About, Mark, Reader, Recorder

SUM = About("world", "all_reduce", 2, 1204224, "float32", "sum", caller="train.py:88")


def test_what_is_written_is_read_back_once_and_in_order(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.events", 3)
    name = recorder.name("sum", lambda: SUM)
    recorder.stamp(Mark.ENTER, name, 57)
    reader = Reader(tmp_path / "a.events")
    assert reader.rank == 3
    (entry,) = reader.new()
    assert (entry.mark, entry.about, entry.sequence) == (Mark.ENTER, SUM, 57)
    assert reader.new() == []
    recorder.stamp(Mark.EXIT, name, 57)
    recorder.stamp(Mark.END)
    leave, end = reader.new()
    assert (leave.mark, end.mark, end.about, reader.dropped) == (Mark.EXIT, Mark.END, None, 0)
    assert entry.time <= leave.time <= end.time


def test_what_was_written_over_is_counted_as_dropped(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.events", 0)
    reader = Reader(tmp_path / "a.events")
    for number in range(RECORDS + 100):
        recorder.stamp(Mark.STEP, 0, number)
    read = reader.new()
    assert [stamp.sequence for stamp in read] == list(range(100, RECORDS + 100))
    assert reader.dropped == 100


def test_what_was_kept_while_the_run_went_is_read_back_before_the_ring(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.events", 0)
    looker = Reader(tmp_path / "a.events")
    for number in range(2 * RECORDS):
        recorder.stamp(Mark.STEP, 0, number)
        if number % 10_000 == 0:
            looker.keep()
    reader = Reader(tmp_path / "a.events", kept=True)
    assert [stamp.sequence for stamp in reader.new()] == list(range(2 * RECORDS))
    assert (reader.dropped, reader.new()) == (0, [])


def test_time_is_of_one_kind_after_the_other(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.events", 0)
    assert recorder.turn(INPUT) == UNKNOWN
    assert recorder.turn(INPUT) == INPUT
    assert recorder.turn(COMPUTING) == INPUT
    turns = [(stamp.mark, stamp.sequence) for stamp in Reader(tmp_path / "a.events").new()]
    assert turns == [(Mark.TURN, INPUT), (Mark.TURN, COMPUTING)]


def test_when_names_run_out_what_is_named_is_named_less_exactly(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.events", 0)

    def named(size: int) -> int:
        return recorder.name(size, lambda: About("world", "all_reduce", 2, size, "float32", "sum"))

    numbers = [named(size) for size in range(NAMES + 10)]
    assert 0 not in numbers
    for number in (numbers[5], numbers[-1], numbers[-2]):
        recorder.stamp(Mark.ENTER, number)
    known, late, later = Reader(tmp_path / "a.events").new()
    assert known.about == About("world", "all_reduce", 2, 5, "float32", "sum")
    assert late.about == later.about == About("world", "all_reduce", 2, None, "float32", "sum")


def test_the_last_events_of_a_killed_process_can_be_read(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from offbeat.runtime.events.recorder import Mark, Recorder\n"
        "recorder = Recorder(Path(sys.argv[1]), 0)\n"
        "for number in range(5): recorder.stamp(Mark.STEP, 0, number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, tmp_path / "a.events"], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [stamp.sequence for stamp in Reader(tmp_path / "a.events").new()] == [0, 1, 2, 3, 4]


def test_files_that_hold_no_events_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.events").write_bytes(b"offbeat")
    with pytest.raises(UsageError, match="cannot be read as events"):
        Reader(tmp_path / "a.events")
    Recorder(tmp_path / "b.events", 0)
    with (tmp_path / "b.events").open("r+b") as file:
        file.write(b"offbeat9")
    with pytest.raises(UsageError, match="no events that this version"):
        Reader(tmp_path / "b.events")

"""From records to what the page draws: spans, waits that end when the last one comes, windows that put together."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_support import SUM

from offbeat.monitor.diagram.intervals import (
    COMMUNICATE,
    FAILED,
    INTERVAL,
    NO_CALL,
    STUCK,
    UNDER_WAY,
    WAIT,
    Window,
)
from offbeat.monitor.diagram.waits import FileLane, Names
from offbeat.monitor.page.run_view import LaneView
from offbeat.runtime.events.recorder import About, Mark, Reader, Recorder


class Written:
    """Two workers' events at times that the test chooses, read as the page reads them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        monkeypatch.setattr("offbeat.runtime.events.recorder.time.monotonic", lambda: self._now)
        self.names = Names()
        self._recorders = [Recorder(folder / f"worker-{rank}.events", rank) for rank in (0, 1)]
        self.lanes = [
            FileLane(f"worker {rank}", Reader(folder / f"worker-{rank}.events"), self.names) for rank in (0, 1)
        ]

    def at(self, now: float, rank: int, mark: Mark, sequence: int = 0, about: About | None = SUM) -> None:
        self._now = now
        recorder = self._recorders[rank]
        recorder.stamp(mark, 0 if about is None else recorder.name(about, lambda: about), sequence)

    def drawn(self, now: float | None = None) -> LaneView:
        for lane in self.lanes:
            lane.read()
        return LaneView(self.lanes, self.names, now)

    def pieces(self, now: float | None = None) -> list[tuple[int, int, float, float]]:
        found = self.drawn(now).intervals
        return sorted((int(p["lane"]), int(p["kind"]), float(p["start"]), float(p["stop"] - p["start"])) for p in found)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    return Written(tmp_path, monkeypatch)


def test_a_wait_lasts_until_the_last_one_comes_and_the_rest_is_communication(written: Written) -> None:
    written.at(1.0, 0, Mark.ENTER, 1)
    written.at(3.0, 1, Mark.ENTER, 1)
    written.at(4.0, 0, Mark.EXIT, 1)
    written.at(5.0, 1, Mark.EXIT, 1)
    assert written.pieces() == [(0, WAIT, 1.0, 2.0), (0, COMMUNICATE, 3.0, 1.0), (1, COMMUNICATE, 3.0, 2.0)]
    calls = written.drawn().intervals["call"]
    assert len(set(calls.tolist())) == 1


def test_what_is_not_waited_for_is_under_way_until_it_is(written: Written) -> None:
    for rank, begun in ((0, 1.0), (1, 1.5)):
        written.at(begun, rank, Mark.START, 1)
        written.at(2.0, rank, Mark.WAIT, 1)
        written.at(2.5, rank, Mark.EXIT, 1)
    assert written.pieces() == [
        (0, COMMUNICATE, 2.0, 0.5), (0, UNDER_WAY, 1.0, 1.0),
        (1, COMMUNICATE, 2.0, 0.5), (1, UNDER_WAY, 1.5, 0.5),
    ]  # fmt: skip


def test_a_beginning_and_its_end_are_found_over_several_looks(written: Written) -> None:
    written.at(1.0, 0, Mark.ENTER, 1)
    assert written.pieces(now=1.5) == [(0, WAIT, 1.0, 0.5)]
    written.at(2.0, 1, Mark.ENTER, 1)
    written.at(2.5, 1, Mark.EXIT, 1)
    assert written.pieces(now=2.75) == [(0, WAIT, 1.0, 1.0), (0, COMMUNICATE, 2.0, 0.75), (1, COMMUNICATE, 2.0, 0.5)]
    written.at(3.0, 0, Mark.EXIT, 1)
    assert written.pieces(now=9.0)[:2] == [(0, WAIT, 1.0, 1.0), (0, COMMUNICATE, 2.0, 1.0)]


def test_who_never_comes_out_is_stuck_and_who_fails_has_failed(written: Written) -> None:
    written.at(0.0, 1, Mark.STEP, about=None)
    written.at(1.0, 0, Mark.ENTER, 1)
    written.at(10.0, 1, Mark.STEP, about=None)
    assert written.pieces() == [(0, STUCK, 1.0, pytest.approx(9.3))]
    written.at(11.0, 0, Mark.FAIL, 1)
    assert written.pieces() == [(0, FAILED, 1.0, 10.0)]


def test_messages_are_joined_by_their_channel_whatever_they_are_called_on_either_side(written: Written) -> None:
    written.at(1.0, 1, Mark.ENTER, 1, About("world", "receive from", peer=0))
    written.at(2.0, 0, Mark.START, 1, About("world", "send to", peer=1))
    written.at(2.5, 0, Mark.EXIT, 1, About("world", "send to", peer=1))
    written.at(3.0, 1, Mark.EXIT, 1, About("world", "receive from", peer=0))
    assert written.pieces() == [(0, UNDER_WAY, 2.0, 0.5), (1, WAIT, 1.0, 1.0), (1, COMMUNICATE, 2.0, 1.0)]
    assert len(set(written.drawn().intervals["call"].tolist())) == 1
    said = [written.names.labels[label].numbered(1) for label in written.drawn().intervals["label"].tolist()]
    assert "send to worker 1 #1 of group world" in said


def test_who_was_last_is_counted_by_calls_of_several(written: Written) -> None:
    for number in range(1, 5):
        for rank in (0, 1):
            written.at(number + rank * 0.1 * (-1) ** (number == 4), rank, Mark.ENTER, number)
        for rank in (0, 1):
            written.at(number + 0.5, rank, Mark.EXIT, number)
    drawn = written.drawn()
    assert drawn.last_in.tolist() == [1, 3]
    assert drawn.often_last(0.75, 4) == ["worker 1"]
    assert drawn.often_last(0.75, 5) == []


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.floats(0, 100), st.floats(1e-4, 5)), min_size=1, max_size=200),
    st.floats(0, 90), st.floats(0.01, 100), st.integers(1, 50),
)  # fmt: skip
def test_a_window_keeps_the_time_that_was_spent_and_has_no_more_pieces_than_pixels(
    spans: list[tuple[int, float, float]], start: float, width: float, pixels: int
) -> None:
    some = np.zeros(len(spans), INTERVAL)
    some["lane"], some["start"], lengths = zip(*spans, strict=True)
    some["stop"], some["share"], some["count"] = some["start"] + lengths, 1.0, 1
    stop = start + width
    found = np.concatenate(Window(some, 2).seen(start, stop, pixels))
    whole = some[(some["start"] < stop) & (some["stop"] > start)]
    short = whole["stop"] - whole["start"] < width / pixels
    assert len(found) <= np.count_nonzero(~short) + 2 * pixels
    merged = found[found["call"] == NO_CALL]
    assert set(whole["lane"].tolist()) == set(found["lane"].tolist())
    if not len(merged):
        assert len(found) == len(whole)
    else:
        spent = (whole["stop"] - whole["start"])[short]
        shown = (merged["stop"] - merged["start"]) * merged["share"]
        assert shown.sum() == pytest.approx(spent.sum(), rel=1e-5)
        assert merged["count"].sum() == np.count_nonzero(short)
        assert merged["start"].min() >= start - 1e-9


def test_a_packed_window_is_read_back_column_by_column(written: Written) -> None:
    written.at(1.0, 0, Mark.ENTER, 1)
    written.at(2.0, 0, Mark.EXIT, 1)
    drawn = written.drawn()
    packed = drawn.packed(drawn.intervals, 1.0, 2.0)
    size = int.from_bytes(packed[:4], "little")
    assert (size + 4) % 8 == 0
    assert b'"lanes":["worker 0","worker 1"]' in packed[4 : 4 + size]
    assert b"(sum of float32 x 4) of group world, called at train.py:88" in packed[4 : 4 + size]
    assert np.frombuffer(packed, "<f8", 1, 4 + size).tolist() == [1.0]
    assert len(packed) == 4 + size + len(drawn.intervals) * (INTERVAL.itemsize - 1)  # Without `open`.


def test_more_records_than_a_ring_holds_are_counted_as_dropped(tmp_path: Path) -> None:
    recorders = [Recorder(tmp_path / f"worker-{rank}.events", rank) for rank in range(2)]
    for number in range(1, 20_001):
        for recorder in recorders:
            name = recorder.name("sum", lambda: SUM)
            recorder.stamp(Mark.ENTER, name, number)
            recorder.stamp(Mark.EXIT, name, number)
    names = Names()
    lanes = [FileLane(f"worker {rank}", Reader(tmp_path / f"worker-{rank}.events"), names) for rank in range(2)]
    assert [lane.read() for lane in lanes] == [True, True]
    assert [lane.reader.dropped for lane in lanes] == [40_000 - 32_768] * 2
    drawn = LaneView(lanes, names, time.monotonic())
    assert len(drawn.window(drawn.start, drawn.stop, 500)) <= 500 * 2 * 5 + 1000

"""Space-time diagrams: what is in their lanes, how windows and merging treat it, and what the pictures show."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from causal_support import computations, few, lines
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import UsageError
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.cuts import parse_cut, window
from offbeat.monitor.diagram.layout import lay_out
from offbeat.monitor.diagram.model import LOGICAL, MANY, SECONDS, Arrow, Diagram, Moment, Span
from offbeat.monitor.diagram.shapes import Rect
from offbeat.monitor.diagram.svg import save, svg
from offbeat.protocols.causality.cuts import is_consistent
from offbeat.protocols.causality.histories import Call, Computation, Event, EventKind, computation
from offbeat.runtime.events.recorder import About, Mark, Stamp

SUM = About("world", "all_reduce", 2, 4, "float32", "sum", caller="train.py:88")
SENT = About("world", "send to", peer=1)
RECEIVED = About("world", "receive from", peer=0)


def stamps(*rows: tuple[Mark, About | None, int, float]) -> list[Stamp]:
    return [Stamp(mark, about, sequence, time) for mark, about, sequence, time in rows]


def late_by_one() -> Scene:
    """Worker 1 enters a second after worker 0, which has begun its sum, worked on, and waited for it."""
    return Scene.of(
        {
            0: stamps(
                (Mark.STEP, None, 0, 100.0),
                (Mark.START, SUM, 1, 101.0),
                (Mark.WAIT, SUM, 1, 101.5),
                (Mark.EXIT, SUM, 1, 102.25),
                (Mark.END, None, 0, 103.0),
            ),
            1: stamps(
                (Mark.STEP, None, 0, 100.0),
                (Mark.ENTER, SUM, 1, 102.0),
                (Mark.EXIT, SUM, 1, 102.25),
                (Mark.END, None, 0, 103.0),
            ),
        },
        "one is late",
    )


def spans_of(lanes: Diagram, lane: int) -> list[tuple[str, float, float]]:
    return [(span.kind, span.start, span.stop) for span in lanes.spans if span.lane == lane]


def test_waiting_is_told_from_computing_and_from_the_exchange_itself() -> None:
    lanes = late_by_one().diagram()
    assert (lanes.names, lanes.axis, lanes.start, lanes.stop, lanes.origin) == (
        ("worker 0", "worker 1"),
        SECONDS,
        0.0,
        3.0,
        100.0,
    )
    assert spans_of(lanes, 0) == [
        ("compute", 0.0, 1.5),
        ("wait", 1.5, 2.0),
        ("communicate", 2.0, 2.25),
        ("compute", 2.25, 3.0),
    ]
    assert spans_of(lanes, 1) == [("compute", 0.0, 2.0), ("communicate", 2.0, 2.25), ("compute", 2.25, 3.0)]
    (band,) = lanes.bands
    assert band.label == "all_reduce #1 (sum of float32 x 4) of group world, called at train.py:88"
    assert [(stay.lane, stay.start, stay.stop) for stay in band.stays] == [(0, 1.0, 2.25), (1, 2.0, 2.25)]
    assert (band.last, band.missing) == (1, ())
    assert [(mark.lane, mark.kind) for mark in lanes.marks] == [(0, "step"), (0, "end"), (1, "step"), (1, "end")]


def test_who_never_came_is_missing_and_the_wait_is_open() -> None:
    scene = Scene.of({0: stamps((Mark.ENTER, SUM, 1, 5.0)), 1: stamps((Mark.END, None, 0, 7.0))})
    lanes = scene.diagram()
    assert lanes.spans == (Span(0, "stuck", 0.0, 2.0, str(lanes.bands[0].label), open=True),)
    assert lanes.bands[0].missing == (1,)
    assert lanes.bands[0].last is None
    assert "has never entered" in svg(lay_out(lanes))


def test_a_wait_that_failed_is_drawn_to_its_end() -> None:
    rows = {
        0: stamps((Mark.ENTER, SUM, 1, 5.0), (Mark.FAIL, SUM, 1, 9.0)),
        1: stamps((Mark.END, None, 0, 7.0)),
    }
    lanes = Scene.of(rows).diagram()
    assert lanes.stop == 4.0
    assert spans_of(lanes, 0) == [("failed", 0.0, 4.0)]
    assert Moment(0, "fail", 4.0, "failed: all_reduce #1") in lanes.marks


def test_an_entry_that_was_written_over_makes_nobody_missing() -> None:
    rows = {
        0: stamps((Mark.ENTER, SUM, 1, 5.0), (Mark.EXIT, SUM, 1, 6.0), (Mark.ENTER, SUM, 2, 7.0)),
        1: stamps((Mark.ENTER, SUM, 2, 6.5)),
    }
    scene = Scene.of(rows, dropped=3)
    lanes = scene.diagram()
    assert [band.missing for band in lanes.bands] == [(), ()]
    assert lanes.notes == ("3 older events were overwritten.",)
    assert ("wait", 0.0, 1.0) not in spans_of(lanes, 0)


def test_a_message_is_an_arrow_and_its_receipt_waits_until_it_is_sent() -> None:
    scene = Scene.of(
        {
            0: stamps(
                (Mark.STEP, None, 0, 0.5), (Mark.START, SENT, 1, 2.0), (Mark.WAIT, SENT, 1, 2.0),
                (Mark.EXIT, SENT, 1, 2.5),
            ),
            1: stamps(
                (Mark.STEP, None, 0, 0.5), (Mark.START, RECEIVED, 1, 1.0), (Mark.WAIT, RECEIVED, 1, 1.0),
                (Mark.EXIT, RECEIVED, 1, 2.5),
            ),
        }
    )  # fmt: skip
    lanes = scene.diagram()
    assert lanes.arrows == (Arrow(0, 1, 1.5, 2.0),)
    assert spans_of(lanes, 1) == [("compute", 0.0, 0.5), ("wait", 0.5, 1.5), ("communicate", 1.5, 2.0)]


def test_what_time_was_spent_on_is_shown_where_it_is_known() -> None:
    events = [Event(what="step", time=1.0), Event(what="step", time=3.0, spent={"input": 0.5, "compute": 1.0})]
    lanes = Scene(computation({"a": events})).diagram()
    assert spans_of(lanes, 0) == [("input", 0.0, 0.5), ("compute", 0.5, 1.5), ("other", 1.5, 2.0)]


@few
@given(computations(4, 60), st.integers(0, 3))
def test_spans_follow_each_other_and_every_collective_has_its_band(run: Computation, shift: int) -> None:
    lanes = Scene(run).diagram()
    by_lane = defaultdict[int, list[Span]](list)
    for span in lanes.spans:
        assert span.start < span.stop
        by_lane[span.lane].append(span)
    for some in by_lane.values():
        assert all(one.stop <= other.start for one, other in pairwise(some))
    entered = {(event.call.group, event.call.sequence) for history in run.histories for event in history if event.call}
    assert len(lanes.bands) == len(entered)
    received = sum(event.kind is EventKind.RECEIVE for history in run.histories for event in history)
    assert len(lanes.arrows) == received
    assert all(arrow.start <= arrow.stop for arrow in lanes.arrows)
    assert lanes.events == sum(run.lengths)
    part = Scene(run).diagram((float(shift), float(shift)))
    assert {(span.lane, span.start) for span in part.spans} <= {(span.lane, span.start) for span in lanes.spans}


@few
@given(computations(4, 40), st.randoms(use_true_random=False))
def test_a_line_crosses_each_lane_just_behind_what_it_holds(run: Computation, random: st.DataObject) -> None:
    scene = Scene(run)
    cut = tuple(random.randint(0, length) for length in run.lengths)  # pyright: ignore[reportAttributeAccessIssue]
    (line,) = scene.diagram(None, {"mine": cut}).cuts
    assert line.counts == cut
    assert line.consistent == is_consistent(run, cut)
    assert bool(line.words) == (not line.consistent)
    for times, time, count in zip(scene.times, line.times, cut, strict=True):
        assert np.all(times[:count] <= time)
        assert np.all(times[count:] >= time)


def many(pairs: int = 1200) -> Scene:
    """Two that meet very often."""
    members = ("a", "b")
    histories: dict[str, list[Event]] = {name: [] for name in members}
    for number in range(pairs):
        call = Call("world", number + 1, members)
        for late, name in enumerate(members):
            histories[name] += [
                Event(what="step", time=number + 0.2),
                Event(EventKind.ENTER, time=number + 0.4 + 0.2 * late, call=call),
                Event(EventKind.EXIT, time=number + 0.8, call=call),
            ]
    return Scene(computation(histories))


def test_too_many_are_merged_and_that_is_said_and_nothing_is_lost() -> None:
    scene = many()
    lanes = scene.diagram(shapes=200)
    assert len(lanes.spans) <= 400
    assert len(lanes.bands) <= 400
    whole = scene.diagram(shapes=10**6)
    assert sum(span.count for span in lanes.spans) == len(whole.spans)
    assert sum(band.count for band in lanes.bands) == len(whole.bands) == 1200
    assert sum(mark.count for mark in lanes.marks) == len(whole.marks)
    for kind in ("wait", "communicate", "compute"):
        merged = sum(
            (span.stop - span.start) * (span.mix.get(kind, 0.0) if span.mix else span.kind == kind)
            for span in lanes.spans
            if span.lane == 0
        )
        real = sum(span.stop - span.start for span in whole.spans if span.lane == 0 and span.kind == kind)
        assert merged == pytest.approx(real)
    assert any(span.kind == MANY for span in lanes.spans)
    assert "1,200 collectives" in lanes.notes[0]
    assert "drawn together" in svg(lay_out(lanes))
    near = scene.diagram((10.0, 20.0), shapes=200)
    assert near.notes == ()
    assert len(near.bands) == 10


def test_messages_too_many_are_merged_too() -> None:
    histories = {
        "a": [Event(EventKind.SEND, time=k, message=k) for k in range(1, 500)],
        "b": [Event(EventKind.RECEIVE, time=k + 0.5, message=k) for k in range(1, 500)],
    }
    lanes = Scene(computation(histories)).diagram(shapes=120)
    assert len(lanes.arrows) <= 120
    assert sum(arrow.count for arrow in lanes.arrows) == 499


def test_a_diagram_becomes_json_and_back() -> None:
    lanes = late_by_one().diagram(cuts={"latest": (3, 3)})
    assert msgspec.json.decode(msgspec.json.encode(lanes), type=Diagram) == lanes


def test_without_times_effects_are_right_of_their_causes() -> None:
    run = lines(3, 2, edges=[((0, 2), (1, 2))])
    lanes = Scene(run, "log").diagram()
    assert lanes.axis == LOGICAL
    assert lanes.arrows == (Arrow(0, 1, 2.0, 3.0, "0.2"),)
    assert Moment(1, "event", 3.0, "1.2") in lanes.marks
    assert lanes.spans == ()


def test_what_is_known_by_way_of_another_is_no_arrow_of_its_own() -> None:
    run = lines(1, 2, 1, edges=[((0, 1), (1, 1)), ((0, 1), (2, 1)), ((1, 1), (2, 1))])
    joined = computation(
        dict(zip(run.processes, run.histories, strict=True)),
        [*run.joins[:1], type(run.joins[0])((run.joins[0].causes[0], run.joins[2].causes[0]), run.joins[1].effects)],
    )
    assert [(arrow.source, arrow.target) for arrow in Scene(joined).diagram().arrows] == [(0, 1), (1, 2)]


# -- cuts and windows as they are asked for


def test_cuts_are_asked_for_in_four_ways() -> None:
    scene = late_by_one()

    def cut(text: str, stop: float = 3.0) -> tuple[int, ...]:
        return parse_cut(scene.run, scene.times, text, stop)

    assert scene.run.lengths == (4, 4)
    assert cut("latest") == (4, 4)
    assert cut("latest", 2.1) == cut("2.1s") == (2, 2)
    assert cut("1500ms") == (2, 1)
    assert cut("past worker 0:3") == (3, 2)
    assert cut("past worker 1:last") == (2, 4)
    assert cut("worker 1:1, worker 0:2") == (2, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("worker 0:2", "omits worker 1"),
        ("worker 0:2, worker 1:9", "is not a cut through"),
        ("worker 0:2, worker 2:1", "no process 'worker 2'"),
        ("lately", "'lately' in --cut 'lately' is not a count of events"),
        ("past worker 0:9", "has events 1 to 4, and no event '9'"),
    ],
)
def test_a_cut_that_is_none_is_refused(text: str, why: str) -> None:
    scene = late_by_one()
    with pytest.raises(UsageError, match=why):
        parse_cut(scene.run, scene.times, text, 3.0)


def test_windows_are_asked_for_by_their_ends() -> None:
    assert window("1s..2s", 0, 10) == (1, 2)
    assert window("500ms..", 0, 10) == (0.5, 10)
    assert window("..3", 1, 10) == (1, 3)
    for text in ("3s", "4s..3s", "a..b", "20s..30s"):
        with pytest.raises(UsageError, match=r"window|not a time"):
            window(text, 0, 10)


# -- pictures

SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_shows_lanes_waits_bands_and_cuts() -> None:
    lanes = late_by_one().diagram(cuts={"latest": (4, 4), "wrong": (3, 1)})
    root = ET.fromstring(svg(lay_out(lanes)))  # noqa: S314
    words = [text.text for text in root.iter(f"{SVG}text")]
    for word in ("one is late", "worker 0", "worker 1", "wait", "collective", "cut latest: consistent", "latest"):
        assert word in words
    assert any(text and text.startswith("cut wrong: not consistent: worker 0's event 3") for text in words)
    shapes = [shape.get("class") for shape in root.iter()]
    # One in each lane, and one in the legend.
    assert (shapes.count("wait"), shapes.count("communicate"), shapes.count("compute")) == (2, 3, 5)
    assert shapes.count("band") == 2
    assert (shapes.count("cut"), shapes.count("wrong-cut")) == (2, 2)


@pytest.mark.parametrize("count", [1, 2, 16, 64])
def test_lanes_of_any_number_fit_and_do_not_touch(count: int) -> None:
    run = computation(
        {f"worker {i}": [Event(what="step", time=1.0), Event(what="step", time=2.0)] for i in range(count)}
    )
    drawing = lay_out(Scene(run).diagram())
    bars = sorted(_heights(shape) for shape in drawing.inside if isinstance(shape, Rect) and shape.look == "compute")
    assert len(bars) == count
    assert all(one[1] + 4 < other[0] for one, other in pairwise(bars))
    top, bottom = _heights(drawing.plot)
    assert top <= bars[0][0]
    assert bars[-1][1] <= bottom <= drawing.height


def _heights(shape: Rect) -> tuple[float, float]:
    """Where a shape begins and ends, from top to bottom."""
    heights = [y for _, y in shape.points]
    return min(heights), max(heights)


def test_a_run_without_events_and_odd_names_can_be_drawn() -> None:
    assert ET.fromstring(svg(lay_out(Scene(computation({"a": []})).diagram()))) is not None  # noqa: S314
    odd = Scene(computation({"<a> & 'b'": [Event(what='"x" < $y$', time=1.0)]}), "]]> & <title>")
    assert "<a> & 'b'" in [text.text for text in ET.fromstring(svg(lay_out(odd.diagram()))).iter(f"{SVG}text")]  # noqa: S314


def test_pictures_are_saved_by_their_names(tmp_path: Path) -> None:
    lanes = late_by_one().diagram(cuts={"latest": (4, 4)})
    save(lanes, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == svg(lay_out(lanes))
    save(lanes, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(UsageError, match=r"a\.gif is not a name for a picture.*\.png, \.svg"):
        save(lanes, tmp_path / "a.gif")


def test_png_without_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UsageError, match=r"pip install 'offbeat\[draw\]'"):
        save(late_by_one().diagram(), tmp_path / "a.png")

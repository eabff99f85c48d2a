"""`offbeat explain` on logs of other programs, and its pictures, cuts and exports."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from causal_support import computations, few, lines, parse, places
from cli_support import Offbeat, in_process, write
from hypothesis import given

from offbeat.errors import UsageError
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.export import export, exported
from offbeat.monitor.foreign_log import account, longest_chain
from offbeat.protocols.causality.histories import Computation
from offbeat.protocols.causality.shiviz import ShivizLog
from offbeat.runtime.launch import Launcher

LOG = """\
client {"client": 1}
ask
server {"server": 1}
start
server {"server": 2, "client": 1}
heard the question
client {"client": 2}
wait
server {"server": 3, "client": 1}
answer
client {"client": 3, "server": 3}
heard the answer
"""


@pytest.fixture
def offbeat_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Offbeat:
    # Nothing is run, so no fork server is needed.
    return in_process(Launcher(()), tmp_path, monkeypatch, capsys)


def test_a_log_of_another_program_is_told_in_words(offbeat_: Offbeat, tmp_path: Path) -> None:
    said = offbeat_("explain", write(tmp_path / "a.log", LOG))
    assert said.code == 0
    assert said.out.splitlines() == [
        "2 processes, 6 events, 2 messages.",
        "Concurrent pairs of events of different processes: 4 (44% of 9).",
        "Clocks: consistent.",
        "Longest causal chain: 4 events, through client > server > client.",
        "Last events, the earliest first:",
        "  server: 3 events, others know of all of them; the last, at 3: answer",
        "  client: 3 events, others know of its first 1; the last, at 4: heard the answer",
    ]


def test_cuts_of_a_log_are_judged_drawn_and_exported(offbeat_: Offbeat, tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", LOG)
    good = offbeat_("explain", log, "--cut", "client:2, server:2", "--cut", "past server:2")
    assert good.code == 0
    assert "Cut client:2, server:2 (client:2, server:2): consistent." in good.out
    assert "Cut past server:2 (client:1, server:2): consistent." in good.out
    wrong = offbeat_("explain", log, "--cut", "client:3,server:2", "--picture", "a.svg", "--format", "json")
    assert wrong.code == 20
    told = json.loads(wrong.out)
    assert (told["events"], told["messages"], told["chain_events"], told["drawn"]) == (6, 2, 4, "a.svg")
    (cut,) = told["cuts"]
    assert not cut["consistent"]
    assert cut["words"].startswith("client's event 3 (local: heard the answer) is in the cut, but its cause is not")
    assert "heard the answer" in (tmp_path / "a.svg").read_text()
    for name, kind in (
        ("b.shiviz", None),
        ("b.perfetto", None),
        ("b.json", None),
        ("b.jsonl", None),
        ("b.txt", "jsonl"),
    ):
        assert offbeat_("explain", log, "--export", name, *(["--as", kind] if kind else [])).code == 0
    assert (tmp_path / "b.txt").read_text() == (tmp_path / "b.jsonl").read_text()
    assert parse((tmp_path / "b.shiviz").read_text()).computation.lengths == (3, 3)


@pytest.mark.parametrize(
    "text",
    [
        'ask\na {"a": 1}\nheard\nb {"b": 1, "a": 1}\n',
        'a {"a": 1} ask\nb {"b": 1, "a": 1} heard\n',
        'INFO a {"a": 1}\nask\nWARN b {"b": 1, "a": 1}\nheard\n',
        '1456966522871394967 a {"a": 1}\nask\n1456966522871394990 b {"b": 1, "a": 1}\nheard\n',
        '(?<event>.*)\\n(?<host>\\S*) (?<clock>{.*})\n\nask\na {"a": 1}\nheard\nb {"b": 1, "a": 1}\n',
    ],
)
def test_what_logs_are_often_like_is_known(text: str) -> None:
    run = parse(text).computation
    assert run.processes == ("a", "b")
    assert [event.what for history in run.histories for event in history] == ["ask", "heard"]
    assert len(list(run.edges)) == 1


def test_a_log_of_any_form_is_read_by_its_pattern(offbeat_: Offbeat, tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", 'at 3: a=>{"a":1} hello\nat 4: b=>{"b":1,"a":1} hi\n')
    assert offbeat_("explain", log).code == 2
    said = offbeat_("explain", log, "--pattern", r"at \d+: (?<host>\w+)=>(?<clock>{.*}) (?<event>.*)")
    assert said.code == 0
    assert said.out.startswith("2 processes, 2 events, 1 messages.")


SEVERAL = """\
(?<host>\\S*) (?<clock>{.*})\\n(?<event>.*)
^=== (?<trace>.*) ===$
=== first ===
a {"a": 1}
alone
=== second ===
a {"a": 1}
ask
b {"b": 1, "a": 1}
heard
"""


def test_of_several_executions_in_a_log_one_is_named(offbeat_: Offbeat, tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", SEVERAL)
    both = offbeat_("explain", log)
    assert both.code == 0
    assert [line for line in both.out.splitlines() if line.startswith(("Execution", "1 proc", "2 proc"))] == [
        "Execution first:",
        "1 processes, 1 events, 0 messages.",
        "Execution second:",
        "2 processes, 2 events, 1 messages.",
    ]
    told = json.loads(offbeat_("explain", log, "--format", "json").out)["executions"]
    assert [(one["execution"], one["events"]) for one in told] == [("first", 1), ("second", 2)]
    assert "pictures, cuts and exports are of one: name it" in offbeat_("explain", log, "--picture", "a.svg").err
    assert "has no execution 'third'" in offbeat_("explain", log, "--execution", "third").err
    assert offbeat_("explain", log, "--execution", "second").out.startswith("2 processes, 2 events, 1 messages.")
    with pytest.raises(UsageError, match=r"the clock in line 9 of the log knows of event 4 of 'a'"):
        parse(SEVERAL.replace('"b": 1, "a": 1', '"b": 1, "a": 4'), execution="second")


def test_a_pattern_that_would_never_end_is_given_up(
    offbeat_: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.cli.commands.explain.MATCHING", 0.2)
    pattern = r"(?<host>(a+)+) (?<clock>{.*}) (?<event>.*)"
    said = offbeat_("explain", write(tmp_path / "a.log", f"{pattern}\n\n{'a' * 200}\n"))
    assert said.code == 2
    assert "was given up after 0.2 s of computing" in said.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--window", "1..2"], "--window '1..2' is for a picture or a predicate: add --picture"),
        (["--as", "jsonl"], "--as jsonl is for an export: add --export"),
        (["--picture", "a.gif"], "a.gif is not a name for a picture"),
        (["--export", "a.doc"], "does not say as what to export"),
        (["--export", "a.doc", "--as", "perfeto"], "Did you mean 'perfetto'?"),
        (["--picture", "nowhere/a.svg"], "nowhere/a.svg cannot be written"),
        (["--cut", "client:1"], "omits server"),
        (["--picture", "a.svg", "--window", "50..60"], "window '50..60' holds nothing"),
    ],
)
def test_wrong_wishes_are_refused(offbeat_: Offbeat, tmp_path: Path, words: list[str], why: str) -> None:
    said = offbeat_("explain", write(tmp_path / "a.log", LOG), *words)
    assert said.code in (1, 2)
    assert why in said.err


def test_what_is_no_log_and_no_run_is_refused(offbeat_: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as a log" in offbeat_("explain", "a.bin").err
    assert "is not a run folder" in offbeat_("explain", "nowhere").err
    assert "--pattern is for logs" in offbeat_("explain", tmp_path, "--pattern", "x").err


@few
@given(computations(4, 40))
def test_pairs_and_chains_are_counted_rightly(run: Computation) -> None:
    if not all(run.lengths):
        return
    told = account(ShivizLog(run, ()))
    apart = [(a, b) for a in places(run) for b in places(run) if a < b and a.process != b.process]
    concurrent = [pair for pair in apart if not run.happened_before(*pair) and not run.happened_before(*pair[::-1])]
    assert (told.pairs, told.concurrent) == (len(apart), len(concurrent))
    chain = longest_chain(run)
    assert all(run.happened_before(one, other) for one, other in pairwise(chain))
    assert len(chain) == told.chain_events == max(int(clocks[-1]) for clocks in run.lamports)


def test_a_trace_of_a_log_without_times_has_logical_ones(tmp_path: Path) -> None:
    scene = Scene(lines(2, 1, edges=[((0, 1), (1, 1))]))
    trace = json.loads(exported(scene, "trace"))["traceEvents"]
    assert {(one["pid"], one["ts"]) for one in trace if one["ph"] == "X"} == {(0, 0.0), (0, 1000.0), (1, 1000.0)}
    with pytest.raises(UsageError, match="nothing is exported as 'csv'"):
        export(scene, tmp_path / "a.csv", "csv")


@few
@given(computations(4, 60))
def test_a_trace_has_slices_that_follow_each_other_and_flows_that_lead_on(run: Computation) -> None:
    scene = Scene(run)
    trace = json.loads(exported(scene, "perfetto"))["traceEvents"]
    assert [one["args"]["name"] for one in trace if one["name"] == "process_name"] == list(run.processes)
    tracks = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    begun, ended = dict[int, float](), dict[int, float]()
    for one in trace:
        if one["ph"] == "X":
            tracks[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
        elif one["ph"] in "sf":
            assert (one["ts"], one["ts"]) <= tracks[one["pid"], one["tid"]][-1], (
                "A flow holds on to the slice before it."
            )
            (begun if one["ph"] == "s" else ended)[one["id"]] = one["ts"]
    for slices in tracks.values():
        assert all(one[1] <= other[0] + 1e-6 for one, other in pairwise(slices))
    assert begun.keys() == ended.keys()
    assert all(begun[flow] <= ended[flow] for flow in begun)
    lanes = scene.diagram()
    held = 0
    for band in lanes.bands:
        came = [stay.start for stay in band.stays if stay.lane == band.last]
        held += sum(stay.lane != band.last and stay.stop >= came[0] for stay in band.stays) if came else 0
    assert len(begun) == len(lanes.arrows) + held
    stays = {phase: [one["id"] for one in trace if one["ph"] == phase] for phase in "be"}
    assert sorted(stays["b"]) == sorted(f"{i}.{stay.lane}" for i, band in enumerate(lanes.bands) for stay in band.stays)
    assert set(stays["b"]) - set(stays["e"]) == {
        f"{i}.{stay.lane}" for i, band in enumerate(lanes.bands) for stay in band.stays if stay.open
    }

"""ShiViz logs, read and written, and what else a computation is exported as."""

from __future__ import annotations

import json
import time

import pytest
from causal_support import computations, few, lines, parse, places
from hypothesis import given

from offbeat.errors import UsageError
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.export import chrome_trace
from offbeat.protocols.causality.cuts import is_consistent
from offbeat.protocols.causality.histories import (
    Call,
    Computation,
    Event,
    EventKind,
    EventPosition,
    computation,
    json_lines,
)
from offbeat.protocols.causality.shiviz import parse_all, write

LOG = """\
node0 {"node0": 1}
start
node0 {"node0": 2}
send request
node1 {"node1": 1}
start
node1 {"node0": 2, "node1": 2}
receive request
"""


@few
@given(computations(4, 30))
def test_what_is_written_is_read_back_with_the_same_order(run: Computation) -> None:
    if not all(run.lengths):
        return
    log = parse(write(run))
    assert log.completed == ()
    hosts = [name.replace(" ", "-") for name in run.processes]
    assert set(log.computation.processes) == set(hosts)
    moved = {i: log.computation.index(host) for i, host in enumerate(hosts)}
    for one in places(run):
        for other in places(run):
            read = log.computation.happened_before(
                EventPosition(moved[one.process], one.number), EventPosition(moved[other.process], other.number)
            )
            assert read == run.happened_before(one, other)


def test_a_log_is_a_computation_with_cuts() -> None:
    run = parse(LOG).computation
    assert run.processes == ("node0", "node1")
    assert [event.what for event in run.histories[1]] == ["start", "receive request"]
    assert list(run.edges) == [((0, 2), (1, 2))]
    assert not is_consistent(run, (1, 2))


def test_a_log_may_have_any_pattern_its_own_lines_in_any_order_and_fields_of_its_own() -> None:
    pattern = r"^\[(?<date>.*?)\] (?<host>\w+) (?<clock>{.*}) (?<event>.*)$"
    text = '[10:02] b {"a": 1, "b": 1} got it\n\n[10:01] b {"b": 2, "a": 1} done\n[10:00] a {"a": 1} sent it\n'
    run = parse(text, pattern).computation
    assert run.processes == ("b", "a")
    assert run.happened_before(EventPosition(1, 1), EventPosition(0, 1))
    assert run.event(EventPosition(0, 1)) == Event(what="got it", labels={"date": "10:02"})
    assert parse(f"{pattern}\n{text}").computation == run


def test_a_collective_is_read_back_as_one_join() -> None:
    run = exported()
    assert len(parse(write(run)).computation.joins) == len(run.joins) == 1


def test_clocks_that_leave_out_what_follows_are_completed_and_told() -> None:
    text = 'a {"a": 1}\nx\nb {"b": 1, "a": 1}\ny\nc {"c": 1, "b": 1}\nz\nb {"b": 2}\nw\n'
    log = parse(text)
    assert log.completed == (5, 7)
    assert log.computation.vector(EventPosition(2, 1)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no event in this log"),
        (LOG.replace('node0 {"node0": 2}', "node0 lost it"), "knows of event 2 of 'node0', of which the log has 1"),
        (LOG.replace('node0 {"node0": 1}', "node0 lost it"), "event 1 should be.*Line 1 fits no event"),
        (LOG.replace('{"node0": 2}', "{node0: 2}"), "clock in line 3 of the log.*is not JSON"),
        (LOG.replace('{"node0": 2}', '{"node0": "2"}'), "clock in line 3.*must have a count"),
        (LOG.replace('{"node0": 2}', '{"node0": -2}'), "clock in line 3.*must have a count"),
        (LOG.replace('{"node0": 2}', '{"node0": true}'), "clock in line 3.*must have a count"),
        (LOG.replace('{"node0": 2}', '{"node1": 2}'), "clock in line 3.*no entry for its own host 'node0'"),
        (LOG.replace('node0 {"node0": 1}', 'node0 {"node0": 3}'), "line 3 of the log is event 2 of 'node0', where its"),
        (LOG.replace('{"node0": 2}', '{"node0": 1}'), "line 3 of the log is event 1 of 'node0', where its event 2"),
        (LOG.replace('{"node0": 2, ', '{"node0": 7, '), "line 7 of the log knows of event 7 of 'node0'.*has 2"),
        (LOG.replace('{"node0": 2, ', '{"node9": 1, '), "line 7 of the log knows of event 1 of 'node9'.*has 0"),
        ('a {"a": 1, "b": 1}\nx\nb {"b": 1, "a": 1}\ny\n', "would have to happen before itself"),
    ],
)
def test_a_bad_log_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(text)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?<host>", "is not a regular expression"),
        ("(?<host>.*)", "does not say where to find clock"),
        ("(" * 5000 + ")" * 5000, "is not a regular expression: maximum recursion depth"),
        ("(?<host>a{99999999999})", "is not a regular expression: the repetition number is too large"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse(LOG, pattern)


def test_lines_that_fit_no_event_are_skipped_and_told() -> None:
    log = parse("\n\nwhat is this\n" + LOG + "garbage\n")
    assert log.skipped == (3, 12)
    assert log.computation == parse(LOG).computation


@pytest.mark.parametrize(
    "events",
    [
        # As Akka, TLA+ and programs with named threads write them.
        "[INFO] [10/13/2014 04:23:20.113] [app-dispatcher-4] [akka://App/user/{host}] {clock} {event}",
        'State 2: <{event} line 1, col 3 of module M>\n/\\ Host = {host}\n/\\ Clock = "{escaped}"\n/\\ x = (n :> 1)\n',
        "[2013-05-24 23:28:00,637 app.Store] INFO {event}\n{host} {clock}  ",
        "1456966522870845696 {event}\n{host} {clock}",
    ],
)
def test_what_shiviz_brings_along_is_read_without_a_pattern(events: str) -> None:
    told = (("n1", '{"n1":1, "n2":0}', "send"), ("n2", '{"n1":1, "n2":1}', "receive"))
    text = "\n".join(
        events.format(host=host, clock=clock, event=event, escaped=clock.replace('"', '\\"'))
        for host, clock, event in told
    )
    log = parse(text)
    assert log.computation.processes == ("n1", "n2")
    assert list(log.computation.edges) == [((0, 1), (1, 1))]
    assert [history[0].what.split()[-1] for history in log.computation.histories] == ["send", "receive"]
    assert log.skipped == ()


EXECUTIONS = '=== first ===\nask\na {"a":1}\n=== second ===\nask\na {"a":1}\nheard\nb {"a":1, "b":1}\n'


def test_executions_are_parted_as_in_logs_of_shiviz_or_as_is_said() -> None:
    assert [(name, log.computation.lengths) for name, log in parse_all(EXECUTIONS).items()] == [
        ("first", (1,)),
        ("second", (1, 1)),
    ]
    other = EXECUTIONS.replace("=== first ===", "--").replace("=== second ===", "--")
    assert list(parse_all(other, delimiter="^--$")) == ["1", "2"]
    assert list(parse_all(EXECUTIONS, execution="second")) == ["second"]
    with pytest.raises(UsageError, match="second execution called 'first'"):
        parse_all(EXECUTIONS.replace("second", "first"))


def test_executions_are_parted_whichever_way_their_events_are_written() -> None:
    text = '=== one ===\na {"a":1}\nask\n=== two ===\na {"a":1}\nask\nb {"a":1, "b":1}\nheard\n'
    found = parse_all(text)
    assert list(found) == ["one", "two"]
    for log in found.values():
        assert log.skipped == ()
        assert [log.computation.event(place).what for place in log.computation.order][:1] == ["ask"]


def test_a_pattern_may_refer_back_to_what_it_has_found() -> None:
    pattern = r"(?<mark>[ab]) (?<host>\k<mark>) (?<clock>{.*}) (?<event>.*)"
    assert parse('a a {"a":1} ask\nb b {"b":1, "a":1} heard\n', pattern).computation.lengths == (1, 1)


def test_a_line_that_only_looks_like_one_between_executions_is_skipped() -> None:
    (log,) = parse_all(f"=== begin ===\n{LOG}=== end ===\n").values()
    assert log.skipped == (1, 10)
    assert log.computation == parse(LOG).computation


@pytest.mark.parametrize(
    "line", ["a" * 100_000, "{ " * 50_000, '"' * 100_000, " " * 100_000 + "x", "a {" + '"' * 99_999]
)
@pytest.mark.parametrize("heading", ["", "(?<event>.*)\\n(?<host>\\S*) (?<clock>{.*})\n\n"])
def test_a_long_line_takes_no_longer_than_it_is_long(line: str, heading: str) -> None:
    began = time.process_time()
    log = parse(f'{heading}start\na {{"a": 1}}\n{line}\n')
    assert time.process_time() - began < 2.0
    assert log.computation.lengths == (1,)


def test_clocks_that_would_fill_the_memory_are_refused() -> None:
    with pytest.raises(UsageError, match="too many clocks"):
        parse("".join(f'h{i} {{"h{i}": 1}}\nx\n' for i in range(6000)))


def test_names_that_become_the_same_are_refused() -> None:
    with pytest.raises(UsageError, match="same name once spaces are hyphens"):
        write(computation({"a b": [Event()], "a-b": [Event()]}))


def test_words_of_several_lines_stay_one_event() -> None:
    assert write(computation({"a": [Event(what="two\nlines")]})) == 'a {"a": 1}\nlocal two lines\n'


def exported() -> Computation:
    call = Call("world", 1, ("a", "b"), "all_reduce", (4,), "float32")
    histories = {
        name: [
            Event(what="batch", time=10.0, spent={"input": 0.5}),
            Event(EventKind.ENTER, time=11.0 + i, call=call),
            Event(EventKind.EXIT, time=13.0, call=call),
        ]
        for i, name in enumerate(("a", "b"))
    }
    return computation(histories)


def test_a_trace_has_a_slice_for_each_span_and_a_flow_from_what_was_waited_for() -> None:
    trace = json.loads(json.dumps(chrome_trace(Scene(exported()).diagram())))["traceEvents"]
    by_phase = {phase: [record for record in trace if record["ph"] == phase] for phase in "MXbesf"}
    assert sum(map(len, by_phase.values())) == len(trace)
    assert {record["args"]["name"] for record in by_phase["M"] if record["name"] == "process_name"} == {"a", "b"}
    work = [record for record in by_phase["X"] if record["tid"] == 0]
    assert [(record["pid"], record["cat"], record["ts"], record["dur"]) for record in work] == [
        (0, "compute", 0.0, 1e6), (0, "wait", 1e6, 1e6), (0, "communicate", 2e6, 1e6),
        (1, "compute", 0.0, 2e6), (1, "communicate", 2e6, 1e6),
    ]  # fmt: skip
    stays = {record["id"]: record["ts"] for record in by_phase["b"]}
    assert stays == {"0.0": 1e6, "0.1": 2e6}
    assert {record["id"]: record["ts"] for record in by_phase["e"]} == {"0.0": 3e6, "0.1": 3e6}
    slices = {(record["pid"], record["tid"], record["ts"]) for record in by_phase["X"]}
    starts = {record["id"]: (record["pid"], record["tid"], record["ts"]) for record in by_phase["s"]}
    ends = {record["id"]: (record["pid"], record["tid"], record["ts"]) for record in by_phase["f"]}
    assert set(starts.values()) | set(ends.values()) <= slices
    # Both have left when b, the last, had entered.
    assert [(starts[number], ends[number]) for number in starts] == [((1, 1, 2e6), (0, 1, 3e6))]


def test_lines_of_json_say_everything_that_is_known() -> None:
    told = [json.loads(line) for line in json_lines(exported())]
    assert len(told) == 6
    exit_of_a = next(line for line in told if (line["process"], line["number"]) == ("a", 3))
    assert exit_of_a["vector"] == [3, 2]
    assert exit_of_a["lamport"] == 3
    assert exit_of_a["causes"] == [["b", 2]]
    assert exit_of_a["call"]["operation"] == "all_reduce"
    assert told[0] == {
        "process": "a", "number": 1, "kind": "local", "what": "batch", "time": 10.0, "spent": {"input": 0.5},
        "lamport": 1, "vector": [1, 0], "causes": [],
    }  # fmt: skip


def test_a_computation_without_events_is_exported_too() -> None:
    empty = lines(0, 0)
    assert write(empty) == ""
    assert list(json_lines(empty)) == []
    assert {record["ph"] for record in chrome_trace(Scene(empty).diagram())["traceEvents"]} == {"M"}

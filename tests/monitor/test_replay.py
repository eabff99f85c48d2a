"""A run replayed under a rule of delivery, and what held possibly and definitely, on made-up events and on a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_support import Offbeat, in_process

from offbeat.cli.commands.explain import ActionOptions
from offbeat.errors import UsageError
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.predicates import Possibilities, predicate
from offbeat.monitor.replay import RULES, replay
from offbeat.runtime.events.recorder import COMPUTING, INPUT, About, Mark, Stamp
from offbeat.runtime.launch import Launcher

Stamps = dict[int, list[Stamp]]


def lockstep(workers: int = 3, steps: int = 8) -> Stamps:
    """Workers that sum in every step; worker 0 comes first, the last one last."""
    about = About("world", "all_reduce", workers, 4, "float32", "sum")
    return {
        worker: [
            stamp
            for step in range(1, steps + 1)
            for stamp in (
                Stamp(Mark.TURN, None, COMPUTING, step / 100),
                Stamp(Mark.ENTER, about, step, step / 100 + 0.002 + worker / 1000),
                Stamp(Mark.EXIT, about, step, step / 100 + 0.007 + worker / 10_000),
                Stamp(Mark.STEP, None, step, step / 100 + 0.008 + worker / 10_000),
            )
        ]
        for worker in range(workers)
    }


def message(mark: Mark, operation: str, peer: int, number: int, time: float) -> Stamp:
    return Stamp(mark, About("world", operation, 2, peer=peer), number, time)


def ping_pong(rounds: int = 30) -> Stamps:
    """Two workers that send each other a message in turn, each waiting for the other's."""
    run: Stamps = {0: [], 1: []}
    for number in range(rounds):
        for turn, sender in enumerate((0, 1)):
            time, receiver = number * 0.006 + turn * 0.003, 1 - sender
            run[receiver].append(message(Mark.ENTER, "receive from", sender, number + 1, time))
            run[sender].append(message(Mark.START, "send to", receiver, number + 1, time + 0.001))
            run[receiver].append(message(Mark.EXIT, "receive from", sender, number + 1, time + 0.002))
    return run


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("run", [lockstep(), ping_pong()])
def test_rules_that_keep_cause_and_effect_give_an_order_that_the_run_can_have_had(run: Stamps, rule: str) -> None:
    seen = replay(run, rule=rule)
    assert seen.events == sum(map(len, run.values()))
    assert seen.overtaken > 0
    assert seen.consistent == (rule in ("time", "lamport", "vector")) == (not seen.example)
    assert (seen.held > 0, seen.longest > 0) == ((False, False) if rule == "arrival" else (True, True))
    assert (seen.probes > 0) == (rule == "lamport")
    assert seen.verdict is None


def test_arrival_order_shows_a_deadlock_that_a_consistent_cut_refutes() -> None:
    (phantom,) = replay(ping_pong(), rule="arrival").phantoms
    assert phantom.verdict.startswith("deadlock: worker 0 waits for worker 1 in receive from worker 1 #1 of group")
    assert phantom.refuted
    assert "which has none" in str(phantom)
    assert all(not replay(ping_pong(), rule=rule).phantoms for rule in ("time", "lamport", "vector"))


@pytest.mark.parametrize("rule", RULES)
def test_a_deadlock_that_is_true_is_seen_under_every_rule_and_is_no_phantom(rule: str) -> None:
    run = lockstep(2)
    for rank, group in enumerate(("one", "other")):
        run[rank].append(Stamp(Mark.ENTER, About(group, "barrier", 2), 1, 1.0))
    seen = replay(run, rule=rule)
    assert seen.verdict is not None
    assert seen.verdict.startswith("deadlock: worker 0 waits for worker 1 in barrier #1 of group one")
    assert seen.phantoms == ()


def test_a_consistent_cut_is_said_to_be_deadlocked_where_it_is() -> None:
    run = lockstep(2)
    for rank, group in enumerate(("one", "other")):
        run[rank].append(Stamp(Mark.ENTER, About(group, "barrier", 2), 1, 1.0))
    done = ActionOptions(cuts=("latest", "past worker 0:3")).done(Scene.of(run))
    waits = "worker 0 waits for worker 1 in barrier #1 of group one"
    told = f"{waits}; worker 1 waits for worker 0 in barrier #1 of group other."
    assert [line for line in done.lines if "Deadlocked" in line] == [f"  Deadlocked there: {told}"]
    assert done.plain["deadlocked"] == {"latest": told}


def test_clocks_that_do_not_agree_spoil_the_order_of_time_and_no_other() -> None:
    run = lockstep(2)
    run[1] = [Stamp(one.mark, one.about, one.sequence, one.time - 0.5) for one in run[1]]
    assert not replay(run, rule="time").consistent
    assert replay(run, rule="lamport").consistent
    assert replay(run, rule="vector").consistent


@pytest.mark.parametrize("rule", RULES)
def test_of_a_long_run_the_last_events_are_replayed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.monitor.replay.MOST", 40)
    seen = replay(lockstep(2, 20), rule=rule)
    assert (seen.events, seen.left_out) == (40, 120)
    assert seen.consistent == (rule in ("time", "lamport", "vector"))
    assert "120 older ones were left out" in seen.lines()[0]


@pytest.mark.parametrize(
    ("run", "text", "possibly", "definitely"),
    [
        (lockstep(), "all-waiting", "yes", "yes"),
        (lockstep(), "steps-apart>0", "yes", "yes"),
        (lockstep(), "steps-apart>1", "no", "no"),
        (lockstep(), "in-flight>0", "no", "no"),
        (ping_pong(4), "all-waiting", "yes", "no"),
        (ping_pong(4), "in-flight>0", "yes", "yes"),
        (ping_pong(4), "in-flight>1", "no", "no"),
    ],
)
def test_what_holds_on_some_and_on_every_way(run: Stamps, text: str, possibly: str, definitely: str) -> None:
    ways = Possibilities(run)
    assert [ways.ask(how, predicate(text)).answer for how in ("possibly", "definitely")] == [possibly, definitely]


def test_workers_that_need_not_have_stopped_computing_together() -> None:
    kinds = (COMPUTING, INPUT, COMPUTING)
    run = {rank: [Stamp(Mark.TURN, None, kind, time) for time, kind in enumerate(kinds)] for rank in range(2)}
    ways = Possibilities(run)
    assert ways.ask("possibly", predicate("nobody-computing")).answer == "yes"
    assert ways.ask("definitely", predicate("nobody-computing")).answer == "no"


def test_an_example_is_told_by_the_numbers_that_cuts_are_asked_for_by() -> None:
    told = str(Possibilities(lockstep(2)).ask("possibly", predicate("steps-apart>0")))
    assert told.startswith("possibly steps-apart>0: yes, for example at worker 0:")
    assert "worker 0:3 (step); worker 1:1 (enter all_reduce #1" in told or "worker 1:3 (step)" in told


def test_a_window_and_a_limit_bound_the_search() -> None:
    run = lockstep(2, 20)
    assert Possibilities(run, cap=50).ask("possibly", predicate("steps-apart>1")).limit == 50
    assert "the limit of 50 cuts was reached" in str(
        Possibilities(run, cap=50).ask("definitely", predicate("steps-apart>1"))
    )
    part = Possibilities(run, window=(0.15, 0.17), cap=50)
    assert part.ask("possibly", predicate("steps-apart>1")).answer == "no"
    assert "#15" in (part.ask("possibly", predicate("all-waiting")).cut or "")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("all-wating", "Did you mean 'all-waiting'"),
        ("step-apart>3", "Did you mean 'steps-apart>N'"),
        ("steps-apart", "Did you mean 'steps-apart>N'"),
        ("steps-apart>many", "needs a whole number"),
    ],
)
def test_an_unknown_predicate_is_refused_with_the_nearest(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        predicate(text)


@pytest.fixture
def offbeat_(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
def test_a_run_is_replayed_and_asked_about_by_the_command(offbeat_: Offbeat, tmp_path: Path) -> None:
    strategy = "server(consistency=ssp(2))"
    goal = ("--workers", "2", "--steps", "40", "--target", "2")
    ran = offbeat_("run", "offbeat.tasks.digits", "--strategy", strategy, *goal, "--monitor")
    assert ran.code == 0, ran.err
    told = {}
    for rule in RULES:
        asked = offbeat_("explain", "runs/latest", "--delivery", rule, "--delay", "5ms", "--format", "json")
        told[rule] = json.loads(asked.out)["delivery"]
    # Of the order of time nothing is promised: a worker notes a push after it has sent it, maybe a while after.
    assert not told["arrival"]["consistent"]
    assert not told["fifo"]["consistent"]
    assert told["lamport"]["consistent"]
    assert told["vector"]["consistent"]
    assert len({one["events"] for one in told.values()}) == 1
    said = offbeat_(
        "explain", "runs/latest", "--delivery", "vector", "--possibly", "steps-apart>0", "--definitely", "steps-apart>3"
    )
    assert "The order is consistent: no event comes before its cause." in said.out
    assert "possibly steps-apart>0: yes, for example at worker 0:" in said.out
    assert "definitely steps-apart>3: no." in said.out
    for words, why in (
        (("--delivery", "fifi"), "Did you mean 'fifo'"),
        (("--delivery", "fifo", "--delay", "0"), "give more than 0"),
        (("--delay", "5ms"), "add --delivery RULE"),
        (("--possibly", "in-fligt>2"), "Did you mean 'in-flight>N'"),
        (("--window", "1s..2s"), "add --picture FILE or --possibly"),
    ):
        refused = offbeat_("explain", "runs/latest", *words)
        assert refused.code == 2
        assert why in refused.err
    log = tmp_path / "other.log"
    log.write_text('a {"a": 1}\nbegins\n')
    refused = offbeat_("explain", log, "--delivery", "fifo")
    assert refused.code == 2
    assert "--delivery is for runs" in refused.err

"""Verdicts on events: what can never go on is told, in words, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec import structs

from offbeat.monitor import Judge, blame, held_up, late_steps, staleness, unfit
from offbeat.monitor.cpu_wait import FILE, QueueWriter, queued, read_queues
from offbeat.monitor.stragglers import STRETCH
from offbeat.runtime.events.process_state import seconds_without_core
from offbeat.runtime.events.recorder import COMPUTING, INPUT, About, Mark, Stamp
from offbeat.runtime.events.servers import GROUP, MEETINGS, WARM_START

WORLD = About("world", "all_reduce", 2, 4, "float32", "sum", caller="a.py:1")
OTHER = About("1", "barrier", 2, caller="a.py:2")


def at(mark: Mark, about: About | None = WORLD, sequence: int = 1, time: float = 0.0) -> Stamp:
    return Stamp(mark, about, sequence, time)


def fed(*histories: list[Stamp]) -> Judge:
    judge = Judge()
    for rank, history in enumerate(histories):
        judge.feed(rank, history)
    return judge


def test_two_who_wait_for_each_other_in_two_groups_are_deadlocked() -> None:
    judge = fed([at(Mark.ENTER, WORLD, 57)], [at(Mark.ENTER, OTHER, 12)])
    verdict = judge.final()
    assert verdict is not None
    assert verdict.kind == "deadlock"
    assert verdict.message == (
        "worker 0 waits for worker 1 in all_reduce #57 (sum of float32 x 4) of group world, called at a.py:1; "
        "worker 1 waits for worker 0 in barrier #12 of group 1, called at a.py:2."
    )
    assert verdict.missing == (0, 1)


@pytest.mark.parametrize("mover", [0, 1])
def test_who_has_moved_between_two_looks_is_not_judged(mover: int) -> None:
    judge = fed([at(Mark.ENTER, WORLD)], [at(Mark.ENTER, OTHER)])
    assert judge.final(moved={mover}) is None


def test_who_is_waited_for_and_does_not_wait_is_no_deadlock() -> None:
    assert fed([at(Mark.ENTER)], [at(Mark.STEP, None)]).final() is None
    assert fed([at(Mark.ENTER)], [at(Mark.START, OTHER)]).final() is None


def test_a_collective_that_all_have_entered_is_none_even_if_an_entry_was_lost() -> None:
    assert fed([at(Mark.ENTER, WORLD, 5)], [at(Mark.ENTER, WORLD, 6)]).final() is None


def test_an_operation_that_torch_waits_for_inside_is_told_when_the_other_has_ended() -> None:
    judge = fed([at(Mark.START, WORLD, 3)], [at(Mark.END, None)])
    verdict = judge.final()
    assert verdict is not None
    assert verdict.kind == "ended"
    assert "worker 0 waits for worker 1 in all_reduce #3" in verdict.message
    assert verdict.message.endswith("worker 1 has ended its program.")


def test_a_wait_that_failed_holds_until_the_worker_goes_on() -> None:
    failed = [at(Mark.ENTER, WORLD, 3), at(Mark.FAIL, WORLD, 3)]
    verdict = fed(failed, [at(Mark.END, None)]).final()
    assert verdict is not None
    assert verdict.kind == "ended"
    assert fed([*failed, at(Mark.STEP, None)], [at(Mark.END, None)]).final() is None


def test_nobody_waits_for_others_in_a_broadcast_that_it_is_the_root_of() -> None:
    shared = About("world", "broadcast", 2, 4, "float32", root=0)
    assert fed([at(Mark.ENTER, shared)], [at(Mark.END, None)]).final() is None
    verdict = fed([at(Mark.END, None)], [at(Mark.ENTER, shared)]).final()
    assert verdict is not None
    assert "worker 1 waits for worker 0 in broadcast #1" in verdict.message


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (About("world", "barrier", 2), "operation"),
        (About("world", "all_reduce", 2, 5, "float32", "sum"), "shape"),
        (About("world", "all_reduce", 2, 4, "float64", "sum"), "dtype"),
        (About("world", "all_reduce", 2, 4, "float32", "max"), "reduce"),
    ],
)
def test_calls_that_differ_are_told_at_entry(other: About, why: str) -> None:
    verdict = fed([at(Mark.START, WORLD)], [at(Mark.START, other)]).final()
    assert verdict is not None
    assert verdict.kind == "desync"
    assert verdict.message.endswith(f"different {why}.")


def message(what: str, peer: int, mark: Mark = Mark.WAIT, sequence: int = 1, tag: int = 0) -> Stamp:
    return at(mark, About("world", what, peer=peer, tag=tag), sequence)


def test_a_message_under_way_ends_a_wait() -> None:
    waits, answers = message("receive from", 1), message("receive from", 0)
    both = fed([waits], [answers]).final()
    assert both is not None
    assert both.kind == "deadlock"
    assert fed([message("send to", 1, Mark.START), waits], [answers]).final() is None
    other_tag = fed([message("send to", 1, Mark.START, tag=7), waits], [answers]).final()
    assert other_tag is not None


def test_two_who_wait_until_what_they_sent_is_taken_are_deadlocked() -> None:
    assert fed([message("send to", 1)], [message("send to", 0)]).final() is not None
    taken = [message("receive from", 0, Mark.START), message("send to", 0)]
    assert fed([message("send to", 1)], taken).final() is None
    from_anybody = [message("receive from", -1, Mark.START), message("send to", 0)]
    assert fed([message("send to", 1)], from_anybody).final() is None


def anybody(mark: Mark, sequence: int = 1, source: int = 0) -> Stamp:
    about = About("world", "receive from", 3, peer=-1)
    return Stamp(mark, about, sequence, 0.0, value=source)


def test_who_waits_for_anybody_is_stuck_only_if_nobody_can_send_any_more() -> None:
    barrier = at(Mark.ENTER, About("world", "barrier", 3))
    sent = message("send to", 0, Mark.START)
    starving = [anybody(Mark.START), anybody(Mark.EXIT, 1, source=2), anybody(Mark.WAIT, 2)]
    verdict = fed(starving, [sent, barrier], [barrier]).final()
    assert verdict is not None
    assert "worker 0 waits for any of worker 1, worker 2 in receive from anybody #2" in verdict.message
    under_way = [sent, message("send to", 0, Mark.START, 2), barrier]
    assert fed(starving, under_way, [barrier]).final() is None
    assert fed(starving, [sent, barrier], [at(Mark.STEP, None)]).final() is None


PULL = About(GROUP, "pull", 3, bound=3, words="ssp(3)")


def pushed(step: int, time: float = 0.0) -> Stamp:
    return Stamp(Mark.START, About(GROUP, "push"), step, time, step, 1)


def pull(mark: Mark, step: int, time: float = 0.0, about: About = PULL) -> Stamp:
    return Stamp(mark, about, step, time, step)


def view(epoch: int, workers: tuple[int, ...], servers: tuple[str, ...] = ("server 0.0",)) -> Stamp:
    return Stamp(Mark.VIEW, About(GROUP, "view", workers, servers=servers), epoch, 0.0)


def test_a_pull_waits_for_those_below_the_bound_and_a_meeting_for_those_who_have_not_come() -> None:
    ahead = [pushed(40), pull(Mark.WAIT, 41)]
    met = at(Mark.WAIT, About(MEETINGS, "meeting for the end", 3), 5)
    judge = fed(ahead, [pushed(36)], [pushed(37)])
    judge.feed_server([view(0, (0, 1, 2))])
    assert judge.final() is None
    assert judge.waiting()[0] == (
        "worker 0 waits for worker 1 in a pull of ssp(3) for step 41 (worker 1 has finished step 37)"
    )
    came = fed(ahead, [pushed(36), at(Mark.START, met.about, 5), met], [pushed(37)])
    came.feed_server([view(0, (0, 1, 2))])
    verdict = came.final()
    assert verdict is not None
    assert verdict.kind == "deadlock"
    assert "worker 0 waits for worker 1 in a pull of ssp(3) for step 41" in verdict.message
    assert "worker 1 waits for worker 0 in the meeting for the end (#5)" in verdict.message


def test_with_spare_workers_a_pull_waits_for_some_of_the_others_only() -> None:
    spared = About(GROUP, "pull", 3, bound=0, spare=1, words="drop_slowest(1)")
    judge = fed([pushed(4), pull(Mark.WAIT, 5, about=spared)], [pushed(3)], [pushed(3)])
    judge.feed_server([view(0, (0, 1, 2))])
    assert judge.waiting()[0].startswith("worker 0 waits for 1 of worker 1, worker 2 in a pull of drop_slowest(1)")
    enough = fed([pushed(4), pull(Mark.WAIT, 5, about=spared)], [pushed(4)], [pushed(3)])
    enough.feed_server([view(0, (0, 1, 2))])
    assert enough.waiting() == []


def test_the_dead_are_told_with_what_the_run_did_and_nobody_waits_for_them() -> None:
    judge = fed([pushed(40), pull(Mark.WAIT, 41)], [pushed(36)], [pushed(40)])
    judge.served.gone["worker 1"] = "was ended by signal 9"
    judge.feed_server([view(0, (0, 1, 2)), view(1, (0, 2), ("server 0.1",))])
    assert judge.waiting() == []
    verdict = judge.served.deaths()
    assert verdict is not None
    assert (verdict.kind, verdict.final, verdict.who) == ("dead", False, ("server 0.0", "worker 1"))
    assert "worker 1 was ended by signal 9 after step 37, and the run went on without it (worker 0, worker 2)" in str(
        verdict
    )
    assert "server 0.0 gave no sign of life and was declared dead, and server 0.1 has taken over" in str(verdict)


def test_who_has_left_or_was_replaced_is_not_mourned() -> None:
    judge = fed([pushed(3), at(Mark.LEAVE, None)], [pushed(3)])
    judge.feed_server([view(0, (0, 1)), view(1, (1,))])
    assert judge.served.deaths() is None
    waits = fed([pushed(40), pull(Mark.WAIT, 41)], [pushed(3)])
    waits.feed_server([view(0, (0, 1)), view(1, (0,)), view(2, (0, 1))])
    waits.reborn(1)
    assert waits.waiting() == []
    told = waits.served.deaths()
    assert told is not None
    assert "worker 1 gave no sign of life and was declared dead after step 4, and another has taken" in told.message


def test_reads_and_who_held_them_up() -> None:
    def read(step: int, old: int) -> Stamp:
        return Stamp(Mark.READ, About(GROUP, "read", shard=0), 1, 0.0, step, old)

    (told,) = staleness({0: [read(1, 0), read(2, 3), read(3, 3)], 1: []})
    assert (told.reads, told.worst, told.step) == ({0: 1, 3: 2}, 3, 2)
    waits = [pushed(40, 1.0), pull(Mark.WAIT, 41, 1.0), pull(Mark.EXIT, 41, 3.1)]
    (held,) = held_up({0: waits, 1: [pushed(37, 3.0)], 2: [pushed(37, 2.0)]})
    assert (held.worker, held.pulls, held.seconds) == ("worker 1", 1, pytest.approx(2.0))


def test_numbers_that_are_not_finite_are_traced_to_whom_they_reached() -> None:
    sick = Stamp(Mark.NAN, WORLD, 2, 1.9, 7)
    gives = [at(Mark.ENTER, WORLD, 1, 1.0), at(Mark.EXIT, WORLD, 1, 1.2), sick, at(Mark.ENTER, WORLD, 2, 2.0)]
    takes = [at(Mark.ENTER, WORLD, 1, 1.0), at(Mark.EXIT, WORLD, 1, 1.2), at(Mark.ENTER, WORLD, 2, 2.0)]
    (found,) = unfit({0: takes, 1: gives}, {})
    assert (found.worker, found.step, found.reached) == ("worker 1", 7, ())
    after = [at(Mark.EXIT, WORLD, 2, 2.2), Stamp(Mark.NAN, WORLD, 3, 2.5, 8)]
    (later,) = unfit({0: [*takes, *after], 1: [*gives, at(Mark.EXIT, WORLD, 2, 2.2)]}, {})
    assert (later.worker, later.reached) == ("worker 1", ("worker 0",))
    refused = Stamp(Mark.REFUSED, About(GROUP, "push refused", peer=2, shard=0, words="NaN"), 4, 1.0, 4)
    (push,) = unfit({}, {"server 0.0": [refused]})
    assert str(push) == (
        "worker 2 pushed numbers that are not fit to be used in step 4: server 0.0 refused its part (NaN), and it "
        "reached nobody"
    )


def test_who_is_silent_is_told_only_after_a_while() -> None:
    judge = fed([at(Mark.START, WORLD, 1, time=100.0)], [at(Mark.STEP, None)])
    assert judge.silent(now=105.0, patience=10.0) is None
    verdict = judge.silent(now=111.0, patience=10.0)
    assert verdict is not None
    assert (verdict.kind, verdict.missing) == ("silent", (1,))
    assert "worker 0 has waited 11 s for worker 1 in all_reduce #1" in verdict.message


def steps(delay: float) -> list[Stamp]:
    """Twenty steps of a worker that computes for `delay`, beside one that takes 0.3 s; an exchange takes 0.1 s."""
    found: list[Stamp] = []
    for number in range(20):
        began = number * 0.4
        found += [
            at(Mark.START, WORLD, number + 1, began + delay),
            at(Mark.EXIT, WORLD, number + 1, began + 0.4),
            at(Mark.STEP, None, number + 1, began + 0.4),
        ]
    return found


def test_the_straggler_is_named_and_what_a_step_would_take_without_it() -> None:
    first, second = blame({0: steps(0.1), 1: steps(0.3)})
    assert (first.worker, first.straggler, second.straggler) == ("worker 1", True, False)
    assert first.last == first.collectives
    assert first.seconds == pytest.approx(0.4, rel=0.1)
    assert first.without == pytest.approx(0.2, rel=0.15)


def by_kind(slow: float, count: int = 20) -> list[Stamp]:
    """Steps of 0.3 s of computing, after input that takes `slow`; all leave the exchange 0.6 s after they began."""
    found: list[Stamp] = []
    for number in range(1, count + 1):
        began = number * 0.6
        found += [
            at(Mark.STEP, None, number, began),
            at(Mark.TURN, None, INPUT, began),
            at(Mark.TURN, None, COMPUTING, began + slow),
            at(Mark.ENTER, WORLD, number, began + slow + 0.3),
            at(Mark.EXIT, WORLD, number, began + 0.59),
        ]
    return found


def test_lateness_is_split_into_kinds_step_by_step() -> None:
    stamps = {0: by_kind(0.02), 1: by_kind(0.25)}
    assert all((one.worker, one.kind) == ("worker 1", "input") for one in late_steps(stamps))
    worst = blame(stamps)[0]
    assert worst.by_kind["input"] == pytest.approx(0.23)
    assert worst.by_kind["computing"] == pytest.approx(0.0, abs=1e-9)
    assert str(worst).startswith(
        "worker 1 was last in 19 of 19 steps, by 230 ms in the mean: 230 ms input; the run lost"
    )
    assert "without it a step would take 37" in str(worst)
    assert worst.cause == "input"
    assert blame({0: by_kind(0.02), 1: by_kind(0.02)})[0].cause is None
    now_and_then = [*by_kind(0.03)[:70], *by_kind(0.28)[70:]]
    assert blame({0: by_kind(0.02), 1: now_and_then})[0].cause is None


def meeting(late: Mapping[int, Mapping[int, float]], workers: int = 2, count: int = 300) -> dict[int, list[Stamp]]:
    """Steps of 20 ms of which everybody leaves the exchange when the last has come; `late`: by worker and step."""
    found: dict[int, list[Stamp]] = {rank: [] for rank in range(workers)}
    group, now = structs.replace(WORLD, members=workers), 0.0
    for number in range(1, count + 1):
        came = {rank: now + 0.02 + late.get(rank, {}).get(number, 0.0) for rank in range(workers)}
        for rank, some in found.items():
            some += [at(Mark.STEP, None, number, now), at(Mark.ENTER, group, number, came[rank])]
            some += [at(Mark.EXIT, group, number, max(came.values()) + 0.001)]
        now = max(came.values()) + 0.002
    return found


NO_WAITS = {rank: [(0.0, 0.0), (1e6, 0.0)] for rank in range(3)}
"""Everybody had a core whenever it wanted one."""


def test_who_costs_the_run_much_is_the_straggler_however_seldom_it_is_last() -> None:
    often = dict.fromkeys(range(5, 300, 20), 0.15)  # 15 of 300 steps, 2.25 s of about 8.9 s.
    worst, *others = blame(meeting({1: often}, workers=3), queues=NO_WAITS)
    assert (worst.worker, worst.straggler, [one.straggler for one in others]) == ("worker 1", True, [False, False])
    assert worst.last < 0.5 * worst.steps
    assert worst.run_seconds_lost == pytest.approx(2.25, rel=0.1)
    assert worst.worker_seconds_lost == pytest.approx(4.5, rel=0.1)
    assert "the run lost 2.2" in str(worst)
    assert "and the others together waited 4.5 worker-seconds" in str(worst)
    told = worst.plain()
    assert (told["run_seconds_lost"], told["worker_seconds_lost"]) == (
        worst.run_seconds_lost,
        worst.worker_seconds_lost,
    )


@pytest.mark.parametrize(
    "late",
    [
        {0: dict.fromkeys(range(5, 300, 20), 0.15), 1: dict.fromkeys(range(15, 300, 20), 0.15)},
        {1: dict.fromkeys(range(5, 300, 20), 0.02)},
        {1: {150: 3.0}},
        {1: dict.fromkeys(range(150, 165), 0.2)},
    ],
    ids=["everybody alike", "little", "once", "in one spell"],
)
def test_what_all_do_what_costs_little_and_what_may_be_chance_makes_no_straggler(
    late: Mapping[int, Mapping[int, float]],
) -> None:
    assert not any(one.straggler for one in blame(meeting(late), queues=NO_WAITS))


def test_who_waited_for_a_core_is_not_blamed_for_it() -> None:
    stamps = meeting({1: dict.fromkeys(range(5, 300, 20), 0.15)})
    end = stamps[0][-1].time
    for waited, straggler in ((0.0, True), (2.2, False)):
        queues = {rank: [(0.0, 1.0), (end / 2, 1.0 + rank * waited / 2), (end, 1.0 + rank * waited)] for rank in (0, 1)}
        worst = blame(stamps, queues=queues)[0]
        assert worst.queued_seconds == pytest.approx(waited, abs=0.1)
        assert (worst.worker, worst.straggler) == ("worker 1", straggler)
    assert not blame(stamps)[0].straggler


def test_who_trains_alone_in_a_warm_start_is_not_blamed_for_it() -> None:
    alone = meeting({0: dict.fromkeys(range(1, 40), 0.1)}, count=40)
    assert blame(alone)[0].straggler
    wanted = About(MEETINGS, f"meeting for {WARM_START}", 2)
    assert (
        blame(
            {rank: [structs.replace(one, about=one.about and wanted) for one in some] for rank, some in alone.items()}
        )
        == []
    )


def test_waits_for_cores_are_written_and_read_and_damaged_ones_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    writer = QueueWriter(tmp_path)
    pids = {0: os.getpid(), 1: 2**22 + 1}
    for now in (1.0, 1.2, 3.0):  # The second is too soon.
        writer.note(now, pids, lambda rank: seconds_without_core(pids[rank]))
    found = read_queues(tmp_path)
    assert [time for time, _ in found[0]] == [1.0, 3.0]
    assert list(found) == [0]
    assert (queued(found, 0, 1.0, 3.0) or 0.0) >= 0.0
    assert queued(found, 1, 1.0, 3.0) is None
    (tmp_path / "events" / FILE).write_text("[1, {")
    assert not read_queues(tmp_path)


def test_a_long_run_is_blamed_over_all_of_it() -> None:
    count = STRETCH // 2
    slow_at_first = [*by_kind(0.25, count)[: 5 * (count * 4 // 5)], *by_kind(0.01, count)[5 * (count * 4 // 5) :]]
    worst = blame({0: by_kind(0.02, count), 1: slow_at_first})[0]
    assert worst.worker == "worker 1"
    assert worst.steps > count * 0.9
    assert worst.last == pytest.approx(0.8 * worst.steps, rel=0.05)


def test_a_step_on_servers_in_lockstep_is_blamed_like_a_collective() -> None:
    lockstep = About(GROUP, "pull", 2, bound=0, words="bsp")

    def run(computing: float) -> list[Stamp]:
        found: list[Stamp] = []
        for step in range(20):
            found += [
                at(Mark.STEP, None, step + 1, step + computing),
                pushed(step, step + computing),
                pull(Mark.WAIT, step + 1, step + computing, lockstep),
                pull(Mark.EXIT, step + 1, step + 0.95, lockstep),
            ]
        return found

    worst = blame({0: run(0.2), 1: run(0.9)})[0]
    assert (worst.worker, worst.straggler) == ("worker 1", True)


def test_milliseconds_of_a_short_run_make_no_straggler() -> None:
    brief = {
        worker: [structs.replace(stamp, time=stamp.time / 100) for stamp in stamps]
        for worker, stamps in {0: steps(0.1), 1: steps(0.3)}.items()
    }
    worst = blame(brief)[0]
    assert worst.run_seconds_lost == pytest.approx(0.038), "nearly half of the run, but 38 ms"
    assert not worst.straggler


def test_equals_are_no_stragglers() -> None:
    assert not any(one.straggler for one in blame({0: steps(0.299), 1: steps(0.3)}))
    assert blame({0: [at(Mark.STEP, None)], 1: [at(Mark.STEP, None)]}) == []

"""Faults that are asked for: understood or refused, the same with the same seed, and real on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import Offbeat, in_process, points, write
from fit_tasks import Watched
from launch_support import is_alive

from conftest import clean_environment, wait_until
from offbeat.errors import UsageError, WorkerError
from offbeat.protocols.disturbances import (
    BLOCK,
    FORMS,
    AtStep,
    Chance,
    Every,
    FaultPlan,
    KillFault,
    PaceFault,
    Pause,
    Poison,
    asked,
    chances,
    check,
    parse,
)
from offbeat.run.drive import Result, drive, fit
from offbeat.run.job import Job, Script
from offbeat.runtime.disturb import Disturber
from offbeat.runtime.launch import Control, Launcher, Role
from offbeat.runtime.run.settings import Goal
from offbeat.tasks.mixture import Mixture

Fit = Callable[..., Result]


@pytest.fixture
def learn(launcher: Launcher, tmp_path: Path) -> Fit:
    def run(task: Any, *args: Any, **options: Any) -> Result:
        return fit(task, *args, launcher=launcher, out=tmp_path / "runs", **options)

    return run


@pytest.fixture
def offbeat(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offbeat:
    return in_process(launcher, tmp_path, monkeypatch, capsys)


def recorded(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


# --- sentences


@pytest.mark.parametrize(
    ("text", "role", "rank", "action"),
    [
        ("worker 1: pause 200ms every 1s", "worker", 1, Pause(0.2, Every(1.0))),
        ("any worker: pause 200ms with probability 0.15", "worker", None, Pause(0.2, Chance(0.15))),
        ("worker 3: pause 2us with probability 1", "worker", 3, Pause(2e-6, Chance(1.0))),
        ("worker 2: kill at step 50", "worker", 2, KillFault(AtStep(50))),
        ("worker *: kill at step 0", "worker", None, KillFault(AtStep(0))),
        ("server 0: kill at step 50", "server", 0, KillFault(AtStep(50))),
        ("server 0: stop 5s at step 50", "server", 0, Pause(5.0, AtStep(50))),
        ("any server: stop .5s with probability 0", "server", None, Pause(0.5, Chance(0.0))),
        ("worker *: pace 40ms", "worker", None, PaceFault(0.04)),
        ("  Worker 1 :PACE  40 ms ", "worker", 1, PaceFault(0.04)),
    ],
)
def test_a_sentence_is_understood(text: str, role: str, rank: int | None, action: object) -> None:
    found = parse(text)
    assert (found.role, found.rank, found.text) == (role, rank, text.strip())
    if isinstance(action, KillFault):
        assert found.action == action
    else:
        assert isinstance(action, Pause | PaceFault)
        assert isinstance(found.action, type(action))
        assert found.action.seconds == pytest.approx(action.seconds)
        assert getattr(found.action, "when", None) == getattr(action, "when", None)


def test_a_data_server_has_a_name_of_two_words() -> None:
    parsed = parse("Data  server 1: kill at step 20")
    assert (parsed.role, parsed.rank, parsed.action) == ("data server", 1, KillFault(AtStep(20)))
    assert parse("any data server: pause 20ms with probability 0.5").rank is None
    with pytest.raises(UsageError, match="a data server computes no steps"):
        parse("data server *: pace 4ms")


@pytest.mark.parametrize(
    ("text", "rank", "poison"),
    [
        ("client 7: poison", 7, Poison("sign", 10.0)),
        ("client 7: poison(sign)", 7, Poison("sign", 10.0)),
        ("Client *: Poison ( noise , 2.5 )", None, Poison("noise", 2.5)),
        ("client 5: poison(labels)", 5, Poison("labels")),
        ("any client: poison(sign, 1) with probability 0.2", None, Poison("sign", 1.0, Chance(0.2))),
    ],
)
def test_a_poison_is_understood(text: str, rank: int | None, poison: Poison) -> None:
    parsed = parse(text)
    assert (parsed.role, parsed.rank, parsed.action) == ("client", rank, poison)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_that_errors_show_is_understood(form: str) -> None:
    assert parse(form).text == form


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "",
            "the sentence ends too early; what should come here is worker, server, client, data server, coordinator or "
            "any",
        ),
        (
            "bob 1: kill at step 3",
            "'bob' is not understood; what should come here is worker, server, client, data server, coordinator or any",
        ),
        (
            "any: kill at step 3",
            "':' is not understood; what should come here is worker, server, client, data server or coordinator",
        ),
        ("worker: pace 40ms", "':' is not understood; what should come here is the worker's number, or * for each"),
        ("worker -1: pace 40ms", "'-1' is not understood"),
        ("worker 1 kill at step 3", "'kill' is not understood; what should come here is ':'"),
        ("worker 1: pauze 1s", "'pauze' is not understood; what should come here is kill, pause, stop, pace or poison"),
        ("worker 1: kill", "the sentence ends too early; what should come here is 'at'"),
        ("worker 1: kill at 3", "'3' is not understood; what should come here is 'step'"),
        ("worker 1: kill at step x", "'x' is not understood"),
        ("worker 1: kill at step 3 twice", "'twice' is not understood; what should come here is the end"),
        ("worker 1: pause 200 every 1s", "'200' is not understood; what should come here is a time above 0"),
        ("worker 1: pause 0ms every 1s", "'0ms' is not understood"),
        ("worker 1: pause 1h every 1s", "'1h' is not understood"),
        ("worker 1: pause 1s", "the sentence ends too early; what should come here is every, with or at"),
        ("worker 1: pause 1s sometimes", "'sometimes' is not understood"),
        ("worker 1: pause 1s every 1s", "'1s' is not longer than the pause"),
        ("worker 1: pause 1s with probability 1.5", "'1.5' is not understood; what should come here is a probability"),
        ("worker 1: pause 1s with probability nan", "'nan' is not understood"),
        ("any worker: kill at step 3", "'any worker' is for what happens with a probability"),
        ("any worker: pause 1s every 2s", "'any worker' is for what happens with a probability"),
        ("server 0: pace 40ms", "a server computes no steps, so it has no pace"),
        ("worker 1: poison", "poison is for clients"),
        ("client 1: kill at step 3", "a client is not a process, so it can only poison"),
        ("client 1: poison(sgn)", "'sgn' is not understood; what should come here is sign, noise or labels"),
        ("client 1: poison(noise, 0)", "'0' is not understood; what should come here is a factor above 0"),
        ("client 1: poison(noise, nan)", "'nan' is not understood"),
        ("client 1: poison(noise, 1e7)", "'1e7' is not understood; what should come here is a factor above 0 and up"),
        ("client 1: poison(labels, 3)", "',' is not understood; what should come here is ')'"),
        ("client 1: poison(sign", "the sentence ends too early; what should come here is ')'"),
        ("client 1: poison with probability 0.5", "a probability is for 'any client'"),
        ("any client: poison", "'any client' is for what happens with a probability"),
    ],
)
def test_nonsense_is_refused_with_the_word_and_the_forms(text: str, why: str) -> None:
    with pytest.raises(UsageError) as refused:
        Goal(disturb=(text,))
    said = str(refused.value)
    assert f"--disturb {text!r}: {why}" in said
    assert all(form in said for form in FORMS)


def test_a_sentence_counts_once_for_each_process_it_is_about() -> None:
    cast = {"worker": 4, "server": 2}
    assert asked([parse("worker 1: kill at step 3")], cast) == 1
    assert asked([parse("worker *: pace 1ms"), parse("any server: stop 1s with probability 1")], cast) == 6


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("worker 2: kill at step 3", "there is no worker 2 in this run, workers 0 to 1"),
        ("server 1: kill at step 3", "there is no server 1 in this run, only server 0"),
    ],
)
def test_a_process_that_will_not_be_there_cannot_be_disturbed(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check([parse(text)], {"worker": 2, "server": 1})
    with pytest.raises(UsageError, match="this run has no servers"):
        check([parse("server *: kill at step 1")], {"worker": 2})


# --- what fires in which step


def fires(sentences: list[str], seed: int, role: str, rank: int, steps: int) -> list[list[int]]:
    plan = FaultPlan([parse(text) for text in sentences], role, rank, seed)
    return [[number for number, _ in plan.at(step)] for step in range(steps)]


def test_the_same_seed_gives_the_same_faults_and_another_gives_others() -> None:
    twice = ["any worker: pause 1ms with probability 0.3", "any worker: pause 1ms with probability 0.3"]
    steps = 2 * BLOCK
    first = fires(twice, 7, "worker", 0, steps)
    assert fires(twice, 7, "worker", 0, steps) == first
    assert fires(twice, 8, "worker", 0, steps) != first
    assert fires(twice, 7, "worker", 1, steps) != first
    assert [0 in fired for fired in first] != [1 in fired for fired in first]
    share = sum(0 in fired for fired in first) / steps
    assert 0.25 < share < 0.35


def test_the_order_in_which_steps_are_asked_for_does_not_matter() -> None:
    plan = FaultPlan([parse("any worker: pause 1ms with probability 0.5")], "worker", 3, 11)
    forwards = [bool(plan.at(step)) for step in range(3 * BLOCK)]
    assert [bool(plan.at(step)) for step in reversed(range(3 * BLOCK))] == forwards[::-1]
    drawn = np.concatenate([chances(11, "worker", 3, 0, block) for block in range(3)])
    assert (drawn < 0.5).tolist() == forwards


def test_a_fault_is_for_those_it_names() -> None:
    sentences = ["worker 1: kill at step 3", "server 1: stop 1s at step 3", "worker *: stop 1s at step 4"]
    assert fires(sentences, 0, "worker", 1, 6) == [[], [], [], [0], [2], []]
    assert fires(sentences, 0, "server", 1, 6) == [[], [], [], [1], [], []]
    assert fires(sentences, 0, "worker", 0, 6) == [[], [], [], [], [2], []]
    assert not FaultPlan([parse(sentences[0])], "server", 1, 0)


def test_of_several_paces_the_slowest_holds() -> None:
    plan = FaultPlan([parse("worker *: pace 40ms"), parse("worker 1: pace 80ms")], "worker", 1, 0)
    assert (plan.pace, plan.paces, plan.pauses) == (pytest.approx(0.08), [0, 1], False)


# --- one process


def walk(config: Mapping[str, Any], control: Control) -> None:
    """A role that takes steps under a disturber, and tells how long each beginning took."""
    sentences = [parse(text) for text in config["sentences"]]
    disturber = Disturber(sentences, config["role"], config["rank"], 5, control.send, config["fired"])
    if config["resumed"]:
        disturber.go_on_from(config["resumed"])
    guards = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    control.send({"kind": "guards", "pids": guards, "descriptors": [held(pid) for pid in guards]})
    ticks = Ticks()
    for number in config["steps"]:
        start = time.monotonic()
        disturber.step(number)
        end = time.monotonic()
        control.send({"kind": "step", "start": start, "end": end, "silence": ticks.longest_silence()})
    disturber.close()
    ticks.over.set()
    if guards:
        assert not is_alive(guards[0])
    for number in config["steps"]:
        disturber.step(number + 1000)


class Ticks(threading.Thread):
    """Ticks every millisecond, unless the whole process stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()
        self._last = time.monotonic()
        self._longest = 0.0
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.001):
            self._longest = max(self._longest, time.monotonic() - self._last)
            self._last = time.monotonic()

    def longest_silence(self) -> float:
        """The longest time without a tick since this was asked last."""
        time.sleep(0.005)
        longest, self._longest = self._longest, 0.0
        return longest


def held(pid: int) -> list[str]:
    """What the descriptors of a process are, once it runs its own program."""
    wait_until(lambda: b"_guard.py" in Path(f"/proc/{pid}/cmdline").read_bytes(), "the guard")
    return [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]


def walked(
    launcher: Launcher,
    folder: Path,
    sentences: list[str],
    numbers: list[int],
    kind: str = "worker",
    fired_before: Sequence[int] = (),
    resumed: int = 0,
) -> Any:
    """What such a role has said: what fired after how many steps, its steps, its guards; and how it failed."""
    said: list[dict[str, Any]] = []
    config = {"sentences": sentences, "role": kind, "rank": 0, "steps": numbers}
    config |= {"fired": list(fired_before), "resumed": resumed}
    role = Role(kind, 0, f"{__name__}:walk", config, {}, folder / "walk.log", 1)
    failure: WorkerError | None = None
    try:
        launcher.run([role], on_message=lambda _, message: said.append(message))
    except WorkerError as error:
        failure = error
    fired: list[tuple[int, int]] = []
    done = 0
    for message in said:
        done += message["kind"] == "step"
        if message["kind"] == "disturbed":
            fired.append((message["number"], done))
    steps = [message for message in said if message["kind"] == "step"]
    guards = next(message for message in said if message["kind"] == "guards")
    assert [pid for pid in guards["pids"] if is_alive(pid)] == []
    return fired, steps, guards, failure


def test_a_paused_step_begins_later_and_only_once(launcher: Launcher, tmp_path: Path) -> None:
    fired, steps, guards, failure = walked(launcher, tmp_path, ["worker 0: pause 150ms at step 2"], [0, 1, 2, 2, 3])
    assert failure is None
    assert fired == [(0, 2)]
    assert steps[2]["end"] - steps[2]["start"] >= 0.15
    assert steps[2]["silence"] >= 0.15
    assert len(guards["pids"]) == 1


def test_the_guard_holds_none_of_its_owners_sockets(launcher: Launcher, tmp_path: Path) -> None:
    _, _, guards, _ = walked(launcher, tmp_path, ["worker 0: pause 10ms at step 1"], [0])
    held_by_guard = set(guards["descriptors"][0])
    assert {what for what in held_by_guard if what.startswith("socket:")} == set()
    assert str(tmp_path / "walk.log") in held_by_guard


def test_what_a_servers_clock_jumps_over_still_happens(launcher: Launcher, tmp_path: Path) -> None:
    sentences = ["server 0: stop 20ms at step 3", "server 0: stop 30ms at step 5", "worker 0: kill at step 0"]
    fired, steps, _, failure = walked(launcher, tmp_path, sentences, [0, 2, 7, 8], kind="server")
    assert failure is None
    assert fired == [(0, 2), (1, 2)]
    assert steps[2]["end"] - steps[2]["start"] >= 0.05


def test_what_has_fired_before_in_the_same_place_does_not_fire_again_but_what_has_not_does(
    launcher: Launcher, tmp_path: Path
) -> None:
    sentences = ["worker *: pace 20ms", "worker 0: stop 10ms at step 2", "worker 0: stop 10ms with probability 1"]
    sentences += ["worker 0: kill at step 2", "worker 0: kill at step 3"]
    fired, steps, _, failure = walked(launcher, tmp_path, sentences, [2, 3, 4], fired_before=[0, 1, 2, 3])
    assert fired == [(2, 0), (2, 1), (4, 1)]
    assert failure is not None
    assert steps[0]["end"] - steps[0]["start"] >= 0.02, "the pace is kept, though it was counted before"


def test_what_was_to_happen_before_a_resumed_run_goes_on_does_not_happen(launcher: Launcher, tmp_path: Path) -> None:
    sentences = [f"server 0: stop 1ms at step {step}" for step in (3, 6, 7)]
    fired, _, _, failure = walked(launcher, tmp_path, sentences, [6, 7], kind="server", resumed=6)
    assert (fired, failure) == ([(1, 0), (2, 1)], None)


def test_who_joins_after_the_step_is_not_disturbed(launcher: Launcher, tmp_path: Path) -> None:
    fired, _, guards, failure = walked(launcher, tmp_path, ["worker 0: kill at step 3"], [4, 5])
    assert (fired, guards["pids"], failure) == ([], [], None)


def test_a_killed_process_tells_of_it_first_and_its_guard_goes_too(launcher: Launcher, tmp_path: Path) -> None:
    sentences = ["worker 0: pause 10ms every 20ms", "worker 0: kill at step 2"]
    fired, steps, guards, failure = walked(launcher, tmp_path, sentences, [0, 1, 2, 3])
    assert failure is not None
    assert "SIGKILL" in str(failure)
    assert "disturbed: worker 0: kill at step 2" in str(failure)
    assert len(steps) == 2
    assert [at for number, at in fired if number == 1] == [2]
    assert len(guards["pids"]) == 1


ORPHANING = """\
import os, time
from offbeat.protocols.disturbances import parse
from offbeat.runtime.disturb import Disturber

sentences = [parse("worker 0: stop 1s at step 9"), parse("worker 0: kill at step 1")]
disturber = Disturber(sentences, "worker", 0, 0, lambda message: None)
disturber.step(0)
guard = open(f"/proc/self/task/{os.getpid()}/children").read().strip()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(guard, child, flush=True)
disturber.step(1)
"""


def test_the_guard_dies_with_its_owner_though_others_hold_its_pipe() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANING], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        guard, child = map(int, owner.stdout.readline().split())
        try:
            assert owner.wait(60) == -signal.SIGKILL
            assert is_alive(child)
            wait_until(lambda: not is_alive(guard), "the end of the guard", 10)
        finally:
            os.kill(child, signal.SIGKILL)


def test_pauses_by_the_clock_come_on_top_of_the_pace(launcher: Launcher, tmp_path: Path) -> None:
    sentences = ["worker *: pace 50ms", "worker 0: pause 30ms every 100ms"]
    fired, steps, _, failure = walked(launcher, tmp_path, sentences, list(range(16)))
    assert failure is None
    assert fired[0] == (0, 0)
    pauses = sum(number == 1 for number, _ in fired)
    assert pauses >= 3
    # Swallowed by the sleeps, less than a third would be left of the pauses; the last may fall after the last step.
    assert steps[-1]["end"] - steps[0]["start"] >= 0.05 * 16 + 0.75 * 0.03 * (pauses - 1)
    assert max(step["silence"] for step in steps) >= 0.03


# --- runs


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "workers"), [("allreduce", 2), ("ddp", 2), ("single", 1)])
def test_pauses_slow_a_run_down_and_are_the_same_with_the_same_seed(learn: Fit, strategy: str, workers: int) -> None:
    sentence = "any worker: pause 50ms with probability 0.2"
    options: dict[str, Any] = {"workers": workers, "steps": 30, "seed": 3, "target": 2.0, "disturb": sentence}
    first = learn("offbeat.tasks.digits", strategy, **options)
    fired = [sum(map(bool, fires([sentence], 3, "worker", rank, 30))) for rank in range(workers)]
    assert first.disturbances == {"asked": workers, "fired": sum(fired)}
    assert sum(fired) > 0
    assert first.steps == 30
    assert first.seconds >= 0.05 * max(fired)
    again = learn("offbeat.tasks.digits", strategy, **options)
    assert again.disturbances == first.disturbances
    assert again.score == first.score
    plain = learn("offbeat.tasks.digits", strategy, **options | {"disturb": ()})
    assert plain.disturbances == {"asked": 0, "fired": 0}
    assert plain.score == first.score
    assert "disturbances" not in recorded(plain.run)


@pytest.mark.parametrize("strategy", ["allreduce", "ddp"])
def test_a_worker_is_killed_at_its_step_and_a_resumed_run_is_not(learn: Fit, tmp_path: Path, strategy: str) -> None:
    task = Watched(str(tmp_path), examples=24, batch=6)
    options: dict[str, Any] = {"workers": 2, "epochs": 3, "checkpoint_every": 2}
    with pytest.raises(WorkerError, match=r"worker 1 was ended by SIGKILL") as killed:
        learn(task, strategy, disturb="worker 1: kill at step 7", **options)
    assert killed.value.rank == 1
    assert "disturbed: worker 1: kill at step 7" in str(killed.value)
    assert len((tmp_path / "seen-1").read_text().splitlines()) == 7 * 3
    run = (tmp_path / "runs" / "latest").resolve()
    told = recorded(run)
    assert told["state"] == "failed"
    each = [{"sentence": "worker 1: kill at step 7", "fired": 1}]
    assert told["disturbances"] == {"asked": 1, "fired": 1, "each": each}
    resumed = learn(task, resume=run)
    assert (resumed.steps, resumed.disturbances) == (12, {"asked": 0, "fired": 0})


def test_a_fault_after_the_last_step_is_asked_for_but_does_not_fire(learn: Fit, tmp_path: Path) -> None:
    task = Watched(str(tmp_path), examples=24, batch=6)
    result = learn(task, "single", steps=4, disturb=["worker 0: kill at step 4"])
    assert (result.steps, result.disturbances) == (4, {"asked": 1, "fired": 0})


def test_a_paced_run_takes_at_least_the_pace_of_all_steps(learn: Fit, tmp_path: Path) -> None:
    task = Watched(str(tmp_path), examples=24, batch=6)
    result = learn(task, "allreduce", workers=2, steps=8, target=1e9, disturb="worker *: pace 40ms")
    assert result.steps == 8
    assert result.seconds >= 8 * 0.04
    assert result.disturbances == {"asked": 2, "fired": 2}


def test_an_accumulated_step_is_one_step(learn: Fit, tmp_path: Path) -> None:
    task = Watched(str(tmp_path), examples=24, batch=6)
    result = learn(task, "single + accumulate(2)", steps=4, disturb="worker 0: pause 1ms with probability 1")
    assert (result.steps, result.disturbances) == (4, {"asked": 1, "fired": 4})


def test_iterations_are_disturbed_too(learn: Fit) -> None:
    sentences = ["worker *: pace 20ms", "worker 0: stop 30ms at step 2"]
    result = learn(Mixture(examples=600), "allreduce", workers=2, steps=4, target=1e9, disturb=sentences)
    assert result.disturbances == {"asked": 3, "fired": 3}
    assert result.seconds >= 4 * 0.02 + 0.5 * 0.03


def test_a_loop_without_a_loader_steps_where_its_optimizer_does(launcher: Launcher, tmp_path: Path) -> None:
    script = write(
        tmp_path / "loop.py",
        """\
        import torch, offbeat

        with offbeat.init() as team:
            model = torch.nn.Linear(2, 1)
            model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()
        assert not optimizer._optimizer_step_post_hooks
        """,
    )
    goal = Goal(disturb=("worker *: pace 20ms", "worker 1: stop 30ms at step 3", "worker 0: kill at step 6"))
    result = drive(Job(Script(str(script)), goal, 2, 1, tmp_path / "runs"), launcher=launcher)
    assert (result.steps, result.disturbances) == (5, {"asked": 4, "fired": 3})
    assert result.seconds >= 5 * 0.02


def test_what_cannot_be_done_is_refused_before_anything_starts(offbeat: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "mine.py")
    for sentence, why in (
        ("worker 2: kill at step 3", "there is no worker 2 in this run"),
        ("server 0: kill at step 3", "this run has no servers"),
        ("monitor 0: kill at step 3", "'monitor' is not understood"),
    ):
        said = offbeat("run", "mine.py:Points", "--workers", "2", "--disturb", sentence)
        assert (said.code, said.out) == (2, "")
        assert why in said.err
    assert not (tmp_path / "runs").exists()


def test_the_command_says_what_fired(offbeat: Offbeat, tmp_path: Path) -> None:
    points(tmp_path / "mine.py")
    words = ("--disturb", "worker 0: pause 1ms with probability 1", "--disturb", "worker 0: pace 1ms")
    said = offbeat("run", "mine.py:Points", "--workers", "1", *words, "--steps", "3")
    assert said.code == 0, said.err
    assert "disturbances        4 fired, 2 asked for" in said.out


# --- an interrupt


def stopped(log: Path) -> list[int]:
    """Processes that are stopped and write into a log."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if status == "T" and (entry / "fd" / "2").readlink() == log:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def working_in(folder: Path) -> list[int]:
    """Processes that work in a folder, zombies aside."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink().is_relative_to(folder) and is_alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_ctrl_c_while_a_worker_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    points(tmp_path / "mine.py")
    words = ["run", "mine.py:Points", "--workers", "2", "--disturb", "worker 1: stop 100s at step 3"]
    with subprocess.Popen(
        [sys.executable, "-m", "offbeat", *words],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        latest = tmp_path / "runs" / "latest"
        wait_until(lambda: bool(stopped((latest / "logs" / "worker-1.log").resolve())), "a stopped worker")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    told = recorded(latest)
    assert told["state"] == "interrupted"
    assert told["disturbances"]["fired"] == 1
    wait_until(lambda: not working_in(tmp_path), "the end of all processes", 10)

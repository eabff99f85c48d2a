"""How runs of the launcher end: by failures, signals, Ctrl-C and kills, and that nothing is left of them."""

from __future__ import annotations

import dataclasses
import gzip
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import launch_entries
import pytest
from launch_support import MakeRole, Pids, is_alive, role_maker, run, wait_until

from offbeat.errors import CheckpointError, NonFiniteError, OffbeatError, RunError, WaitError, WorkerError
from offbeat.runtime.launch import Launcher, RemoteError, Role, RoleOutcome, _run, serve_store, worker_environment
from offbeat.runtime.launch._child import describe
from offbeat.runtime.launch._roles import cause_of


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as made:
        yield made


@pytest.fixture
def role(tmp_path: Path) -> MakeRole:
    return role_maker(tmp_path)


# Exceptions.


def test_an_exception_arrives_with_role_rank_and_traceback_within_two_seconds(
    launcher: Launcher, role: MakeRole
) -> None:
    raised_at: list[float] = []
    roles = [role(0, "sleep_well", kind="server"), role(1, "fail", raises="ValueError", text="bad digit")]
    with pytest.raises(WorkerError, match=r"worker 1 failed with ValueError: bad digit") as caught:
        launcher.run(roles, on_message=lambda _, message: raised_at.append(message.get("raised_at", 0.0)))
    assert time.monotonic() - max(raised_at) < 2.0
    assert (caught.value.role, caught.value.rank) == ("worker", 1)
    assert caught.value.remote_traceback.startswith("Traceback (most recent call last):")
    assert "in fail" in caught.value.remote_traceback
    assert "_child.py" not in caught.value.remote_traceback
    assert "ValueError: bad digit" in roles[1].log.read_text()


@pytest.mark.parametrize(
    ("raises", "text", "kind", "message"),
    [
        ("NonFiniteError", "the loss is nan", NonFiniteError, "worker 1: the loss is nan"),
        ("NonFiniteError", "the loss of worker 1 is nan", NonFiniteError, "the loss of worker 1 is nan"),
        ("OwnError", "of another run", CheckpointError, "worker 1: of another run"),
        ("WorkerError", "server 3 failed", WorkerError, "worker 1 failed with WorkerError: server 3 failed"),
    ],
)
def test_an_error_of_ours_is_raised_again_as_its_class(
    launcher: Launcher, role: MakeRole, raises: str, text: str, kind: type[OffbeatError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        run(launcher, role(1, "fail", raises=raises, text=text))
    assert type(caught.value) is kind
    assert str(caught.value).startswith(message)
    assert f"{text}\n" in vars(caught.value)["remote_traceback"]


def test_an_entry_that_does_not_exist_is_an_error_of_its_role(launcher: Launcher, role: MakeRole) -> None:
    with pytest.raises(WorkerError, match=r"worker 0 failed with AttributeError: .*no_such_function"):
        run(launcher, role(0, "no_such_function"))


@pytest.mark.parametrize("code", [0, None])
def test_a_role_that_exits_without_complaint_has_succeeded(
    launcher: Launcher, role: MakeRole, code: int | None
) -> None:
    outcomes, _ = run(launcher, role(0, "exit_with", code=code))
    assert outcomes[0].exit_code == 0


@pytest.mark.parametrize(("code", "expected"), [(3, "3"), ("a reason", "1")])
def test_an_exit_code_is_told_with_the_last_lines_of_the_log(
    launcher: Launcher, role: MakeRole, code: int | str, expected: str
) -> None:
    with pytest.raises(WorkerError, match=rf"worker 0 ended with exit code {expected}\.") as caught:
        run(launcher, role(0, "exit_with", code=code), role(1, "sleep_well"))
    assert "these were\nmy last words" in str(caught.value)
    assert expected == "3" or str(caught.value).endswith("a reason")


def test_an_exception_in_a_callback_ends_the_run_and_is_raised(launcher: Launcher, role: MakeRole) -> None:
    pids = Pids(1)

    def complain(role: Role, message: dict[str, Any]) -> None:
        pids(role, message)
        raise LookupError("no place for it")

    with pytest.raises(LookupError, match="no place for it"):
        launcher.run([role(0, "sleep_well")], on_message=complain)
    pids.assert_gone()


def test_a_forged_frame_ends_the_run(launcher: Launcher, role: MakeRole) -> None:
    with pytest.raises(RunError, match=r"worker 0 sent a message that cannot be read: A frame of 4,294,967,295"):
        run(launcher, role(0, "forge_a_frame"))


# Signals.


def test_a_killed_worker_ends_the_others_and_is_named(launcher: Launcher, role: MakeRole, tmp_path: Path) -> None:
    pids = Pids(3, go=tmp_path / "go")
    roles = [
        role(0, "sleep_well"),
        role(1, "kill_oneself", after=str(tmp_path / "go")),
        role(0, "sleep_well", kind="server"),
    ]
    with pytest.raises(WorkerError, match=r"worker 1 was ended by SIGKILL \(killed by .* out of memory\?\)") as caught:
        launcher.run(roles, on_message=pids)
    assert str(roles[1].log) in str(caught.value)
    pids.assert_gone()


def test_a_crash_in_native_code_leaves_its_stack_in_the_error(launcher: Launcher, role: MakeRole) -> None:
    with pytest.raises(WorkerError, match=r"worker 0 was ended by SIGSEGV") as caught:
        run(launcher, role(0, "crash_natively"))
    assert "crash_natively" in str(caught.value)


def test_the_others_reach_their_finally(launcher: Launcher, role: MakeRole, tmp_path: Path) -> None:
    marks = [tmp_path / "0", tmp_path / "1"]
    sleeping = [role(rank, "sleep_well", mark=str(mark)) for rank, mark in enumerate(marks)]
    pids = Pids(3, go=tmp_path / "go")
    with pytest.raises(WorkerError, match="worker 2"):
        launcher.run([*sleeping, role(2, "kill_oneself", after=str(tmp_path / "go"))], on_message=pids)
    assert all(mark.exists() for mark in marks)


def test_a_child_that_ignores_sigint_is_killed_after_the_grace(
    launcher: Launcher, role: MakeRole, tmp_path: Path
) -> None:
    pids = Pids(1, go=tmp_path / "go")
    roles = [role(0, "sleep_deaf"), role(1, "fail", raises="ValueError", text="over", after=str(tmp_path / "go"))]
    started = time.monotonic()
    with pytest.raises(WorkerError, match="worker 1"):
        launcher.run(roles, on_message=pids, grace=timedelta(seconds=0.3))
    assert time.monotonic() - started > 0.3
    pids.assert_gone()


def test_a_stopped_child_is_continued_to_clean_up_and_ends(launcher: Launcher, role: MakeRole, tmp_path: Path) -> None:
    pids = Pids(1)
    pid_file = tmp_path / "pid"

    def note(role: Role, message: dict[str, Any]) -> None:
        pids(role, message)
        (tmp_path / "part").write_text(str(message["pids"][0]))
        (tmp_path / "part").rename(pid_file)

    roles = [
        role(0, "stop_oneself", mark=str(tmp_path / "mark")),
        role(1, "fail_when_stopped", pid_file=str(pid_file)),
    ]
    with pytest.raises(WorkerError, match="worker 1 failed with ValueError: the other one is stopped"):
        launcher.run(roles, on_message=note)
    assert (tmp_path / "mark").exists()
    pids.assert_gone()


@pytest.mark.parametrize("how", ["return", "raise"])
def test_grandchildren_are_gone_when_the_run_is_over(launcher: Launcher, role: MakeRole, how: str) -> None:
    pids = Pids(3)
    with nullcontext() if how == "return" else pytest.raises(WorkerError):
        launcher.run([role(0, "leave_grandchildren", how=how)], on_message=pids)
    pids.assert_gone()


def test_the_processes_of_a_data_loader_go_with_their_role(launcher: Launcher, role: MakeRole) -> None:
    pids = Pids(3)
    with pytest.raises(WorkerError, match="SIGKILL"):
        launcher.run([role(0, "load_data")], on_message=pids)
    pids.assert_gone()


def test_exit_handlers_run_and_threads_are_waited_for(launcher: Launcher, role: MakeRole, tmp_path: Path) -> None:
    run(launcher, role(0, "end_with_handlers", handler=str(tmp_path / "h"), thread=str(tmp_path / "t")))
    assert (tmp_path / "h").exists()
    assert (tmp_path / "t").exists()


@pytest.mark.parametrize(("ends", "error"), [("return", None), ("exit", "exit code 3"), ("raise", "at the end")])
def test_a_pool_that_a_module_holds_ends_before_the_exit_handlers(
    launcher: Launcher, role: MakeRole, tmp_path: Path, ends: str, error: str | None
) -> None:
    with nullcontext() if error is None else pytest.raises(WorkerError, match=error):
        run(launcher, role(0, "hold_a_used_pool", order=str(tmp_path / "order"), ends=ends))
    assert (tmp_path / "order").read_text().splitlines() == ["last work of the pool", "exit handler"]


@pytest.mark.parametrize(
    ("entry", "waited_for"),
    [
        ("hang_at_exit", "an exit handler"),
        ("leave_a_thread_for_ever", r"thread 'uploader' \(launch_entries.py:\d+ in "),
    ],
)
def test_what_never_ends_at_the_end_of_a_role_is_named(
    launcher: Launcher, role: MakeRole, entry: str, waited_for: str
) -> None:
    hanging = dataclasses.replace(role(0, entry), patience=0.2)
    with pytest.raises(WaitError, match=rf"worker 0 had done its work .* 0\.2 s, because it waited for {waited_for}"):
        run(launcher, hanging)
    assert "most recent call first" in hanging.log.read_text()


def test_a_process_that_still_works_at_the_end_of_a_role_is_named_and_waited_for(
    launcher: Launcher, role: MakeRole, tmp_path: Path
) -> None:
    working = role(0, "leave_a_process_working", mark=str(tmp_path / "mark"))
    outcomes, messages = run(launcher, working)
    text = "worker 0 has done its work and waits for process 'exporter'."
    assert outcomes[0].exit_code == 0
    assert messages == [(0, {"kind": "lingering", "text": text})]
    assert text in working.log.read_text()
    assert (tmp_path / "mark").exists()


def test_files_that_are_left_open_are_written_out(launcher: Launcher, role: MakeRole, tmp_path: Path) -> None:
    run(launcher, role(0, "leave_files_open", text=str(tmp_path / "text"), archive=str(tmp_path / "archive.gz")))
    assert (tmp_path / "text").read_text() == "kept"
    assert gzip.decompress((tmp_path / "archive.gz").read_bytes()) == b"kept"


def test_a_role_that_is_stopped_for_too_long_is_ended_and_named(
    launcher: Launcher, role: MakeRole, tmp_path: Path
) -> None:
    stopped = dataclasses.replace(role(0, "stop_oneself", mark=str(tmp_path / "mark")), patience=0.3)
    with pytest.raises(WaitError, match=r"worker 0 was stopped \(SIGSTOP\) for longer than 0\.3 s and has been ended"):
        run(launcher, stopped, role(1, "greet"))
    borne = dataclasses.replace(stopped, expendable=True)
    outcomes, _ = run(launcher, borne, role(1, "greet"))
    assert [outcome.signal for outcome in outcomes] == [signal.SIGKILL, None]


# The cause among several.


def test_a_stock_script_reduces_under_our_environment(launcher: Launcher, role: MakeRole) -> None:
    store = serve_store()
    environments = [worker_environment(rank, 2, store.port) for rank in (0, 1)]
    _, messages = run(
        launcher,
        *(role(rank, "all_reduce_until_dead", environment=environments[rank], steps=6, dies=None) for rank in (0, 1)),
    )
    assert sorted(messages) == [(0, {"sum": 2.0}), (1, {"sum": 2.0})]


@pytest.mark.parametrize("dies", [0, 1])
def test_the_killed_worker_is_the_cause_and_not_its_peer_in_gloo(launcher: Launcher, role: MakeRole, dies: int) -> None:
    store = serve_store()
    environments = [worker_environment(rank, 2, store.port) for rank in (0, 1)]
    with pytest.raises(WorkerError, match=rf"worker {dies} was ended by SIGKILL"):
        run(
            launcher,
            *(role(rank, "all_reduce_until_dead", environment=environments[rank], dies=dies) for rank in (0, 1)),
        )


def test_a_complaint_about_a_peer_waits_for_a_better_explanation(launcher: Launcher, role: MakeRole) -> None:
    text = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    complaining = role(0, "fail", raises="RuntimeError", text=text)
    with pytest.raises(WorkerError, match="worker 1 failed with ValueError: the reason"):
        run(launcher, complaining, role(1, "fail", raises="ValueError", text="the reason", delay=0.15))
    with pytest.raises(WorkerError, match=r"worker 0 failed with RuntimeError: .*closed by peer"):
        run(launcher, complaining, role(1, "sleep_well"))


def test_the_first_failure_in_time_is_the_cause_and_a_death_is_dated_back(role: MakeRole) -> None:
    def raised(rank: int, at: float, communication: bool = False) -> RoleOutcome:
        error = RemoteError("ValueError", "text", "", None, communication, at)
        return RoleOutcome(role(rank, "greet"), error=error, at=at)

    killed = RoleOutcome(role(9, "greet"), signal=9, at=10.02)
    assert cause_of([raised(1, 12.0), raised(0, 11.0)]).role.rank == 0
    assert cause_of([raised(1, 10.0, communication=True), raised(0, 11.0)]).role.rank == 0
    assert cause_of([raised(1, 10.0), killed]) is killed
    assert cause_of([raised(1, 9.0), killed]).role.rank == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"), True),
        (WaitError("worker 1 did not come"), True),
        (ConnectionResetError("gone"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloomy"), False),
    ],
)
def test_errors_that_complain_of_a_peer_are_known(error: Exception, expected: bool) -> None:
    assert describe(error).communication is expected
    wrapped = KeyError("wrapped")
    wrapped.__cause__ = error
    assert describe(wrapped).communication is expected


# The end of the fork server and of the launcher itself.


def test_a_killed_fork_server_is_told_and_its_children_are_gone(role: MakeRole) -> None:
    pids = Pids(4)
    with Launcher(preload=()) as launcher:

        def kill_server(role: Role, message: dict[str, Any]) -> None:
            pids(role, message)
            if len(pids.all) == 4:
                assert launcher.server_pid is not None
                os.kill(launcher.server_pid, signal.SIGKILL)

        roles = [role(0, "leave_grandchildren", how="sleep"), role(1, "sleep_deaf")]
        with pytest.raises(RunError, match=r"The fork server, .* was killed by SIGKILL"):
            launcher.run(roles, on_message=kill_server)
        pids.assert_gone()
        outcomes, _ = run(launcher, role(0, "greet"))
        assert outcomes[0].exit_code == 0


def test_a_fork_server_that_dies_between_runs_is_told(role: MakeRole) -> None:
    with Launcher(preload=()) as launcher:
        run(launcher, role(0, "greet"))
        assert launcher.server_pid is not None
        os.kill(launcher.server_pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"was killed by SIGKILL"):
            run(launcher, role(0, "greet"))
        run(launcher, role(0, "greet"))


def test_a_fork_server_that_does_not_answer_is_waited_for_until_a_deadline(
    role: MakeRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_run, "FORK_DEADLINE", 0.3)
    monkeypatch.setattr(_run, "KILL_DEADLINE", 0.3)
    with Launcher(preload=()) as launcher:
        run(launcher, role(0, "greet"))
        assert launcher.server_pid is not None
        os.kill(launcher.server_pid, signal.SIGSTOP)
        with pytest.raises(WaitError, match=r"did not start worker 0, worker 1 within 0\.3 s"):
            run(launcher, role(0, "greet"), role(1, "greet"), grace=timedelta(seconds=0.1))
        run(launcher, role(0, "greet"))


@contextmanager
def program(folder: Path, entry: str, grace: float = 1.0) -> Iterator[tuple[subprocess.Popen[bytes], int, list[int]]]:
    """A program with a launcher and two roles that have started: itself, its store's port, its processes."""
    arguments = [sys.executable, launch_entries.__file__, str(folder), entry, str(grace)]
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until((folder / "started").exists, "the program's roles")
            port, *pids = map(int, (folder / "started").read_text().split())
            assert all(is_alive(pid) for pid in pids)
            yield process, port, pids
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_leave_no_process(tmp_path: Path, number: signal.Signals) -> None:
    with program(tmp_path, "sleep_well") as (process, _, pids):
        process.send_signal(number)
        # Python ends itself by SIGINT when nobody catches KeyboardInterrupt.
        assert process.wait(20) == -signal.SIGINT
        assert not any(is_alive(pid) for pid in pids)


def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with program(tmp_path, "sleep_deaf", grace=100.0) as (process, _, pids):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT
        assert not any(is_alive(pid) for pid in pids)


def test_a_killed_launcher_leaves_no_process_no_port_and_no_shared_memory(tmp_path: Path) -> None:
    shared = set(Path("/dev/shm").iterdir())
    with program(tmp_path, "leave_grandchildren") as (process, port, pids):
        assert len(pids) == 7
        socket.create_connection(("127.0.0.1", port)).close()
        process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of all processes")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
        assert set(Path("/dev/shm").iterdir()) <= shared


# Roles that serve, and roles that may die.


def test_who_serves_is_ended_when_the_others_are_done(launcher: Launcher, role: MakeRole, tmp_path: Path) -> None:
    server = dataclasses.replace(role(0, "sleep_well", kind="server"), serves=True)
    ended: list[str] = []
    outcomes, _ = run(launcher, server, role(0, "greet"), on_end=lambda outcome: ended.append(str(outcome.role)))
    assert ended == ["worker 0", "server 0"]
    assert [outcome.exit_code for outcome in outcomes if not outcome.role.serves] == [0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGSEGV])
def test_a_run_goes_on_without_an_expendable_role(
    launcher: Launcher, role: MakeRole, tmp_path: Path, number: signal.Signals
) -> None:
    killed = tmp_path / "killed"
    dying = dataclasses.replace(role(0, "kill_oneself", signal=int(number)), expendable=True)
    staying = dataclasses.replace(role(1, "await_file", path=str(killed)), expendable=True)
    outcomes, _ = run(launcher, dying, staying, on_end=lambda _: killed.touch())
    assert [(outcome.exit_code, outcome.signal) for outcome in outcomes] == [(None, number), (0, None)]


def test_an_exit_code_ends_the_run_unless_its_role_only_serves(
    launcher: Launcher, role: MakeRole, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    waiting = role(1, "await_file", path=str(ended))
    server = dataclasses.replace(role(0, "exit_with", kind="server", code=5), serves=True, expendable=True)
    run(launcher, server, waiting, on_end=lambda _: ended.touch())
    worker = dataclasses.replace(role(0, "exit_with", code=5), expendable=True)
    with pytest.raises(WorkerError, match="worker 0 ended with exit code 5"):
        run(launcher, worker, role(1, "sleep_well"))


def test_an_exit_code_is_told_though_others_fail_of_it_before_its_process_has_ended(
    launcher: Launcher, role: MakeRole, tmp_path: Path
) -> None:
    leaving = role(0, "exit_slowly", path=str(tmp_path / "leaving"))
    deserted = role(1, "fail", raises="WaitError", text="worker 0 has left", after=str(tmp_path / "leaving"))
    with pytest.raises(WorkerError, match="worker 0 ended with exit code 5") as caught:
        run(launcher, leaving, deserted)
    assert caught.value.exit_code == 5


def test_a_role_is_called_by_its_name(launcher: Launcher, role: MakeRole) -> None:
    failing = dataclasses.replace(role(3, "fail", kind="server", raises="ValueError", text="bad"), name="server 1.1")
    with pytest.raises(WorkerError, match=r"^server 1\.1 failed with ValueError: bad") as caught:
        run(launcher, failing)
    assert (caught.value.name, caught.value.rank) == ("server 1.1", 3)


def test_a_run_in_which_all_have_died_has_failed(launcher: Launcher, role: MakeRole) -> None:
    dying = [dataclasses.replace(role(rank, "kill_oneself"), expendable=True) for rank in range(2)]
    server = dataclasses.replace(role(0, "sleep_well", kind="server"), serves=True, expendable=True)
    with pytest.raises(WorkerError, match="was ended by SIGKILL"):
        run(launcher, server, *dying)


def test_a_death_that_was_borne_is_not_the_cause_of_a_later_failure(
    launcher: Launcher, role: MakeRole, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    dying = dataclasses.replace(role(0, "kill_oneself"), expendable=True)
    server = dataclasses.replace(role(0, "kill_oneself", kind="server"), serves=True, expendable=True)
    failing = role(1, "fail", raises="ValueError", text="bad digit", after=str(killed))
    ended: list[str] = []

    def note(outcome: RoleOutcome) -> None:
        ended.append(str(outcome.role))
        if len(ended) == 2:
            killed.touch()

    with pytest.raises(WorkerError, match="worker 1 failed with ValueError: bad digit"):
        run(launcher, server, dying, dataclasses.replace(failing, expendable=True), on_end=note)


def test_an_expendable_role_that_raises_fails_the_run(launcher: Launcher, role: MakeRole) -> None:
    failing = dataclasses.replace(role(0, "fail", raises="ValueError", text="bad digit"), expendable=True)
    with pytest.raises(WorkerError, match="worker 0 failed with ValueError: bad digit"):
        run(launcher, failing, role(1, "sleep_well"))

"""The launcher with real processes: how they are started, how they fail, and that nothing is left of them."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_support import MakeRole, Messages, role_maker, run

import offbeat.runtime.launch as launch
from offbeat.errors import (
    OutputError,
    RunError,
    UsageError,
    WorkerError,
)
from offbeat.runtime.launch import Launcher, LogFollower, Role, serve_store, threads_for, worker_environment


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as made:
        yield made


@pytest.fixture
def role(tmp_path: Path) -> MakeRole:
    return role_maker(tmp_path)


# What is public.


def test_the_public_names_are_these_and_documented() -> None:
    assert set(launch.__all__) == {
        "EVERYWHERE", "GRACE", "PRELOAD", "Control", "Launcher", "LogFollower", "RoleOutcome", "RemoteError", "Role",
        "PrivateStore", "free_port", "last_lines", "obituary", "private_store", "serve_store", "threads_for",
        "worker_environment", "ForkServerLink", "ServerGoneError",
    }  # fmt: skip
    assert all(getattr(launch, name).__doc__ for name in launch.__all__)


def test_importing_the_launcher_does_not_import_torch() -> None:
    code = "import sys, offbeat.runtime.launch; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Starting.


def test_roles_run_to_their_end_and_their_messages_arrive_in_order(launcher: Launcher, role: MakeRole) -> None:
    outcomes, messages = run(launcher, role(0, "count", to=100), role(1, "count", to=50))
    assert [(str(o.role), o.exit_code, o.signal, o.error) for o in outcomes] == [
        ("worker 0", 0, None, None),
        ("worker 1", 0, None, None),
    ]
    assert [m["number"] for rank, m in messages if rank == 0] == list(range(100))
    assert [m["number"] for rank, m in messages if rank == 1] == list(range(50))
    assert math.isnan(messages[0][1]["nan"])


def test_a_role_is_forked_with_torch_already_imported(launcher: Launcher, role: MakeRole) -> None:
    run(launcher, role(0, "greet"))
    started = time.monotonic()
    _, messages = run(launcher, role(0, "greet", deep={"list": [1, None, "x", 0.5]}))
    greeting = messages[0][1]
    print(f"from run() to the entry function: {(greeting['at'] - started) * 1e3:.1f} ms")
    assert greeting["torch"] is True
    assert greeting["config"] == {"deep": {"list": [1, None, "x", 0.5]}}


def test_a_role_finds_the_surroundings_of_its_launcher_and_its_own(
    launcher: Launcher, role: MakeRole, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OFFBEAT_TEST_LAUNCHER", "set after the fork server was started")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    environment = {"OFFBEAT_TEST": "mine"}
    roles = [role(rank, "surroundings", environment=environment, threads=rank + 1) for rank in (0, 1)]
    _, messages = run(launcher, *roles)
    found = dict(messages)
    for rank in (0, 1):
        assert found[rank]["mine"] == "mine"
        assert found[rank]["inherited"] == "set after the fork server was started"
        assert found[rank]["openblas"] is None
        assert found[rank]["directory"] == str(tmp_path)
        assert found[rank]["path"] == sys.path
        assert found[rank]["threads"] == rank + 1
        assert found[rank]["session"] is True
        assert found[rank]["stdin"] == ""
        assert found[rank]["mask"] == 0
        # Its standard three, its control socket, and the listing itself: nothing of the server or a sibling.
        assert len(found[rank]["descriptors"]) == 5
    assert found[0]["random"] != found[1]["random"]


def test_a_log_holds_what_python_c_and_descriptors_print_as_it_comes(launcher: Launcher, role: MakeRole) -> None:
    printing = role(0, "print_everywhere")
    printing = role(0, "print_everywhere", log=str(printing.log))
    printing.log.parent.mkdir()
    printing.log.write_text("from an earlier run\n")
    _, messages = run(launcher, printing)
    assert messages[0][1]["log"].splitlines() == [
        "from an earlier run",
        "from python",
        "from python's stderr",
        "from a descriptor",
        "from printf",
    ]
    assert printing.log.read_text().endswith("from printf\nwithout a newline")


def test_large_messages_arrive_whole(launcher: Launcher, role: MakeRole) -> None:
    _, messages = run(launcher, role(0, "send_large", size=20_000_000), role(1, "send_large", size=5_000_000))
    assert {rank: len(message["text"]) for rank, message in messages} == {0: 20_000_000, 1: 5_000_000}


def test_a_message_over_the_limit_is_refused_in_the_child(launcher: Launcher, role: MakeRole) -> None:
    with pytest.raises(UsageError, match=r"worker 0: A message of 70,000,\d+ bytes .* limit is 67,108,864"):
        run(launcher, role(0, "send_large", size=70_000_000))


def test_threads_of_a_role_may_send_at_once(launcher: Launcher, role: MakeRole) -> None:
    _, messages = run(launcher, role(0, "send_from_threads"))
    for name in range(4):
        assert [m["number"] for _, m in messages if m["name"] == name] == list(range(50))


def test_a_fork_of_a_role_cannot_write_into_its_messages(launcher: Launcher, role: MakeRole) -> None:
    _, messages = run(launcher, role(0, "send_from_grandchild"))
    assert messages == [(0, {"code": 7})]


def test_ticks_come_on_the_callers_thread(launcher: Launcher, role: MakeRole) -> None:
    threads: set[int] = set()
    ticks: list[float] = []

    def tick() -> None:
        threads.add(threading.get_ident())
        ticks.append(time.monotonic())
        if len(ticks) == 5:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        run(launcher, role(0, "sleep_well"), on_tick=tick)
    assert threads == {threading.get_ident()}


def test_two_launchers_live_side_by_side(launcher: Launcher, role: MakeRole) -> None:
    inner: Messages = []
    with Launcher(preload=()) as second:

        def run_inside(_role: Role, _message: dict[str, Any]) -> None:
            inner.extend(run(second, role(0, "greet", kind="monitor"))[1])

        launcher.run([role(0, "greet")], on_message=run_inside)
    assert inner[0][1]["torch"] is False


def test_a_launcher_can_be_used_again_after_success_failure_and_close(role: MakeRole) -> None:
    launcher = Launcher(preload=())
    run(launcher, role(0, "greet"))
    with pytest.raises(WorkerError):
        run(launcher, role(0, "exit_with", code=3))
    server = launcher.server_pid
    run(launcher, role(0, "greet"))
    assert launcher.server_pid == server
    launcher.close()
    run(launcher, role(0, "greet"))
    launcher.close()
    launcher.close()


def test_runs_leave_no_descriptor_open(launcher: Launcher, role: MakeRole) -> None:
    run(launcher, role(0, "greet"))
    before = sorted(Path("/proc/self/fd").iterdir())
    run(launcher, role(0, "greet"), role(1, "greet"))
    with pytest.raises(WorkerError):
        run(launcher, role(0, "kill_oneself"), role(1, "sleep_well"))
    assert sorted(Path("/proc/self/fd").iterdir()) == before


# Refusing.


def test_what_cannot_be_run_is_refused_before_any_process_starts(role: MakeRole, tmp_path: Path) -> None:
    with Launcher(preload=()) as launcher:
        with pytest.raises(UsageError, match=r"worker 0 was given more than once"):
            run(launcher, role(0, "greet"), role(0, "count"))
        with pytest.raises(UsageError, match=r"The config of worker 1 cannot be passed on.*object is not plain data"):
            run(launcher, role(0, "greet"), role(1, "greet", bad=object()))
        (tmp_path / "logs").touch()
        with pytest.raises(OutputError, match=r"The log of worker 0 cannot be written"):
            run(launcher, role(0, "greet"))
    with pytest.raises(UsageError, match=r"'nonsense' of worker 0 names no function"):
        Role("worker", 0, "nonsense", {}, {}, tmp_path / "log")
    with pytest.raises(UsageError, match=r"0 threads"):
        Role("worker", 0, "a:b", {}, {}, tmp_path / "log", threads=0)


def test_a_run_within_a_run_of_the_same_launcher_is_refused(launcher: Launcher, role: MakeRole) -> None:
    with pytest.raises(UsageError, match="already running"):
        launcher.run([role(0, "greet")], on_message=lambda *_: run(launcher, role(1, "greet")) and None)


def test_a_module_that_cannot_be_preloaded_is_named(role: MakeRole) -> None:
    with (
        Launcher(preload=("json", "no_such_module")) as launcher,
        pytest.raises(RunError, match=r"could not import 'no_such_module': ModuleNotFoundError"),
    ):
        run(launcher, role(0, "greet"))


def test_a_fork_server_that_dies_importing_is_told_with_its_last_words(
    role: MakeRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_the_process.py").write_text("import os\nos.write(2, b'no more')\nos._exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        Launcher(preload=("ends_the_process",)) as launcher,
        pytest.raises(RunError, match=r"The fork server, .* ended with code 3\. It said:\nno more"),
    ):
        run(launcher, role(0, "greet"))


def test_a_preloaded_module_that_starts_threads_is_refused(
    role: MakeRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "starts_a_thread.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with Launcher(preload=("starts_a_thread",)) as launcher, pytest.raises(RunError, match=r"2 threads .*preload"):
        run(launcher, role(0, "greet"))


# Helpers.


def test_a_busy_port_is_refused_with_advice() -> None:
    store = serve_store()
    with pytest.raises(UsageError, match=rf"port {store.port} of 127\.0\.0\.1: Address already in use.* or 0 for any"):
        serve_store(store.port)


def test_a_store_listens_on_loopback_alone_and_frees_its_port() -> None:
    store = serve_store()
    port = store.port
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    assert f"0100007F:{port:04X}" in listening
    del store
    socket.create_server(("127.0.0.1", port)).close()
    assert launch.free_port() > 0


def test_threads_are_shared_out_over_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [threads_for(workers) for workers in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_only_loopback_pins_the_interface() -> None:
    assert worker_environment(0, 1, 1)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in worker_environment(0, 1, 1, "10.0.0.7")
    assert worker_environment(0, 1, 1, "localhost")["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_log_is_followed_in_whole_lines_and_whole_letters(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = LogFollower(path)
    assert follower.new_text() == ""
    with path.open("ab", buffering=0) as log:
        log.write(b"eins\nzw")
        assert follower.new_text() == "eins\n"
        log.write("ö".encode()[:1])
        assert follower.new_text() == ""
        log.write("ö".encode()[1:] + b"lf\n50%\r")
        assert follower.new_text() == "zwölf\n50%\r"
        log.write(b"\xffno letter\nthe end")
        assert follower.new_text() == "\ufffdno letter\n"
        assert follower.rest() == "the end"
        assert follower.rest() == ""
    later = LogFollower(path)
    assert later.rest() == ""


def test_the_last_lines_of_a_long_log_are_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert launch.last_lines(path) == ""
    path.write_text("".join(f"line {number}\n" for number in range(10_000)))
    assert launch.last_lines(path, 2) == "line 9998\nline 9999"

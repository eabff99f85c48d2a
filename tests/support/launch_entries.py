"""What the processes of test_launch do; reachable in them because sys.path is passed on."""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gzip
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from offbeat import errors
from offbeat.runtime.launch import Control, Launcher, Role, serve_store

Config = dict[str, Any]

TORCH_WAS_THERE = "torch" in sys.modules
POOL: ThreadPoolExecutor
OPEN: list[Any]


class OwnError(errors.CheckpointError):
    """Somebody's own error below one of ours."""


def wait_for(path: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)


def greet(config: Config, control: Control) -> None:
    control.send({"at": time.monotonic(), "config": config, "torch": TORCH_WAS_THERE, "pid": os.getpid()})


def surroundings(config: Config, control: Control) -> None:
    import torch

    control.send(
        {
            "mine": os.environ.get("OFFBEAT_TEST"),
            "inherited": os.environ.get("OFFBEAT_TEST_LAUNCHER"),
            "openblas": os.environ.get("OPENBLAS_NUM_THREADS"),
            "directory": str(Path.cwd()),
            "path": sys.path,
            "threads": torch.get_num_threads(),
            "session": os.getsid(0) == os.getpid(),
            "stdin": sys.stdin.read(),
            "descriptors": sorted(path.name for path in Path("/proc/self/fd").iterdir()),
            "random": random.random(),
            "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        }
    )


def count(config: Config, control: Control) -> None:
    for number in range(config["to"]):
        control.send({"number": number, "nan": float("nan")})


def send_large(config: Config, control: Control) -> None:
    control.send({"text": "x" * config["size"]})


def send_from_threads(config: Config, control: Control) -> None:
    def speak(name: int) -> None:
        for number in range(50):
            control.send({"name": name, "number": number, "filling": "." * 20_000})

    threads = [threading.Thread(target=speak, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send_from_grandchild(config: Config, control: Control) -> None:
    process = os.fork()
    if process == 0:
        try:
            control.send({})
        except errors.UsageError:
            os._exit(7)
        os._exit(8)
    control.send({"code": os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])})


def forge_a_frame(config: Config, control: Control) -> None:
    os.write(control._socket.fileno(), b"\xff" * 8)
    time.sleep(60)


def fail(config: Config, control: Control) -> None:
    time.sleep(config.get("delay", 0.0))
    if "after" in config:
        wait_for(config["after"])
    control.send({"raised_at": time.monotonic()})
    kind = config["raises"]
    if kind == "OwnError":
        raise OwnError(config["text"])
    if kind == "WorkerError":
        raise errors.WorkerError(config["text"], role="server", rank=3)
    raise (getattr(errors, kind, None) or getattr(builtins, kind))(config["text"])


def sleep_well(config: Config, control: Control) -> None:
    """Sleep until ended, and prove that `finally` was reached."""
    try:
        control.send({"pids": [os.getpid()]})
        time.sleep(60)
    finally:
        if "mark" in config:
            Path(config["mark"]).touch()


def sleep_deaf(config: Config, control: Control) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send({"pids": [os.getpid()]})
    time.sleep(60)


def stop_oneself(config: Config, control: Control) -> None:
    control.send({"pids": [os.getpid()]})
    try:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    finally:
        Path(config["mark"]).touch()


def fail_when_stopped(config: Config, control: Control) -> None:
    wait_for(config["pid_file"])
    stat = Path(f"/proc/{Path(config['pid_file']).read_text()}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.005)
    raise ValueError("the other one is stopped")


def kill_oneself(config: Config, control: Control) -> None:
    control.send({"pids": [os.getpid()]})
    if "after" in config:
        wait_for(config["after"])
    os.kill(os.getpid(), config.get("signal", signal.SIGKILL))
    time.sleep(60)


def exit_with(config: Config, control: Control) -> None:
    print("these were", "my last words", sep="\n")
    sys.exit(config["code"])


def leave_grandchildren(config: Config, control: Control) -> None:
    """Start a program and a fork that both ignore SIGINT, then end as told."""
    program = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    fork = os.fork()
    if fork == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)
        os._exit(0)
    control.send({"pids": [os.getpid(), program.pid, fork]})
    program.returncode = 0  # Not ours to wait for: that is what is tested.
    if config["how"] == "raise":
        raise ValueError("leaving them behind")
    if config["how"] == "sleep":
        time.sleep(60)


def load_data(config: Config, control: Control) -> None:
    """Fail while the processes of a DataLoader wait for work."""
    from torch.utils.data import DataLoader

    batches = iter(DataLoader(range(1000), batch_size=2, num_workers=2))  # pyright: ignore[reportArgumentType]
    next(batches)
    control.send({"pids": [os.getpid(), *(worker.pid for worker in batches._workers)]})
    os.kill(os.getpid(), signal.SIGKILL)


def print_everywhere(config: Config, control: Control) -> None:
    print("from python")
    print("from python's stderr", file=sys.stderr)
    os.write(1, b"from a descriptor\n")
    libc = ctypes.CDLL(None)
    libc.printf(b"from %s\n", b"printf")
    control.send({"log": Path(config["log"]).read_text()})
    libc.printf(b"without a newline")


def crash_natively(config: Config, control: Control) -> None:
    ctypes.string_at(0)


def end_with_handlers(config: Config, control: Control) -> None:
    def late() -> None:
        time.sleep(0.2)
        Path(config["thread"]).touch()

    threading.Thread(target=late).start()
    atexit.register(Path(config["handler"]).touch)


def hang_at_exit(config: Config, control: Control) -> None:
    atexit.register(time.sleep, 60)


def exit_slowly(config: Config, control: Control) -> None:
    """Exit handlers that take longer than the failures of others take to settle."""
    atexit.register(time.sleep, 3.0)
    atexit.register(Path(config["path"]).touch)
    sys.exit(5)


def hold_a_used_pool(config: Config, control: Control) -> None:
    """End as a script does whose module holds an executor: its thread waits for work until `threading` shuts down."""
    global POOL
    POOL = ThreadPoolExecutor(1)
    control.send({"sum": POOL.submit(sum, [1, 2]).result()})
    Path(config["order"]).write_text("")

    def write(text: str) -> None:
        with Path(config["order"]).open("a") as file:
            file.write(f"{text}\n")

    atexit.register(write, "exit handler")
    POOL.submit(write, "last work of the pool")
    if config["ends"] == "exit":
        sys.exit(3)
    if config["ends"] == "raise":
        raise ValueError("at the end")


def leave_a_thread_for_ever(config: Config, control: Control) -> None:
    threading.Thread(target=wait_for, args=("/nothing/ever", 60.0), name="uploader").start()


def leave_a_process_working(config: Config, control: Control) -> None:
    """End while a process that is not a daemon has its work to do, as multiprocessing allows."""
    from offbeat.runtime.launch import _child

    _child.NOTICE_SECONDS = 0.1
    process = multiprocessing.get_context("fork").Process(target=_touch_later, args=(config["mark"],), name="exporter")
    process.start()


def _touch_later(path: str) -> None:
    time.sleep(0.8)
    Path(path).touch()


def leave_files_open(config: Config, control: Control) -> None:
    global OPEN
    OPEN = [Path(config["text"]).open("w"), gzip.open(config["archive"], "wt")]  # noqa: SIM115 - that is what is tested
    for file in OPEN:
        file.write("kept")


def all_reduce_until_dead(config: Config, control: Control) -> None:
    """A stock script's loop; the rank that is told to dies in the middle of it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(1000)
    for step in range(100_000):
        if step == 5:
            control.send({"sum": float(tensor[0])})
        if step == 20 and dist.get_rank() == config["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        tensor.fill_(1.0)
        dist.all_reduce(tensor)
        if step == config.get("steps"):
            break
    dist.destroy_process_group()


def launch_and_wait(folder: Path, entry: str, grace: str) -> None:
    """A program of its own: a launcher with two workers, a store, and a file that says who they are."""
    store = serve_store() if entry == "leave_grandchildren" else None
    pids: dict[int, list[int]] = {}

    def note(role: Role, message: dict[str, Any]) -> None:
        pids[role.rank] = message["pids"]
        if len(pids) == 2:
            numbers = [store.port if store else 0, launcher.server_pid, *pids[0], *pids[1]]
            (folder / "part").write_text(" ".join(map(str, numbers)))
            (folder / "part").rename(folder / "started")

    config = {"how": "sleep"}
    roles = [Role("worker", rank, f"launch_entries:{entry}", config, {}, folder / f"{rank}.log") for rank in (0, 1)]
    with Launcher(preload=()) as launcher:
        launcher.run(roles, on_message=note, grace=timedelta(seconds=float(grace)))


if __name__ == "__main__":
    launch_and_wait(Path(sys.argv[1]), *sys.argv[2:])


def await_file(config: Config, control: Control) -> None:
    wait_for(config["path"])

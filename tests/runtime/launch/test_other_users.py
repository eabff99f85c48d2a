"""Other users of the machine: what they can reach of a run, and that it goes on whatever they do."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch.distributed as dist

from conftest import clean_environment, wait_until
from offbeat.errors import UsageError
from offbeat.runtime.collectives.one_sided.segment import Segment, SegmentError
from offbeat.runtime.collectives.one_sided.tickets import FIXED_SIZE
from offbeat.runtime.launch import private_store

NOBODY = 65534
HELD = 1100
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@contextlib.contextmanager
def stranger(act: Callable[[], str]) -> Generator[str]:
    """What `act` answers, or raises, in a process of another user, which lives on inside the block."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                said = act()
            except OSError as error:
                said = type(error).__name__
            os.write(writer, said.encode())
            os.close(writer)
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            yield pipe.read().decode()
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


# --- the store


def test_a_private_store_needs_no_connections_and_keeps_its_port() -> None:
    with private_store() as store:
        dist.FileStore(store.path, -1).set("key", "value")
        assert dist.FileStore(store.path, -1).get("key") == b"value"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", store.port))
        with pytest.raises(UsageError, match=f"port {store.port} of 127.0.0.1: Address already in use"):
            private_store(store.port).__enter__()
    assert not Path(store.path).exists()


@needs_root
def test_another_user_cannot_open_a_private_store() -> None:
    with private_store() as store, stranger(lambda: Path(store.path).open("rb").name) as said:
        assert said == "PermissionError"


# --- shared memory


def memory(size: int = 4096, name: str = "offbeat", seals: int = FIXED_SIZE) -> str:
    """A ticket for memory made as `Segment.create` makes it, or nearly so."""
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return f"{os.getpid()}:{descriptor}:{size}"


@needs_root
def test_memory_of_another_user_is_not_mapped() -> None:
    with stranger(memory) as ticket, pytest.raises(SegmentError, match="another user"):
        Segment.attach(ticket, 4096)


@pytest.mark.parametrize(
    "ticket",
    ["", "1:2", "1:2:3:4", "-1:2:4096", "1:2:-4096", "1:../exe:4096", "0:1:4096", "1" * 40 + ":1:4096", "\x00:1:4096"],
)
def test_what_is_not_a_ticket_opens_nothing(ticket: str) -> None:
    with pytest.raises(SegmentError, match="is not a ticket"):
        Segment.attach(ticket, 4096)


def test_only_memory_that_was_made_to_be_shared_is_mapped() -> None:
    good = memory()
    Segment.attach(good, 4096).seal()
    others = {
        "still change its size": memory(seals=fcntl.F_SEAL_GROW),
        "does not name shared memory of offbeat": memory(name="x"),
    }
    reader, writer = os.pipe()
    pipe = ("does not name shared memory of offbeat", f"{os.getpid()}:{reader}:4096")
    for why, ticket in (*others.items(), pipe):
        with pytest.raises(SegmentError, match=why):
            Segment.attach(ticket, 4096)
    with pytest.raises(SegmentError, match="8192 bytes"):
        Segment.attach(good, 8192)
    for descriptor in (reader, writer, *(int(ticket.split(":")[1]) for ticket in (good, *others.values()))):
        os.close(descriptor)


def test_a_ticket_for_more_than_the_memory_holds_is_refused() -> None:
    process, descriptor, _ = (ticket := memory()).split(":")
    with pytest.raises(SegmentError, match="has 4,096 bytes, not 8,192"):
        Segment.attach(f"{process}:{descriptor}:8192", 8192)
    os.close(int(ticket.split(":")[1]))


# --- connections

SCRIPT = """
import pathlib, time, torch, offbeat

with offbeat.init() as team:
    model = torch.nn.Linear(4, 4)
    model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while not team.mean(held=float(pathlib.Path("held").exists()))["held"]:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
    torch.distributed.barrier(group=torch.distributed.new_group(backend="gloo"))
"""


def listening(root: int) -> dict[int, int]:
    """Ports on which a process or its descendants listen, and who does."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(entry.name))
    sockets: dict[str, int] = {}
    left = [root]
    while left:
        process = left.pop()
        left += children.get(process, [])
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets[str(entry.readlink())] = process
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {line[1]: f"socket:[{line[9]}]" for line in lines if line[3] == "0A"}
    return {int(at.partition(":")[2], 16): sockets[name] for at, name in found.items() if name in sockets}


def hold(port: int, count: int) -> list[socket.socket]:
    """So many connections that say nothing; those that are not taken within a moment are given up."""
    held = [socket.socket() for _ in range(count)]
    for connection in held:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError, OSError):
            connection.connect(("127.0.0.1", port))
    return held


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_goes_on_while_a_stranger_holds_all_its_ports(tmp_path: Path) -> None:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 8 * HELD:
        pytest.skip(f"this process may have {most} descriptors at most")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "offbeat", "run", "train.py", "--strategy", "ddp", "--workers", "2", "--monitor"]
    held: dict[int, list[socket.socket]] = {}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most)),
    ) as run:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

            def all_held() -> bool:
                found = listening(run.pid)
                for port in found.keys() - held.keys():
                    held[port] = hold(port, HELD)
                return run.poll() is not None or len(set(found.values())) == 3  # The page's, and the workers' Gloo.

            wait_until(all_held, "the launcher and both workers to listen", 240.0)
            (tmp_path / "held").touch()
            said, _ = run.communicate(timeout=120)
        finally:
            run.kill()
            for connection in itertools.chain(*held.values()):
                connection.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    assert run.returncode == 0, said[-3000:]
    assert len(said.splitlines()) < 60, said[-3000:]

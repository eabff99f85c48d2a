"""What the tests of messages share: endpoints that leave nothing behind, and strangers at their door."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from frame_support import CODEC, Push, Reply

from conftest import DEADLINE, wait_until
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.messages import Endpoint, Incoming
from offbeat.runtime.messages.frames import EndpointHello

Endpoints = Callable[..., Endpoint[Push | Reply]]
TCP = "tcp://127.0.0.1:*"
PRIVATE = "ipc://*"


def held() -> set[str]:
    """Sockets, event descriptors and memory that this process has open."""
    gc.collect()
    found: set[str] = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            if target.startswith(("socket:", "anon_inode:[event", "/memfd:offbeat")):
                found.add(f"{entry.name} {target}")
    return found


def start_collector() -> None:
    """Let pyzmq have the sockets that it keeps from the first message on that is not copied."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.bind("inproc://x")
        two.connect("inproc://x")
        one.send(bytes(100_000), copy=False)
        two.recv()


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    tmp_path_factory.getbasetemp()  # Made now, or pytest would make it in the folder below.
    start_collector()
    before = held()
    with tempfile.TemporaryDirectory(prefix="m") as folder:  # Not `tmp_path`: addresses must be short.
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert list(Path(folder).iterdir()) == []
        wait_until(lambda: held() <= before, "sockets and memory to be gone", 20.0)


@pytest.fixture
def endpoints(nothing_is_left: None) -> Iterator[Endpoints]:
    made: list[Endpoint[Push | Reply]] = []

    def make(name: str, **more: Any) -> Endpoint[Push | Reply]:
        made.append(Endpoint(name, CODEC, **more))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


def received(endpoint: Endpoint[Push | Reply]) -> Incoming[Push | Reply]:
    incoming = endpoint.receive(DEADLINE)
    assert incoming is not None
    return incoming


def shares(endpoint: Endpoint[Any], peer: str) -> bool:
    known = endpoint.known.by_name.get(peer)
    return known is not None and known.shares


def pair(endpoints: Endpoints, bind: str = PRIVATE, **more: Any) -> tuple[Endpoint[Any], Endpoint[Any]]:
    """A server and a worker that is connected to it; both have greeted."""
    server, worker = endpoints("server 0.0", bind=bind, **more), endpoints("worker 1", **more)
    assert server.address is not None
    worker.connect("server 0.0", server.address)
    met(server, worker)
    return server, worker


def met(server: Endpoint[Any], worker: Endpoint[Any]) -> None:
    def greeted() -> bool:
        for endpoint in (server, worker):
            assert endpoint.receive(0.01) is None
        return shares(server, worker.name) and shares(worker, server.name)

    wait_until(greeted, "the greetings")


def lent(endpoint: Endpoint[Any], size: int = 100_000) -> Segment:
    segment = Segment.create(size)
    segment.bytes[:] = np.arange(segment.size, dtype=np.uint64).astype(np.uint8)
    endpoint.lend(segment)
    return segment


class Stranger:
    """A bare socket that says whatever it likes, under a name."""

    def __init__(self, address: str | None, name: bytes | None = b"worker 1", connects: bool = True) -> None:
        assert address is not None
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if name is not None:
            self.socket.setsockopt(zmq.ROUTING_ID, name)
        if connects:
            self.socket.connect(address)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def says(self, *frames: Any) -> None:
        self.socket.send_multipart(frames)

    def greets(self, server: Endpoint[Any], process: int | None = None) -> None:
        """As somebody on this host who knows how."""
        host = server._host_as(5)  # pyright: ignore[reportPrivateUsage]
        self.says(CODEC.encode_hello(EndpointHello(host, process or os.getpid(), 5, False)))


def refuses(server: Endpoint[Any], count: int) -> bool:
    """Whether the server comes to have refused so many messages, and nothing else is heard of them."""
    deadline = time.monotonic() + DEADLINE
    while server.refused < count and time.monotonic() < deadline:
        assert server.receive(0.01) is None
    return server.refused == count

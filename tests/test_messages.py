"""Endpoints, keys and driven machines, on real sockets."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from cli_support import Offbeat, in_process
from conftest import DEADLINE, wait_until
from offbeat.errors import UsageError
from offbeat.protocols.machine import Done, Effect, Ended, Event, Payload, Received, Send, SetTimer, Start, Timer
from offbeat.runtime.launch import Launcher
from offbeat.runtime.messages import Endpoint, Inbox, Incoming, Keys, address_in, drive, private_directory
from offbeat.runtime.messages import endpoint as endpoint_module
from offbeat.runtime.messages.drive import Timers
from offbeat.runtime.messages.frames import CHUNK, Hello, Reference
from offbeat.runtime.messages.keys import for_socket
from offbeat.runtime.shared.segment import Segment
from test_frames import CODEC, Push, Reply, mutated, on_the_wire, originals, resealed

Endpoints = Callable[..., Endpoint[Push | Reply]]
TCP = "tcp://127.0.0.1:*"
PRIVATE = "ipc://*"
MILLION = 1_000_000


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


@pytest.fixture(autouse=True)
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
def endpoints() -> Iterator[Endpoints]:
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
        return server.shares_memory_with(worker.name) and worker.shares_memory_with(server.name)

    wait_until(greeted, "the greetings")


# --- round trips


@pytest.mark.parametrize("way", ["ipc", "tcp", "curve"])
@pytest.mark.parametrize("size", [None, 0, 4096, 100_000, 2 * CHUNK + 77])
def test_a_request_and_its_reply_arrive(endpoints: Endpoints, way: str, size: int | None) -> None:
    keys = Keys.generate() if way == "curve" else None
    server, worker = pair(endpoints, PRIVATE if way == "ipc" else TCP, keys=keys)
    payload = None if size is None else np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    assert worker.send("server 0.0", Push("worker 1", 1), payload)
    asked = received(server)
    assert (asked.sender, asked.message) == ("worker 1", Push("worker 1", 1))
    assert server.send("worker 1", Reply(1), asked.payload)
    answered = received(worker)
    assert (answered.sender, answered.message) == ("server 0.0", Reply(1))
    for found in (asked.payload, answered.payload):
        assert (found is None) == (payload is None)
        if payload is not None and found is not None:
            assert not found.flags.writeable
            np.testing.assert_array_equal(found, payload)
    traffic = worker.traffic["server 0.0"]
    assert (traffic.sent, traffic.received, traffic.dropped) == (1, 1, 0)
    assert (traffic.bytes_sent, traffic.bytes_received, traffic.bytes_lent) == (size or 0, size or 0, 0)
    assert server.refused == worker.refused == 0


def test_messages_of_one_sender_come_in_order(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    for number in range(500):
        assert worker.send("server 0.0", Push("worker 1", number))
    assert [received(server).message.number for _ in range(500)] == list(range(500))


def test_two_that_bind_both_may_connect_to_each_other(endpoints: Endpoints) -> None:
    one, two = endpoints("server 0.0", bind=PRIVATE), endpoints("server 0.1", bind=PRIVATE)
    one.connect("server 0.1", two.address)
    two.connect("server 0.0", one.address)
    one.send("server 0.1", Reply(1))
    two.send("server 0.0", Reply(2))
    assert received(two) == ("server 0.0", Reply(1), None)
    assert received(one) == ("server 0.1", Reply(2), None)


def test_one_may_be_spoken_to_before_it_is_there(endpoints: Endpoints, tmp_path: Path) -> None:
    worker = endpoints("worker 1")
    worker.connect("server 0.0", address_in(tmp_path, "server 0.0"))
    assert worker.send("server 0.0", Push("worker 1", 1))
    server = endpoints("server 0.0", bind=address_in(tmp_path, "server 0.0"))
    assert received(server).message == Push("worker 1", 1)


def test_a_wait_without_a_message_ends(endpoints: Endpoints) -> None:
    assert endpoints("server", bind=PRIVATE).receive(0.0) is None
    assert endpoints("worker").receive(0.01) is None


def test_another_thread_ends_a_wait(endpoints: Endpoints) -> None:
    endpoint = endpoints("worker")
    thread = threading.Timer(0.05, endpoint.wake)
    thread.start()
    assert endpoint.receive(None) is None
    thread.join()
    endpoint.wake()
    assert endpoint.receive(None) is None
    assert endpoint.receive(0.0) is None
    endpoint.close()
    endpoint.wake()


# --- who is there


def test_what_cannot_be_sent_is_dropped_and_counted(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints, high_water=10)
    assert not server.send("worker 9", Reply(1))
    assert server.traffic["worker 9"].dropped == 1
    sent = [worker.send("server 0.0", Push("worker 1", number), bytes(1_000_000)) for number in range(200)]
    assert not all(sent)
    assert worker.traffic["server 0.0"].dropped == sent.count(False)
    got = [received(server).message.number for _ in range(sent.count(True))]
    assert got == [number for number, went in enumerate(sent) if went]


def test_one_that_has_gone_is_not_waited_for(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    worker.close()
    wait_until(lambda: not server.send("worker 1", Reply(1)), "the end to be noticed")
    assert server.traffic["worker 1"].dropped == 1


def test_a_restarted_peer_takes_over_its_name(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    again = endpoints("worker 1")
    again.connect("server 0.0", server.address)
    again.send("server 0.0", Push("worker 1", 2))
    assert received(server).message.number == 2
    assert server.send("worker 1", Reply(2))
    assert received(again).message == Reply(2)
    assert worker.receive(0.0) is None


def test_a_restarted_server_is_greeted_anew(endpoints: Endpoints, tmp_path: Path) -> None:
    address = address_in(tmp_path, "server 0.0")
    server, worker = pair(endpoints, address)
    server.close()
    server = endpoints("server 0.0", bind=address)
    deadline = time.monotonic() + DEADLINE
    while not server.shares_memory_with("worker 1"):
        assert time.monotonic() < deadline
        worker.send("server 0.0", Push("worker 1", 1))
        worker.receive(0.01)
        server.receive(0.01)


def test_a_forgotten_peer_is_not_reached_any_more(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    assert worker.peers == ("server 0.0",)
    worker.forget("server 0.0")
    worker.forget("server 0.0")
    assert worker.peers == ()
    assert not worker.send("server 0.0", Push("worker 1", 1))
    worker.connect("server 0.0", server.address)
    worker.send("server 0.0", Push("worker 1", 2))
    assert received(server).message.number == 2
    with pytest.raises(UsageError, match=r"connected to 'server 0.0' already"):
        worker.connect("server 0.0", server.address)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 201, "\0abc"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be a name"):
        Endpoint(name, CODEC)


# --- lent memory


def lent(endpoint: Endpoint[Any], size: int = 100_000) -> Segment:
    segment = Segment.create(size)
    segment.bytes[:] = np.arange(segment.size, dtype=np.uint64).astype(np.uint8)
    endpoint.lend(segment)
    return segment


def test_lent_memory_is_not_copied(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    segment = lent(worker)
    worker.send("server 0.0", Push("worker 1", 1), segment.bytes[8:72].view(np.int64))
    segment.bytes[8] = 77
    found = received(server).payload
    assert found is not None
    assert (found.nbytes, found[0]) == (64, 77)
    segment.bytes[9] = 78
    assert found[1] == 78
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    traffic = worker.traffic["server 0.0"]
    assert (traffic.bytes_sent, traffic.bytes_lent) == (64, 64)
    assert server.traffic["worker 1"].bytes_received == 64
    worker.reclaim(segment)
    worker.send("server 0.0", Push("worker 1", 2), segment.bytes[8:72])
    segment.bytes[8] = 99
    assert received(server).payload[0] == 77  # pyright: ignore[reportOptionalSubscript]
    segment.seal()


def test_memory_is_mapped_once_and_let_go_with_the_peer(endpoints: Endpoints) -> None:
    def maps() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("/memfd:offbeat")

    server, worker = pair(endpoints)
    segment = lent(worker)
    before = maps()
    for number in range(3):
        worker.send("server 0.0", Push("worker 1", number), segment.bytes[: 10 * (number + 1)])
        assert received(server).payload.nbytes == 10 * (number + 1)  # pyright: ignore[reportOptionalMemberAccess]
    assert maps() == before + 1
    server.forget("worker 1")
    assert maps() == before
    segment.seal()


def test_memory_that_comes_back_under_an_old_ticket_is_mapped_anew(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    first = lent(worker)
    ticket = first.ticket
    worker.send("server 0.0", Push("worker 1", 1), first.bytes[:10])
    assert received(server).payload[3] == 3  # pyright: ignore[reportOptionalSubscript]
    worker.reclaim(first)
    first.seal()
    second = lent(worker)
    assert second.ticket == ticket
    second.bytes[:] = 5
    worker.send("server 0.0", Push("worker 1", 2), second.bytes[:10])
    assert received(server).payload[3] == 5  # pyright: ignore[reportOptionalSubscript]
    second.seal()


def test_sealed_memory_cannot_be_lent(endpoints: Endpoints) -> None:
    segment = Segment.create(10)
    segment.seal()
    with pytest.raises(UsageError, match="sealed"):
        endpoints("worker").lend(segment)


def test_memory_that_cannot_be_opened_is_sent_the_next_time(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    segment = lent(worker)
    payload = segment.bytes[:10]
    segment.seal()
    worker.send("server 0.0", Push("worker 1", 1), payload)
    wait_until(lambda: server.receive(0.01) is None and server.refused == 1, "the refusal")
    wait_until(lambda: worker.receive(0.01) is None and not worker.shares_memory_with("server 0.0"), "the news of it")
    worker.send("server 0.0", Push("worker 1", 1), payload)
    np.testing.assert_array_equal(received(server).payload, payload)  # pyright: ignore[reportArgumentType]
    assert worker.traffic["server 0.0"].bytes_lent == 10


def test_peers_of_another_host_get_no_references(endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    monkeypatch.setattr("offbeat.runtime.shared.segment.host_identity", lambda: "elsewhere")
    worker = endpoints("worker 1")
    worker.connect("server 0.0", server.address)
    segment = lent(worker)
    for number in range(2):
        worker.send("server 0.0", Push("worker 1", number), segment.bytes[:10])
        received(server)
        server.send("worker 1", Reply(number))
        received(worker)
    assert server.peers == ("worker 1",)
    assert not worker.shares_memory_with("server 0.0")
    assert not server.shares_memory_with("worker 1")
    assert worker.traffic["server 0.0"].bytes_lent == 0
    segment.seal()


@pytest.mark.slow
def test_two_processes_share_memory(endpoints: Endpoints) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    program = """
        import sys, numpy as np
        sys.path.insert(0, sys.argv[2])
        from test_frames import CODEC, Push
        from offbeat.runtime.messages import Endpoint
        from offbeat.runtime.shared.segment import Segment
        with Endpoint("worker 1", CODEC) as worker:
            worker.connect("server 0.0", sys.argv[1])
            segment = Segment.create(1_000_000)
            worker.lend(segment)
            while not worker.shares_memory_with("server 0.0"):
                worker.receive(0.1)
            segment.bytes[:] = 3
            worker.send("server 0.0", Push("worker 1", 1), segment.bytes[:1_000_000])
            assert worker.receive(60) is not None
            segment.bytes[:] = 4
            worker.send("server 0.0", Push("worker 1", worker.traffic["server 0.0"].bytes_lent))
            assert worker.receive(60) is not None
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(server.address), str(Path(__file__).parent)]
    with subprocess.Popen(arguments) as process:
        found = received(server).payload
        assert found is not None
        assert (found == 3).all()
        server.send("worker 1", Reply(1))
        assert received(server).message.number == 1_000_000
        assert (found == 4).all()
        server.send("worker 1", Reply(2))
        assert process.wait(DEADLINE) == 0
    assert (found == 4).all()


# --- strangers


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
        self.says(CODEC.encode_hello(Hello(host, process or os.getpid(), 5, False)))


def refuses(server: Endpoint[Any], count: int) -> bool:
    """Whether the server comes to have refused so many messages, and nothing else is heard of them."""
    deadline = time.monotonic() + DEADLINE
    while server.refused < count and time.monotonic() < deadline:
        assert server.receive(0.01) is None
    return server.refused == count


@pytest.mark.parametrize("name", [None, b"\xff\xfe", b"a\x01b", b"x" * 250])
def test_senders_without_a_name_are_refused(endpoints: Endpoints, name: bytes | None) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    with Stranger(server.address, name) as stranger:
        stranger.says(*on_the_wire(CODEC.encode(Push("worker 1", 1))))
        assert refuses(server, 1)
    assert (server.peers, server.traffic) == ((), {})


def test_there_are_not_more_senders_than_fit(endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MOST_PEERS", 2)
    server = endpoints("server 0.0", bind=PRIVATE)
    for number in range(2):
        with Stranger(server.address, f"worker {number}".encode()) as stranger:
            stranger.says(*on_the_wire(CODEC.encode(Push("", 1))))
            assert received(server).sender == f"worker {number}"
    with Stranger(server.address, b"worker 2") as stranger:
        stranger.says(*on_the_wire(CODEC.encode(Push("", 1))))
        assert refuses(server, 1)
    with pytest.raises(UsageError, match="cannot connect to 'worker 3'"):
        server.connect("worker 3", str(server.address))
    assert server.peers == ("worker 0", "worker 1")


def test_more_frames_than_may_be_are_refused(endpoints: Endpoints) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    with Stranger(server.address) as stranger:
        stranger.says(*([b"x"] * 3000))
        assert refuses(server, 1)


def test_a_frame_over_the_limit_ends_its_connection(endpoints: Endpoints) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    with Stranger(server.address) as stranger, stranger.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        stranger.says(CODEC.encode(Push("worker 1", 1))[0], bytes(2 * CHUNK))
        assert monitor.poll(DEADLINE * 1000)
        assert server.receive(0.05) is None
        stranger.socket.disable_monitor()
    assert server.peers == ()


def spoofed(segment: Segment, pipe: int, plain: int) -> dict[str, Reference]:
    """References to what is not the sender's to lend."""
    process, descriptor, size = segment.ticket.split(":")
    return {
        "no ticket": Reference("/etc/passwd", 1, 0, 10),
        "another process": Reference(f"1:{descriptor}:{size}", 2, 0, 10),
        "a path": Reference(f"{process}:../exe:{size}", 3, 0, 10),
        "no descriptor": Reference(f"{process}:99999:{size}", 4, 0, 10),
        "another size": Reference(f"{process}:{descriptor}:{int(size) * 2}", 5, 0, 10),
        "no size": Reference(f"{process}:{descriptor}:0", 6, 0, 0),
        "too far": Reference(segment.ticket, 7, int(size) - 9, 10),
        "much too far": Reference(segment.ticket, 8, 2**62, 10),
        "a pipe": Reference(f"{process}:{pipe}:0", 9, 0, 10),
        "a file": Reference(f"{process}:{plain}:20", 10, 0, 10),
    }


def test_references_to_what_is_not_the_senders_are_refused(endpoints: Endpoints, tmp_path: Path) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    segment = Segment.create(4096)
    reader, writer = os.pipe()
    (tmp_path / "file").write_bytes(bytes(20))
    with (tmp_path / "file").open("rb") as plain, Stranger(server.address) as stranger:
        good = CODEC.encode_reference(Push("worker 1", 1), Reference(segment.ticket, 0, 10, 20))
        stranger.says(good)
        assert refuses(server, 1), "whoever has not greeted from this host lends nothing"
        stranger.greets(server)
        stranger.says(good)
        assert received(server).payload.nbytes == 20  # pyright: ignore[reportOptionalMemberAccess]
        for number, reference in enumerate(spoofed(segment, reader, plain.fileno()).values(), 2):
            stranger.says(CODEC.encode_reference(Push("worker 1", 1), reference))
            assert refuses(server, number), reference
        stranger.says(good)
        assert received(server).payload.nbytes == 20  # pyright: ignore[reportOptionalMemberAccess]
    for descriptor in (reader, writer):
        os.close(descriptor)
    segment.seal()


def test_a_greeting_cannot_be_echoed(endpoints: Endpoints) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    with Stranger(server.address) as stranger:
        stranger.says(CODEC.encode_hello(Hello("unknown", 1, 1, True)))
        wait_until(lambda: server.receive(0.01) is None and stranger.socket.poll(0) != 0, "its greeting")
        stranger.says(stranger.socket.recv())
        stranger.says(*on_the_wire(CODEC.encode(Push("worker 1", 1))))
        received(server)
        assert not server.shares_memory_with("worker 1")


def mutations(count: int) -> list[list[bytes]]:
    chance, valid = random.Random(count), originals()
    made = [mutated(chance.choice(valid), valid, chance) or [b""] for _ in range(count)]
    return [frames for frames in made if frames not in valid]


@pytest.mark.parametrize("count", [10_000, pytest.param(MILLION, marks=pytest.mark.slow)])
def test_mutated_messages_at_the_door_have_no_effect(endpoints: Endpoints, count: int) -> None:
    server, batch, pool = endpoints("server 0.0", bind=PRIVATE), 500, mutations(min(count, 50_000))
    memory: list[int] = []
    with Stranger(server.address, b"mutant") as stranger:
        for sent in range(0, count, batch):
            for number in range(sent, sent + batch):
                stranger.says(*pool[number % len(pool)])
            assert refuses(server, sent + batch)
            memory.append(resident_bytes())
        assert (server.peers, server.traffic) == ((), {})
        assert max(memory) - memory[len(memory) // 4] < 4 * 1024 * 1024
        stranger.says(*originals()[0])
        assert received(server).sender == "mutant"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_resealed_messages_have_no_effect_either(endpoints: Endpoints) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    plain = CODEC.encode(Reply(1))[0]
    with Stranger(server.address) as stranger:
        for number, body in enumerate([b"", b"\x80", plain[24:] + b"\x00", b"\x91" * 20_000], 1):
            stranger.says(resealed(plain[:24] + body))
            assert refuses(server, number)
    assert server.peers == ()


# --- addresses and keys


def test_other_machines_need_keys(endpoints: Endpoints) -> None:
    for address in ("tcp://0.0.0.0:*", "tcp://*:5555", "tcp://10.0.0.1:5555", "tcp://example.org:5555"):
        with pytest.raises(UsageError, match="reached from other machines"):
            Endpoint("server", CODEC, bind=address)
        with pytest.raises(UsageError, match="offbeat keys new"):
            endpoints("worker").connect("server", address)
    assert endpoints("server", bind="tcp://0.0.0.0:*", keys=Keys.generate()).address is not None


@pytest.mark.parametrize("address", ["udp://127.0.0.1:1", "tcp://127.0.0.1", "inproc://x", "tcp://a;127.0.0.1:1", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is no address"):
        Endpoint("server", CODEC, bind=address)


def test_sockets_lie_in_private_folders(endpoints: Endpoints, tmp_path: Path) -> None:
    address = endpoints("server", bind=PRIVATE).address
    assert address is not None
    folder = Path(address.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="Other users can enter"):
        Endpoint("server", CODEC, bind=address_in(tmp_path, "server"))
    with pytest.raises(UsageError, match="too long"):
        Endpoint("server", CODEC, bind=address_in(tmp_path / ("x" * 100), "server"))
    with pytest.raises(UsageError, match="cannot be used"):
        Endpoint("server", CODEC, bind=address_in(tmp_path / "nowhere", "server"))
    with private_directory() as folder, Endpoint("a/b c", CODEC, bind=address_in(folder, "a/b c")):
        assert [path.name for path in folder.iterdir()] == ["a-b-c"]
    assert not folder.exists()


def test_a_port_that_is_taken_is_said(endpoints: Endpoints) -> None:
    address = endpoints("server", bind=TCP).address
    with pytest.raises(UsageError, match=f"cannot listen at {address}"):
        Endpoint("other", CODEC, bind=address)


def test_another_key_is_let_in_if_it_is_allowed(endpoints: Endpoints) -> None:
    client = Keys.generate()
    keys = Keys.generate().allow(client.public)
    server, worker = endpoints("server 0.0", bind=TCP, keys=keys), endpoints("worker 1", keys=client)
    worker.connect("server 0.0", str(server.address), public=keys.public)
    worker.send("server 0.0", Push("worker 1", 1))
    assert received(server).sender == "worker 1"
    server.send("worker 1", Reply(1))
    assert received(worker).message == Reply(1)


@pytest.mark.parametrize("who", ["an unknown key", "no key", "the wrong server"])
def test_strangers_are_not_let_in(endpoints: Endpoints, who: str) -> None:
    keys = Keys.generate()
    server = endpoints("server 0.0", bind=TCP, keys=keys)
    with Stranger(server.address, connects=False) as stranger:
        if who != "no key":
            theirs = keys if who == "the wrong server" else Keys.generate()
            stranger.socket.curve_publickey = for_socket(theirs.public)
            stranger.socket.curve_secretkey = for_socket(theirs.secret)
            stranger.socket.curve_serverkey = for_socket(keys.public if theirs is not keys else Keys.generate().public)
        failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED
        with stranger.socket.get_monitor_socket(failed) as monitor:
            stranger.socket.connect(str(server.address))
            stranger.says(*on_the_wire(CODEC.encode(Push("worker 1", 1))))
            assert monitor.poll(DEADLINE * 1000)
            event = recv_monitor_message(monitor)["event"]
            assert who != "an unknown key" or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            stranger.socket.disable_monitor()
        assert server.receive(0.1) is None
    assert (server.peers, server.refused) == ((), 0)


def test_keys_are_kept_in_a_file_of_ones_own(tmp_path: Path) -> None:
    keys = Keys.generate().allow(Keys.generate().public)
    keys.save(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    assert Keys.load(tmp_path / "keys") == keys
    assert keys.secret not in repr(keys)
    with pytest.raises(UsageError, match="exists"):
        keys.save(tmp_path / "keys")
    (tmp_path / "keys").chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        Keys.load(tmp_path / "keys")
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_wrong_keys_are_refused(tmp_path: Path) -> None:
    keys = Keys.generate()
    with pytest.raises(UsageError, match="does not belong"):
        Keys(keys.public, Keys.generate().secret)
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        keys.allow("abc")
    (tmp_path / "keys").write_text("{}")
    (tmp_path / "keys").chmod(0o600)
    with pytest.raises(UsageError, match="no file of keys"):
        Keys.load(tmp_path / "keys")
    with pytest.raises(UsageError, match="cannot be written"):
        keys.save(tmp_path / "nowhere" / "keys")


def test_the_command_makes_shows_and_allows_keys(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offbeat: Offbeat = in_process(launcher, tmp_path, monkeypatch, capsys)
    assert offbeat("keys", "new", "a.keys").code == 0
    keys, other = Keys.load(tmp_path / "a.keys"), Keys.generate()
    shown = offbeat("keys", "show", "a.keys")
    assert shown.out == f"public   {keys.public}\n"
    assert offbeat("keys", "allow", "a.keys", other.public).code == 0
    assert Keys.load(tmp_path / "a.keys") == keys.allow(other.public)
    assert offbeat("keys", "show", "a.keys").out == f"public   {keys.public}\nallowed  {other.public}\n"
    for words in (("new", "a.keys"), ("show", "b.keys"), ("allow", "a.keys", "xyz")):
        said = offbeat("keys", *words)
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith("error: ")
    for word in ("new", "show", "allow"):
        assert f"Example: offbeat keys {word}" in offbeat("keys", word, "--help").out


# --- machines


class Scripted:
    """A machine that answers every event by a script, and remembers them."""

    def __init__(self, name: str, begin: Sequence[Effect], script: Callable[[Event], Sequence[Effect]]) -> None:
        self.name = name
        self._begin = begin
        self._script = script
        self.seen: list[Event] = []

    def begin(self, now: float) -> Sequence[Effect]:
        return self._begin

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        self.seen.append(event)
        return self._script(event)


def quiet(event: Event) -> Sequence[Effect]:
    return []


def no_work(item: Any, token: Any) -> None:
    raise AssertionError((item, token))


def test_effects_are_done_in_order_and_work_is_answered(endpoints: Endpoints) -> None:
    log: list[Any] = []

    def work(item: Any, token: Any) -> Any:
        log.append((item, token))
        return item * 2

    begin = [Start(1, "a"), Start(2), Start(3, "b")]
    machine = Scripted("m", begin, lambda event: [Start(4, "c")] if event == Done("a", 2) else [])
    drive(machine, endpoints("m"), work, until=lambda: len(machine.seen) == 3)
    assert log == [(1, "a"), (2, None), (3, "b"), (4, "c")]
    assert machine.seen == [Done("a", 2), Done("b", 6), Done("c", 8)]


def test_timers_come_in_order_and_the_same_token_replaces(endpoints: Endpoints) -> None:
    begin = [SetTimer(0.001, "x"), SetTimer(0.04, "late"), SetTimer(0.02, "soon"), SetTimer(0.06, "x")]
    machine = Scripted("m", begin, quiet)
    drive(machine, endpoints("m"), no_work, until=lambda: len(machine.seen) == 3)
    assert machine.seen == [Timer("soon"), Timer("late"), Timer("x")]


def test_timers_keep_no_rubbish() -> None:
    timers = Timers()
    for number in range(100):
        timers.set(float(number), "x")
        timers.set(1000.0 - number, number)
    assert timers.take(98.9) is None
    assert timers.take(99.0) == Timer("x")
    assert timers.due() == 901.0
    assert [timers.take(2000.0) for _ in range(101)] == [*(Timer(number) for number in range(99, -1, -1)), None]


def test_two_machines_talk_with_payloads(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    numbers = np.arange(1000.0)

    def answer(event: Event) -> Sequence[Effect]:
        assert isinstance(event, Received)
        return [Send(event.sender, Reply(event.message.number), event.payload)]  # pyright: ignore[reportAttributeAccessIssue]

    serving = Scripted("server 0.0", [], answer)
    asking = Scripted(
        "worker 1",
        [Send("server 0.0", Push("worker 1", 1), Payload(8000, numbers)), Send("server 0.0", Push("worker 1", 2))],
        quiet,
    )
    stop = threading.Event()
    thread = threading.Thread(target=drive, args=(serving, server, no_work, stop.is_set))
    thread.start()
    drive(asking, worker, no_work, until=lambda: len(asking.seen) == 2)
    stop.set()
    server.wake()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    first, second = asking.seen
    assert isinstance(first, Received)
    assert (first.sender, first.message, first.payload.nbytes) == ("server 0.0", Reply(1), 8000)
    np.testing.assert_array_equal(first.payload.handle.view(np.float64), numbers)
    assert second == Received("server 0.0", Reply(2))


def test_another_thread_hands_over_events(endpoints: Endpoints) -> None:
    endpoint = endpoints("m")
    inbox = Inbox(endpoint)
    machine = Scripted("m", [], quiet)
    thread = threading.Timer(0.05, inbox.put, (Ended("worker 1"),))
    thread.start()
    drive(machine, endpoint, no_work, until=lambda: bool(machine.seen), inbox=inbox)
    thread.join()
    assert machine.seen == [Ended("worker 1")]

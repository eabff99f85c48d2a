"""Endpoints on real sockets: round trips, peers that come and go, and memory that is lent."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import paths
import pytest
from frame_support import CODEC, Push, Reply
from message_support import PRIVATE, TCP, Endpoints, lent, pair, received, shares
from message_support import endpoints as endpoints
from message_support import nothing_is_left as nothing_is_left

from conftest import DEADLINE, wait_until
from offbeat.errors import UsageError
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.messages import Endpoint, Keys, address_in
from offbeat.runtime.messages.frames import CHUNK

pytestmark = pytest.mark.usefixtures("nothing_is_left")

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
    while not shares(server, "worker 1"):
        assert time.monotonic() < deadline
        worker.send("server 0.0", Push("worker 1", 1))
        worker.receive(0.01)
        server.receive(0.01)


def test_a_forgotten_peer_is_not_reached_any_more(endpoints: Endpoints) -> None:
    server, worker = pair(endpoints)
    assert tuple(worker.known.by_name) == ("server 0.0",)
    worker.forget("server 0.0")
    worker.forget("server 0.0")
    assert tuple(worker.known.by_name) == ()
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
    wait_until(lambda: worker.receive(0.01) is None and not shares(worker, "server 0.0"), "the news of it")
    worker.send("server 0.0", Push("worker 1", 1), payload)
    np.testing.assert_array_equal(received(server).payload, payload)  # pyright: ignore[reportArgumentType]
    assert worker.traffic["server 0.0"].bytes_lent == 10


def test_peers_of_another_host_get_no_references(endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    monkeypatch.setattr("offbeat.runtime.messages.endpoint.host_identity", lambda: "elsewhere")
    worker = endpoints("worker 1")
    worker.connect("server 0.0", server.address)
    segment = lent(worker)
    for number in range(2):
        worker.send("server 0.0", Push("worker 1", number), segment.bytes[:10])
        received(server)
        server.send("worker 1", Reply(number))
        received(worker)
    assert tuple(server.known.by_name) == ("worker 1",)
    assert not shares(worker, "server 0.0")
    assert not server.known.by_name["worker 1"].shares
    assert worker.traffic["server 0.0"].bytes_lent == 0
    segment.seal()


@pytest.mark.slow
def test_two_processes_share_memory(endpoints: Endpoints) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    program = """
        import sys, numpy as np
        sys.path.insert(0, sys.argv[2])
        from frame_support import CODEC, Push
        from offbeat.runtime.messages import Endpoint
        from offbeat.runtime.collectives.one_sided.segment import Segment
        with Endpoint("worker 1", CODEC) as worker:
            worker.connect("server 0.0", sys.argv[1])
            segment = Segment.create(1_000_000)
            worker.lend(segment)
            while not worker.known.by_name["server 0.0"].shares:
                worker.receive(0.1)
            segment.bytes[:] = 3
            worker.send("server 0.0", Push("worker 1", 1), segment.bytes[:1_000_000])
            assert worker.receive(60) is not None
            segment.bytes[:] = 4
            worker.send("server 0.0", Push("worker 1", worker.traffic["server 0.0"].bytes_lent))
            assert worker.receive(60) is not None
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(server.address), str(paths.SUPPORT)]
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

"""Who and what is not let in: mutated frames, spoofed references, unknown keys."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq
from cli_support import Offbeat, in_process
from frame_support import CODEC, Push, Reply, on_the_wire, resealed
from message_support import PRIVATE, TCP, Endpoints, Stranger, received, refuses
from message_support import endpoints as endpoints
from message_support import nothing_is_left as nothing_is_left
from mutated_frames import mutated_at_the_door
from zmq.utils.monitor import recv_monitor_message

from conftest import DEADLINE, wait_until
from offbeat.errors import UsageError
from offbeat.runtime.collectives.one_sided.segment import Segment
from offbeat.runtime.launch import Launcher
from offbeat.runtime.messages import Endpoint, Keys, address_in, private_directory
from offbeat.runtime.messages import endpoint as peers_module
from offbeat.runtime.messages.frames import CHUNK, EndpointHello, MemoryReference
from offbeat.runtime.messages.keys import for_socket

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# --- at the door


@pytest.mark.parametrize("name", [None, b"\xff\xfe", b"a\x01b", b"x" * 250])
def test_senders_without_a_name_are_refused(endpoints: Endpoints, name: bytes | None) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    with Stranger(server.address, name) as stranger:
        stranger.says(*on_the_wire(CODEC.encode(Push("worker 1", 1))))
        assert refuses(server, 1)
    assert (tuple(server.known.by_name), server.traffic) == ((), {})


def test_there_are_not_more_senders_than_fit(endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MOST_PEERS", 2)
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
    assert tuple(server.known.by_name) == ("worker 0", "worker 1")


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
    assert tuple(server.known.by_name) == ()


def spoofed(segment: Segment, pipe: int, plain: int) -> dict[str, MemoryReference]:
    """References to what is not the sender's to lend."""
    process, descriptor, size = segment.ticket.split(":")
    return {
        "no ticket": MemoryReference("/etc/passwd", 1, 0, 10),
        "another process": MemoryReference(f"1:{descriptor}:{size}", 2, 0, 10),
        "a path": MemoryReference(f"{process}:../exe:{size}", 3, 0, 10),
        "no descriptor": MemoryReference(f"{process}:99999:{size}", 4, 0, 10),
        "another size": MemoryReference(f"{process}:{descriptor}:{int(size) * 2}", 5, 0, 10),
        "no size": MemoryReference(f"{process}:{descriptor}:0", 6, 0, 0),
        "too far": MemoryReference(segment.ticket, 7, int(size) - 9, 10),
        "much too far": MemoryReference(segment.ticket, 8, 2**62, 10),
        "a pipe": MemoryReference(f"{process}:{pipe}:0", 9, 0, 10),
        "a file": MemoryReference(f"{process}:{plain}:20", 10, 0, 10),
    }


def test_references_to_what_is_not_the_senders_are_refused(endpoints: Endpoints, tmp_path: Path) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    segment = Segment.create(4096)
    reader, writer = os.pipe()
    (tmp_path / "file").write_bytes(bytes(20))
    with (tmp_path / "file").open("rb") as plain, Stranger(server.address) as stranger:
        good = CODEC.encode_reference(Push("worker 1", 1), MemoryReference(segment.ticket, 0, 10, 20))
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
        stranger.says(CODEC.encode_hello(EndpointHello("unknown", 1, 1, True)))
        wait_until(lambda: server.receive(0.01) is None and stranger.socket.poll(0) != 0, "its greeting")
        stranger.says(stranger.socket.recv())
        stranger.says(*on_the_wire(CODEC.encode(Push("worker 1", 1))))
        received(server)
        assert not server.known.by_name["worker 1"].shares


def test_mutated_messages_at_the_door_have_no_effect(endpoints: Endpoints) -> None:
    """A million of them are sent by `make chaos`; the same million is decoded in `frame_support`."""
    mutated_at_the_door(endpoints, 50_000)


def test_resealed_messages_have_no_effect_either(endpoints: Endpoints) -> None:
    server = endpoints("server 0.0", bind=PRIVATE)
    plain = CODEC.encode(Reply(1))[0]
    with Stranger(server.address) as stranger:
        for number, body in enumerate([b"", b"\x80", plain[24:] + b"\x00", b"\x91" * 20_000], 1):
            stranger.says(resealed(plain[:24] + body))
            assert refuses(server, number)
    assert tuple(server.known.by_name) == ()


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
    with pytest.raises(UsageError, match="is not an address"):
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
    assert (tuple(server.known.by_name), server.refused) == ((), 0)


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
    with pytest.raises(UsageError, match="not a key file"):
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


def test_the_folder_that_a_killed_process_has_left_is_removed_by_the_next_one() -> None:
    code = """
import os, signal
from offbeat.runtime.messages import private_directory
with private_directory() as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    left = Path(told.stdout.strip())
    assert left.is_dir()
    with private_directory() as own, private_directory() as another:
        assert not left.exists()
        assert own.is_dir()
        assert another.is_dir(), "a living process keeps its folders"

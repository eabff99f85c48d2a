"""The agent of one machine: `python -m offbeat.runtime.agents.agent`, with its settings as one line on standard input.

It ends, and everything that it runs with it, when the launcher is silent, and when standard input closes: the engine
that started it holds the other end.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

import msgspec

from offbeat.errors import OffbeatError, RunError
from offbeat.protocols.agents import LAUNCHER, Deliver, LinkMessage, LinksMachine, LinkTiming, Offer, PeerLost
from offbeat.protocols.machine import Done, Payload
from offbeat.runtime.agents import contents as say
from offbeat.runtime.agents.code import Unpacking
from offbeat.runtime.agents.facts import available_memory, cores, free_ports, interface_of, own_address, versions
from offbeat.runtime.agents.mirror import FolderMirror
from offbeat.runtime.launch import ForkServerLink, ServerGoneError
from offbeat.runtime.launch import messages as wire
from offbeat.runtime.messages import Codec, Driver, Endpoint, Inbox, Keys, named
from offbeat.runtime.run.procfs import seen

LOOK = 0.25
"""Seconds between looks for new bytes in the run folder."""
LONGEST_SETTINGS = 1024 * 1024
PROBE = 3.0
"""Seconds that another machine has to answer."""
_PREFIX = "offbeat-agent-"


class AgentSettings(msgspec.Struct, frozen=True):
    """What an agent is told on its standard input."""

    address: str
    """Where the launcher listens: `tcp://host:port`."""
    launcher: str
    """The launcher's public key."""
    public: str
    secret: str
    """The agent's own keys."""
    preload: tuple[str, ...]
    timing: LinkTiming = LinkTiming()
    patience: float = 30.0
    """Seconds to wait for the launcher's first sign of life."""


class Agent:
    """The agent of one machine, for one run."""

    def __init__(self, settings: AgentSettings, folder: Path) -> None:
        self._settings, self._root = settings, folder
        self.run, self._sockets, self._code = (folder / name for name in ("run", "sockets", "code"))
        for made in (self.run / "logs", self._sockets, self._code):
            made.mkdir(parents=True, mode=0o700)
        self._server = ForkServerLink(settings.preload)
        keys = Keys(settings.public, settings.secret)
        self._endpoint: Endpoint[Any] = Endpoint(named(keys.public), Codec(LinkMessage), keys=keys)
        self._endpoint.connect(LAUNCHER, settings.address, settings.launcher)
        self._inbox = Inbox(self._endpoint)
        self._machine = LinksMachine(self._endpoint.name, [LAUNCHER], settings.timing)
        self._driver = Driver(self._machine, self._endpoint, self._work, self._inbox)
        self._mirror = FolderMirror(self.run)
        self._unpacking = Unpacking(self._code)
        self._problem = ""
        self._children: dict[int, wire.Channel[wire.FromChild]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server.channel, selectors.EVENT_READ, None)
        self._heard = False
        self.over: str | None = None
        """Why to end; empty: the work is done."""
        self._finishing = threading.Event()

    # -- what the launcher says

    def serve(self) -> None:
        """Do what the launcher says until it has finished or is lost."""
        began = time.monotonic()
        self._hello()
        threading.Thread(target=self._pump, name="offbeat-agent-pump", daemon=True).start()
        self._driver.begin()
        while self.over is None:
            self._driver.turn(0.5)
            if not self._heard and time.monotonic() - began > self._settings.patience:
                self.over = (
                    f"the agent on {socket.gethostname()} has not heard from the launcher at {self._settings.address} "
                    f"for {self._settings.patience:g} s. Is that port open to this machine?"
                )
        links = self._machine.links[LAUNCHER]
        deadline = time.monotonic() + self._settings.timing.silence
        while not self.over and links.pending and not links.lost and time.monotonic() < deadline:
            self._driver.turn(0.05)

    def close(self) -> None:
        """End every role, and leave nothing behind."""
        self._finishing.set()
        self._server.close()
        self._endpoint.close()
        shutil.rmtree(self._root, ignore_errors=True)

    def _hello(self) -> None:
        host = self._settings.address.removeprefix("tcp://").rpartition(":")[0]
        address, known = own_address(host), versions()
        facts = say.MachineFacts(
            host=socket.gethostname(),
            offbeat=known["offbeat"],
            torch=known["torch"],
            python=known["Python"],
            cores=cores(),
            memory=available_memory(),
            address=address,
            interface=interface_of(address),
            ports=free_ports(address),
            folder=str(self.run),
            sockets=str(self._sockets),
            code=str(self._code),
            now=time.monotonic(),
        )
        self._offer(say.AgentHello(facts))

    def _offer(self, message: msgspec.Struct, data: bytes = b"") -> None:
        content = say.content_of(message, data)
        self._inbox.put(Done(Offer(LAUNCHER), Payload(len(content), content)))

    def _work(self, work: Any, _token: Any) -> None:
        self._heard = True
        match work:
            case PeerLost(_, silent):
                self.over = f"the launcher has been silent for {silent:.1f} s"
            case Deliver(_, content):
                try:
                    self._obey(*say.to_agent(content.handle))
                except ServerGoneError:
                    self._offer(wire.Broken(self._server.obituary(), ""))
            case _:
                pass

    def _obey(self, message: say.ToAgent, data: memoryview) -> None:
        match message:
            case say.CodePiece():
                self._keeping(lambda: self._unpacking.take(message.digest, bytes(data), message.last))
            case say.HomeFile():
                self._keeping(lambda: self._receive(message, data))
            case say.AgentQuestion():
                missing = tuple(path for path in message.paths if not Path(path).exists())
                self._offer(
                    say.AgentAnswer(missing, tuple(filter(None, map(_unreachable, message.addresses))), self._problem)
                )
            case say.RoleOrder():
                self._start(message)
            case wire.Signal() | wire.Drain():
                self._server.send(message)
            case say.FinishRun():
                self._finishing.set()
            case _:
                assert_never(message)

    def _keeping(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (OSError, OffbeatError) as error:
            self._problem = self._problem or str(error)

    def _receive(self, file: say.HomeFile, data: memoryview) -> None:
        path = self.run / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb" if file.first else "ab") as opened:
            opened.write(data)
        self._mirror.known(file.path)

    def _start(self, order: say.RoleOrder) -> None:
        fork = order.fork
        here = fork.directory if fork.directory and Path(fork.directory).is_dir() else str(self._root)
        path = [*(entry for entry in fork.path if Path(entry).exists()), *(e for e in sys.path if e)]
        fork = msgspec.structs.replace(
            fork, environment={**os.environ, **fork.environment}, directory=here, path=list(dict.fromkeys(path))
        )
        log = self.run / order.log
        ours, theirs = socket.socketpair()
        with theirs:
            channel: wire.Channel[wire.FromChild] = wire.Channel(ours, wire.FromChild, fork.label)
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("ab") as opened:
                    self._children[fork.id] = channel
                    self._selector.register(channel, selectors.EVENT_READ, fork.id)
                    self._server.send(fork, (theirs.fileno(), opened.fileno()))
            except OSError as error:
                self._offer(wire.ForkRefused(fork.id, f"its log {log} cannot be written: {error}"))

    # -- what processes and files say

    def _pump(self) -> None:
        """Send on what the fork server and the roles say, and what is written to files."""
        looked = 0.0
        while self.over is None:
            for key, _ in self._selector.select(LOOK):
                if key.data is None:
                    self._from_server()
                elif key.data in self._children:
                    self._from_child(key.data, self._children[key.data].receive)
            if self._finishing.is_set():
                self._look()
                self._offer(say.RunFinished())
                self.over = ""
                self._endpoint.wake()
            elif time.monotonic() - looked > LOOK:
                self._look()
                looked = time.monotonic()

    def _from_server(self) -> None:
        for message in self._server.channel.receive():
            if isinstance(message, wire.ServerReady):
                self._server.is_ready = True
            if isinstance(message, wire.RoleEnded):
                # Everything that it has said and written comes before its end.
                if message.id in self._children:
                    self._from_child(message.id, self._children[message.id].receive_rest)
                    self._forget(message.id)
                self._look()
            self._offer(message)
        if self._server.channel.ended and not self._finishing.is_set():
            self._selector.unregister(self._server.channel)
            self._offer(wire.Broken(self._server.obituary(), ""))

    def _from_child(self, number: int, receive: Callable[[], list[wire.FromChild]]) -> None:
        try:
            for message in receive():
                self._offer(say.Said(number, message))
        except (RunError, msgspec.MsgspecError) as error:
            self._offer(say.Trouble(f"a role sent a message that cannot be read: {error}"))
            self._forget(number)
            return
        if self._children[number].ended:
            self._forget(number)

    def _forget(self, number: int) -> None:
        channel = self._children.pop(number, None)
        if channel is not None:
            self._selector.unregister(channel)
            channel.close()

    def _look(self) -> None:
        try:
            for path, offset, data in self._mirror.news():
                self._offer(say.Piece(path, offset), data)
                # A disk is faster than a link: what is on its way stays in memory.
                while self._machine.links[LAUNCHER].pending > 64 and self.over is None:
                    time.sleep(0.005)
        except OSError as error:
            self._offer(say.Trouble(f"files of the run cannot be read: {error}"))


def _unreachable(address: str) -> str:
    """Why an address cannot be reached from here; empty if it can."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), PROBE):
            return ""
    except OSError as error:
        return f"{address} ({error.strerror or error})"


def sweep(parent: Path) -> None:
    """Remove folders of agents that were killed."""
    for left in parent.glob(f"{_PREFIX}*"):
        process = left.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if process.isdigit() and left.stat().st_uid == os.getuid() and seen(int(process)) is None:
                shutil.rmtree(left, ignore_errors=True)


def _watch_input(agent: Agent) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    agent.over = agent.over or "the engine has closed the agent's standard input"


def main() -> None:
    """Serve one run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal's Ctrl-C is for the launcher, which then says what to do.
    line = sys.stdin.buffer.readline(LONGEST_SETTINGS)
    try:
        settings = msgspec.json.decode(line, type=AgentSettings)
    except msgspec.MsgspecError as error:
        sys.exit(f"the agent got no settings on its standard input ({error}); offbeat starts it, with --on.")
    parent = Path(tempfile.gettempdir())
    sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))
    try:
        agent = Agent(settings, folder)
        try:
            signal.signal(signal.SIGTERM, lambda _number, _frame: setattr(agent, "over", "it was ended by SIGTERM"))
            threading.Thread(target=_watch_input, args=(agent,), name="offbeat-agent-input", daemon=True).start()
            agent.serve()
        finally:
            agent.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if agent.over:
        print(agent.over, file=sys.stderr, flush=True)
    os._exit(1 if agent.over else 0)  # Without waiting for the thread that reads standard input.


if __name__ == "__main__":
    main()

"""The launcher's end of all agents of a run: a thread that hears them, and a link to each for the launcher."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

import offbeat
from offbeat.errors import MachineLostError, OffbeatError, RunError, UsageError, WaitError
from offbeat.protocols.agents import Deliver, LinkMessage, LinksMachine, LinkTiming, Offer, PeerLost
from offbeat.protocols.machine import Done, Payload
from offbeat.runtime.agents import contents as say
from offbeat.runtime.agents.agent import AgentSettings
from offbeat.runtime.agents.code import digest_of
from offbeat.runtime.agents.collected_files import CollectedFiles
from offbeat.runtime.agents.facts import versions
from offbeat.runtime.launch import Role
from offbeat.runtime.launch import messages as wire
from offbeat.runtime.messages import Codec, Driver, Endpoint, Inbox, Keys, named

START = 60.0
"""Seconds that an agent may take to say hello: a cold disk is slow."""
FAREWELL = 30.0
"""Seconds that an agent may be silent while it sends its last files."""
TURN = 0.2
PIECE = 1024 * 1024

M = TypeVar("M")


class StartedAgent(Protocol):
    """An agent that an engine has started."""

    def ended(self) -> str | None:
        """How it has ended; None while it runs."""
        ...

    def end(self) -> None:
        """End it now, whatever it does, and free what is held for it."""
        ...


class QueueChannel(Generic[M]):
    """Messages from another thread, read like those of a socket: a descriptor that is ready when there are some."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._messages: deque[M] = deque()
        self._closed = False
        self.ended = False
        """Whether no more will come."""

    def fileno(self) -> int:
        """The descriptor; -1 if closed."""
        return -1 if self._closed else self._event

    def put(self, message: M) -> None:
        """Hand over a message."""
        with self._lock:
            if not self._closed:
                self._messages.append(message)
                os.eventfd_write(self._event, 1)

    def finish(self) -> None:
        """Say that no more will come."""
        with self._lock:
            self.ended = True
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def receive(self) -> list[M]:
        """All messages that have come."""
        with self._lock:
            if not self._closed and not self.ended:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._event)
            messages = list(self._messages)
            self._messages.clear()
        return messages

    receive_rest = receive

    def close(self) -> None:
        """Free the descriptor."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._event)


class AgentLink:
    """One agent, as the launcher sees it: like a fork server that is elsewhere."""

    def __init__(self, machine: str, agent: StartedAgent, keys: Keys, offer: Callable[[str, bytes], None]) -> None:
        self.machine, self.agent, self.peer = machine, agent, named(keys.public)
        self._offer = offer
        self.channel: QueueChannel[wire.FromServer] = QueueChannel()
        self.facts: say.MachineFacts | None = None
        self.is_ready = False
        self.is_usable = True
        self.lost = ""
        """Why it is lost, if it is."""
        self.gone = ""
        """How the engine says that it has ended."""
        self.finished = False
        self.offset = 0.0
        """Seconds that this machine's monotonic clock is ahead of the agent's."""
        self.answer: say.AgentAnswer | None = None
        self.trouble = ""
        self.roles: dict[int, QueueChannel[wire.FromChild]] = {}
        self.heard = 0.0
        self._moved: dict[str, str] = {}

    def relocate(self, paths: Mapping[str, str]) -> None:
        """Paths of the launcher and where they are on this machine."""
        self._moved = dict(paths)

    def say(self, message: say.ToAgent, data: bytes = b"") -> None:
        """Send a message, unless the agent is lost."""
        if not self.lost:
            self._offer(self.peer, say.content_of(message, data))

    send = say

    def start(self, order: wire.Fork, role: Role) -> QueueChannel[wire.FromChild]:
        """Have a role started there; the channel has what it says."""
        channel = self.roles[order.id] = QueueChannel()
        environment = dict(role.environment)
        order = msgspec.structs.replace(
            order,
            config=self.here(order.config),
            environment=environment,
            directory=self.here(order.directory),
            path=[self.here(order.directory), *map(self.here, _own_paths(order.path))],
            network=None,
        )
        self.say(say.RoleOrder(order, f"logs/{role.log.name}"))
        return channel

    def here(self, value: Any) -> Any:
        """Plain data with the launcher's paths replaced by this machine's."""
        if isinstance(value, str):
            for home, there in self._moved.items():
                if value == home or value.startswith(f"{home}/"):
                    return there + value[len(home) :]
            return value
        if isinstance(value, Mapping):
            return {key: self.here(entry) for key, entry in value.items()}  # pyright: ignore[reportUnknownVariableType]
        return [self.here(entry) for entry in value] if isinstance(value, list | tuple) else value  # pyright: ignore[reportUnknownVariableType]

    def hear(self, message: say.FromAgent) -> None:
        """A message for the launcher's loop."""
        match message:
            case say.AgentHello(facts):
                self.offset = time.monotonic() - facts.now
                self.facts = facts
            case say.AgentAnswer():
                self.answer = message
            case say.Said(number, content):
                if number in self.roles:
                    self.roles[number].put(self._dated(content))
            case say.Trouble(text):
                self.trouble = self.trouble or text
            case say.RunFinished():
                self.finished = True
            case wire.Broken(text, trace):
                self.channel.put(wire.Broken(f"on machine {self.machine}: {text}", trace))
            case say.Piece():
                pass
            case _:
                self.channel.put(self._dated(message))

    def _dated(self, message: Any) -> Any:
        """With the time of this machine's clock."""
        at = getattr(message, "at", None)
        if at is None:
            return message
        return msgspec.structs.replace(message, at=min(at + self.offset, time.monotonic()))

    def lose(self, why: str) -> None:
        """It is gone."""
        if not self.lost:
            self.lost, self.is_usable = why, False
            for channel in self.roles.values():
                channel.finish()
            self.channel.finish()

    def close(self) -> None:
        """Free everything held for it."""
        self.is_usable = False
        self.agent.end()
        for channel in self.roles.values():
            channel.close()
        self.channel.close()


def _own_paths(path: Sequence[str]) -> list[str]:
    """Import paths of the user's; Python's own and those of installed packages are each machine's."""
    installed = (sys.prefix, sys.base_prefix, str(Path(offbeat.__file__).parent.parent))
    return [entry for entry in path if not entry.startswith(installed)]


class Fleet:
    """All agents of one run."""

    def __init__(
        self,
        address: str,
        machines: Sequence[str],
        start: Callable[[str, bytes], StartedAgent],
        preload: Sequence[str],
        timing: LinkTiming | None = None,
    ) -> None:
        self.address = address
        own = {machine: Keys.generate() for machine in machines}
        self._secrets = {machine: key.secret for machine, key in own.items()}
        keys = self._keys = Keys.generate([key.public for key in own.values()])
        self._endpoint: Endpoint[Any] = Endpoint(
            "launcher", Codec(LinkMessage), bind=f"tcp://{address}:*", keys=keys, named_by_key=True
        )
        self._inbox = Inbox(self._endpoint)
        self._machine = LinksMachine("launcher", [named(key.public) for key in own.values()], timing)
        self._files: CollectedFiles | None = None
        self.links: dict[str, AgentLink] = {}
        self.lost: dict[str, str] = {}
        """Machines that are lost, and why."""
        self._closing = False
        self._failure: BaseException | None = None
        try:
            for machine, key in own.items():
                settings = AgentSettings(
                    self._endpoint.address or "", keys.public, key.public, key.secret, tuple(preload),
                    timing or LinkTiming(), START,
                )  # fmt: skip
                agent = start(machine, msgspec.json.encode(settings) + b"\n")
                self.links[machine] = AgentLink(machine, agent, key, self._offer)
        except BaseException:
            self._close()
            raise
        self._by_peer = {link.peer: link for link in self.links.values()}
        self._thread = threading.Thread(target=self._hear, name="offbeat-agents", daemon=True)
        self._thread.start()
        # Apart, because an engine may take seconds to answer, in which agents would take the launcher for lost.
        self._watch = threading.Thread(target=self._watch_engine, name="offbeat-engine", daemon=True)
        self._watch.start()

    @property
    def strangers(self) -> int:
        """How many keys that are not of this run have tried to connect, and messages that were refused."""
        return self._endpoint.strangers + self._endpoint.refused

    def await_hellos(self) -> dict[str, say.MachineFacts]:
        """What every machine is; refuses ones that do not come, and ones with other versions."""
        self._await(lambda link: link.facts is not None, START, "did not say hello")
        mine = versions()
        differing = [
            f"{name} has {what} {has}, this machine {needed}"
            for name, link in self.links.items()
            if link.facts is not None
            for (what, needed), has in zip(
                mine.items(), (link.facts.offbeat, link.facts.torch, link.facts.python), strict=True
            )
            if has != needed
        ]
        if differing:
            raise UsageError(
                f"the machines of a run must have the same versions, or they would not compute the same: "
                f"{'; '.join(differing)}. Install the same ones there."
            )
        return {name: link.facts for name, link in self.links.items() if link.facts is not None}

    def prepare(self, folder: Path, moved: Mapping[str, str], paths: Sequence[str], code: bytes | None) -> None:
        """Send what every machine needs, and refuse machines that lack one of these paths or cannot reach another.

        `moved` maps the launcher's paths to names of the agent's folders: folder, sockets or code.
        """
        self._files = CollectedFiles(folder)
        for link in self.links.values():
            assert link.facts is not None  # noqa: S101 (await_hellos)
            link.relocate({home: getattr(link.facts, there) for home, there in moved.items()})
            for path in sorted(folder.rglob("*")):
                if path.is_file() and not path.is_symlink() and path.name != "run.json":
                    self._send_file(link, folder, path)
            if code is not None:
                digest = digest_of(code)
                for start in range(0, len(code), PIECE):
                    piece = code[start : start + PIECE]
                    link.say(say.CodePiece(digest, start + PIECE >= len(code)), piece)
            link.say(say.AgentQuestion(tuple(map(link.here, paths))))
        self._await(lambda link: link.answer is not None, START, "did not answer")
        for name, link in self.links.items():
            answer = link.answer
            if answer is not None and answer.problem:
                raise RunError(f"machine {name} could not keep what was sent to it: {answer.problem}.")
            if answer is not None and answer.missing:
                raise UsageError(
                    f"there is no {', '.join(answer.missing)} on machine {name}: paths are each machine's own. Copy it "
                    f"there, or send your code along with --ship."
                )

    def _send_file(self, link: AgentLink, folder: Path, path: Path) -> None:
        name, first = str(path.relative_to(folder)), True
        with path.open("rb") as file:
            while (data := file.read(PIECE)) or first:
                link.say(say.HomeFile(name, first), data)
                first = False

    def expect_checkpoints(self, machines: Iterable[str], elastic: bool) -> None:
        """The machines that have workers, and whether the run continues without those that are lost."""
        if self._files is not None:
            self._files.expect(machines, elastic)

    def _await(self, done: Callable[[AgentLink], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while missing := [link for link in self.links.values() if not done(link)]:
            for link in missing:
                if link.lost:
                    raise MachineLostError(f"machine {link.machine} was lost before the run began: {link.lost}")
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                names = ", ".join(link.machine for link in missing)
                raise WaitError(f"the agent on {names} {what} within {seconds:g} s.")
            time.sleep(0.01)

    def finish(self) -> None:
        """Let every agent send what is left of its files and end."""
        for link in self.links.values():
            link.say(say.FinishRun())
            link.heard = time.monotonic()
        while any(not (link.finished or link.lost) for link in self.links.values()):
            now = time.monotonic()
            for link in self.links.values():
                if not link.finished and now - link.heard > FAREWELL:
                    self._lose(link, f"it sent none of its last files for {FAREWELL:g} s")
            time.sleep(0.01)
        if self._files is not None:
            self._files.discard_drafts()

    def close(self) -> None:
        """End all agents."""
        self._closing = True
        self._endpoint.wake()
        self._thread.join()
        self._watch.join(FAREWELL)
        self._close()

    def _close(self) -> None:
        for link in self.links.values():
            link.close()
        self._endpoint.close()

    # -- the thread

    def _offer(self, peer: str, content: bytes) -> None:
        self._inbox.put(Done(Offer(peer), Payload(len(content), content)))

    def _hear(self) -> None:
        driver = Driver(self._machine, self._endpoint, self._work, self._inbox)
        try:
            driver.begin()
            while not self._closing:
                driver.turn(TURN)
                self._look_after_agents()
        except BaseException as error:
            self._failure = error
            for link in self.links.values():
                self._lose(link, f"the launcher could not go on hearing it: {error}")

    def _watch_engine(self) -> None:
        """Ask the engine which agents have ended, until the run is over."""
        while not self._closing:
            for link in self.links.values():
                if not (link.lost or link.finished or link.gone) and (how := link.agent.ended()) is not None:
                    link.gone = how
                    self._endpoint.wake()
            time.sleep(TURN)

    def _look_after_agents(self) -> None:
        for link in self.links.values():
            if link.gone and not link.lost and not link.finished:
                self._lose(link, link.gone)

    def _lose(self, link: AgentLink, why: str) -> None:
        self.lost.setdefault(link.machine, why)
        link.lose(why)
        self._machine.links[link.peer].lose()
        if self._files is not None:
            self._files.lose(link.machine)

    def _work(self, work: Any, _token: Any) -> None:
        match work:
            case PeerLost(peer, silent):
                self._lose(self._by_peer[peer], f"it has been silent for {silent:.1f} s")
            case Deliver(peer, content):
                link = self._by_peer[peer]
                link.heard = time.monotonic()
                try:
                    message, data = say.from_agent(content.handle)
                    if isinstance(message, say.Piece) and self._files is not None:
                        self._files.take(link.machine, message.path, message.offset, data)
                    link.hear(message)
                except (OffbeatError, OSError) as error:
                    self._lose(link, f"what it sent could not be kept: {error}")
            case _:
                pass

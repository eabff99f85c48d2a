"""The link between the launcher and its agents on other machines: everything arrives once and in order, or is lost.

Messages may be lost, late or doubled and connections may break and return; a side that stays silent is lost for good.
The agent's half ends what it runs when the launcher is lost, the launcher's half reports which agent is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Done, Effect, Effects, Event, Name, Payload, Received, Timer

LAUNCHER = "launcher"
"""The name of the launcher's end."""


class LinkTiming(Struct, frozen=True):
    """How a link tells a slow peer from a lost one."""

    beat: float = 0.5  # Seconds between signs of life.
    resend: float = 1.0  # Seconds without progress until what is unacknowledged is sent again.
    silence: float = 5.0  # Seconds without a sign of life until the peer is lost.
    window: int = 16 * 1024 * 1024  # Unacknowledged bytes in flight.


class Numbered(Struct, tag=True, frozen=True):
    """The content with this number, as payload; and how many contents of the receiver have arrived."""

    number: int
    received: int


class LinkBeat(Struct, tag=True, frozen=True):
    """A sign of life, and how many contents of the receiver have arrived."""

    received: int


LinkMessage = Numbered | LinkBeat


class Offer(Struct, frozen=True):
    """The token of `Done`: its result is a payload to deliver to this peer."""

    to: Name


class Deliver(Struct, frozen=True):
    """Work: hand this content to the program, in order."""

    sender: Name
    content: Payload


class PeerLost(Struct, frozen=True):
    """Work: this peer has been silent for so many seconds; nothing more will come from it or reach it."""

    peer: Name
    silent: float


class LinkEnd:
    """One end of a link: numbers what is sent, acknowledges what arrives, resends, and notices silence."""

    def __init__(self, peer: Name, timing: LinkTiming) -> None:
        self.peer, self._timing = peer, timing
        self.lost = False
        self.received = 0
        """How many contents have arrived."""
        self._sent = 0
        self._waiting: deque[Payload] = deque()
        self._flying: deque[tuple[int, Payload]] = deque()
        self._bytes_flying = 0
        self._heard = self._progress = 0.0

    def begin(self, now: float) -> None:
        """Count silence from now on."""
        self._heard = self._progress = now

    @property
    def pending(self) -> int:
        """Contents that the peer has not acknowledged."""
        return len(self._waiting) + len(self._flying)

    def offer(self, content: Payload, now: float, out: Effects) -> None:
        """Send a content as soon as the window has room."""
        if self.lost:
            return
        self._waiting.append(content)
        self._fill(now, out)

    def hear(self, message: LinkMessage, content: Payload, now: float, out: Effects) -> None:
        """A message of the peer has come."""
        if self.lost:
            return
        self._heard = now
        self._acknowledge(message.received, now)
        if isinstance(message, Numbered):
            if message.number == self.received:
                self.received += 1
                out.start(Deliver(self.peer, content))
            # Also for one that came before, or after a gap: it tells the sender where to go on.
            out.send(self.peer, LinkBeat(self.received))
        self._fill(now, out)

    def beat(self, now: float, out: Effects) -> None:
        """Give a sign of life; resend what is overdue; notice silence."""
        if self.lost:
            return
        silent = now - self._heard
        if silent > self._timing.silence:
            self.lose()
            out.start(PeerLost(self.peer, silent))
            return
        out.send(self.peer, LinkBeat(self.received))
        if self._flying and now - self._progress > self._timing.resend:
            self._progress = now
            for number, content in self._flying:
                out.send(self.peer, Numbered(number, self.received), content)

    def lose(self) -> None:
        """Forget the peer: it is gone."""
        self.lost = True
        self._waiting.clear()
        self._flying.clear()

    def _acknowledge(self, received: int, now: float) -> None:
        while self._flying and self._flying[0][0] < received:
            _, content = self._flying.popleft()
            self._bytes_flying -= content.nbytes
            self._progress = now

    def _fill(self, now: float, out: Effects) -> None:
        while self._waiting and (not self._flying or self._bytes_flying < self._timing.window):
            content = self._waiting.popleft()
            if not self._flying:
                self._progress = now
            self._flying.append((self._sent, content))
            self._bytes_flying += content.nbytes
            out.send(self.peer, Numbered(self._sent, self.received), content)
            self._sent += 1


class LinksMachine:
    """All links of one process: the launcher's to its agents, or an agent's to the launcher."""

    def __init__(self, name: Name, peers: Iterable[Name], timing: LinkTiming | None = None) -> None:
        self.name = name
        self._timing = timing or LinkTiming()
        self.links = {peer: LinkEnd(peer, self._timing) for peer in peers}
        self._begun: set[Name] = set()
        """Peers that were heard: before that, whoever started them knows how long it takes."""

    def begin(self, now: float) -> Sequence[Effect]:
        """Begin to beat."""
        out = Effects()
        self._beat(now, out)
        return out.done

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Effects of a message, of a content to send, and of time."""
        out = Effects()
        match event:
            case Received(sender, Numbered() | LinkBeat() as message, content) if sender in self.links:
                if sender not in self._begun:
                    self._begun.add(sender)
                    self.links[sender].begin(now)
                self.links[sender].hear(message, content, now, out)
            case Done(Offer(peer), content) if peer in self.links:
                self.links[peer].offer(content or NOTHING, now, out)
            case Timer():
                self._beat(now, out)
            case _:
                pass
        return out.done

    def _beat(self, now: float, out: Effects) -> None:
        for peer, link in self.links.items():
            if peer not in self._begun:
                link.begin(now)
            link.beat(now, out)
        out.timer(self._timing.beat, "beat")

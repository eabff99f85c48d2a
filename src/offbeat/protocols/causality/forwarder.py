"""Events of a machine on their way to a monitor on another: a forwarder there, a collector here.

A forwarder reads what the processes of its machine have recorded, and sends it in numbered batches. The collector
takes them in order and acknowledges the last; what is not acknowledged is sent again. At most `LinkPace.window` bytes
are under way: while they are, the forwarder reads nothing, and what processes overwrite meanwhile is missing from the
next batch, which the collector sees by the numbers of the records. So every record comes once, or is known to be lost.

A forwarder that was killed and started again says so. It is told how far the collector has come, and continues there,
as long as the records are still in memory. Pulses say several times a second how much has been recorded, what the
kernel says of the processes, and what time it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from offbeat.protocols.causality.clock_offset import ClockOffset, OffsetEstimate
from offbeat.protocols.machine import (
    Done,
    Effect,
    Effects,
    Event,
    Name,
    Payload,
    Received,
    Timer,
)

HOME: Final[Name] = "collector"
MOST_AHEAD: Final = 1024  # Batches that are kept while one before them is missing; later ones will be sent again.
_LOOK, _READ, _RESEND, _PULSE, _GREET = "look", "read", "resend", "pulse", "greet"


class LinkPace(Struct, frozen=True):
    """How often things are done, in seconds, and how much may be under way."""

    look: float = 0.05  # Between two readings.
    pulse: float = 0.2  # Between two pulses.
    resend: float = 0.5  # Until an unacknowledged batch is sent again; doubles up to `longest`.
    longest: float = 4.0
    window: int = 1 << 20  # Bytes under way.
    lost: float = 10.0  # Silence after which a link counts as broken, and its processes' last events as lost.


class ProcessPulse(Struct, frozen=True, array_like=True, gc=False):
    """What a machine says of one of its processes."""

    process: Name
    birth: int  # Which process of this name it is.
    written: int  # Number of records so far.
    ended: bool  # Whether the process has ended: there will be no more.
    main: str = ""  # What its main thread does, as the kernel says: R, S, T …
    ticks: int = 0  # Processor time of its main thread.
    stopped: bool = False  # Whether it is stopped.
    without_core: float | None = None  # Seconds for which its threads had no core; None if unknown.


class Greeting(Struct, frozen=True, tag=True):
    """A forwarder starts."""

    life: int  # Differs between two forwarders of a machine.
    clock: str  # Which clock its times are by: machines of the same clock need no offset.


class Position(Struct, frozen=True, array_like=True, gc=False):
    """How far the collector has come with a process."""

    process: Name
    birth: int
    number: int  # Its last record that has come.


class Positions(Struct, frozen=True, tag=True):
    """The answer to a greeting: where to continue."""

    life: int
    positions: tuple[Position, ...]


class Records(Struct, frozen=True, tag=True):
    """A batch of consecutive records of a process; the payload has them."""

    life: int
    number: int  # Of the batch, from 1 in each life.
    process: Name
    birth: int
    first: int  # Number of its first record.
    count: int
    names: tuple[tuple[int, bytes], ...] = ()  # What the records are about, as far as it was not sent before.


class Pulse(Struct, frozen=True, tag=True):
    """Time and processes of a machine."""

    life: int
    sent: float
    processes: tuple[ProcessPulse, ...]
    waiting: int = 0  # Number of records that were recorded and not acknowledged yet.
    heard: tuple[float, float] | None = None
    """When the last acknowledgement was sent, by the collector's clock, and when it came, by this machine's."""


class Acknowledgement(Struct, frozen=True, tag=True):
    """All batches up to this number have come."""

    life: int
    number: int
    sent: float


class StackRequest(Struct, frozen=True, tag=True):
    """Make these processes dump their stacks."""

    processes: tuple[Name, ...]


class StackReply(Struct, frozen=True, tag=True):
    """The stacks of those that answered."""

    stacks: dict[Name, str]


LinkMessage = (
    Greeting | Positions | Records | Pulse | Acknowledgement | StackRequest | StackReply
)  # What passes between a forwarder and the collector.


class ReadRecords(Struct, frozen=True):
    """Work: read what has been recorded, at most so many bytes; the result is a `RecordsRead`."""

    most: int
    pulse: bool  # Whether facts about the processes are wanted as well.


class Continue(Struct, frozen=True):
    """Work: read on after these positions."""

    positions: tuple[Position, ...]


class RecordsRead(Struct, frozen=True):
    """Batches, in which life and number are missing, with their bytes; and facts about the processes."""

    batches: tuple[tuple[Records, Payload], ...] = ()
    processes: tuple[ProcessPulse, ...] = ()
    left: int = 0  # Number of records that were not read yet.


class Forwarder:
    """A machine's side."""

    def __init__(self, name: Name, life: int, clock: str, pace: LinkPace | None = None) -> None:
        self.name = name
        self._life, self._clock, self._pace = life, clock, pace or LinkPace()
        self._known = False  # Whether the collector has said where to continue.
        self._number = 0
        self._under_way: deque[tuple[Records, Payload]] = deque()
        self._bytes = 0
        self._left = 0
        self._patience = self._pace.resend
        self._progress_at = 0.0
        self._pulse_at = 0.0
        self._heard: tuple[float, float] | None = None
        self._reading = False

    @property
    def waiting(self) -> int:
        """Number of records that were recorded and not acknowledged yet."""
        return self._left + sum(batch.count for batch, _ in self._under_way)

    def begin(self, now: float) -> Sequence[Effect]:
        """Greet the collector."""
        self._pulse_at = now
        return self._greet()

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Read, send, send again."""
        effects = Effects()
        match event:
            case Timer(token="greet") if not self._known:
                return self._greet()
            case Received(message=Positions(life=life, positions=positions)) if life == self._life and not self._known:
                self._known = True
                effects.start(Continue(positions))
                effects.timer(0.0, _LOOK)
                effects.timer(self._pace.resend, _RESEND)
            case Timer(token="look"):
                self._look(effects, now)
            case Done(token="read", result=RecordsRead() as read):
                self._send(effects, read, now)
            case Received(message=Acknowledgement(life=life) as acknowledged) if life == self._life:
                self._acknowledged(acknowledged, now)
            case Timer(token="resend"):
                self._resend(effects, now)
            case Received(message=StackRequest() as request):
                effects.start(request, "stacks")
            case Done(token="stacks", result=StackReply() as reply):
                effects.send(HOME, reply)
            case _:
                pass
        return effects.done

    def _greet(self) -> Sequence[Effect]:
        effects = Effects()
        effects.send(HOME, Greeting(self._life, self._clock))
        effects.timer(self._pace.resend, _GREET)
        return effects.done

    def _look(self, effects: Effects, now: float) -> None:
        if not self._reading:
            self._reading = True
            effects.start(ReadRecords(max(0, self._pace.window - self._bytes), now >= self._pulse_at), _READ)
        effects.timer(self._pace.look, _LOOK)

    def _send(self, effects: Effects, read: RecordsRead, now: float) -> None:
        self._reading, self._left = False, read.left
        if read.batches and not self._under_way:
            self._progress_at = now
        for part, payload in read.batches:
            self._number += 1
            batch = Records(
                self._life, self._number, part.process, part.birth, part.first, part.count, part.names
            )  # fmt: skip
            self._under_way.append((batch, payload))
            self._bytes += payload.nbytes
            effects.send(HOME, batch, payload)
        if read.processes or now >= self._pulse_at:
            self._pulse_at = now + self._pace.pulse
            effects.send(HOME, Pulse(self._life, now, read.processes, self.waiting, self._heard))

    def _acknowledged(self, acknowledged: Acknowledgement, now: float) -> None:
        self._heard = (acknowledged.sent, now)
        while self._under_way and self._under_way[0][0].number <= acknowledged.number:
            _, payload = self._under_way.popleft()
            self._bytes -= payload.nbytes
            self._patience, self._progress_at = self._pace.resend, now

    def _resend(self, effects: Effects, now: float) -> None:
        if self._under_way and now - self._progress_at >= self._patience:
            self._patience = min(2 * self._patience, self._pace.longest)
            self._progress_at = now
            for batch, payload in self._under_way:
                effects.send(HOME, batch, payload)
        effects.timer(self._pace.resend / 2, _RESEND)


class WriteRecords(Struct, frozen=True):
    """Work: records of a process have come; the payload has them, and the first `skip` are known already."""

    machine: Name
    batch: Records
    payload: Payload
    skip: int
    lost: int  # Number of records before them that will never come.
    is_new: bool  # Whether they are the first of this process.


class LinkState(Struct):
    """A link to a machine, as the monitor sees it."""

    machine: Name
    clock: str = ""
    life: int = -1
    heard: float = float("-inf")  # When it was last heard from, by the monitor's clock.
    received: int = 0  # Number of records that have come.
    lost: int = 0  # Number of records that will never come.
    restarts: int = 0  # How often its forwarder was started again.
    waiting: int = 0  # Number of records that were recorded there and had not come at the last pulse.
    delay: float | None = None  # Seconds that its last pulse took, as far as the clocks' offset is known.
    offset: ClockOffset = ClockOffset()  # How far its clock is ahead of the monitor's.


class _Link:
    def __init__(self, machine: Name) -> None:
        self.state = LinkState(machine)
        self.number = 0  # The last batch that has come, as have all before it.
        self.ahead: dict[int, tuple[Records, Payload]] = {}  # Batches that have overtaken others.
        self.estimate = OffsetEstimate()
        self.positions: dict[Name, Position] = {}
        self.pulses: dict[Name, tuple[ProcessPulse, float]] = {}  # With when they were sent, on the machine's clock.
        self.pulsed = float("-inf")  # When the last pulse was sent.
        self.until: dict[Name, float] = {}  # The time up to which all events of a process have come.


class Collector:
    """The monitor's side, for all machines."""

    def __init__(self, machines: Sequence[Name], pace: LinkPace | None = None) -> None:
        self.name = HOME
        self._pace = pace or LinkPace()
        self._links = {machine: _Link(machine) for machine in machines}

    def begin(self, now: float) -> Sequence[Effect]:
        """Nothing, until a forwarder greets."""
        for link in self._links.values():
            link.state.heard = now
        return []

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Take batches in order, and acknowledge. `Done(machine, StackRequest)` asks a machine for stacks."""
        effects = Effects()
        if isinstance(event, Done) and isinstance(event.result, StackRequest):
            effects.send(event.token, event.result)
        if not isinstance(event, Received) or event.sender not in self._links:
            return effects.done
        link, message = self._links[event.sender], event.message
        link.state.heard = now
        match message:
            case Greeting():
                self._greeted(link, message)
                effects.send(event.sender, Positions(message.life, tuple(link.positions.values())))
            case Records() if message.life == link.state.life:
                if message.number > link.number and len(link.ahead) < MOST_AHEAD:
                    link.ahead[message.number] = message, event.payload
                while (following := link.ahead.pop(link.number + 1, None)) is not None:
                    link.number += 1
                    self._take(link, *following, effects)
                effects.send(event.sender, Acknowledgement(message.life, link.number, now))
            case Pulse() if message.life == link.state.life:
                self._beat(link, message, now)
                effects.send(event.sender, Acknowledgement(message.life, link.number, now))
            case StackReply():
                effects.start(message)
            case _:
                pass
        return effects.done

    def _greeted(self, link: _Link, greeting: Greeting) -> None:
        if greeting.life != link.state.life:
            link.state.restarts += link.state.life >= 0
            link.state.life, link.state.clock, link.number = greeting.life, greeting.clock, 0
            link.ahead.clear()

    def _take(self, link: _Link, batch: Records, payload: Payload, effects: Effects) -> None:
        before = link.positions.get(batch.process)
        is_new = before is None or before.birth != batch.birth
        known = 0 if before is None or is_new else before.number
        last = batch.first + batch.count - 1
        lost, skip = max(0, batch.first - known - 1), max(0, known + 1 - batch.first)
        if last > known:
            link.positions[batch.process] = Position(batch.process, batch.birth, last)
            link.state.received += batch.count - skip
            link.state.lost += lost
            effects.start(WriteRecords(link.state.machine, batch, payload, skip, lost, is_new))

    def _beat(self, link: _Link, pulse: Pulse, now: float) -> None:
        link.estimate.received(pulse.sent, now)
        if pulse.heard is not None:
            link.estimate.delivered(*pulse.heard)
        link.pulsed = max(link.pulsed, pulse.sent)
        state = link.state
        state.waiting, state.offset = pulse.waiting, link.estimate.at(now)
        state.delay = now - (pulse.sent - state.offset.seconds) if state.offset.error < float("inf") else None
        for process in pulse.processes:
            link.pulses[process.process] = process, pulse.sent

    # -- what the monitor asks ----------------------------------------------------------------------------------------

    def links(self) -> list[LinkState]:
        """The state of all links."""
        return [link.state for link in self._links.values()]

    def processes(self, machine: Name) -> tuple[Name, ...]:
        """The processes that a machine has said it has."""
        return tuple(sorted({**self._links[machine].pulses, **self._links[machine].positions}))

    def home_of(self, process: Name) -> Name | None:
        """The machine of a process, if one has said that it has it."""
        return next((machine for machine in self._links if process in self.processes(machine)), None)

    def pulse(self, machine: Name, process: Name) -> ProcessPulse | None:
        """The last that was heard of a process."""
        return self._links[machine].pulses.get(process, (None, 0.0))[0]

    def is_broken(self, machine: Name, now: float) -> bool:
        """Whether nothing was heard from a machine for so long that its last events count as lost."""
        return now - self._links[machine].state.heard > self._pace.lost

    def is_complete(self, machine: Name, process: Name, now: float) -> bool:
        """Whether all events of a process that has ended have come, or will never come."""
        pulse = self.pulse(machine, process)
        has_all = pulse is not None and pulse.ended and self._has(machine, pulse)
        return has_all or self.is_broken(machine, now)

    def known_until(self, machine: Name, process: Name, now: float) -> float:
        """The time, on the monitor's clock, up to which all events of a process have come."""
        link = self._links[machine]
        pulse, sent = link.pulses.get(process, (ProcessPulse(process, 0, 0, ended=False), link.pulsed))
        until = link.until.get(process, float("-inf"))
        if self._has(machine, pulse):
            sent_here = sent - link.state.offset.seconds - link.state.offset.error  # At the earliest.
            until = link.until[process] = now if pulse.ended else max(until, sent_here)
        return until

    def _has(self, machine: Name, pulse: ProcessPulse) -> bool:
        position = self._links[machine].positions.get(pulse.process)
        if position is None or position.birth != pulse.birth:
            return pulse.written == 0
        return position.number >= pulse.written

"""Machines in virtual time: the protocols that run on real processes, under injected faults.

Messages are delayed, lost, duplicated and reordered; processes are killed, stopped and continued, partitioned, and
restarted. All of it follows from one seed, so a failure can be reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any

from msgspec import Struct

from offbeat.protocols.machine import Done, Effect, Ended, Event, Machine, Name, Received, Send, SetTimer, Start, Timer


class Sent(Struct, frozen=True):
    """A message has left."""

    at: float
    sender: Name
    to: Name
    message: Any
    nbytes: int
    arrivals: tuple[float, ...]  # Arrival times: two if it is duplicated, none if it is lost.


class Told(Struct, frozen=True):
    """A process handles an event; None: it begins."""

    at: float
    name: Name
    event: Event | None


Happening = Sent | Told
Perform = Callable[[Any], Any]  # Does the work of a `Start`, and returns the result of the `Done`.


class LossyNetwork(Struct, frozen=True):
    """What happens to messages. Each has its own delay, so one may overtake another."""

    delay: float = 0.001  # Minimum delay, in seconds.
    jitter: float = 0.0  # Mean of an exponentially distributed extra delay, so that a few take very long.
    loss: float = 0.0  # Share of messages that are lost.
    duplicate: float = 0.0  # Share of messages that are duplicated.
    per_byte: float = 0.0  # Seconds that each byte of a payload adds to the delay.
    ordered: bool = False  # Messages between two processes arrive in order, as on one connection.
    until: float = float("inf")  # When losses and duplicates cease.


class Kill(Struct, frozen=True):
    """Kill a process; its parent sees that after a while, or never."""

    name: Name
    at: float
    seen_after: float | None = None  # Seconds until `Ended` reaches the observer; None: only its silence tells.


class Stop(Struct, frozen=True):
    """Stop a process for some seconds. Events meanwhile, including timers, are handled when it continues."""

    name: Name
    at: float
    seconds: float


class Partition(Struct, frozen=True):
    """Cut these off from all others for some seconds: messages across are lost."""

    names: frozenset[Name]
    at: float
    seconds: float


class Restart(Struct, frozen=True):
    """Start a process under the name of another, which is killed first if it lives."""

    name: Name
    at: float
    machine: Callable[[], Machine]  # Makes the new process's machine.


Fault = Kill | Stop | Partition | Restart


class _Process(Struct):
    machine: Machine
    birth: int  # Which process of this name it is.
    stopped_until: float = 0.0
    alive: bool = True


class Simulation:
    """Drives machines through virtual time."""

    def __init__(
        self,
        machines: Iterable[Machine],
        *,
        seed: int = 0,
        network: LossyNetwork | None = None,
        faults: Sequence[Fault] = (),
        perform: Mapping[Name, Perform] | None = None,
        observer: Name = "coordinator",
        log: Callable[[Happening], None] | None = None,
    ) -> None:
        self.now = 0.0
        self.events = 0  # Number of events so far.
        self.lost = 0  # Number of lost messages.
        self._random = Random(seed)  # noqa: S311 - faults to be repeated, not secrets
        self._network = network or LossyNetwork()
        self._perform = dict(perform or {})
        self._observer = observer
        self._log = log
        self._processes: dict[Name, _Process] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._entered = 0
        self._timers: dict[tuple[Name, int, Any], int] = {}
        self._cuts: list[Partition] = []
        self._latest: dict[tuple[Name, Name], float] = {}
        for machine in machines:
            self._give_birth(machine)
        self.add(faults)

    def add(self, faults: Iterable[Fault]) -> None:
        """Inject more faults."""
        for fault in faults:
            if isinstance(fault, Partition):
                self._cuts.append(fault)
            else:
                self._at(fault.at, lambda fault=fault: self._strike(fault))

    def alive(self, name: Name) -> bool:
        """Whether a process of this name lives, even if stopped."""
        return name in self._processes and self._processes[name].alive

    def machine(self, name: Name) -> Machine:
        """The machine of the newest process of this name."""
        return self._processes[name].machine

    def performing(self, name: Name, perform: Perform) -> None:
        """Set what does the work of a machine from now on."""
        self._perform[name] = perform

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let virtual time pass, up to `seconds` from the beginning. True if `until` became true before."""
        while self._queue and not until():
            at, _, act = self._queue[0]
            if at > seconds:
                break
            heappop(self._queue)
            self.now = max(self.now, at)
            self.events += 1
            act()
        return until()

    def carry_out(self, name: Name, effects: Sequence[Effect]) -> None:
        """Carry out a machine's effects now; for effects that did not come from an event."""
        process = self._processes[name]
        following: list[Event] = []
        for effect in effects:
            match effect:
                case Send():
                    self._send(name, effect)
                case SetTimer():
                    self._set_timer(name, process, effect)
                case Start():
                    result = self._perform[name](effect.work) if name in self._perform else None
                    if effect.token is not None:
                        following.append(Done(effect.token, result))
        for event in following:
            self._happen(name, process, event)

    def _at(self, time: float, act: Callable[[], None]) -> None:
        self._entered += 1
        heappush(self._queue, (time, self._entered, act))

    def _give_birth(self, machine: Machine) -> None:
        before = self._processes.get(machine.name)
        process = _Process(machine, before.birth + 1 if before else 0)
        self._processes[machine.name] = process
        self._at(self.now, lambda: self._begin(process))

    def _begin(self, process: _Process) -> None:
        if process.alive:
            if self._log is not None:
                self._log(Told(self.now, process.machine.name, None))
            self.carry_out(process.machine.name, process.machine.begin(self.now))

    def _happen(self, name: Name, process: _Process, event: Event) -> None:
        """A process handles an event: later, if it is stopped; never, if it is dead."""
        if not process.alive:
            return
        if self.now < process.stopped_until:
            self._at(process.stopped_until, lambda: self._happen(name, process, event))
            return
        if self._log is not None:
            self._log(Told(self.now, name, event))
        self.carry_out(name, process.machine.on(event, self.now))

    def _set_timer(self, name: Name, process: _Process, effect: SetTimer) -> None:
        key = (name, process.birth, effect.token)
        setting = self._timers[key] = self._timers.get(key, 0) + 1

        def ring() -> None:
            if self._timers[key] == setting:
                self._happen(name, process, Timer(effect.token))

        self._at(self.now + effect.after, ring)

    def _send(self, sender: Name, effect: Send) -> None:
        network, calm = self._network, self.now >= self._network.until
        if self._is_cut(sender, effect.to) or (not calm and self._random.random() < network.loss):
            self.lost += 1
            if self._log is not None:
                self._log(Sent(self.now, sender, effect.to, effect.message, effect.payload.nbytes, ()))
            return
        copies = 1 if calm or self._random.random() >= network.duplicate else 2
        arrivals: list[float] = []
        for _ in range(copies):
            arrival = self.now + network.delay + network.per_byte * effect.payload.nbytes
            if network.jitter:
                arrival += self._random.expovariate(1 / network.jitter)
            if network.ordered:
                arrival = self._latest[sender, effect.to] = max(arrival, self._latest.get((sender, effect.to), 0.0))
            arrivals.append(arrival)
            self._at(arrival, lambda: self._arrive(effect.to, Received(sender, effect.message, effect.payload)))
        if self._log is not None:
            self._log(Sent(self.now, sender, effect.to, effect.message, effect.payload.nbytes, tuple(arrivals)))

    def _arrive(self, name: Name, event: Received) -> None:
        process = self._processes.get(name)
        if process is not None:
            self._happen(name, process, event)

    def _is_cut(self, one: Name, other: Name) -> bool:
        return any(
            cut.at <= self.now < cut.at + cut.seconds and (one in cut.names) != (other in cut.names)
            for cut in self._cuts
        )

    def _strike(self, fault: Kill | Stop | Restart) -> None:
        process = self._processes.get(fault.name)
        if process is not None and isinstance(fault, Stop):
            process.stopped_until = max(process.stopped_until, self.now + fault.seconds)
        elif process is not None:
            process.alive = False
        if isinstance(fault, Restart):
            self._give_birth(fault.machine())
        observer = self._processes.get(self._observer)
        if isinstance(fault, Kill) and fault.seen_after is not None and observer is not None:
            ended = Ended(fault.name)
            self._at(self.now + fault.seen_after, lambda: self._happen(self._observer, observer, ended))

"""Which messages are sent when: a schedule, training with servers, or machines, played in virtual time and logged.

All three give the same plain data, a `Timeline`, which `offbeat draw` shows. Nothing here decides what is sent:
schedules are played by `trace`, servers and workers by `Drive`, machines by `Simulation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from offbeat.protocols.machine import Machine, Name
from offbeat.protocols.schedule import Layout, Op, Schedule, View
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import RhythmOf
from offbeat.simulate.machines import LossyNetwork as Delays
from offbeat.simulate.machines import Perform, Sent, Simulation
from offbeat.simulate.network import Link, Network
from offbeat.simulate.queues import Times
from offbeat.simulate.schedules import Activity, Interval, Message, Trace, label_of, trace
from offbeat.simulate.servers.events import Drive, ServerPorts, Worker

PULLED = "values"  # What servers send.


class RoundSummary(NamedTuple):
    """A round of a schedule, over all ranks."""

    number: int
    op: Op
    pairs: tuple[tuple[int, int], ...]  # Sources and targets, in order; each once.
    smallest: int  # Bytes of its smallest entry.
    largest: int
    begin: float  # When the first rank was ready for it.
    end: float  # When the last rank had done it.
    what: str = ""  # Of a pipeline: what is computed or brought.


class RoleCost(NamedTuple):
    """What all participants of a role send to all of another."""

    sender: str
    receiver: str
    messages: int
    headers: int  # Bytes of the messages themselves, as they are on the wire.
    vectors: int  # Bytes of the vectors beside them.


class Timeline(Struct, frozen=True):
    """The content of a picture or table."""

    title: str
    lanes: tuple[str, ...]
    hosts: tuple[int, ...]  # The host of each lane; a server has its own.
    intervals: tuple[Interval, ...]
    messages: tuple[Message, ...]
    rounds: tuple[RoundSummary, ...] = ()  # Of a schedule; empty where there is none.
    notes: tuple[str, ...] = ()  # What there is to say about the whole.
    costs: tuple[RoleCost, ...] = ()  # By role, where there are roles.
    costs_of: str = ""  # What has these costs.
    clock: str = "virtual time"

    @property
    def end(self) -> float:
        """When everything is over."""
        ends = [interval.end for interval in self.intervals] + [message.arrives for message in self.messages]
        return max((end for end in ends if not math.isnan(end)), default=0.0)


def schedule_timeline(
    schedule: Schedule, view: View, layout: Layout, network: Network, title: str, role: str = "rank"
) -> Timeline:
    """A schedule, round by round; `role` is what its ranks are called."""
    played = trace(schedule(view, layout), view, layout, network)
    waits = [
        Interval(rank, begin, begin + waited, Activity.WAIT, f"waits for {label_of(number, each)}")
        for number, each in enumerate(played.rounds)
        for rank, (begin, waited) in enumerate(zip(played.begin[number], played.waited[number], strict=True))
        if waited > 0
    ]
    lanes = tuple(f"{role} {rank}" for rank in range(view.size))
    hosts = tuple(view.hosts.tolist())
    return Timeline(title, lanes, hosts, (*waits, *played.work), played.transfers, summaries(played, layout))


def summaries(played: Trace, layout: Layout) -> tuple[RoundSummary, ...]:
    """Each round that has entries, over all ranks."""
    rows: list[RoundSummary] = []
    for number, each in enumerate(played.rounds):
        if not len(each.source):
            continue
        sizes = each.lengths * layout.itemsize
        pairs = tuple(dict.fromkeys(zip(each.source.tolist(), each.target.tolist(), strict=True)))
        begins = [begin for begin in played.begin[number].tolist() if not math.isnan(begin)]
        ends = [end for end in played.end[number].tolist() if not math.isnan(end)]
        extent = min(begins, default=0.0), max(ends, default=0.0)
        rows.append(RoundSummary(number, each.op, pairs, int(sizes.min()), int(sizes.max()), *extent))
    return tuple(rows)


# -- servers ----------------------------------------------------------------------------------------------------------


class ServerTraining(Struct, frozen=True):
    """Training with parameter servers, as needed for a picture."""

    rule: Rule
    rhythm: RhythmOf
    servers: int
    link: Link
    pulled: int  # Bytes of all parameters.
    pushed: int  # Bytes of a push: fewer than all, where it is compressed.


def server_timeline(training: ServerTraining, durations: Times, title: str) -> Timeline:
    """Workers and servers, push by push; `durations` has a row for each step, with a column for each worker."""
    ports = _LoggedPorts(training.link, training.pulled, training.servers, training.pushed)
    drive = _LoggedDrive(training, durations, ports)
    drive.run()
    count = drive.count
    lanes = [f"worker {number}" for number in range(count)]
    lanes.append("server" if training.servers == 1 else f"each of {training.servers} servers")
    waits = _between(drive.computed, drive.ends)
    end = max(drive.ends)  # A straggler of the last step may compute beyond it.
    intervals = [each._replace(end=min(each.end, end)) for each in (*drive.computed, *waits) if each.begin < end]
    return Timeline(title, tuple(lanes), (*range(count), count), tuple(intervals), tuple(drive.messages))


_Times = tuple[float, float, float, float, float]
"""When bytes begin and cease to hold the sender's port, then the receiver's, and when they arrive."""


class _LoggedPorts(ServerPorts):
    """Remembers when pushes and pulls held which port."""

    def __init__(self, link: Link, nbytes: int, servers: int, pushed: int) -> None:
        super().__init__(link, nbytes, servers, pushed)
        self.pushed: list[_Times] = []
        self.pulled: list[_Times] = []

    def push(self, now: float) -> float:
        """Log the push."""
        done = super().push(now)
        left, arrived = now + self._pushed_whole, self._inbound
        self.pushed.append((now, left, arrived - self._pushed_part, arrived, max(arrived, left) + self.alpha))
        return done

    def pull(self, now: float) -> float:
        """Log the pull."""
        done, left = super().pull(now), self._outbound
        self.pulled.append((left - self._pulled_part, left, done - self._pulled_whole, done, done))
        return done


class _LoggedDrive(Drive):
    """Logs who computes when, and what each push and pull carries."""

    def __init__(self, training: ServerTraining, durations: Times, ports: _LoggedPorts) -> None:
        super().__init__(training.rule, durations, training.rhythm, ports, None)
        self._logged, self._training = ports, training
        self.computed: list[Interval] = []
        self.messages: list[Message] = []

    def _begin(self, number: int, worker: Worker, now: float) -> None:
        before = len(self._entries)
        super()._begin(number, worker, now)
        if len(self._entries) > before:
            end, step = self._entries[-1][0], worker.steps + 1
            self.computed.append(Interval(number, now, end, Activity.COMPUTE, f"step {step}"))

    def _push(self, number: int, worker: Worker, pulls: bool, now: float) -> None:
        super()._push(number, worker, pulls, now)
        label = f"push of step {worker.clock}" + (", asks for values" if pulls else "")
        self.messages.append(Message(number, self.count, self._training.pushed, *self._logged.pushed[-1], label))

    def _hand_out(self, now: float) -> None:
        admitted, before = list(self._admitted), len(self._logged.pulled)
        complete = self.pacing.minimum
        super()._hand_out(now)
        self._pulls(admitted, before, f"{PULLED} of {complete} complete steps")

    def _moved(self, now: float) -> None:
        before = len(self._logged.pulled)
        super()._moved(now)
        asking = set(self._admitted)
        unasked = [number for number in range(self.count) if number not in asking] if self.rule.eager else []
        self._pulls(unasked, before, f"{PULLED} of {self.pacing.minimum} complete steps, unasked")

    def _pulls(self, numbers: Sequence[int], before: int, label: str) -> None:
        for number, times in zip(numbers, self._logged.pulled[before:], strict=True):
            self.messages.append(Message(self.count, number, self._training.pulled, *times, label))


def _between(computed: Sequence[Interval], ends: Sequence[float]) -> list[Interval]:
    """The waits between two steps of a worker, and between its last step and its end."""
    waits: list[Interval] = []
    for lane, end in enumerate(ends):
        own = [interval for interval in computed if interval.lane == lane]
        following = [*(interval.begin for interval in own[1:]), end]
        waits += [
            Interval(lane, step.end, begin, Activity.WAIT, f"after {step.label}: pushes, pulls, waits its turn")
            for step, begin in zip(own, following, strict=True)
            if begin > step.end
        ]
    return waits


# -- machines ---------------------------------------------------------------------------------------------------------


class Ensemble(Struct, frozen=True):
    """Machines that are run together."""

    machines: Sequence[Machine]
    perform: Callable[[Name], Perform | None] = lambda _: None  # Does the work that a machine starts.
    computing: Callable[[], Iterable[Interval]] = lambda: ()  # Computing intervals, called when the run is over.


def machine_timeline(
    ensemble: Ensemble, seconds: float, delays: Delays, seed: int, title: str, done: Callable[[], bool] | None = None
) -> Timeline:
    """Every message of machines run for `seconds` of virtual time, or until they are done."""
    names = [machine.name for machine in ensemble.machines]
    work = {name: act for name in names if (act := ensemble.perform(name)) is not None}
    sent: list[Sent] = []

    def note(happening: Any) -> None:
        if isinstance(happening, Sent):
            sent.append(happening)

    simulation = Simulation(ensemble.machines, seed=seed, network=delays, perform=work, log=note)
    simulation.run(seconds, done or (lambda: False))
    places = {name: place for place, name in enumerate(names)}
    messages: list[Message] = []
    for each in sent:
        if each.to not in places:
            continue
        ends, took = (places[each.sender], places[each.to]), delays.per_byte * each.nbytes
        for arrival in each.arrivals or (math.nan,):
            comes = each.at if math.isnan(arrival) else arrival - took
            times = each.at, each.at + took, comes, arrival, arrival
            messages.append(Message(*ends, each.nbytes, *times, type(each.message).__name__.lower()))
    return Timeline(title, tuple(names), tuple(range(len(names))), tuple(ensemble.computing()), tuple(messages))

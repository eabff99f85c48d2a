"""Who sends what to whom when: a schedule, training with servers, or machines, played in virtual time and written down.

All three come to the same plain data, a `Timeline`, which `offbeat draw` shows. Nothing here decides who sends what:
schedules are played by `trace`, servers and workers by `Drive`, machines by `Simulation`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from offbeat.protocols.machine import Machine, Name
from offbeat.protocols.schedule import Layout, Op, Schedule, View
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import RhythmOf
from offbeat.simulate.machines import LossyNetwork as Delays
from offbeat.simulate.machines import Perform, Sent, Simulation
from offbeat.simulate.network import Link, Network
from offbeat.simulate.queues import Times
from offbeat.simulate.schedules import Trace, trace
from offbeat.simulate.servers.events import Drive, ServerPorts, Worker

PULLED = "values"
"""What servers send."""


class Activity(StrEnum):
    """What a participant does with its time, apart from sending and receiving."""

    COMPUTE = "compute"
    REDUCE = "reduce"
    WAIT = "wait"


class Interval(NamedTuple):
    """A participant is busy, or waits."""

    lane: int
    begin: float
    end: float
    activity: Activity
    label: str


class Message(NamedTuple):
    """Bytes on their way from one participant to another."""

    source: int
    target: int
    nbytes: int
    leaves: float
    """When the first byte enters the sender's port."""
    left: float
    """When the sender's port is free again."""
    comes: float
    """When the first byte enters the receiver's port."""
    came: float
    """When the receiver's port is free again."""
    arrives: float
    """When the receiver has all of it; NaN: it is lost."""
    label: str
    round: int | None = None
    """Of the schedule."""


class RoundSummary(NamedTuple):
    """A round of a schedule, over all ranks."""

    number: int
    op: Op
    pairs: tuple[tuple[int, int], ...]
    """Sources and targets, in order; each once."""
    smallest: int
    """Bytes of its smallest entry."""
    largest: int
    begin: float
    """When the first rank was ready for it."""
    end: float
    """When the last rank had done it."""


@dataclass(frozen=True)
class Timeline:
    """What a picture or table shows."""

    title: str
    lanes: tuple[str, ...]
    hosts: tuple[int, ...]
    """Where each lane lives; a server has a host of its own."""
    intervals: tuple[Interval, ...]
    messages: tuple[Message, ...]
    rounds: tuple[RoundSummary, ...] = ()
    """Of a schedule; empty where there is none."""

    @property
    def end(self) -> float:
        """When all is over."""
        ends = [one.end for one in self.intervals] + [one.arrives for one in self.messages]
        return max((end for end in ends if not math.isnan(end)), default=0.0)


def schedule_timeline(
    schedule: Schedule, view: View, layout: Layout, network: Network, title: str, role: str = "rank"
) -> Timeline:
    """A schedule, round by round; `role` is what its ranks are called."""
    played = trace(schedule(view, layout), view, layout, network)
    names = _round_labels(played)
    waits = [
        Interval(rank, begin, begin + waited, Activity.WAIT, f"waits for {names[number]}")
        for number in range(len(played.rounds))
        for rank, (begin, waited) in enumerate(zip(played.begin[number], played.waited[number], strict=True))
        if waited > 0
    ]
    work = [
        Interval(one.rank, one.begin, one.end, Activity.COMPUTE if computes else Activity.REDUCE, names[one.round])
        for one in played.work
        for computes in [played.rounds[one.round].op is Op.COMPUTE]
    ]
    messages = [
        Message(one.source, one.target, one.nbytes, *one[4:], one.arrives, names[one.round], one.round)
        for one in played.transfers
    ]
    lanes = tuple(f"{role} {rank}" for rank in range(view.size))
    hosts = tuple(view.hosts.tolist())
    return Timeline(title, lanes, hosts, (*waits, *work), tuple(messages), _summaries(played, layout))


def _round_labels(played: Trace) -> list[str]:
    return [
        "computes" if one.op is Op.COMPUTE else f"round {number} ({one.op})" for number, one in enumerate(played.rounds)
    ]


def _summaries(played: Trace, layout: Layout) -> tuple[RoundSummary, ...]:
    made: list[RoundSummary] = []
    for number, one in enumerate(played.rounds):
        if not len(one.source):
            continue
        sizes = one.lengths * layout.itemsize
        pairs = tuple(dict.fromkeys(zip(one.source.tolist(), one.target.tolist(), strict=True)))
        begins = [begin for begin in played.begin[number].tolist() if not math.isnan(begin)]
        ends = [end for end in played.end[number].tolist() if not math.isnan(end)]
        extent = min(begins, default=0.0), max(ends, default=0.0)
        made.append(RoundSummary(number, one.op, pairs, int(sizes.min()), int(sizes.max()), *extent))
    return tuple(made)


# -- servers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerTraining:
    """Training with parameter servers, as far as a picture needs it."""

    rule: Rule
    rhythm: RhythmOf
    servers: int
    link: Link
    pulled: int
    """Bytes of all parameters."""
    pushed: int
    """Bytes of a push: fewer than all, where it is compressed."""


def server_timeline(training: ServerTraining, durations: Times, title: str) -> Timeline:
    """Workers and servers, push by push; `durations` has a row for each step, with a column for each worker."""
    ports = _LoggedPorts(training.link, training.pulled, training.servers, training.pushed)
    drive = _LoggedDrive(training, durations, ports)
    drive.run()
    count = drive.count
    lanes = [f"worker {number}" for number in range(count)]
    lanes.append("server" if training.servers == 1 else f"each of {training.servers} servers")
    waits = _between(drive.computed, drive.ends)
    end = max(drive.ends)  # Who is late in the last step may compute beyond it.
    intervals = [one._replace(end=min(one.end, end)) for one in (*drive.computed, *waits) if one.begin < end]
    return Timeline(title, tuple(lanes), (*range(count), count), tuple(intervals), tuple(drive.messages))


class _Passage(NamedTuple):
    """When bytes hold a worker's port and a server's, and when all of them are through."""

    begin: float
    worker: float
    server_begin: float
    server_end: float
    through: float


class _LoggedPorts(ServerPorts):
    """Remembers when the last push or pull held which port."""

    def __init__(self, link: Link, nbytes: int, servers: int, pushed: int) -> None:
        super().__init__(link, nbytes, servers, pushed)
        self.pushed: list[_Passage] = []
        self.pulled: list[_Passage] = []

    def push(self, now: float) -> float:
        """As it is, and written down."""
        done = super().push(now)
        arrived = max(self._inbound, now + self._pushed_whole) + self.alpha
        start = self._inbound - self._pushed_part
        self.pushed.append(_Passage(now, now + self._pushed_whole, start, self._inbound, arrived))
        return done

    def pull(self, now: float) -> float:
        """As it is, and written down."""
        done = super().pull(now)
        start = self._outbound - self._pulled_part
        self.pulled.append(_Passage(done - self._pulled_whole, done, start, self._outbound, done))
        return done


class _LoggedDrive(Drive):
    """Writes down who computes when, and what each push and pull carries."""

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
        passed = self._logged.pushed[-1]
        label = f"push of step {worker.clock}" + (", asks for values" if pulls else "")
        self.messages.append(
            Message(
                number, self.count, self._training.pushed, passed.begin, passed.worker, passed.server_begin,
                passed.server_end, passed.through, label,
            )
        )  # fmt: skip

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
        for number, passed in zip(numbers, self._logged.pulled[before:], strict=True):
            self.messages.append(
                Message(
                    self.count, number, self._training.pulled, passed.server_begin, passed.server_end, passed.begin,
                    passed.worker, passed.through, label,
                )
            )  # fmt: skip


def _between(computed: Sequence[Interval], ends: Sequence[float]) -> list[Interval]:
    """What lies between two steps of a worker, and between its last step and its end: waiting."""
    waits: list[Interval] = []
    for lane, end in enumerate(ends):
        own = [one for one in computed if one.lane == lane]
        following = [*(one.begin for one in own[1:]), end]
        waits += [
            Interval(lane, one.end, begin, Activity.WAIT, f"after {one.label}: pushes, pulls, waits its turn")
            for one, begin in zip(own, following, strict=True)
            if begin > one.end
        ]
    return waits


# -- machines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ensemble:
    """Machines that are run together."""

    machines: Sequence[Machine]
    perform: Callable[[Name], Perform | None] = lambda _: None
    """Who does the work that a machine starts."""
    computing: Callable[[], Iterable[Interval]] = lambda: ()
    """What participants computed, asked for when the run is over."""


def machine_timeline(
    ensemble: Ensemble, seconds: float, delays: Delays, seed: int, title: str, done: Callable[[], bool] | None = None
) -> Timeline:
    """Machines for so many seconds of virtual time, or until they are done: every message."""
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
    for one in sent:
        if one.to not in places:
            continue
        took = delays.per_byte * one.nbytes
        for arrival in one.arrivals or (math.nan,):
            comes = one.at if math.isnan(arrival) else arrival - took
            passage = one.at, one.at + took, comes, arrival, arrival
            messages.append(
                Message(places[one.sender], places[one.to], one.nbytes, *passage, type(one.message).__name__.lower())
            )
    return Timeline(title, tuple(names), tuple(range(len(names))), tuple(ensemble.computing()), tuple(messages))

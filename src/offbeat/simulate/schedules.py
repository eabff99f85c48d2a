"""Schedules in virtual time: when each rank is done, given who arrives when and what links cost.

The rounds are executed as `protocols.schedule` says, for all ranks at once. A rank begins its part of a round when it
has done its parts of the rounds in `after`; where it has no part in one of those, it counts as done when it could have
begun. A `SEND` starts when both sides have begun and takes the hop's time of both. A `FETCH` starts when the reader has
begun and the source has finished the rounds in `after`; it takes time of the reader alone. `REDUCE` and `SCALE` take
`gamma` and `COPY` takes `copy` per byte of the target's processor, which does one thing at a time in each stream; so
does what a rank brings to itself, which passes no port.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.errors import UsageError
from offbeat.protocols.schedule import IntArray, Layout, Op, Round, Stream, View
from offbeat.simulate.network import Link, Network, Ports
from offbeat.simulate.queues import Places, Queue, Times, at, raised, spread

REMEMBERED = 2**24
"""Times that are remembered of single rounds (128 MiB): enough to reach back 4,096 rounds with 4,096 ranks.

Of older ones only the latest times of all together are known, which serves a round that comes after all of them.
"""


class Activity(StrEnum):
    """What a participant does with its time, apart from sending and receiving."""

    COMPUTE = "compute"
    REDUCE = "reduce"
    WAIT = "wait"
    FORWARD = "forward"  # Of a pipeline, whose computing has kinds.
    BACKWARD = "backward"
    WEIGHTS = "weights"  # Gradients of weights, where they are computed apart.

    @property
    def computes(self) -> bool:
        """Whether it is computing."""
        return self not in (Activity.REDUCE, Activity.WAIT)


class Interval(NamedTuple):
    """A participant is busy, or waits."""

    lane: int
    begin: float
    end: float
    activity: Activity
    label: str
    mark: str = ""  # What pictures write into it; empty: the label.
    later: bool = False  # Whether it is of a later chunk, which pictures show lighter.


class Message(NamedTuple):
    """Bytes from one participant to another."""

    source: int
    target: int
    nbytes: int
    leaves: float  # When the first byte enters the sender's port.
    left: float  # When the sender's port is free again.
    comes: float  # When the first byte enters the receiver's port.
    came: float  # When the receiver's port is free again.
    arrives: float  # When the receiver has all of it; NaN: it is lost.
    label: str
    round: int | None = None  # Of the schedule.


@dataclass(frozen=True)
class Trace:
    """What every rank did in every round, as arrays of rounds by ranks; NaN where it had no part."""

    rounds: tuple[Round, ...]
    begin: NDArray[np.float64]  # When the rank was ready to do its part.
    end: NDArray[np.float64]  # When it had done it.
    waited: NDArray[np.float64]  # How much of that it only waited for another rank to be ready.
    transfers: tuple[Message, ...]  # What passed ports, in the order of rounds.
    work: tuple[Interval, ...]  # What took time of processors, in the order of rounds.

    @property
    def finish(self) -> NDArray[np.float64]:
        """When each rank had done all its parts; NaN for one that had none."""
        some = ~np.isnan(self.end).all(axis=0)
        return np.where(some, np.max(np.nan_to_num(self.end, nan=0.0), axis=0, initial=0.0), np.nan)


def finish_times(
    rounds: Iterable[Round], view: View, layout: Layout, network: Network, arrivals: ArrayLike | None = None
) -> NDArray[np.float64]:
    """When each rank is done, in seconds on the clock of `arrivals` (0 for all, unless given)."""
    clockwork = Clockwork(view, layout, network, arrivals)
    for one in rounds:
        clockwork.play(one)
    return spread(clockwork.finish, view.size)[:, 0]


def finish_by_scale(
    rounds: Iterable[Round], view: View, layout: Layout, network: Network, scales: ArrayLike
) -> NDArray[np.float64]:
    """When the last rank is done, all having arrived at 0, if the data were `scales` times as large as the layout's."""
    clockwork = Clockwork(view, layout, network, None, scales)
    for one in rounds:
        clockwork.play(one)
    return clockwork.finish.max(axis=0)


def trace(
    rounds: Iterable[Round], view: View, layout: Layout, network: Network, arrivals: ArrayLike | None = None
) -> Trace:
    """What every rank does when, for small numbers of ranks."""
    clockwork = Clockwork(view, layout, network, arrivals)
    clockwork.log = log = TraceLog(layout.itemsize)
    played = tuple(rounds)
    shape = (len(played), view.size)
    begin, end, waited = np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape, np.nan)
    for number, one in enumerate(played):
        log.enter(number, one)
        here = spread(clockwork.begun(one), view.size)[:, 0]
        done = spread(clockwork.play(one), view.size)[:, 0]
        part = np.unique(np.concatenate([one.source, one.target] if one.op is Op.SEND else [one.target]))
        begin[number, part], end[number, part] = here[part], done[part]
        waited[number, part] = _waited(one, here)[part]
    return Trace(played, begin, end, waited, tuple(log.transfers), tuple(log.work))


def _waited(one: Round, begun: NDArray[np.float64]) -> NDArray[np.float64]:
    """How long each rank waits in a round for the latest of those it exchanges with."""
    latest = begun.copy()
    if one.op in (Op.SEND, Op.FETCH):
        np.maximum.at(latest, one.target, begun[one.source])
    if one.op is Op.SEND:
        np.maximum.at(latest, one.source, begun[one.target])
    return latest - begun


def label_of(number: int, one: Round) -> str:
    """What a round is called in pictures and tables."""
    if one.what is not None:
        return str(one.what)
    return "computes" if one.op is Op.COMPUTE else f"round {number} ({one.op})"


class TraceLog:
    """Logs what passes ports and what processors do, for the first case."""

    def __init__(self, itemsize: int) -> None:
        self.transfers: list[Message] = []
        self.work: list[Interval] = []
        self._itemsize = itemsize
        self._round, self._label, self._activity = 0, "", Activity.REDUCE

    def enter(self, number: int, one: Round) -> None:
        """Play this round next."""
        self._round, self._label = number, label_of(number, one)
        self._activity = Activity.COMPUTE if one.op is Op.COMPUTE else Activity.REDUCE

    def transfer(self, op: Op, source: IntArray, target: IntArray, lengths: IntArray, times: tuple[Times, ...]) -> None:
        """Entries of the round that is played; `times`: when each leaves, arrives, and how long it holds a port."""
        leaves, arrives, held = (np.broadcast_to(one[:, 0], len(source)).tolist() for one in times)
        columns = (source, target, lengths * self._itemsize)
        ends = (column.tolist() for column in columns)
        for here, there, nbytes, start, stop, took in zip(*ends, leaves, arrives, held, strict=True):
            left = start + took if op is Op.SEND else start
            times_held = (start, left, stop - took, stop, stop)
            self.transfers.append(Message(here, there, nbytes, *times_held, self._label, self._round))

    def busy(self, target: IntArray, begin: Times, duration: Times) -> None:
        """Work of processors in the round that is played."""
        starts, lasts = (np.broadcast_to(one[:, 0], len(target)).tolist() for one in (begin, duration))
        for rank, start, took in zip(target.tolist(), starts, lasts, strict=True):
            self.work.append(Interval(rank, start, start + took, self._activity, self._label))


class Clockwork:
    """The clocks of all ranks, ports and processors; plays one round after the other."""

    def __init__(
        self,
        view: View,
        layout: Layout,
        network: Network,
        arrivals: ArrayLike | None = None,
        scales: ArrayLike = (1.0,),
    ) -> None:
        self.log: TraceLog | None = None  # Log of what happens, if wanted.
        self._size = view.size
        self._itemsize = layout.itemsize
        self._network = network
        self._scales = np.asarray(scales, dtype=np.float64)[np.newaxis, :]
        hosts = np.unique(view.hosts, return_inverse=True)[1].astype(np.int64)
        self._hosts: IntArray = hosts
        self._apart = len(np.unique(hosts)) == view.size
        self._together = not hosts.any()
        self._arrivals = self._arrived(arrivals)
        self.finish: Times = self._arrivals  # When each rank has done all its parts so far.
        self._done: dict[int, Times] = {}
        self._played = 0
        self._forgotten = 0
        self._long_ago: Times = self._arrivals
        self._held = 0
        cases = self._scales.shape[1]
        ports = 2 * view.size if network.ports is Ports.HOST and not (self._apart or self._together) else view.size
        self._leaving, self._coming = Queue(ports, cases), Queue(ports, cases)
        self._processors = {stream: Queue(view.size, cases) for stream in Stream}

    def play(self, one: Round) -> Times:
        """Execute a round; answers when each rank has done its part."""
        begun = self.begun(one)
        if not len(one.source):
            done = begun
        elif one.op in (Op.SEND, Op.FETCH):
            done = self._transferred(one, begun)
        else:
            done = self._worked(one, begun)
        if done is not begun:
            self.finish = done if self.finish is begun else np.maximum(self.finish, done)
        self._remember(done)
        return done

    def begun(self, one: Round) -> Times:
        """When each rank may begin its part of a round."""
        if not one.after:
            return self._arrivals
        if min(one.after) < 0 or max(one.after) >= self._played:
            raise UsageError(f"round {self._played} comes after {one.after}, which are not all earlier ones.")
        recent = [self._done[number] for number in one.after if number >= self._forgotten]
        if len(recent) < len(one.after):
            recent.append(self._recalled(set(one.after)))
        begun = recent[0]
        for other in recent[1:]:
            begun = begun if other is begun else np.maximum(begun, other)
        return begun

    def _transferred(self, one: Round, begun: Times) -> Times:
        own = one.source == one.target
        if not own.any():
            return self._moved(one.op, one.source, one.target, one.lengths, begun)
        duration = self._duration(self._network.inside.copy, one.lengths[own])
        done = self._busy(one.target[own], duration, one.stream, begun)
        if own.all():
            return done
        others = one.source[~own], one.target[~own], one.lengths[~own]
        return np.maximum(done, self._moved(one.op, *others, begun))

    def _moved(self, op: Op, source: IntArray, target: IntArray, lengths: IntArray, begun: Times) -> Times:
        """Bytes through the ports of both sides."""
        senders, receivers = Places(source, self._size), Places(target, self._size)
        inside, between = self._network.inside, self._network.between
        local = self._local(source, target)
        alpha = np.where(local, inside.alpha, between.alpha)[..., np.newaxis]
        duration = self._duration(np.where(local, inside.beta, between.beta), lengths)
        left = np.maximum(at(begun, senders), at(begun, receivers))
        if op is Op.SEND:
            left = self._leaving.serve(self._ports(senders, local), left, duration)
        finish = self._coming.serve(self._ports(receivers, local), left + alpha, duration) + duration
        if self.log is not None:
            self.log.transfer(op, source, target, lengths, (left, finish, duration))
        done = raised(begun, senders, finish) if op is Op.SEND else begun
        return raised(done, receivers, finish)

    def _local(self, source: IntArray, target: IntArray) -> NDArray[np.bool_]:
        """Which entries stay inside a host; one answer for all where they cannot differ."""
        if self._apart or self._together:
            return np.array([self._together])
        return self._hosts[source] == self._hosts[target]

    def _ports(self, ranks: Places, local: NDArray[np.bool_]) -> Places:
        """Everybody's own port, or the one that a host has: those come behind the ranks' own."""
        if self._network.ports is Ports.RANK or self._apart or self._together:
            return ranks
        shared = self._hosts[ranks.index] + self._size
        return Places(np.where(local, ranks.index, shared), 2 * self._size)

    def _worked(self, one: Round, begun: Times) -> Times:
        if one.op is Op.COMPUTE:
            seconds = np.full((1, self._scales.shape[1]), one.seconds)
            return self._busy(one.target, seconds, one.stream, begun)
        cost = self._cost(one)
        if not isinstance(cost, np.ndarray) and not cost:
            return begun  # A round less to look at, for half of all rounds on networks that only transfer.
        return self._busy(one.target, self._duration(cost, one.lengths), one.stream, begun)

    def _busy(self, target: IntArray, duration: Times, stream: Stream, begun: Times) -> Times:
        """Work of the targets' processors; what takes no time is not even queued."""
        working = duration.any(axis=1)
        if not working.any():
            return begun
        if not working.all():
            target, duration = target[working], duration[working]
        targets = Places(target, self._size)
        begin = self._processors[stream].serve(targets, at(begun, targets), duration)
        if self.log is not None:
            self.log.busy(target, begin, duration)
        return raised(begun, targets, begin + duration)

    def _cost(self, one: Round) -> float | NDArray[np.float64]:
        """Seconds per byte that is reduced or copied, by where it came from."""
        inside, between = _handling(self._network.inside, one.op), _handling(self._network.between, one.op)
        if inside == between:
            return inside
        return np.where(self._hosts[one.source] == self._hosts[one.target], inside, between)

    def _duration(self, per_byte: float | NDArray[np.float64], lengths: IntArray) -> Times:
        seconds = per_byte * (lengths * self._itemsize)
        if len(seconds) > 1 and bool((seconds == seconds[0]).all()):
            seconds = seconds[:1]
        return seconds[:, np.newaxis] * self._scales

    def _arrived(self, arrivals: ArrayLike | None) -> Times:
        if arrivals is None:
            return np.zeros((1, self._scales.shape[1]))
        given = np.asarray(arrivals, dtype=np.float64)
        if given.shape != (self._size,):
            raise UsageError(f"{given.size} arrival times were given for {self._size} ranks; give one for each.")
        return spread(given[:, np.newaxis], self._size) + np.zeros_like(self._scales)

    def _remember(self, done: Times) -> None:
        self._done[self._played] = done
        self._played += 1
        self._held += done.size
        while self._held > REMEMBERED:
            oldest = self._done.pop(self._forgotten)
            self._held -= oldest.size
            self._forgotten += 1
            self._long_ago = np.maximum(self._long_ago, oldest)

    def _recalled(self, after: set[int]) -> Times:
        if not after.issuperset(range(self._forgotten)):
            raise UsageError(
                f"round {self._played} comes after round {min(after)}, which is no longer remembered with "
                f"{self._size} ranks; let it name a later round that itself comes after that one."
            )
        return self._long_ago


def _handling(link: Link, op: Op) -> float:
    return link.gamma if op in (Op.REDUCE, Op.SCALE) else link.copy

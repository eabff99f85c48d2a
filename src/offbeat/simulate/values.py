"""Schedules in virtual time with numbers in their buffers: what ranks end with, whatever is slow.

Every transfer and every use takes a random time, from a seed. What a schedule's `after` leaves open thus happens in
another order with every seed; a rank that waits for a message that never comes is an error.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ScheduleError
from offbeat.protocols.schedule import Layout, Op, Round, Schedule, View

Buffers = list[NDArray[Any]]
_Key = tuple[int, ...]


def play_values(schedule: Schedule, view: View, layout: Layout, buffers: Sequence[NDArray[Any]], seed: int) -> Buffers:
    """Each rank's final buffer; a ScheduleError if some rank never gets there."""
    return _Play(list(schedule(view, layout)), view, buffers, seed).run()


class _Play:
    def __init__(self, rounds: list[Round], view: View, buffers: Sequence[NDArray[Any]], seed: int) -> None:
        self._rounds, self._size = rounds, view.size
        self._live = [buffer.copy() for buffer in buffers]
        self._published = [buffer.copy() for buffer in buffers]
        self._is_published = [np.zeros(len(buffer), dtype=np.bool_) for buffer in buffers]
        self._chance = Random(seed)  # noqa: S311 - an order to be repeated, not a secret
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._now, self._entered = 0.0, 0
        self._inbox: defaultdict[_Key, deque[NDArray[Any]]] = defaultdict(deque)
        self._entries = [_by_rank(each, view.size) for each in rounds]
        self._open = [[len(set(each.after)) for _ in range(view.size)] for each in rounds]
        self._left = [[len(own) for own in ranks] for ranks in self._entries]
        self._ready = [[False] * view.size for _ in rounds]
        self._begun = [[False] * len(each.source) for each in rounds]
        self._done = [[False] * view.size for _ in rounds]
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        for number, each in enumerate(rounds):
            for earlier in set(each.after):
                if not 0 <= earlier < number:
                    raise ScheduleError(f"round {number} comes after round {earlier}, which is not an earlier one")
                self._followers[earlier].append(number)

    def run(self) -> Buffers:
        for number, each in enumerate(self._rounds):
            if not each.after:
                for rank in range(self._size):
                    self._prepare(number, rank)
        while self._queue:
            self._now, _, act = heappop(self._queue)
            act()
        self._conclude()
        return self._live

    def _later(self, act: Callable[[], None]) -> None:
        self._entered += 1
        heappush(self._queue, (self._now + self._chance.expovariate(1.0), self._entered, act))

    def _prepare(self, number: int, rank: int) -> None:
        """A rank has done all that comes before its part of a round."""
        self._ready[number][rank] = True
        each = self._rounds[number]
        if each.op in (Op.SEND, Op.FETCH):
            for entry in np.flatnonzero((each.source == rank) | (each.target == rank)).tolist():
                self._bring(number, entry)
        elif self._left[number][rank]:
            self._later(lambda: self._use(number, rank))
        if not self._left[number][rank]:
            self._finish(number, rank)

    def _bring(self, number: int, entry: int) -> None:
        """Start a transfer if both sides are ready, and it has not begun."""
        each = self._rounds[number]
        source, target = int(each.source[entry]), int(each.target[entry])
        if self._begun[number][entry] or not (self._ready[number][source] and self._ready[number][target]):
            return
        self._begun[number][entry] = True
        start, stop = int(each.start[entry]), int(each.stop[entry])
        data = self._live[source][start:stop].copy()
        if each.op is Op.FETCH:
            chosen = self._is_published[source][start:stop]
            data = np.where(chosen, self._published[source][start:stop], data)

        def arrive() -> None:
            self._inbox[_key(each, entry)].append(data)
            for rank in {source, target} if each.op is Op.SEND else {target}:
                self._left[number][rank] -= 1
                if not self._left[number][rank]:
                    self._finish(number, rank)

        self._later(arrive)

    def _use(self, number: int, rank: int) -> None:
        for entry in self._entries[number][rank]:
            self._apply(number, self._rounds[number], rank, entry)
        self._left[number][rank] = 0
        self._finish(number, rank)

    def _apply(self, number: int, each: Round, rank: int, entry: int) -> None:
        start, stop, place = int(each.start[entry]), int(each.stop[entry]), int(each.place[entry])
        weight = 1 if each.weight is None else float(each.weight[entry])
        mine = self._live[rank][place : place + stop - start]
        if each.op is Op.COMPUTE:
            return
        if each.op is Op.SCALE:
            mine *= weight
            return
        if each.op is Op.COPY and each.source[entry] == rank:
            self._published[rank][start:stop] = self._live[rank][start:stop]
            self._is_published[rank][start:stop] = True
            return
        waiting = self._inbox[_key(each, entry)]
        if not waiting:
            raise ScheduleError(
                f"rank {rank} in round {number} uses [{start}, {stop}) from rank {each.source[entry]}, which has not "
                f"come by then"
            )
        came = waiting.popleft()
        mine[:] = mine + weight * came if each.op is Op.REDUCE else came

    def _finish(self, number: int, rank: int) -> None:
        if self._done[number][rank]:
            return
        self._done[number][rank] = True
        for later in self._followers[number]:
            self._open[later][rank] -= 1
            if not self._open[later][rank]:
                self._prepare(later, rank)

    def _conclude(self) -> None:
        for number, done in enumerate(self._done):
            for rank, here in enumerate(done):
                if not here:
                    raise ScheduleError(f"rank {rank} waits for ever in round {number} ({self._rounds[number].op})")
        for key, left in self._inbox.items():
            if left:
                raise ScheduleError(f"[{key[2]}, {key[3]}) from rank {key[0]} reaches rank {key[1]} and is never used")


def _key(each: Round, entry: int) -> _Key:
    return tuple(int(column[entry]) for column in (each.source, each.target, each.start, each.stop, each.place))


def _by_rank(each: Round, size: int) -> list[list[int]]:
    """The entries that each rank's part consists of, in their order."""
    own: list[list[int]] = [[] for _ in range(size)]
    for entry, (source, target) in enumerate(zip(each.source.tolist(), each.target.tolist(), strict=True)):
        own[target].append(entry)
        if each.op is Op.SEND and source != target:
            own[source].append(entry)
    return own

"""Schedules in virtual time with numbers in their buffers: what ranks end with, whatever is slow.

Of all transfers and uses that may happen next, a random choice does, from a seed. What a schedule's `after` leaves open
thus happens in another order with every seed; a rank that uses a message that has not come is an error.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ScheduleError
from offbeat.protocols.schedule import Layout, Op, Round, Schedule, View

Buffers = list[NDArray[Any]]
_BRINGS = (Op.SEND, Op.FETCH)


def play_values(schedule: Schedule, view: View, layout: Layout, buffers: Sequence[NDArray[Any]], seed: int) -> Buffers:
    """Each rank's final buffer; a ScheduleError if what a rank uses has not come, or what has come is never used."""
    return _Play(list(schedule(view, layout)), view, buffers).run(Random(seed))  # noqa: S311 - not a secret


class _Play:
    def __init__(self, rounds: list[Round], view: View, buffers: Sequence[NDArray[Any]]) -> None:
        self._rounds = rounds
        self._live = [buffer.copy() for buffer in buffers]
        self._published = [buffer.copy() for buffer in buffers]
        self._is_published = [np.zeros(len(buffer), dtype=np.bool_) for buffer in buffers]
        self._inbox: defaultdict[tuple[int, ...], deque[NDArray[Any]]] = defaultdict(deque)
        self._left = np.zeros((len(rounds), view.size), dtype=np.int64)  # What each rank still has to do in each round.
        todo: list[tuple[int, tuple[int, ...], list[int]]] = []  # Round, ranks that must be ready, entries.
        for number, each in enumerate(rounds):
            for earlier in each.after:
                if not 0 <= earlier < number:
                    raise ScheduleError(f"round {number} comes after round {earlier}, which is not an earlier one")
            if each.op in _BRINGS:
                pairs = zip(each.source.tolist(), each.target.tolist(), strict=True)
                todo += [(number, pair, [entry]) for entry, pair in enumerate(pairs)]
            else:  # A rank uses all that has come for it at once.
                ranks = np.unique(each.target).tolist()
                todo += [(number, (rank,), np.flatnonzero(each.target == rank).tolist()) for rank in ranks]
        for number, ranks, _ in todo:
            self._left[number, self._busy(number, ranks)] += 1
        self._todo = dict(enumerate(todo))

    def _busy(self, number: int, ranks: tuple[int, ...]) -> list[int]:
        """The ranks whose part of the round this belongs to: a source is only read by a FETCH."""
        return list(set(ranks)) if self._rounds[number].op is Op.SEND else [ranks[-1]]

    def run(self, chance: Random) -> Buffers:
        while self._todo:
            begun = self._begun()
            ready = [key for key, (number, ranks, _) in self._todo.items() if begun[number, list(ranks)].all()]
            for key in chance.sample(ready, chance.randint(1, len(ready))):
                number, ranks, entries = self._todo.pop(key)
                act = self._bring if self._rounds[number].op in _BRINGS else self._use
                for entry in entries:
                    act(number, entry)
                self._left[number, self._busy(number, ranks)] -= 1
        for key, left in self._inbox.items():
            if left:
                raise ScheduleError(f"[{key[2]}, {key[3]}) from rank {key[0]} reaches rank {key[1]} and is never used")
        return self._live

    def _begun(self) -> NDArray[np.bool_]:
        """Which rank may do its part of which round; a part that is empty is done when it may begin."""
        begun = np.ones(self._left.shape, dtype=np.bool_)
        for number, each in enumerate(self._rounds):
            for earlier in each.after:
                begun[number] &= begun[earlier] & (self._left[earlier] == 0)
        return begun

    def _bring(self, number: int, entry: int) -> None:
        each = self._rounds[number]
        source, start, stop = int(each.source[entry]), int(each.start[entry]), int(each.stop[entry])
        data = self._live[source][start:stop].copy()
        if each.op is Op.FETCH:
            data = np.where(self._is_published[source][start:stop], self._published[source][start:stop], data)
        self._inbox[_key(each, entry)].append(data)

    def _use(self, number: int, entry: int) -> None:
        each, rank = self._rounds[number], int(self._rounds[number].target[entry])
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


def _key(each: Round, entry: int) -> tuple[int, ...]:
    return tuple(int(column[entry]) for column in (each.source, each.target, each.start, each.stop, each.place))

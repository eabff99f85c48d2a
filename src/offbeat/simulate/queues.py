"""Things that serve one entry at a time, for all ranks at once.

Times are arrays of one row per rank and one column per case (such as a size of the data). Where all ranks have the
same time, one row stands for all of them: a ring of 4,096 equal ranks then costs no more than a ring of two.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offbeat.protocols.schedule import IntArray

Times = NDArray[np.float64]


class Places:
    """Which of `count` places each entry of a round is about; a place may come up several times or not at all."""

    def __init__(self, index: IntArray, count: int) -> None:
        self.index = index
        self.count = count
        self.straight = len(index) == count and bool((index[1:] > index[:-1]).all())
        """Every place once, in order: entry i is about place i."""
        self.once = self.straight or _no_repeats(index, count)  # No place comes up twice.
        self.everyone = self.once and len(index) == count  # Every place comes up exactly once.

    @cached_property
    def order(self) -> IntArray:
        """The entries by place, and within a place as they came."""
        # On 16 bits numpy sorts by radix, which is several times as fast.
        short = self.index.astype(np.uint16) if self.count <= 2**16 else self.index
        return np.argsort(short, kind="stable")

    @cached_property
    def heads(self) -> IntArray:
        """Where, in that order, the entries of another place begin."""
        ordered = self.index[self.order]
        return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))

    @cached_property
    def lengths(self) -> IntArray:
        """How many entries each place has that has any."""
        return np.diff(np.append(self.heads, len(self.index)))

    @cached_property
    def named(self) -> IntArray:
        """The places that have entries, in order."""
        return self.index[self.order[self.heads]]


def _no_repeats(index: IntArray, count: int) -> bool:
    return len(index) <= 1 or (len(index) <= count and bool(np.bincount(index, minlength=count).max() == 1))


def at(times: Times, places: Places) -> Times:
    """The times of each entry's place; one row stands for any number of equal ones."""
    return times if len(times) == 1 or places.straight else times.take(places.index, axis=0)


def _rows(times: Times, index: IntArray) -> Times:
    return times if len(times) == 1 else times.take(index, axis=0)


def spread(times: Times, rows: int) -> Times:
    """A copy that has a row for each place."""
    return times.copy() if len(times) == rows else np.repeat(times, rows, axis=0)


def raised(times: Times, places: Places, values: Times) -> Times:
    """Times in which each place is at least as late as each of its entries' values."""
    if values is times:
        return times
    if len(values) == 1 and places.everyone:
        return values if len(times) == 1 and bool((values >= times).all()) else np.maximum(times, values)
    if places.straight:
        return np.maximum(times, values)
    result = spread(times, places.count)
    if places.once:
        result[places.index] = np.maximum(at(times, places), values)
    elif len(places.index):
        latest = np.maximum.reduceat(spread(values, len(places.index))[places.order], places.heads, axis=0)
        result[places.named] = np.maximum(_rows(times, places.named), latest)
    return result


class Queue:
    """`count` servers, such as ports; each serves its entries one after the other, in the order they are given."""

    def __init__(self, count: int, cases: int) -> None:
        self.count = count
        self.free: Times = np.zeros((1, cases))

    def serve(self, places: Places, ready: Times, duration: Times) -> Times:
        """When each entry's service begins; the servers are busy for its duration from then on."""
        if not places.once:
            return self._in_turn(places, ready, duration)
        begin = np.maximum(ready, at(self.free, places))
        end = begin + duration
        if places.everyone and (len(end) == 1 or places.straight):
            self.free = end
        else:
            self._own()[places.index] = end
        return begin

    def _own(self) -> Times:
        if len(self.free) != self.count:
            self.free = spread(self.free, self.count)
        return self.free

    def _in_turn(self, places: Places, ready: Times, duration: Times) -> Times:
        """Each entry begins when it is ready and the one before it is through: a running maximum, place by place.

        With c the time that those before it take, begin - c is the largest of ready - c so far.
        """
        entries = len(places.index)
        late = spread(ready, entries)[places.order]
        each = spread(duration, entries)[places.order]
        late[places.heads] = np.maximum(late[places.heads], _rows(self.free, places.named))
        before = np.cumsum(each, axis=0) - each
        before -= np.repeat(before[places.heads], places.lengths, axis=0)
        late -= before
        position = np.arange(entries) - np.repeat(places.heads, places.lengths)
        step = 1
        while step < int(places.lengths.max()):
            earlier = np.where(position[step:, np.newaxis] >= step, late[:-step], -np.inf)
            late[step:] = np.maximum(late[step:], earlier)
            step *= 2
        late += before
        tails = places.heads + places.lengths - 1
        self._own()[places.named] = late[tails] + each[tails]
        begin = np.empty_like(late)
        begin[places.order] = late
        return begin

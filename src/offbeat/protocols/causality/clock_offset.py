"""How far the clocks of machines are apart, from messages that passed between them, with the error.

A message cannot arrive before it was sent. So a message from A to B that left at a on A's clock and came at b on B's
says that B's clock is at most b - a ahead of A's; one from B to A gives the other side. The true offset is between the
highest lower and the lowest upper bound, whatever the delays were. It takes no pairs of requests and answers, and the
error is known: half the distance. Clocks also drift, by at most `DRIFT`: an old bound says less than a new one.

Between several machines, bounds add up along paths; the shortest paths give the tightest bounds, and the middles of
those bounds contradict no message. That is a system of difference constraints: Cormen et al., "Introduction to
Algorithms", section 24.4; Duda et al., "Estimating Global Time in Distributed Systems" (1987), draw the same bounds as
convex hulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.errors import UsageError

DRIFT: Final = 1e-4  # By how much two clocks of machines differ in rate, at most: 100 parts per million.
_INFINITY: Final = float("inf")


class ClockOffset(Struct, frozen=True):
    """How far a clock is ahead of another, in seconds, and by how much this may be wrong."""

    seconds: float = 0.0
    error: float = _INFINITY  # Infinite until messages have passed in both directions.

    def __str__(self) -> str:
        if self.error == _INFINITY:
            return "unknown"
        value = f"{self.seconds:+,.3f} s" if abs(self.seconds) >= 1 else f"{1e3 * self.seconds:+.3g} ms"
        return f"{value} ± {1e3 * self.error:.2g} ms"


class OffsetEstimate:
    """The offset of one other clock, kept up to date while messages pass. All times are in seconds."""

    def __init__(self, drift: float = DRIFT) -> None:
        self._drift = drift
        self._low, self._low_at = -_INFINITY, 0.0
        self._high, self._high_at = _INFINITY, 0.0

    def received(self, sent: float, now: float) -> None:
        """A message that left at `sent` on the other clock has come at `now` on ours."""
        bound = sent - now
        if bound >= self._low - self._drift * (now - self._low_at):
            self._low, self._low_at = bound, now

    def delivered(self, sent: float, received: float) -> None:
        """A message that left at `sent` on our clock came at `received` on the other."""
        bound = received - sent
        if bound <= self._high + self._drift * (sent - self._high_at):
            self._high, self._high_at = bound, sent

    def at(self, now: float) -> ClockOffset:
        """How far the other clock is ahead of ours."""
        low = self._low - self._drift * max(0.0, now - self._low_at)
        high = self._high + self._drift * max(0.0, now - self._high_at)
        if -_INFINITY in (low, -high):
            return ClockOffset()
        # The clocks may drift faster than they should, or time may have stood still on one of them.
        return ClockOffset((low + high) / 2, max((high - low) / 2, abs(high - low) / 2))


class Transfer(Struct, frozen=True, gc=False):
    """A message between two clocks, by their numbers."""

    source: int
    target: int
    sent: float
    received: float


def offsets(clocks: int, transfers: Iterable[Transfer], known: Sequence[ClockOffset] = ()) -> list[ClockOffset]:
    """How far each clock is ahead of clock 0, so that no message arrives before it was sent.

    `known` has what is known already of each clock, for example from `OffsetEstimate`. If messages contradict each
    other, as they may if clocks drift or a send was noted too late, all are allowed to arrive early by the same time,
    the shortest that makes sense of them, and the errors include it.
    """
    if clocks < 1:
        raise UsageError(f"offsets of {clocks} clocks make no sense: give at least one.")
    bounds = np.full((clocks, clocks), _INFINITY)  # [a, b]: how far b is ahead of a, at most.
    np.fill_diagonal(bounds, 0.0)
    for transfer in transfers:
        if transfer.source != transfer.target:
            bound = transfer.received - transfer.sent
            bounds[transfer.source, transfer.target] = min(bounds[transfer.source, transfer.target], bound)
    for clock, offset in enumerate(known):
        if clock and offset.error < _INFINITY:
            bounds[0, clock] = min(bounds[0, clock], offset.seconds + offset.error)
            bounds[clock, 0] = min(bounds[clock, 0], offset.error - offset.seconds)
    shortest, slack = _shortest(bounds), 0.0
    while (np.diagonal(shortest) < 0).any():
        slack = max(1e-9, 2 * slack, -float(np.diagonal(shortest).min()) / clocks)
        shortest = _shortest(bounds + slack * (1 - np.eye(clocks)))
    return [_middle(float(shortest[0, clock]), float(-shortest[clock, 0]), slack) for clock in range(clocks)]


def _shortest(bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The shortest path between every two clocks, by Floyd and Warshall."""
    shortest = bounds.copy()
    for via in range(len(bounds)):
        shortest = np.minimum(shortest, shortest[:, via, None] + shortest[None, via, :])
    return shortest


def _middle(high: float, low: float, slack: float) -> ClockOffset:
    if high == _INFINITY and low == -_INFINITY:
        return ClockOffset()
    if high == _INFINITY or low == -_INFINITY:  # One direction only: no message is known to take less.
        return ClockOffset(low if high == _INFINITY else high)
    return ClockOffset((high + low) / 2, (high - low) / 2 + slack)

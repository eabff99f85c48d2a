"""Time against size, as exactly as the schedule has it, from a handful of simulations.

When all ranks arrive together, a schedule's time is built from sums and maxima of what is constant or grows in
proportion to the size. So it is a convex chain of straight lines, and two neighbouring pieces of the same slope are
one line: nothing needs to be simulated in between. What is left out is that ranges end at whole elements, which moves
each round by less than one element's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offbeat.protocols.schedule import Layout, Schedule, View
from offbeat.simulate.network import Network
from offbeat.simulate.schedules import finish_by_scale, finish_times

STRAIGHT = 1e-9
"""How far from a line, relative to the time, is still called one: what rounding does."""
REFINEMENTS = 24
"""How often corners are looked for; each finds at least one in every gap, and schedules have a few."""


@dataclass(frozen=True)
class Curve:
    """Seconds against bytes, as a chain of straight lines."""

    sizes: NDArray[np.float64]
    """Bytes at the corners."""
    seconds: NDArray[np.float64]
    """Seconds at the corners."""

    def __call__(self, sizes: ArrayLike) -> NDArray[np.float64]:
        """The time at some sizes between the smallest and the largest that were asked for."""
        return np.interp(np.asarray(sizes, dtype=np.float64), self.sizes, self.seconds)


def curve(schedule: Schedule, view: View, network: Network, sizes: Sequence[int], itemsize: int = 4) -> Curve:
    """How long a schedule takes between the smallest and the largest of these sizes, until the last rank is done."""
    low, high = min(sizes), max(sizes)
    layout = Layout(-(-high // (itemsize * view.size)) * view.size, itemsize)  # Blocks of equal length.
    whole = layout.count * itemsize

    def simulated(asked: NDArray[np.float64]) -> NDArray[np.float64]:
        return finish_by_scale(schedule(view, layout), view, layout, network, asked / whole)

    known = np.unique(np.array([low / 2, low, high, 2 * high], dtype=np.float64))
    seconds = simulated(known)
    for _ in range(REFINEMENTS):
        corners = _possible_corners(known, seconds)
        if not len(corners):
            break
        known, seconds = np.concatenate([known, corners]), np.concatenate([seconds, simulated(corners)])
        order = np.argsort(known)
        known, seconds = known[order], seconds[order]
    return Curve(known, seconds)


def played(schedule: Schedule, view: View, network: Network, sizes: Sequence[int], itemsize: int = 4) -> Curve:
    """The same for a schedule that has more rounds the larger the buffer is: exact at these sizes, joined by lines."""
    layouts = [Layout(-(-size // itemsize), itemsize) for size in sorted(set(sizes))]
    seconds = [finish_times(schedule(view, one), view, one, network).max() for one in layouts]
    return Curve(np.array(sorted(set(sizes)), dtype=np.float64), np.array(seconds))


def _possible_corners(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the lines on both sides of a gap meet: if it hides a single corner, it is there."""
    slopes = np.diff(seconds) / np.diff(sizes)
    before, here, after = slopes[:-2], slopes[1:-1], slopes[2:]
    left, right = sizes[1:-2], sizes[2:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        meeting = left + (right - left) * (after - here) / (after - before)
    hidden = (here - before) * (meeting - left) > STRAIGHT * seconds[2:-1]
    inner = (meeting - left > STRAIGHT * right) & (right - meeting > STRAIGHT * right)
    return meeting[hidden & inner]

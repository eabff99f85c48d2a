"""Which algorithm of a collective is the fastest at which size, on a simulated network.

When all ranks arrive together, a schedule's time is built from sums and maxima of what is constant or grows in
proportion to the size. So it is a convex chain of straight lines, and two neighbouring pieces of the same slope are
one line: nothing needs to be simulated in between. What is left out is that ranges end at whole elements, which moves
each round by less than one element's time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from offbeat.errors import UsageError
from offbeat.protocols.collectives import ALGORITHMS, Algorithm, Collective
from offbeat.protocols.schedule import FloatArray, IntArray, Layout, Schedule, View
from offbeat.simulate.network import Network
from offbeat.simulate.schedules import finish_by_scale, finish_times
from offbeat.statistics import JsonData

TIE = 1e-9  # Times that differ by less, relatively, are equal; the algorithm listed first is then the best.
STEPS = 400  # Sizes at which the best is looked up before crossovers are narrowed down.
ITEMSIZE = 4
STRAIGHT = 1e-9  # How far from a line, relative to the time, is still called one: what rounding does.
REFINEMENTS = 24  # How often corners are looked for; each finds at least one in every gap, and schedules have a few.


@dataclass(frozen=True)
class Curve:
    """Seconds against bytes, as a chain of straight lines."""

    sizes: FloatArray  # Bytes at the corners.
    seconds: FloatArray  # Seconds at the corners.

    def __call__(self, sizes: ArrayLike) -> FloatArray:
        """The time at some sizes between the smallest and the largest that were asked for."""
        return np.interp(np.asarray(sizes, dtype=np.float64), self.sizes, self.seconds)


def curve(schedule: Schedule, view: View, network: Network, sizes: Sequence[int], itemsize: int = 4) -> Curve:
    """How long a schedule takes between the smallest and the largest of these sizes, until the last rank is done."""
    low, high = min(sizes), max(sizes)
    layout = Layout(-(-high // (itemsize * view.size)) * view.size, itemsize)  # Blocks of equal length.
    whole = layout.count * itemsize

    def simulated(asked: FloatArray) -> FloatArray:
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


def _possible_corners(sizes: FloatArray, seconds: FloatArray) -> FloatArray:
    """Where the lines on both sides of a gap meet: if it hides a single corner, it is there."""
    slopes = np.diff(seconds) / np.diff(sizes)
    before, here, after = slopes[:-2], slopes[1:-1], slopes[2:]
    left, right = sizes[1:-2], sizes[2:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        meeting = left + (right - left) * (after - here) / (after - before)
    hidden = (here - before) * (meeting - left) > STRAIGHT * seconds[2:-1]
    inner = (meeting - left > STRAIGHT * right) & (right - meeting > STRAIGHT * right)
    return meeting[hidden & inner]


@dataclass(frozen=True)
class Crossover:
    """A size at which another algorithm becomes the fastest."""

    size: int  # The smallest size, in bytes, at which `after` wins.
    before: str
    after: str


@dataclass(frozen=True)
class Comparison(JsonData):
    """Times of all algorithms of a collective by size, and the fastest at each."""

    collective: Collective
    ranks: int
    hosts: int
    sizes: tuple[int, ...]  # Bytes of a rank's buffer: of the whole result, even if each rank contributes only a block.
    seconds: Mapping[str, tuple[float, ...]]  # By algorithm and size: until the last rank is done.
    crossovers: tuple[Crossover, ...]  # Between the smallest and the largest size, in order.
    left_out: Mapping[str, str]  # Algorithms that cannot be used here, with the reason.

    def best(self, column: int) -> str:
        """The fastest algorithm at the size in a column."""
        least = min(times[column] for times in self.seconds.values())
        return next(name for name, times in self.seconds.items() if times[column] <= least * (1 + TIE))

    def plain(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        best = [self.best(column) for column in range(len(self.sizes))]
        return super().plain() | {"collective": self.collective.value, "best": best}


def compare_collectives(
    ranks: int,
    sizes: Sequence[int],
    network: Network,
    hosts: Sequence[int] | None = None,
    collective: Collective = Collective.ALL_REDUCE,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Simulate every algorithm of a collective; `hosts` gives each rank's host, by default its own.

    `say` is called with the name of each algorithm before it is simulated.
    """
    if ranks < 1 or not sizes or min(sizes) < 1:
        raise UsageError(f"{ranks} ranks and sizes {list(sizes)}: give at least one rank, and sizes of 1 byte or more.")
    view = View.of(ranks, range(ranks) if hosts is None else hosts)
    # A barrier moves one element however large the buffer is.
    chosen = (ITEMSIZE,) if collective is Collective.BARRIER else tuple(sorted(set(sizes)))
    curves: dict[str, Curve] = {}
    left_out: dict[str, str] = {}
    for algorithm in ALGORITHMS[collective].values():
        if say is not None:
            say(algorithm.name)
        reason = _obstacle(algorithm, view)
        if reason is None:
            simulated = played if algorithm.pieced else curve
            curves[algorithm.name] = simulated(algorithm.schedule, view, network, chosen, ITEMSIZE)
        else:
            left_out[algorithm.name] = reason
    seconds = {name: tuple(float(time) for time in times(chosen)) for name, times in curves.items()}
    count = len(set(view.hosts.tolist()))
    return Comparison(collective, ranks, count, chosen, seconds, _crossovers(curves, chosen[0], chosen[-1]), left_out)


def _obstacle(algorithm: Algorithm, view: View) -> str | None:
    """Why an algorithm cannot be used in a view: the error of its first round."""
    if algorithm.pieced and len(set(view.hosts.tolist())) == view.size > 1:
        return "every rank is alone on its host, so no memory is shared: it is a ring"
    try:
        next(iter(algorithm.schedule(view, Layout(view.size))), None)
    except UsageError as error:
        return str(error)
    return None


def _crossovers(curves: Mapping[str, Curve], low: int, high: int) -> tuple[Crossover, ...]:
    """Where the best changes: looked up at many sizes, and narrowed down to the byte."""
    names = list(curves)
    if not names:
        return ()

    def winners(sizes: IntArray) -> list[str]:
        table = np.stack([curves[name](sizes) for name in names])
        return [names[first] for first in np.argmax(table <= table.min(axis=0) * (1 + TIE), axis=0)]

    sizes = np.unique(np.geomspace(low, high, STEPS).round().astype(np.int64))
    crossovers: list[Crossover] = []
    best = winners(sizes)
    for left, right, before, after in zip(sizes, sizes[1:], best, best[1:], strict=False):
        crossovers += _narrowed(winners, int(left), int(right), before, after)
    return tuple(crossovers)


def _narrowed(
    winners: Callable[[IntArray], list[str]], low: int, high: int, before: str, after: str
) -> list[Crossover]:
    """The changes between two sizes; a third algorithm may win in between."""
    if before == after:
        return []
    if high - low == 1:
        return [Crossover(high, before, after)]
    middle = (low + high) // 2
    best = winners(np.array([middle]))[0]
    return _narrowed(winners, low, middle, before, best) + _narrowed(winners, middle, high, best, after)

"""What links cost, from measured times: alpha, beta, gamma and copy by least squares, none of them negative.

A schedule's time, if all ranks arrive together, is close to `alpha * hops + beta * moved + gamma * reduced + copy *
copied`, and these factors are read off the schedule itself. Errors count relative to the measured time, so that small
sizes weigh as much as large ones. For one schedule, everything but the hops is proportional to the size, so only the
sum of the costs is known: it is then all called beta, which predicts that schedule as well. Times of several schedules
together tell the costs apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import UsageError
from offbeat.protocols.schedule import Layout, Schedule, View
from offbeat.simulate.network import Link, Network
from offbeat.simulate.schedules import finish_times
from offbeat.statistics import not_negative


class CostTerms(NamedTuple):
    """The factors of alpha, beta, gamma and copy in a schedule's time."""

    hops: float  # Transfers one after the other.
    moved: float  # Bytes through the busiest ports, one after the other.
    reduced: float  # Bytes combined, one after the other.
    copied: float  # Bytes copied, one after the other.


def cost_of(schedule: Schedule, view: View, layout: Layout) -> CostTerms:
    """A schedule's time if only latency, only moving, only reducing, or only copying took time."""
    units = (Link(1, 0), Link(0, 1), Link(0, 0, 1), Link(0, 0, 0, 1))
    times = (finish_times(schedule(view, layout), view, layout, Network.uniform(unit)) for unit in units)
    return CostTerms(*(float(each.max()) for each in times))


@dataclass(frozen=True)
class Regimes:
    """A link whose cost per byte changes at certain working sets, such as the size of a cache."""

    alpha: float
    betas: tuple[float, ...]  # Seconds per byte: up to the first knot, from there to the second, and so on.
    gamma: float
    copy: float
    knots: tuple[int, ...] = ()  # Working sets, in bytes of a rank's buffer, at which the cost per byte changes.
    call: float = 0.0  # Seconds of any call, however many hops there are: overhead of the program around it.

    def link(self, size: int) -> Link:
        """The link for data of this size: with the mean cost of its bytes."""
        return Link(self.alpha, float(np.dot(_shares(size, self.knots), self.betas)), self.gamma, self.copy)


def fit_link(sizes: Sequence[int], seconds: Sequence[float], costs: Sequence[CostTerms]) -> Link:
    """The link that best explains these times of schedules with these costs."""
    return fit_regimes(sizes, seconds, costs).link(max(sizes, default=1))


def fit_regimes(
    sizes: Sequence[int],
    seconds: Sequence[float],
    costs: Sequence[CostTerms],
    knots: Sequence[int] = (),
    calls: bool = False,
) -> Regimes:
    """The same, with another cost per byte beyond each knot; with one knot, three sizes are met exactly.

    With `calls`, constant time counts as the call's rather than its hops', if either would do: inside a host a signal
    takes far less than the program around it.
    """
    if not len(sizes) == len(seconds) == len(costs) or not sizes:
        raise UsageError(
            f"{len(sizes)} sizes, {len(seconds)} times and {len(costs)} costs: a fit needs one of each per measurement."
        )
    if min(seconds) <= 0 or min(sizes) < 1:
        raise UsageError(f"times {list(seconds)} at sizes {list(sizes)}: a fit needs times and sizes above 0.")
    knots = tuple(sorted(knots))
    shares = np.stack([_shares(size, knots) for size in sizes])
    table = np.asarray(costs, dtype=np.float64)
    called = np.full(len(table), float(calls))
    columns = np.column_stack([called, table[:, 0], shares * table[:, 1:2], table[:, 2:]])
    weights = 1 / np.asarray(seconds, dtype=np.float64)
    weighted = columns * weights[:, np.newaxis]
    best = _hops_only_if_nearer(weighted) if calls else not_negative(weighted)
    call, alpha, *betas, gamma, copy = (float(value) for value in best)
    return Regimes(alpha, tuple(betas), gamma, copy, knots, call)


def _hops_only_if_nearer(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best fit; of equally good ones, one with no cost of hops, the second column."""
    without = columns.copy()
    without[:, 1] = 0.0
    simpler, best = not_negative(without), not_negative(columns)
    missed, least = (float(np.square(columns @ values - 1).sum()) for values in (simpler, best))
    return simpler if missed <= least + 1e-12 else best


def _shares(size: int, knots: Sequence[int]) -> NDArray[np.float64]:
    """The share of a working set in each regime."""
    edges = np.clip([0, *knots, size], 0, size)
    return np.diff(edges) / size

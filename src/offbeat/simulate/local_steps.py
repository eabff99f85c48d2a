"""What a step takes where workers part: local SGD averages now and then, gossip mixes with neighbours.

The schedules are those that run on real processes, put between steps of computing, and executed in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from offbeat.protocols.collectives import Collective, algorithm
from offbeat.protocols.gossip.mixing import mix, steps
from offbeat.protocols.gossip.topology import Mixing
from offbeat.protocols.schedule import Layout, Schedule, View
from offbeat.simulate.network import Network
from offbeat.simulate.schedules import finish_times

Compute = float | Sequence[float] | Sequence[Sequence[float]]
"""Seconds of computing: of every step; of each rank's steps; or of each rank's, for each step."""


def local_step_time(
    view: View, layout: Layout, network: Network, compute: Compute, period: int, periods: int = 1, by: str = "ring"
) -> float:
    """Seconds per step of `local(period)` whose models are averaged by this algorithm: the last rank's."""
    average = algorithm(Collective.ALL_REDUCE, by).schedule
    return _per_step(
        view, layout, network, compute, period * periods, lambda step: average if (step + 1) % period == 0 else None
    )


def gossip_step_time(
    view: View, layout: Layout, network: Network, compute: Compute, mixing: Mixing, count: int = 1, period: int = 1
) -> float:
    """Seconds per step of gossip on this graph, over so many steps; models mix in every `period`-th of them."""
    schedules = [mix(matrix) for matrix in mixing.matrices]

    def exchange(step: int) -> Schedule | None:
        turn, rest = divmod(step + 1, period)
        return None if rest else schedules[(turn - 1) % len(schedules)]

    return _per_step(view, layout, network, compute, count, exchange)


def _per_step(
    view: View,
    layout: Layout,
    network: Network,
    compute: Compute,
    count: int,
    exchange: Callable[[int], Schedule | None],
) -> float:
    seconds: list[list[float]] = np.broadcast_to(np.asarray(compute, dtype=np.float64), (count, view.size)).tolist()
    rounds = steps(seconds, exchange)(view, layout)
    return float(finish_times(rounds, view, layout, network).max()) / count

"""Predicted time of a step, from the schedules of its exchanges, their bytes, and the links.

A strategy says what one step exchanges (`Step`), with measured times of a few trial exchanges. Those, or a known rate,
give a network, on which the schedules that real processes run are played in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from offbeat.protocols.collectives import Collective, algorithm
from offbeat.protocols.compression import SumMethod
from offbeat.protocols.exchanges import Exchanged, Matrix, Part, beside, in_turn, steps
from offbeat.protocols.gossip.mixing import mix
from offbeat.protocols.gossip.topology import Mixing
from offbeat.protocols.schedule import Layout, Schedule, View
from offbeat.simulate.fit import cost_of, fit_link
from offbeat.simulate.network import Link, Network, Ports
from offbeat.simulate.schedules import finish_times

FORWARD = 1 / 3  # Share of computing before the first gradient: backward takes about twice as long as forward.
MIXED = 4  # Least number of mixing steps to play: ranks that differ drift apart until they wait for each other.
_ByStep = Callable[[int], Schedule | None]  # What is exchanged after a step, by its number.


class Timed(Struct, frozen=True):
    """A trial exchange, and the slowest worker's seconds."""

    exchanged: Exchanged
    seconds: float


class Step(Struct, frozen=True, kw_only=True):
    """What workers exchange in a step, or in a period of them."""

    hosts: tuple[int, ...]  # The host of each worker.
    exchanges: tuple[Exchanged, ...]  # One after the other.
    period: int = 1  # They are made every n-th step.
    beside: bool = False  # Whether they begin during computing, each when its share of the bytes is there.
    behind: int = 0  # How many of the last begin when all is computed, such as an all-gather after a step.
    matrices: tuple[Matrix, ...] = ()  # Mixing matrices, in turn.
    trials: tuple[Timed, ...] = ()  # Measured exchanges that tell what the links cost.

    @property
    def view(self) -> View:
        """The workers and their hosts."""
        return View.of(len(self.hosts), self.hosts)


def network_of(step: Step, rate: float | None = None) -> Network:
    """What the links cost, fitted to the trials; with a known rate between hosts, only latency is fitted."""
    if rate is not None and len(set(step.hosts)) > 1:
        first = min(step.trials, key=lambda each: each.exchanged.nbytes)
        hops = cost_of(*_costed(step, first.exchanged)).hops
        return Network(Link(first.seconds / max(hops, 1.0), 1 / rate), ports=Ports.HOST)
    costs = [cost_of(*_costed(step, each.exchanged)) for each in step.trials]
    sizes, seconds = [each.exchanged.nbytes for each in step.trials], [each.seconds for each in step.trials]
    return Network.uniform(fit_link(sizes, seconds, costs))


def step_time(step: Step, network: Network, computing: Sequence[float]) -> float:
    """Seconds of one step, the mean over those that must be played; `computing` has the seconds of each worker."""
    schedule, count = step_schedule(step, [computing])
    return _played(schedule, step.view, Layout(0, 1), network) / count


def step_schedule(step: Step, computing: Sequence[Sequence[float]], count: int | None = None) -> tuple[Schedule, int]:
    """`count` steps as one schedule, and their number: by default one turn of what is exchanged.

    `computing` has the seconds of each worker, a row for each step; rows are reused if there are too few.
    """
    turns = max(1, len(step.matrices))
    if count is None:
        count = 1 if step.beside else step.period * (turns * max(1, -(-MIXED // turns)) if step.matrices else 1)
    seconds = [list(computing[number % len(computing)]) for number in range(count)]
    if step.beside:
        early = step.exchanges[: len(step.exchanges) - step.behind]
        total = max(sum(each.nbytes for each in early), 1)
        parts = [(each.nbytes / total * (1 - FORWARD), _part(step, each)) for each in early]
        if parts:  # Forward comes before the first share of backward.
            parts[0] = (parts[0][0] + FORWARD, parts[0][1])
        parts += [(0.0, _part(step, each)) for each in step.exchanges[len(early) :]]
        return in_turn([(beside(own, parts), Layout(0, 1)) for own in seconds]), count
    chosen = [[each for each in step.exchanges if not each.mixes or int(each.by) == turn] for turn in range(turns)]
    return steps(seconds, _every(step.period, [in_turn([_part(step, each) for each in own]) for own in chosen])), count


def _every(period: int, schedules: Sequence[Schedule]) -> _ByStep:
    """One of the schedules, in turn, after every `period`-th step."""

    def exchange(step: int) -> Schedule | None:
        turn, rest = divmod(step + 1, period)
        return None if rest else schedules[(turn - 1) % len(schedules)]

    return exchange


def _played(schedule: Schedule, view: View, layout: Layout, network: Network) -> float:
    return float(finish_times(schedule(view, layout), view, layout, network).max())


def _part(step: Step, each: Exchanged) -> Part:
    """The schedule of an exchange, and its layout in bytes, as a step's exchanges differ in element size."""
    return replace(each, itemsize=1).part(len(step.hosts), step.matrices)


def _costed(step: Step, each: Exchanged) -> tuple[Schedule, View, Layout]:
    schedule, layout = _part(step, each)
    return schedule, step.view, layout


Compute = float | Sequence[float] | Sequence[Sequence[float]]
"""Seconds of computing: of every step; of each rank's steps; or of each rank's, for each step."""


def local_step_time(
    view: View, layout: Layout, network: Network, compute: Compute, period: int, periods: int = 1, by: str = "ring"
) -> float:
    """Seconds per step of `local(period)` whose models are averaged by this algorithm: the last rank's."""
    average = algorithm(Collective.ALL_REDUCE, by).schedule
    return _mean_step(view, layout, network, compute, period * periods, _every(period, [average]))


def gossip_step_time(
    view: View, layout: Layout, network: Network, compute: Compute, mixing: Mixing, count: int = 1, period: int = 1
) -> float:
    """Seconds per step of gossip on this graph, over `count` steps; models mix in every `period`-th of them."""
    exchange = _every(period, [mix(matrix) for matrix in mixing.matrices])
    return _mean_step(view, layout, network, compute, count, exchange)


def _mean_step(view: View, layout: Layout, network: Network, compute: Compute, count: int, exchange: _ByStep) -> float:
    seconds: list[list[float]] = np.broadcast_to(np.asarray(compute, dtype=np.float64), (count, view.size)).tolist()
    return _played(steps(seconds, exchange), view, layout, network) / count


def exchange_of(nbytes: int, way: SumMethod) -> Exchanged:
    """The sum of `nbytes` compressed bytes per worker, between hosts: gathered by all, or summed on the way."""
    return Exchanged(what="all_gather" if way is SumMethod.GATHER else "all_reduce", by="ring", nbytes=nbytes)


def compressed_sum_time(nbytes: int, way: SumMethod, workers: int, network: Network) -> float:
    """Seconds until all workers, each on its own host, have the sum of `nbytes` compressed bytes per worker.

    Payloads that cannot be summed on the way travel round a ring to all; others are summed by the ring's all-reduce.
    """
    schedule, layout = exchange_of(nbytes, way).part(workers)
    return _played(schedule, View.of(workers, range(workers)), layout, network)

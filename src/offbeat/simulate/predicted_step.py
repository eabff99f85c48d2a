"""What a step of a run will take, from what it exchanges: the schedules of its exchanges, their bytes, and the links.

A strategy says what one step exchanges (`Step`), with times of a few exchanges that were made to learn what links cost.
From those, or from a rate that is known, comes a network; on it the schedules are played.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from offbeat.protocols.exchanges import Exchanged, Matrix
from offbeat.protocols.gossip.mixing import steps
from offbeat.protocols.schedule import Layout, Schedule, View
from offbeat.protocols.stepping import Part, beside, in_turn
from offbeat.simulate.fit import cost_of, fit_link
from offbeat.simulate.network import Link, Network, Ports
from offbeat.simulate.schedules import finish_times

FORWARD = 1 / 3
"""The share of computing that comes before the first gradient: backward takes about twice as long as forward."""
MIXED = 4
"""Steps of mixing that are played at least: ranks that differ drift apart until they wait for each other."""


class Timed(Struct, frozen=True):
    """An exchange that was made once, and the slowest worker's seconds."""

    exchanged: Exchanged
    seconds: float


class Step(Struct, frozen=True, kw_only=True):
    """What workers exchange in a step, or in a period of them."""

    hosts: tuple[int, ...]
    """Where each worker lives."""
    exchanges: tuple[Exchanged, ...]
    """One after the other."""
    period: int = 1
    """They are made every n-th step."""
    beside: bool = False
    """Whether they begin while gradients are still computed, each when its share of the bytes is there."""
    behind: int = 0
    """How many of the last of them begin only when all is computed, as where slices are handed round after a step."""
    matrices: tuple[Matrix, ...] = ()
    """By which workers mix, in turn."""
    trials: tuple[Timed, ...] = ()
    """What the links were measured by."""

    @property
    def view(self) -> View:
        """Who takes part."""
        return View.of(len(self.hosts), self.hosts)


def network_of(step: Step, rate: float | None = None) -> Network:
    """What the links cost: as trials say; where bytes per second between hosts are known, only latency is theirs."""
    if rate is not None and len(set(step.hosts)) > 1:
        first = min(step.trials, key=lambda one: one.exchanged.nbytes)
        hops = cost_of(*_costed(step, first.exchanged)).hops
        return Network(Link(first.seconds / max(hops, 1.0), 1 / rate), ports=Ports.HOST)
    costs = [cost_of(*_costed(step, one.exchanged)) for one in step.trials]
    sizes, seconds = [one.exchanged.nbytes for one in step.trials], [one.seconds for one in step.trials]
    return Network.uniform(fit_link(sizes, seconds, costs))


def step_time(step: Step, network: Network, computing: Sequence[float]) -> float:
    """Seconds of one step, the mean over those that must be played; each worker computes for as long as is given."""
    schedule, count = step_schedule(step, [computing])
    return _played(step, network, schedule) / count


def step_schedule(step: Step, computing: Sequence[Sequence[float]], count: int | None = None) -> tuple[Schedule, int]:
    """So many steps as one schedule, and how many they are: by default one turn of what is exchanged.

    `computing` has the seconds of each worker, a row for each step; rows are used again if there are too few.
    """
    turns = max(1, len(step.matrices))
    if count is None:
        count = 1 if step.beside else step.period * (turns * max(1, -(-MIXED // turns)) if step.matrices else 1)
    seconds = [list(computing[number % len(computing)]) for number in range(count)]
    if step.beside:
        early = step.exchanges[: len(step.exchanges) - step.behind]
        total = max(sum(one.nbytes for one in early), 1)
        parts = [(one.nbytes / total * (1 - FORWARD), _part(step, one)) for one in early]
        if parts:  # Forward comes before the first share of backward.
            parts[0] = (parts[0][0] + FORWARD, parts[0][1])
        parts += [(0.0, _part(step, one)) for one in step.exchanges[len(early) :]]
        return in_turn([(beside(own, parts), Layout(0, 1)) for own in seconds]), count

    def exchange(number: int) -> Schedule | None:
        turn, rest = divmod(number + 1, step.period)
        if rest:
            return None
        chosen = [one for one in step.exchanges if one.what not in ("mix", "tell") or int(one.by) == (turn - 1) % turns]
        return in_turn([_part(step, one) for one in chosen])

    return steps(seconds, exchange), count


def _played(step: Step, network: Network, schedule: Schedule) -> float:
    view, layout = step.view, Layout(0, 1)
    return float(finish_times(schedule(view, layout), view, layout, network).max())


def _part(step: Step, one: Exchanged) -> Part:
    """The schedule of an exchange, and its layout in bytes, as a step's exchanges have elements of several sizes."""
    return replace(one, itemsize=1).part(len(step.hosts), step.matrices)


def _costed(step: Step, one: Exchanged) -> tuple[Schedule, View, Layout]:
    schedule, layout = _part(step, one)
    return schedule, step.view, layout

"""Evaluations of Sandblaster in virtual time, with a worker that is paused again and again."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from offbeat.protocols.machine import Effect, Event, Payload, SetTimer, Start, Timer
from offbeat.protocols.sandblaster.lbfgs import Answer, Evaluate, Iteration, Lbfgs, Request
from offbeat.protocols.sandblaster.messages import first_view
from offbeat.protocols.sandblaster.minimizer import Minimizer
from offbeat.protocols.sandblaster.replica import VectorShard
from offbeat.protocols.sandblaster.shard import FetchRegister
from offbeat.protocols.sandblaster.worker import Compute, Computed, PortionWorker, Ready
from offbeat.protocols.servers.messages import ClusterView, worker_name
from offbeat.simulate.machines import LossyNetwork, Simulation, Stop

PERIOD = 0.5
"""Seconds from one pause to the next."""
DELAY = 2e-4
"""Seconds that a message takes."""


class _Evaluations(Lbfgs):
    """Evaluations in place of an optimizer, whose vectors would not change the time."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def iterate(self) -> Generator[Request, Answer, Iteration]:
        """Evaluate so often."""
        for _ in range(self._count):
            yield Evaluate("g0")
        return Iteration(1, 0.0, 0.0, 0.0, self._count)


class _Computing(PortionWorker):
    """A worker whose computations take time, of which none passes while it is paused."""

    def __init__(self, rank: int, view: ClusterView, seconds: float, paused: float) -> None:
        super().__init__(rank, view)
        self._seconds, self._paused = seconds, paused * PERIOD

    def on(self, event: Event, now: float) -> Sequence[Effect]:
        """Handle an event; work that was begun ends later."""
        if isinstance(event, Timer) and isinstance(event.token, Compute):
            return [Start(event.token, "computed")]
        return [self._later(effect, now) for effect in super().on(event, now)]

    def _later(self, effect: Effect, now: float) -> Effect:
        if isinstance(effect, Start) and isinstance(effect.work, Compute):
            return SetTimer(self._end(now, self._seconds) - now, effect.work)
        return effect

    def _end(self, now: float, seconds: float) -> float:
        """When so many seconds of work are done: every period begins with a pause."""
        while True:
            begun = now // PERIOD * PERIOD
            now = max(now, begun + self._paused)
            if now + seconds <= begun + PERIOD:
                return now + seconds
            # A hair later, so that rounding cannot leave it in the old period.
            seconds, now = seconds - (begun + PERIOD - now), begun + PERIOD + 1e-9


def evaluation_seconds(
    workers: int, portions: int, seconds: float, *, paused: float = 0.0, backups: bool = True, evaluations: int = 20
) -> float:
    """Mean virtual seconds of an evaluation that is `seconds` of work, with worker 0 paused for a share of the time."""
    shards = 2
    view = first_view(workers, shards)
    machines = [_Computing(rank, view, seconds / portions, paused if rank == 0 else 0.0) for rank in range(workers)]
    ends: list[float] = []
    longest = 10.0 * seconds * evaluations
    stops = [Stop(worker_name(0), n * PERIOD, paused * PERIOD) for n in range(int(longest / PERIOD)) if paused]
    minimizer = Minimizer(_Evaluations(evaluations), portions, view, backups=backups)
    empty = Payload(0)

    def work(item: Any) -> Any:
        if isinstance(item, Ready):
            ends.append(simulation.now)
        if isinstance(item, Compute):
            return Computed(0.0, [empty] * shards)
        return empty if isinstance(item, FetchRegister) else ()

    holders = [VectorShard(shard, view) for shard in range(shards)]
    names = [machine.name for machine in (*machines, *holders)]
    simulation = Simulation(
        [minimizer, *holders, *machines],
        network=LossyNetwork(delay=DELAY),
        perform=dict.fromkeys(names, work),
        faults=stops,
    )
    for machine in machines:
        simulation.carry_out(machine.name, machine.iterate())
    if not simulation.run(longest, until=lambda: bool(ends)):
        raise RuntimeError("the evaluations have not ended")
    return ends[0] / evaluations

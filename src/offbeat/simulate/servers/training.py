"""Parameter servers in virtual time: what a step takes, which workers wait, and how stale reads are.

What servers decide (`protocols.servers.pacing`) and what workers do (`protocols.servers.worker.rhythm`) is driven event
by event (`simulate.servers.events`). A worker computes for a drawn time (`stragglers`), then pushes, pulls and waits as
its rhythm says. A server's port carries one byte at a time each way, first come, first served. So the last of p workers
that begin together is done after `alpha + beta * max(n, p * n / K)`, the busiest port's time. The first of them compute
while the others still pull; those out of step queue less.

Where nothing queues, `shortcut` computes the same with arrays, step by step: a worker starts step c when it has
finished c and all have finished c - s. A test equates the two to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from offbeat import limits
from offbeat.errors import UsageError, did_you_mean
from offbeat.protocols.expressions import calls
from offbeat.protocols.schedule import IntArray
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.worker.rhythm import RhythmOf, rhythm_of
from offbeat.simulate.network import Link
from offbeat.simulate.queues import Times
from offbeat.simulate.servers.events import Drive, ServerPorts
from offbeat.simulate.servers.stragglers import Stragglers

Progress = Callable[[float], None]  # Called from time to time with the share that is done.


def parse_rule(text: str) -> Rule:
    """A rule as it is written: `bsp`, `ssp(3)`, `ssp(3, eager)`, `asp`, `drop_slowest(2)` or `deadline(0.5)`."""
    match calls(text, "rule", "ssp(3)"):
        case [("bsp", ())]:
            return Rule(0)
        case [("asp", ())]:
            return Rule(None)
        case [("ssp", (int(bound),))]:
            return Rule(bound)
        case [("ssp", (int(bound), "eager"))]:
            return Rule(bound, eager=True)
        case [("drop_slowest", (int(drop),))]:
            return Rule(0, drop=drop)
        case [("deadline", (int(seconds) | float(seconds),))]:
            return Rule(0, deadline=float(seconds))
        case _:
            names = ["bsp", "ssp(3)", "ssp(3, eager)", "asp", "drop_slowest(2)", "deadline(0.5)"]
            raise UsageError(f"{text!r} is not a rule.{did_you_mean(text, names)}")


@dataclass(frozen=True)
class ShardTraffic:
    """What is exchanged with the servers in each step, and over which link."""

    count: int  # Servers: each holds an equal part of the parameters, and has its own port.
    nbytes: int  # Bytes of all parameters: pushed, and pulled, by each worker in each step.
    link: Link  # Between a worker and a server; its `gamma` is the time to apply a byte that was pushed.

    def __post_init__(self) -> None:
        """Refuse no servers and no bytes."""
        limits.whole("--servers", self.count, limits.SIMULATED_SERVERS)
        limits.whole("--size", self.nbytes, limits.BYTES)


@dataclass(frozen=True)
class Paced:
    """Result of a simulation."""

    rule: Rule
    workers: int
    steps: int  # Steps of each worker; under `drop_slowest` and `deadline`, completed steps.
    ends: Times  # When each worker could have started another step.
    worked: float  # Seconds that all workers together computed.
    exchanged: float  # Seconds that all workers together pushed and pulled.
    staleness: IntArray  # Number of reads by staleness: the reader's clock less the slowest worker's.
    late: int = 0  # Gradients that came when their step was complete, and were discarded.
    pushes: int = 0  # Gradients sent by workers.
    reads: int = 0  # Values sent to workers on request.
    unasked: int = 0  # Values sent to workers unasked.

    @property
    def seconds_per_step(self) -> float:
        """Time in which the team makes as many steps as it has workers."""
        return float(self.workers / np.sum(self.steps / self.ends))

    @property
    def idle_share(self) -> float:
        """Share of the workers' time spent waiting for others."""
        total = float(self.ends.sum())
        # Rounding may leave a hair below zero where nobody waits.
        return max(0.0, 1 - (self.worked + self.exchanged) / total)

    @property
    def exchange_share(self) -> float:
        """Share of the workers' time spent pushing and pulling, queueing included."""
        return self.exchanged / float(self.ends.sum())

    @property
    def messages_per_step(self) -> float:
        """Messages with gradients or values, of one worker in one step."""
        return (self.pushes + self.reads + self.unasked) / (self.workers * self.steps)

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of reads, in steps."""
        return float(np.average(np.arange(len(self.staleness)), weights=self.staleness))

    def staleness_quantile(self, share: float) -> int:
        """The staleness that this share of reads does not exceed."""
        reads = np.cumsum(self.staleness)
        return int(np.searchsorted(reads, share * reads[-1]))

    def plain(self) -> dict[str, object]:
        """The figures, as plain data."""
        return {
            "rule": str(self.rule),
            "seconds_per_step": self.seconds_per_step,
            "idle_share": self.idle_share,
            "exchange_share": self.exchange_share,
            "staleness": {
                "mean": self.staleness_mean,
                "p99": self.staleness_quantile(0.99),
                "maximum": len(self.staleness) - 1,
                "histogram": self.staleness.tolist(),
            },
            "late": self.late,
            "pushes": self.pushes,
            "reads": self.reads,
            "unasked": self.unasked,
        }


def simulate(
    rule: Rule,
    workers: int,
    steps: int,
    stragglers: Stragglers,
    network: ShardTraffic | None = None,
    seed: int = 0,
    *,
    rhythm: RhythmOf | None = None,
    progress: Progress | None = None,
) -> Paced:
    """Train in virtual time: by the shortcut where it equals the protocol, by the protocol where it does not.

    Args:
        rule: Which worker may start a step.
        workers: Number of workers.
        steps: Steps of each worker.
        stragglers: How long computing takes.
        network: What exchanges cost; None: nothing.
        seed: Of the stragglers.
        rhythm: When workers push and pull; None: as `server(consistency=...)` does under this rule.
        progress: Called from time to time with the share that is done.

    """
    limits.whole("--workers", workers, limits.SIMULATED_WORKERS)
    limits.whole("--steps", steps, limits.SIMULATED_STEPS)
    if workers * steps > (most := limits.SIMULATED_STEPS):
        raise UsageError(f"{workers:,} workers x {steps:,} steps are more than {most:,}, the most there is memory for.")
    if rule.drop >= workers:
        raise UsageError(f"{rule} of {workers} workers leaves nobody: drop fewer.")
    durations = stragglers.draw(workers, steps, seed)
    if network is None and rhythm is None and not rule.closes and not rule.eager:
        return shortcut(rule, durations)
    return drive(rule, durations, network, rhythm, progress=progress)


def shortcut(rule: Rule, durations: Times) -> Paced:
    """The same as `drive` without a network, with arrays: for rules that wait for every worker or for none."""
    if rule.closes or rule.eager:
        raise UsageError(f"there is no shortcut for {rule}: what happens depends on the order of events.")
    steps, workers = durations.shape
    finished: Times = np.zeros(workers)
    everyone: Times = np.zeros(steps + 1)
    staleness: IntArray = np.zeros(steps + 1, dtype=np.int64)
    complete: IntArray = np.zeros(workers, dtype=np.int64)  # in what each has read
    reads = 0
    for clock in range(steps):
        start = np.maximum(finished, everyone[rule.needed(clock)])
        if clock:
            # A worker that starts just as the slowest catches up sees that it has.
            seen = np.searchsorted(everyone[rule.needed(clock) + 1 : clock + 1], start, side="right")
            # Under ssp(s) values are read one step before the bound would break, and used again until then.
            reading = complete < rule.needed(clock + 1) if rule.bound else np.ones(workers, dtype=bool)
            complete = np.where(reading, rule.needed(clock) + seen, complete)
            reads += int(reading.sum())
        stale = np.bincount(clock - complete)
        staleness[: len(stale)] += stale
        finished = start + durations[clock]
        everyone[clock + 1] = finished.max()
    ends = np.maximum(finished, everyone[rule.needed(steps)])
    last = int((complete < rule.needed(steps + 1)).sum()) if rule.bound else workers
    counts = {"pushes": steps * workers, "reads": reads + last}
    return Paced(rule, workers, steps, ends, float(durations.sum()), 0.0, _trimmed(staleness), **counts)


def drive(
    rule: Rule,
    durations: Times,
    network: ShardTraffic | None = None,
    rhythm: RhythmOf | None = None,
    *,
    progress: Progress | None = None,
) -> Paced:
    """Simulate event by event; durations have a row for each step, with a column for each worker."""
    ports = None if network is None else ServerPorts(network.link, network.nbytes, network.count)
    played = Drive(rule, durations, rhythm or rhythm_of(rule), ports, progress)
    played.run()
    return Paced(
        rule,
        played.count,
        played.steps,
        np.array(played.ends),
        played.worked,
        played.exchanged,
        _trimmed(np.array(played.staleness, dtype=np.int64)),
        late=played.late,
        pushes=played.pushes,
        reads=played.reads,
        unasked=played.unasked,
    )


def _trimmed(histogram: IntArray) -> IntArray:
    """Without the zeros at its end."""
    return histogram[: int(np.flatnonzero(histogram)[-1]) + 1]

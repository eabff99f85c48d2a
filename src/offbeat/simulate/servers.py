"""Parameter servers in virtual time: what a step takes, who waits, and how stale what is read is.

The machine that decides who may start (`PaceMachine`) is driven event by event. A worker pulls the parameters from all
shards, computes for as long as its stragglers' draw says, and pushes; when the push has arrived, the machine is told.
A server's port carries one byte at a time each way, and serves first who comes first. So the last of p workers that
begin together is through after `alpha + beta * max(n, p * n / K)`, the busiest port's time. The first of them compute
while the others still pull; those out of step queue less.

Where nothing queues, `shortcut` computes the same with arrays, step by step: a worker starts step c when it has
finished c and everybody has finished c - s. A test equates the two to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from offbeat.errors import UsageError, did_you_mean
from offbeat.protocols.machine import Effect, Received, Send, SetTimer, Timer
from offbeat.protocols.schedule import IntArray
from offbeat.protocols.servers.consistency import Admitted, Finished, PaceMachine, Rule
from offbeat.simulate.network import Link
from offbeat.simulate.queues import Times
from offbeat.simulate.stragglers import Stragglers, Transient, calls

MOST = 100_000_000
"""Steps of all workers together that one simulation may have: 800 MB of times."""
PREDICTED_STEPS = 10_000
"""Enough for a hundredth of the time per step under the pauses of `predict`."""
MANY = 8
"""Entries are sorted in if there are more of them than this part of what lies ahead."""
Progress = Callable[[float], None]
"""Told from time to time which share is done."""


def parse_rule(text: str) -> Rule:
    """A rule as it is written: `bsp`, `ssp(3)`, `ssp(3, eager)`, `asp`, `drop_slowest(2)` or `deadline(0.5)`."""
    match calls(text):
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
            raise UsageError(f"{text!r} is no rule.{did_you_mean(text, names)}")


@dataclass(frozen=True)
class Shards:
    """What is exchanged with the servers in each step, and through what."""

    count: int
    """Servers: each holds an equal part of the parameters, and has a port of its own."""
    nbytes: int
    """Bytes of all parameters; so many are pushed, and so many pulled, by each worker in each step."""
    link: Link
    """Between a worker and a server; its `gamma` is the time to apply a byte that was pushed."""

    def __post_init__(self) -> None:
        """Refuse no servers and no bytes."""
        if self.count < 1 or self.nbytes < 1:
            raise UsageError(f"{self.count} servers of {self.nbytes} bytes make no sense: give at least 1 of each.")


@dataclass(frozen=True)
class Paced:
    """What came of a simulation."""

    rule: Rule
    workers: int
    steps: int
    """That each worker made; under `drop_slowest` and `deadline`, that were completed."""
    ends: Times
    """When each worker could have started one step more."""
    worked: float
    """Seconds that all workers together computed."""
    exchanged: float
    """Seconds that all workers together pushed and pulled."""
    staleness: IntArray
    """How many reads were so many steps old: the reader's clock less the slowest worker's."""
    late: int = 0
    """Gradients that came when their step was complete, and were discarded."""

    @property
    def seconds_per_step(self) -> float:
        """Time in which the team makes as many steps as it has workers."""
        return float(self.workers / np.sum(self.steps / self.ends))

    @property
    def idle_share(self) -> float:
        """Share of the workers' time in which they waited to be let go on."""
        total = float(self.ends.sum())
        # Rounding may leave a hair below zero where nobody waits.
        return max(0.0, 1 - (self.worked + self.exchanged) / total)

    @property
    def exchange_share(self) -> float:
        """Share of the workers' time in which they pushed and pulled, queueing included."""
        return self.exchanged / float(self.ends.sum())

    @property
    def staleness_mean(self) -> float:
        """Steps that what was read was old, on average."""
        return float(np.average(np.arange(len(self.staleness)), weights=self.staleness))

    def staleness_quantile(self, share: float) -> int:
        """The staleness that this share of the reads does not exceed."""
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
        }


def simulate(
    rule: Rule,
    workers: int,
    steps: int,
    stragglers: Stragglers,
    network: Shards | None = None,
    seed: int = 0,
    *,
    progress: Progress | None = None,
) -> Paced:
    """Train in virtual time: by the shortcut where it equals the machine, by the machine where it does not."""
    if workers < 1 or steps < 1:
        raise UsageError(f"{workers} workers and {steps} steps make no sense: give at least 1 of each.")
    if workers * steps > MOST:
        raise UsageError(f"{workers:,} workers x {steps:,} steps are more than {MOST:,}, the most there is memory for.")
    if rule.drop >= workers:
        raise UsageError(f"{rule} of {workers} workers leaves nobody: drop fewer.")
    durations = stragglers.draw(workers, steps, seed)
    if network is None and not rule.closes:
        return shortcut(rule, durations)
    return drive(rule, durations, network, progress=progress)


def predict(
    rule: Rule,
    workers: int,
    base: float,
    pause: float,
    probability: float,
    exchange: float = 0.0,
    *,
    overlaps: bool = False,
    compute: float = 0.0,
) -> float:
    """Seconds per step of workers paced to `base` seconds, any step of which is paused with some probability.

    `exchange` seconds are added to every step. A pause that comes before the time of the step is taken adds its whole
    length: the step takes `base + pause`. With `overlaps` it falls into a step that is already timed, whose sleep ends
    when it would have ended anyway: `compute` seconds are worked and the rest is slept, so that the step takes
    `max(base, compute + pause)`.
    """
    longer = max(0.0, compute + pause - base) if overlaps else pause
    stragglers = Stragglers(base + exchange, (Transient(longer, probability),))
    return simulate(rule, workers, PREDICTED_STEPS, stragglers).seconds_per_step


def shortcut(rule: Rule, durations: Times) -> Paced:
    """The same as `drive` without a network, with arrays: for rules that wait for every worker or for none."""
    if rule.closes:
        raise UsageError(f"there is no shortcut for {rule}: who is late depends on the order of events.")
    steps, workers = durations.shape
    finished: Times = np.zeros(workers)
    everyone: Times = np.zeros(steps + 1)
    staleness: IntArray = np.zeros(steps + 1, dtype=np.int64)
    for clock in range(steps):
        start = np.maximum(finished, everyone[rule.needed(clock)])
        # Who starts the moment that the slowest comes up sees that it has.
        seen = np.searchsorted(everyone[rule.needed(clock) + 1 : clock + 1], start, side="right")
        stale = np.bincount(clock - rule.needed(clock) - seen)
        staleness[: len(stale)] += stale
        finished = start + durations[clock]
        everyone[clock + 1] = finished.max()
    ends = np.maximum(finished, everyone[rule.needed(steps)])
    return Paced(rule, workers, steps, ends, float(durations.sum()), 0.0, _trimmed(staleness))


def drive(rule: Rule, durations: Times, network: Shards | None = None, *, progress: Progress | None = None) -> Paced:
    """Drive the machine event by event; durations have a row for each step, with a column for each worker."""
    return _Drive(rule, durations, None if network is None else _Ports(network), progress).run()


class _Ports:
    """The ports of K servers that are all used alike, so that one stands for all of them."""

    def __init__(self, network: Shards) -> None:
        link = network.link
        self._alpha = link.alpha
        self._whole = link.beta * network.nbytes
        self._part = self._whole / network.count
        self._apply = link.gamma * network.nbytes / network.count
        self._inbound = self._outbound = self._applied = 0.0

    def push(self, now: float) -> float:
        """When all servers have applied what a worker begins to push now."""
        self._inbound = max(self._inbound, now) + self._part
        arrived = max(self._inbound, now + self._whole) + self._alpha
        self._applied = max(self._applied, arrived) + self._apply
        return self._applied

    def pull(self, now: float) -> float:
        """When a worker has all that it begins to pull now."""
        self._outbound = max(self._outbound, now) + self._part
        return max(self._outbound, now + self._whole) + self._alpha


class _Drive:
    """Events in order of time. Those of the same time are all told before anybody starts, unless steps are closed.

    An event is a number: w for "worker w's push has arrived", p + w for "it has computed", below 0 for a timer.
    """

    def __init__(self, rule: Rule, durations: Times, ports: _Ports | None, progress: Progress | None) -> None:
        self.steps, self.workers = durations.shape
        self.machine = PaceMachine(rule, range(self.workers))
        self.closes = rule.closes
        self.ports = ports
        self.progress = progress
        self.durations = np.ascontiguousarray(durations).reshape(-1).data
        self.clocks = [0] * self.workers
        """What each worker will have finished when its step is done."""
        self.sorted: list[tuple[float, int]] = []
        self.heap: list[tuple[float, int]] = []
        self.staleness = [0] * (self.steps + 1)
        self.ends = [0.0] * self.workers
        self.worked = self.exchanged = 0.0
        self.oldest = 0

    def run(self) -> Paced:
        """Until every worker has made its steps, or under a rule that closes steps, until all are complete."""
        self._start(self.machine.begin(0.0), 0.0)
        now = self._loop()
        if self.closes:
            self._stop(now)
        ends, staleness = np.array(self.ends), np.array(self.staleness, dtype=np.int64)
        found = (self.worked, self.exchanged, _trimmed(staleness), self.machine.late)
        return Paced(self.machine.rule, self.workers, self.steps, ends, *found)

    def _loop(self) -> float:
        ahead, heap, workers, closes = self.sorted, self.heap, self.workers, self.closes
        on, clocks, message = self.machine.on, self.clocks, Finished(0, 0)
        finished = Received("workers", message)
        effects: list[Effect] = []
        now = 0.0
        while (ahead or heap) and self.oldest < self.steps:
            now, event = ahead.pop() if ahead and (not heap or ahead[-1] < heap[0]) else heappop(heap)
            if event >= workers:
                self._push(event - workers, now)
            elif event >= 0:
                message.worker, message.clock = event, clocks[event]
                effects += on(finished, now)
            else:
                effects += on(Timer(-1 - event), now)
            if not effects or (not closes and ((ahead and ahead[-1][0] == now) or (heap and heap[0][0] == now))):
                continue
            self._start(effects, now)
            effects = []
        return now

    def _start(self, effects: Sequence[Effect], now: float) -> None:
        """Let go whom the machine admits; the clock of its next message is known from then on."""
        steps, workers, ports, clocks = self.steps, self.workers, self.ports, self.clocks
        durations, staleness, oldest = self.durations, self.staleness, self._reached()
        entries: list[tuple[float, int]] = []
        worked = 0.0
        for effect in effects:
            if type(effect) is not Send:
                self._timer(effect, now)
                continue
            admitted = effect.message
            assert type(admitted) is Admitted  # noqa: S101
            worker, step = admitted.worker, admitted.step
            if step >= steps:
                self.ends[worker] = now
                continue
            staleness[step - oldest] += 1
            clocks[worker] = step + 1
            duration = durations[step * workers + worker]
            worked += duration
            if ports is None:
                entries.append((now + duration, worker))
            else:
                entries.append((self._pull(ports, now) + duration, workers + worker))
        self.worked += worked
        self._plan(entries)

    def _plan(self, entries: list[tuple[float, int]]) -> None:
        """Put events in order: many at once by sorting, a few by the heap."""
        if len(entries) * MANY > len(self.sorted):
            self.sorted += entries
            self.sorted.sort(reverse=True)
        else:
            for entry in entries:
                heappush(self.heap, entry)

    def _reached(self) -> int:
        """Steps that are behind everybody: what the slowest has finished, or what is complete without it."""
        oldest = self.machine.step if self.closes else self.machine.clocks.minimum
        if oldest != self.oldest and self.progress is not None:
            self.progress(oldest / self.steps)
        self.oldest = oldest
        return oldest

    def _pull(self, ports: _Ports, now: float) -> float:
        pulled = ports.pull(now)
        self.exchanged += pulled - now
        return pulled

    def _push(self, worker: int, now: float) -> None:
        assert self.ports is not None  # noqa: S101
        arrived = self.ports.push(now)
        self.exchanged += arrived - now
        heappush(self.heap, (arrived, worker))

    def _timer(self, effect: Effect, now: float) -> None:
        assert type(effect) is SetTimer  # noqa: S101
        heappush(self.heap, (now + effect.after, -1 - effect.token))

    def _stop(self, now: float) -> None:
        """All steps are complete: what is still being computed or pushed counts up to now."""
        self.ends = [now] * self.workers
        for time, event in self.sorted + self.heap:
            if event >= self.workers or (event >= 0 and self.ports is None):
                self.worked -= time - now
            elif event >= 0:
                self.exchanged -= time - now


def _trimmed(histogram: IntArray) -> IntArray:
    """Without the zeros at its end."""
    return histogram[: int(np.flatnonzero(histogram)[-1]) + 1]

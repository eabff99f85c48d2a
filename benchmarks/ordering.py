"""How fast the monitor puts events into causal order: a million events of 64 processes on 8 machines.

Claim: delivery by vector clock takes under 20 s, with memory bounded by what is held back. Each machine's reports come
over one link, in order, in batches, with a delay of their own that changes; now and then a link stands still for a
while, and everything that depends on its processes is held back. The order is checked event by event outside the
measured time: nothing before its causes, everything once. A small world is compared with a search through everything
held back before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from heapq import merge
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from offbeat.bench import environment, holds, ratio
from offbeat.protocols.causality.delivery import ByVector, EventReport
from offbeat.protocols.causality.histories import IntArray
from offbeat.protocols.machine import Received, Start

RESULTS = Path(__file__).parent / "results"
BAR = 20.0  # Seconds.
BATCH = 64  # Events of a machine that arrive together.
STALL = 0.02  # Probability that a batch is held up on its link.
SECONDS_EACH = 1e-5  # Virtual time between two events of the run.


class Arrival(NamedTuple):
    """A report on its way: when it arrives, and a number that keeps the order of a link."""

    at: float
    number: int
    process: int
    report: EventReport


def happen(events: int, processes: int, seed: int) -> Iterator[tuple[int, IntArray]]:
    """A run, event by event: its process and vector clock. Every third event has received a recent event's news."""
    random = Random(seed)  # noqa: S311 - to be repeated, not a secret
    clocks = np.zeros((processes, processes), np.int64)
    for _ in range(events):
        process = random.randrange(processes)
        if random.random() < 1 / 3:
            np.maximum(clocks[process], clocks[random.randrange(processes)], out=clocks[process])
        clocks[process, process] += 1
        yield process, clocks[process].copy()


def arrive(events: int, processes: int, machines: int, seed: int) -> Iterator[Arrival]:
    """The reports in the order of their arrival, made one after the other so that only those in flight exist."""
    random = Random(seed + 1)  # noqa: S311 - to be repeated, not a secret
    free = [0.0] * machines  # When each link has delivered everything so far.
    waiting: list[list[Arrival]] = [[] for _ in range(machines)]
    for number, (process, clock) in enumerate(happen(events, processes, seed)):
        machine, now = process % machines, number * SECONDS_EACH
        waiting[machine].append(Arrival(now, number, process, EventReport(int(clock[process]), vector=clock)))
        if len(waiting[machine]) == BATCH or number == events - 1:
            for link in [machine] if number < events - 1 else range(machines):
                delay = random.uniform(0.001, 0.02) + (0.2 if random.random() < STALL else 0.0)
                free[link] = max(free[link], now + delay)
                yield from (arrival._replace(at=free[link]) for arrival in waiting[link])
                waiting[link] = []


def in_flight(arrivals: Iterator[Arrival], longest: float) -> Iterator[Arrival]:
    """The same, sorted by arrival. None is more than `longest` later than those made after it."""
    early: list[Arrival] = []
    for arrival in arrivals:
        early.append(arrival)
        if len(early) >= 2 * longest / SECONDS_EACH:
            early.sort()
            half = len(early) // 2
            yield from early[:half]
            early = early[half:]
    yield from merge(sorted(early))


def measure(events: int, processes: int, machines: int, seed: int) -> dict[str, float]:
    """Seconds in the machine alone; checks that every event is delivered once, after all of its causes."""
    names = [f"worker {rank}" for rank in range(processes)]
    monitor = ByVector(names)
    done = np.zeros(processes, np.int64)
    seconds, held, most, count = 0.0, 0, 0, 0
    for arrival in in_flight(arrive(events, processes, machines, seed), 0.5):
        event = Received(names[arrival.process], arrival.report)
        start = time.perf_counter()
        effects = monitor.on(event, arrival.at)
        seconds += time.perf_counter() - start
        held += 1 - len(effects)
        most = max(most, held)
        for effect in effects:
            if not isinstance(effect, Start):
                raise AssertionError(f"an effect that is no delivery: {effect}")
            process, vector = names.index(effect.work.process), effect.work.report.vector
            done[process] += 1
            if vector[process] != done[process] or (vector > done).any():
                raise AssertionError(f"{effect.work.process}'s report {vector[process]} came before a cause")
            count += 1
    if count != events or held:
        raise AssertionError(f"{count:,} of {events:,} events were delivered, and {held:,} are still held back")
    return {"seconds": seconds, "most_held": most}


def compare_with_a_search(seed: int) -> None:
    """On a small world: the machine delivers exactly what a search through everything held back delivers."""
    names = list("abcd")
    monitor, done, held = ByVector(names), np.zeros(4, np.int64), list[Arrival]()
    reports = list(arrive(200, 4, 2, seed))
    Random(seed).shuffle(reports)  # noqa: S311 - to be repeated, not a secret
    for arrival in reports:
        effects = monitor.on(Received(names[arrival.process], arrival.report), 0.0)
        held.append(arrival)
        expected = 0
        while ready := [one for one in held if np.count_nonzero(one.report.vector > done) == 1
                        and one.report.number == done[one.process] + 1]:  # fmt: skip
            done[ready[0].process] += 1
            held.remove(ready[0])
            expected += 1
        if len(effects) != expected:
            raise AssertionError(f"{len(effects)} reports were delivered where {expected} could be")


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--machines", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "ordering.json")
    options = parser.parse_args()
    for seed in range(20):
        compare_with_a_search(seed)
    runs = [measure(options.events, options.processes, options.machines, seed) for seed in range(options.repeats)]
    seconds = [run["seconds"] for run in runs]
    measured = ratio(seconds, [1.0] * len(seconds))
    kept = holds(measured, at_most=BAR)
    name = f"seconds to order {options.events:,} events of {options.processes} processes on {options.machines} machines"
    figures = {
        "microseconds per event": 1e6 * float(np.median(seconds)) / options.events,
        "most events held back": max(run["most_held"] for run in runs),
        "peak of the process in MiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "repeats": options.repeats,
        "others on the cores (load average)": round(os.getloadavg()[0], 1),
    }
    written = {
        "benchmark": "ordering",
        "holds": kept,
        "environment": environment(),
        "bars": [{"bar": name, "at most": BAR, "found": measured.plain(), "holds": kept}],
        "results": figures,
    }
    options.out.write_text(json.dumps(written, indent=2) + "\n")
    print(json.dumps(written, indent=2))
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()

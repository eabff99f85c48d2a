"""How fast servers are simulated at scale, and that the shortcut is the machine.

Claims: 10,000 workers x 1,000 steps under ssp(3) take the machine itself, driven event by event on one core, under
60 s; the shortcut gives the same ends and the same staleness, to the last bit, in a small part of that.

Two kinds of stragglers: pauses of one length, where many events fall on the same time, and a heavy tail, where none do.
The bar is about time on the wall; processor time is given beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.protocols.servers.consistency import Rule
from offbeat.simulate.servers.stragglers import Stragglers
from offbeat.simulate.servers.training import Paced, drive, shortcut

RESULTS = Path(__file__).parent / "results"
BAR = 60.0
STRAGGLERS = ("transient(0.2, 0.15)", "lognormal(0.02, 1)")


def timed(run: Callable[[], Paced]) -> tuple[Paced, float, float]:
    """The simulated training, wall-clock seconds, and CPU seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    found = run()
    return found, time.perf_counter() - wall, time.process_time() - processor


def measured(stragglers: str, rule: Rule, workers: int, steps: int, runs: int) -> dict[str, Any]:
    """Times of both ways, after they were found equal."""
    durations = Stragglers.parse(stragglers).draw(workers, steps)
    found, short, _ = timed(lambda: shortcut(rule, durations))
    times: list[float] = []
    processor: list[float] = []
    for _ in range(runs):
        same, wall, own = timed(lambda: drive(rule, durations))
        assert np.array_equal(same.ends, found.ends), "the shortcut's ends are not the machine's"
        assert np.array_equal(same.staleness, found.staleness), "the shortcut's staleness is not the machine's"
        times.append(wall)
        processor.append(own)
    return {
        "machine seconds": times,
        "machine processor seconds": processor,
        "machine microseconds per step": 1e6 * min(times) / durations.size,
        "shortcut seconds": short,
        "equal to the last bit": True,
        "seconds per step, simulated": found.seconds_per_step,
        "idle share, simulated": found.idle_share,
        "staleness histogram": found.staleness.tolist(),
    }


def holds(seconds: list[float]) -> bool:
    """The better end reaches the bar, and the median is within 5 % of it."""
    return min(seconds) <= BAR and float(np.median(seconds)) <= 1.05 * BAR


def bars_of(results: dict[str, Any], workers: int, steps: int, rule: Rule) -> list[dict[str, Any]]:
    """Every bar in the form that all our results have."""
    return [
        {
            "bar": f"{workers:,} workers x {steps:,} steps under {rule}, {name}: seconds of the machine",
            "at most": BAR,
            "found": {
                "median": float(np.median(entry["machine seconds"])),
                "low": min(entry["machine seconds"]),
                "high": max(entry["machine seconds"]),
            },
            "holds": holds(entry["machine seconds"]),
        }
        for name, entry in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--bound", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "simulated_servers.json")
    options = parser.parse_args()
    rule = Rule(options.bound)
    results: dict[str, Any] = {}
    for name in STRAGGLERS:
        results[name] = found = measured(name, rule, options.workers, options.steps, options.runs)
        print(f"{name}: machine {found['machine seconds']} s, shortcut {found['shortcut seconds']:.2f} s, equal")
    bars = bars_of(results, options.workers, options.steps, rule)
    everything = all(bar["holds"] for bar in bars)
    stored = {
        "benchmark": "simulated_servers",
        "holds": everything,
        "environment": {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()},
        "bars": bars,
        "results": results,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    if not everything:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

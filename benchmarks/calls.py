"""Every other call of the backend: ours against Gloo and MPICH, in the same processes.

Claims, on one machine: 4 KiB take at most 3 times as long as with MPICH, or 8 us, on 2 ranks, and 1.5 times as long,
or 40 us, on 4 ranks that share 2 cores; from 256 KiB up no call is slower than MPICH's, and over these sizes and calls
they are at least 1.2 times as fast; none is slower than Gloo's at any size. Two-way streams of 1 MiB messages reach 0.7
of the rate of a plain copy. Times of calls between the measured sizes are predicted from the schedules.

Rules as in `collectives.py`: every result verified, the slowest rank's time, one thread per rank, peers in turn within
a block, a second Gloo for the noise, blocks of several launches. A size is that of a rank's longest tensor. `send` is
one message of a ping-pong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from collectives import AGAIN, GLOO, LARGE, MPI, PEERS, RESULTS, Bar, faster, predicted
from offbeat.bench import CALLS, Measured, Spread, described, geometric_mean, measured, ratio, table, why_no_mpi
from offbeat.protocols.collectives import Collective, algorithm

MIDDLE = 4 << 20
SIZES = (4096, 256 << 10, MIDDLE, LARGE)
STREAM = 1 << 20
SECONDS = 0.05
"""Of the block of a fast peer: there are many calls and sizes."""


def bars_for(found: Measured) -> list[Bar]:
    """The bars of one call at one number of ranks."""
    on = f"{found.ranks} ranks, {found.call}"
    bars: list[Bar] = []
    for size, times in found.times.items():
        what = on if found.call == "barrier" else f"{on}, {size >> 10} KiB"
        bars.append(Bar(f"{what}, gloo / offbeat", faster(found, size, GLOO), at_least=1))
        if size > 4096:
            bars.append(Bar(f"{what}, mpi / offbeat", faster(found, size, MPI), at_least=1))
            continue
        factor, least = (3.0, 8e-6) if found.ranks == 2 else (1.5, 40e-6)
        allowed = np.maximum(factor * np.asarray(times[MPI]), least)
        bars.append(Bar(f"{what}, offbeat / allowed", ratio(times["offbeat"], allowed.tolist()), at_most=1))
    return bars


def prediction(found: Measured) -> dict[str, float]:
    """Predicted over measured time at 4 MiB, from the other sizes and the schedule; only for what has a schedule."""
    if found.call in ("send", "exchange", "barrier"):
        return {}
    schedule = algorithm(Collective(found.call), "one_shot").schedule
    fitted = [size for size in SIZES if size != MIDDLE]
    seconds = {size: found.median(size, "offbeat") for size in SIZES}
    time_there = predicted(found.ranks, seconds, MIDDLE, lambda _: schedule, fitted)
    return {"predicted / measured, 4 MiB": time_there / seconds[MIDDLE]}


def overall(results: list[Measured], ranks: int) -> Bar:
    """How much faster than MPICH all calls are together, from 256 KiB up."""
    pairs = [
        (times[MPI], times["offbeat"])
        for found in results
        if found.ranks == ranks
        for size, times in found.times.items()
        if size > 4096
    ]
    return Bar(
        f"{ranks} ranks, geometric mean over calls and sizes, mpi / offbeat", geometric_mean(pairs), at_least=1.2
    )


def stream_bar(console: Console, blocks: int, launches: int) -> tuple[Measured, Bar]:
    """Messages both ways at once against a plain copy of as many bytes."""
    found = measured(2, [STREAM], ["offbeat", GLOO, "copy"], blocks, console.print, launches, "exchange")
    rate: Spread = ratio(found.times[STREAM]["copy"], found.times[STREAM]["offbeat"])
    return found, Bar("2 ranks, two-way stream of 1 MiB messages: rate / plain copy", rate, at_least=0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8, help="of each launch")
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--calls", nargs="+", default=[call for call in CALLS if call != "all_reduce"])
    parser.add_argument("--out", type=Path, default=RESULTS / "calls.json")
    options = parser.parse_args()
    if why := why_no_mpi():
        sys.exit(f"this benchmark compares with MPICH: {why}")
    console = Console(width=150)
    found: list[Measured] = []
    bars: list[Bar] = []
    for ranks in options.ranks:
        print(f"== {ranks} ranks", flush=True)
        for call in options.calls:
            sizes = (4,) if call == "barrier" else SIZES
            peers = [*PEERS, AGAIN]
            found.append(measured(ranks, sizes, peers, options.blocks, console.print, options.launches, call, SECONDS))
            console.print(table(described(found[-1], PEERS, options.blocks * options.launches)))
            bars += bars_for(found[-1])
        bars.append(overall(found, ranks))
    stream, bar = stream_bar(console, options.blocks, options.launches)
    bars.append(bar)
    results = [described(each, PEERS, options.blocks * options.launches) | prediction(each) for each in found]
    results.append(described(stream, ["offbeat", GLOO, "copy"], options.blocks * options.launches))
    for each in bars:
        print(each)
    holds = all(each.holds for each in bars)
    stored: dict[str, Any] = {
        "benchmark": "calls",
        "holds": holds,
        "environment": results[0]["environment"],
        "bars": [each.plain() for each in bars],
        "results": results,
    }
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    if not holds:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

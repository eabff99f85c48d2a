"""One rank of a benchmark: opens all peers, verifies them, and times them in turn.

Started as a role of our launcher, or, with MPI, by mpiexec as `python -m offbeat.bench._ranks CONFIG`.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from offbeat.bench._calls import Exercise, Peer, peer
from offbeat.errors import RunError
from offbeat.runtime.launch import Control

Say = Callable[[Mapping[str, Any]], None]
TIMEOUT = timedelta(seconds=120)
WARM_UP = 2
"""Blocks that are run and not counted."""
MOST_BYTES = 256 << 20
"""Bytes that a block of one peer exchanges: shorter blocks would show how ranks recover from the previous peer."""
MOST_CALLS, FEWEST_CALLS = 200, 3
MOST_BURSTS = 200
"""Maximum bursts of a fast peer's block: bursts of calls that start anew, so that sums of sums stay finite."""


# -- measuring --------------------------------------------------------------------------------------------------------


def repeats(size: int, ranks: int) -> int:
    """Calls of a peer in a block, so that a sum of sums stays finite."""
    fitting = MOST_CALLS if ranks < 2 else int(MOST_CALLS / math.log2(ranks))
    return max(FEWEST_CALLS, min(MOST_CALLS, fitting, MOST_BYTES // max(size, 1)))


def role(config: Mapping[str, Any], control: Control) -> None:
    """A rank started by our launcher."""
    measure(config, int(os.environ["RANK"]), control.send)


def measure(config: Mapping[str, Any], rank: int, say: Say) -> None:
    """Time every peer at every size; rank 0 reports the slowest rank's seconds per call in each block.

    It reports nothing between blocks: the listener would take a core from the ranks, in the next peer's time.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(config["store"], -1)
    store.set_timeout(TIMEOUT)
    ranks = config["ranks"]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    peers = {name: peer(name, config["call"], TIMEOUT) for name in config["peers"]}
    for size in config["sizes"]:
        calls = max(1, repeats(size, ranks) // config["hurry"])
        if rank == 0:
            say({"begins": size})
        times: dict[str, list[float]] = {name: [] for name in peers}
        for name, seconds in _at(size, peers, config["blocks"], calls, config["seconds"]):
            times[name].append(seconds)
        if rank == 0:
            say({"bytes": size, "seconds": times, "calls": calls})
    dist.destroy_process_group()


def _at(size: int, peers: Mapping[str, Peer], blocks: int, calls: int, shortest: float) -> Iterator[tuple[str, float]]:
    """Peer and seconds per call of each block, after each peer is verified."""
    exercises = {name: make(size // 4) for name, make in peers.items()}
    for name, exercise in exercises.items():
        for again in range(2):
            exercise.reset()
            exercise.call()
            exercise.verify(1, f"{name}, call {again + 1} of {size} bytes")
    names = list(exercises)
    bursts = dict.fromkeys(names, 1)
    for block in range(-WARM_UP, blocks):
        turn = block % len(names)
        for name in names[turn:] + names[:turn]:
            exercise = exercises[name]
            seconds = _block(exercise, calls, bursts[name])
            if block < 0:
                bursts[name] = max(1, min(MOST_BURSTS, math.ceil(shortest / (seconds * calls))))
            exercise.verify(calls + 1, f"{name}, block {block} of {size} bytes", every=97)
            if block >= 0:
                yield name, seconds / exercise.messages


def _block(exercise: Exercise, calls: int, bursts: int) -> float:
    """Seconds per call of the slowest rank."""
    dist.barrier()
    elapsed = torch.tensor([sum(_burst(exercise, calls) for _ in range(bursts)) / (calls * bursts)])
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def _burst(exercise: Exercise, calls: int) -> float:
    exercise.reset()
    call = exercise.call
    call()  # The ranks leave it closer together than any barrier would line them up.
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


# -- under mpiexec ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """A rank started by mpiexec, which reports on stdout, a line each."""
    config = json.loads(arguments[0])
    mpi4py: Any = importlib.import_module("mpi4py")
    mpi4py.rc.thread_level = config["thread level"]
    mpi: Any = importlib.import_module("mpi4py.MPI")
    world: Any = mpi.COMM_WORLD
    world.Barrier()
    # All ranks have mapped MPICH's shared memory now: without names, nothing of it stays if they are killed.
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in maps if "/mpich_shm_" in line}:
        Path(path).unlink(missing_ok=True)
    try:
        if world.size != config["ranks"]:
            raise RunError(
                f"MPI sees {world.size} of {config['ranks']} ranks: this mpiexec is not of the library that mpi4py uses"
            )
        if world.rank == 0:
            _print({"library": mpi.Get_library_version().splitlines()[0].strip("\0 ")})
        measure(config, world.rank, _print)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        world.Abort(1)  # Without it the other ranks would wait for this one for ever.


def _print(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

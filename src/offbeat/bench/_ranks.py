"""One rank of a benchmark: opens all peers, verifies them, and times them in turn.

Started as a role of our launcher, or, where MPI takes part, by mpiexec as `python -m offbeat.bench._ranks CONFIG`.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from offbeat.bench._peers import TIMEOUT, FloatArray, Peer, PeerArray, peer
from offbeat.errors import RunError
from offbeat.runtime.launch import Control

Say = Callable[[Mapping[str, Any]], None]
WARM_UP = 2
"""Blocks that are run and not counted."""
MOST_BYTES = 256 << 20
"""How much a block of one peer exchanges, unless that is too many or too few calls.

In shorter blocks one would see how ranks find together again after another peer, rather than how long a call takes.
"""
MOST_CALLS, FEWEST_CALLS = 200, 3
LONG, MOST_BURSTS = 0.2, 200
"""Seconds that a block of a quick peer takes at least, in bursts of so many calls; and how many bursts at the most.

Sums of sums would soon be infinite, so a burst begins with the values of old.
"""
FIRST = 2.0**-100
"""Values start this small, because each call multiplies them by the number of ranks."""


def repeats(size: int, ranks: int) -> int:
    """How often a peer is called in a block, so that a sum of sums stays finite."""
    fitting = MOST_CALLS if ranks < 2 else int(MOST_CALLS / math.log2(ranks))
    return max(FEWEST_CALLS, min(MOST_CALLS, fitting, MOST_BYTES // max(size, 1)))


def role(config: Mapping[str, Any], control: Control) -> None:
    """A rank that our launcher has started."""
    measure(config, int(os.environ["RANK"]), control.send)


def measure(config: Mapping[str, Any], rank: int, say: Say) -> None:
    """Time every peer at every size; rank 0 tells the slowest rank's seconds per call in each block.

    It says nothing between blocks: whoever hears it would take a core from the ranks, in the next peer's time.
    """
    torch.set_num_threads(1)
    store = dist.FileStore(config["store"], -1)
    store.set_timeout(TIMEOUT)
    ranks = config["ranks"]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    peers = {name: peer(name) for name in config["peers"]}
    for size in config["sizes"]:
        calls = max(1, repeats(size, ranks) // config["hurry"])
        if rank == 0:
            say({"begins": size})
        times: dict[str, list[float]] = {name: [] for name in peers}
        for name, seconds in _at(size, peers, config["blocks"], calls):
            times[name].append(seconds)
        if rank == 0:
            say({"bytes": size, "seconds": times, "calls": calls})
    dist.destroy_process_group()


def _at(size: int, peers: Mapping[str, Peer], blocks: int, calls: int) -> Iterator[tuple[str, float]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    contributions = [_contribution(size // 4, other) for other in range(ranks)]
    own, total = contributions[rank], np.asarray(np.sum(contributions, axis=0, dtype=np.float64))
    places = {name: make(size // 4) for name, make in peers.items()}
    for name, place in places.items():
        for again in range(2):
            np.copyto(place.data, own)
            place.call()
            verify(place, own, total, ranks, 1, f"{name}, call {again + 1} of {size} bytes")
    names = list(places)
    bursts = dict.fromkeys(names, 1)
    for block in range(-WARM_UP, blocks):
        turn = block % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = _block(places[name], own, calls, bursts[name])
            if block < 0:
                bursts[name] = max(1, min(MOST_BURSTS, math.ceil(LONG / (seconds * calls))))
            verify(places[name], own, total, ranks, calls + 1, f"{name}, block {block} of {size} bytes", every=97)
            if block >= 0:
                yield name, seconds


def _contribution(count: int, rank: int) -> FloatArray:
    return np.random.default_rng(rank).standard_normal(count, dtype=np.float32) * np.float32(FIRST)


def _block(place: PeerArray, own: FloatArray, calls: int, bursts: int) -> float:
    """Seconds per call of the slowest rank."""
    dist.barrier()
    elapsed = torch.tensor([sum(_burst(place, own, calls) for _ in range(bursts)) / (calls * bursts)])
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def _burst(place: PeerArray, own: FloatArray, calls: int) -> float:
    np.copyto(place.data, own)
    call = place.call
    call()  # The ranks leave it closer together than any barrier would line them up.
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def verify(
    place: PeerArray, own: FloatArray, total: NDArray[np.float64], ranks: int, calls: int, what: str, every: int = 1
) -> None:
    """Refuse to time what does not add up: after some calls the sum has been summed again all but once."""
    expected = total[::every] * float(ranks) ** (calls - 1) if place.sums else own[::every].astype(np.float64)
    apart = np.abs(place.data[::every] - expected)
    scale = float(ranks) ** calls * FIRST if place.sums else FIRST
    # Written so that a NaN, which compares as false, is refused too.
    if not bool(np.all(apart <= 1e-4 * scale)):
        raise RunError(f"wrong result of {what}: off by up to {np.max(apart) / scale:.2g} of what was put in")


def _forget_names() -> None:
    """Take the names off MPICH's shared memory, which all ranks have mapped: so nothing stays if they are killed."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in maps if "/mpich_shm_" in line}:
        Path(path).unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> None:
    """A rank that mpiexec has started: what it has to say goes to stdout, a line each."""
    config = json.loads(arguments[0])
    mpi4py: Any = importlib.import_module("mpi4py")
    mpi4py.rc.thread_level = config["thread level"]
    mpi: Any = importlib.import_module("mpi4py.MPI")
    world: Any = mpi.COMM_WORLD
    world.Barrier()
    _forget_names()
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
        # Without it the other ranks would wait for this one for ever.
        world.Abort(1)


def _print(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

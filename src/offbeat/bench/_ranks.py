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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from offbeat.errors import RunError
from offbeat.runtime.launch import Control

FloatArray = NDArray[np.float32]
Say = Callable[[Mapping[str, Any]], None]
TIMEOUT = timedelta(seconds=120)
WARM_UP = 2
"""Blocks that are run and not counted."""
MOST_BYTES = 256 << 20
"""Bytes that a block of one peer exchanges, unless that is too many or too few calls.

Shorter blocks would show how ranks recover from the previous peer, rather than how long a call takes.
"""
MOST_CALLS, FEWEST_CALLS = 200, 3
LONG, MOST_BURSTS = 0.2, 200
"""Minimum seconds of a fast peer's block, in bursts of calls; and the maximum number of bursts.

Sums of sums would soon be infinite, so a burst starts from the original values.
"""
FIRST = 2.0**-100
"""Values start this small, because each call multiplies them by the number of ranks."""


# -- peers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerArray:
    """An array of this rank, and a peer's operation on it."""

    data: FloatArray
    """This rank's contribution, and where the result appears."""
    call: Callable[[], object]
    """One exchange; all ranks call it."""
    sums: bool = True
    """Whether it is a sum; otherwise (a plain copy, for comparison) the array stays as it is."""


Peer = Callable[[int], PeerArray]
"""Makes an array of the given number of elements."""


def peer(name: str) -> Peer:
    """Open a peer by name, on every rank in the same order; `gloo again` is a second gloo, to show the noise."""
    backend = name.removesuffix(" again")
    if backend == "mpi":
        return _mpi()
    if backend == "copy":
        return _copy
    group: Any = dist.new_group(backend="offbeat" if backend == "zero copy" else backend, timeout=TIMEOUT)
    all_reduce: Any = dist.all_reduce  # As users call it, with all that torch does around a call.

    def make(count: int) -> PeerArray:
        tensor = group.shared_tensor(count, torch.float32) if backend == "zero copy" else torch.empty(count)
        return PeerArray(tensor.numpy(), lambda: all_reduce(tensor, group=group))

    return make


def _mpi() -> Peer:
    # The thread level was set before the first import, see `main`.
    mpi: Any = importlib.import_module("mpi4py.MPI")
    world: Any = mpi.COMM_WORLD

    def make(count: int) -> PeerArray:
        data: FloatArray = torch.empty(count).numpy()
        return PeerArray(data, lambda: world.Allreduce(mpi.IN_PLACE, data))

    return make


def _copy(count: int) -> PeerArray:
    data: FloatArray = torch.empty(count).numpy()
    elsewhere: FloatArray = torch.zeros(count).numpy()
    return PeerArray(data, lambda: np.copyto(elsewhere, data), sums=False)


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
    """Peer and seconds per call of each block, after each peer is verified."""
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), size // 4
    contributions = [
        np.random.default_rng(other).standard_normal(count, dtype=np.float32) * np.float32(FIRST)
        for other in range(ranks)
    ]
    own, total = contributions[rank], np.asarray(np.sum(contributions, axis=0, dtype=np.float64))
    arrays = {name: make(count) for name, make in peers.items()}
    for name, array in arrays.items():
        for again in range(2):
            np.copyto(array.data, own)
            array.call()
            verify(array, own, total, ranks, 1, f"{name}, call {again + 1} of {size} bytes")
    names = list(arrays)
    bursts = dict.fromkeys(names, 1)
    for block in range(-WARM_UP, blocks):
        turn = block % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = _block(arrays[name], own, calls, bursts[name])
            if block < 0:
                bursts[name] = max(1, min(MOST_BURSTS, math.ceil(LONG / (seconds * calls))))
            verify(arrays[name], own, total, ranks, calls + 1, f"{name}, block {block} of {size} bytes", every=97)
            if block >= 0:
                yield name, seconds


def _block(array: PeerArray, own: FloatArray, calls: int, bursts: int) -> float:
    """Seconds per call of the slowest rank."""
    dist.barrier()
    elapsed = torch.tensor([sum(_burst(array, own, calls) for _ in range(bursts)) / (calls * bursts)])
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def _burst(array: PeerArray, own: FloatArray, calls: int) -> float:
    np.copyto(array.data, own)
    call = array.call
    call()  # The ranks leave it closer together than any barrier would line them up.
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def verify(
    array: PeerArray, own: FloatArray, total: NDArray[np.float64], ranks: int, calls: int, what: str, every: int = 1
) -> None:
    """Refuse to time wrong sums: after several calls the sum has been summed again all but once."""
    expected = total[::every] * float(ranks) ** (calls - 1) if array.sums else own[::every].astype(np.float64)
    apart = np.abs(array.data[::every] - expected)
    scale = float(ranks) ** calls * FIRST if array.sums else FIRST
    # Written so that a NaN, which compares as false, is refused too.
    if not bool(np.all(apart <= 1e-4 * scale)):
        raise RunError(f"wrong result of {what}: off by up to {np.max(apart) / scale:.2g} of what was put in")


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

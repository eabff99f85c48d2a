"""`offbeat bench collectives`: measure peers at several sizes, block by block, and describe the result."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat import limits
from offbeat._version import __version__
from offbeat.bench._calls import BLOCKWISE, CALLS
from offbeat.bench._mpi import LEVELS, run_under_mpi, why_no_mpi
from offbeat.bench._show import picture as draw
from offbeat.errors import UsageError, did_you_mean
from offbeat.runtime.launch import PRELOAD, Launcher, Role, private_store, worker_environment
from offbeat.runtime.system.capacity import check_room, free_memory
from offbeat.statistics import ratio

PEERS = ("offbeat", "gloo", "mpi")
"""Peers that can be measured."""
AGAIN = "gloo again"
"""A second gloo beside the first: their ratio is the noise."""
LONG = 0.2
"""Minimum seconds of a fast peer's block."""
PROBE_BLOCKS, PROBE_HURRY = 3, 10
"""The search for MPI's better thread level: blocks, and the factor by which each has fewer calls."""
_ITEM = 4
_BUFFERS = 6
"""Buffers of each size on every rank beside those for verification: the peers' and the sum, which is of float64."""

Say = Callable[[str], None]


@dataclass
class Measured:
    """Seconds per call of the slowest rank, for each block of each peer at each size."""

    ranks: int
    call: str = "all_reduce"
    times: dict[int, dict[str, list[float]]] = field(default_factory=dict[int, dict[str, list[float]]])
    """By size in bytes, then by peer."""
    calls: dict[int, int] = field(default_factory=dict[int, int])
    """Number of calls that a block of this size averages over."""
    library: str | None = None
    """The MPI library's description of itself."""
    levels: dict[int, str] = field(default_factory=dict[int, str])
    """The faster thread level of MPI at this size."""
    probed: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """MPI's seconds at each thread level, by size, where both were tried: where each rank has a core."""

    def median(self, size: int, peer: str) -> float:
        """Median over blocks of the seconds per call."""
        return float(np.median(self.times[size][peer]))

    def add(self, other: Measured) -> None:
        """Add measurements at other sizes, and further blocks at the same ones."""
        for size, peers in other.times.items():
            mine = self.times.setdefault(size, {})
            for peer, seconds in peers.items():
                mine[peer] = [*mine.get(peer, []), *seconds]
        self.calls |= other.calls
        self.library = self.library or other.library


def measured(
    ranks: int,
    sizes: Sequence[int],
    peers: Sequence[str],
    blocks: int,
    say: Say,
    launches: int = 1,
    call: str = "all_reduce",
    seconds: float = LONG,
) -> Measured:
    """Measure peers in turn; with MPI among them, each size at MPI's faster thread level.

    Each of the `launches` has its own blocks and processes: the pages and cores that these get are luck that lasts as
    long as they live.
    """
    result = Measured(ranks, call)
    if "mpi" in peers:
        _choose_levels(result, sizes, say)
    for _ in range(launches):
        for level in LEVELS if result.levels else (None,):
            if here := [size for size in sizes if result.levels.get(size) == level]:
                result.add(_run(ranks, here, peers, blocks, say, level, call=call, seconds=seconds))
    result.times = {size: result.times[size] for size in sizes}
    return result


def _choose_levels(result: Measured, sizes: Sequence[int], say: Say) -> None:
    # With one thread, MPICH spins; where ranks share cores that takes seconds per call, and needs no trial.
    if result.ranks > len(os.sched_getaffinity(0)):
        result.levels = dict.fromkeys(sizes, LEVELS[-1])
        return
    for level in LEVELS:
        say(f"trying MPI's thread level {level}")
        probe = _run(result.ranks, sizes, ["mpi"], PROBE_BLOCKS, lambda _: None, level, PROBE_HURRY, result.call)
        result.probed[level] = {size: probe.median(size, "mpi") for size in sizes}
    result.levels = {size: min(LEVELS, key=lambda level: result.probed[level][size]) for size in sizes}


def _run(
    ranks: int,
    sizes: Sequence[int],
    peers: Sequence[str],
    blocks: int,
    say: Say,
    level: str | None = None,
    hurry: int = 1,
    call: str = "all_reduce",
    seconds: float = LONG,
) -> Measured:
    result = Measured(ranks, call)

    def receive(message: Mapping[str, Any]) -> None:
        if "library" in message:
            result.library = message["library"]
        elif "begins" in message:
            say(f"{call}, {message['begins']} bytes on {ranks} ranks")
        else:
            result.calls[message["bytes"]] = message["calls"]
            result.times[message["bytes"]] = message["seconds"]

    config: dict[str, Any] = {"ranks": ranks, "sizes": list(sizes), "peers": list(peers), "blocks": blocks}
    config |= {"hurry": hurry, "call": call, "seconds": seconds}
    with private_store() as store:
        config |= {"store": store.path, "thread level": level}
        if level is not None:
            run_under_mpi(config, receive)
            return result
        with tempfile.TemporaryDirectory() as folder, Launcher(PRELOAD) as launcher:
            target, logs = "offbeat.bench._ranks:role", [Path(folder) / f"rank-{rank}.log" for rank in range(ranks)]
            roles = [
                Role("rank", rank, target, config, worker_environment(rank, ranks, store), log, threads=1)
                for rank, log in enumerate(logs)
            ]
            launcher.run(roles, on_message=lambda _, message: receive(message))
    return result


def collectives(
    ranks: int,
    sizes: Sequence[int],
    peers: Sequence[str],
    blocks: int,
    out: Path | None,
    picture: Path | None,
    say: Say,
    calls: Sequence[str] = ("all_reduce",),
) -> list[dict[str, Any]]:
    """Time calls on float32 tensors by several peers in turn; returns, and on request writes and draws, a result each.

    Sizes are in bytes. Peers that cannot be measured here are skipped, and the results say why.
    """
    _check(ranks, sizes, peers, blocks, calls)
    skipped = {"mpi": why} if "mpi" in peers and (why := why_no_mpi()) else {}
    for name, why in skipped.items():
        say(f"{name} is left out: {why}")
    present = [name for name in dict.fromkeys(peers) if name not in skipped]
    if not present:
        raise UsageError(f"no peer is left to measure: {skipped}")
    everybody = [*present, *([AGAIN] if "gloo" in present else [])]
    results: list[dict[str, Any]] = []
    for call in dict.fromkeys(calls):
        here = [_ITEM] if call == "barrier" else sizes
        if call in BLOCKWISE:
            here = sorted({max(size - size % (_ITEM * ranks), _ITEM * ranks) for size in sizes})
        measurement = measured(ranks, here, everybody, blocks, say, call=call)
        results.append(described(measurement, present, blocks) | {"left out": skipped})
    for path in filter(None, (out, picture)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if out is not None:
        out.write_text(json.dumps(results[0] if len(results) == 1 else results, indent=2) + "\n")
    if picture is not None:
        draw(results, picture)
    return results


def _check(ranks: int, sizes: Sequence[int], peers: Sequence[str], blocks: int, calls: Sequence[str]) -> None:
    if ranks < 2:
        raise UsageError(f"{ranks} ranks have nothing to exchange: give 2 or more")
    limits.whole("--ranks", ranks, limits.WORKERS, why="each is a process")
    limits.whole("--blocks", blocks, limits.REPEATS)
    check_room(ranks, 1)
    if not sizes or not peers:
        raise UsageError("give at least one size and one peer to measure")
    for call in calls:
        if call not in CALLS:
            raise UsageError(f"there is no call {call!r} to measure.{did_you_mean(call, CALLS)}")
    for size in sizes:
        if size < _ITEM or size % _ITEM:
            raise UsageError(f"{size} bytes hold no whole number of float32 values: give a multiple of {_ITEM}")
        needed, free = size * ranks * (ranks + _BUFFERS), free_memory()
        if free is not None and needed > free:
            raise UsageError(
                f"{size:,} bytes on {ranks} ranks take {needed / 1e9:,.0f} GB: each holds the data of all of them, to "
                f"verify the sum, and {free / 1e9:.1f} GB are free. Measure smaller sizes, or fewer ranks."
            )
    for name in peers:
        if name not in PEERS:
            raise UsageError(f"there is no peer {name!r} to measure.{did_you_mean(name, PEERS)}")


def described(result: Measured, peers: Sequence[str], blocks: int) -> dict[str, Any]:
    """A measurement as JSON data: medians, and the ratio of each peer's time to the first one's."""
    data: dict[str, Any] = {
        "benchmark": "collectives",
        "operation": result.call.replace("_", "-"),
        "dtype": "float32",
        "ranks": result.ranks,
        "blocks": blocks,
        "peers": list(peers),
        "rows": [_row(result, size, peers) for size in result.times],
        "environment": environment(),
    }
    if result.library is not None:
        probed = {level: {str(size): t for size, t in by.items()} for level, by in result.probed.items()}
        data["mpi"] = {"library": result.library, "seconds by thread level": probed}
    return data


def _row(result: Measured, size: int, peers: Sequence[str]) -> dict[str, Any]:
    times = result.times[size]
    first = peers[0]
    row: dict[str, Any] = {
        "bytes": size,
        "calls per block": result.calls[size],
        "seconds": {name: result.median(size, name) for name in peers},
        "ratios": {f"{name} / {first}": ratio(times[name], times[first]).plain() for name in peers[1:]},
    }
    if AGAIN in times:
        row["noise"] = ratio(times[AGAIN], times["gloo"]).plain()
    if size in result.levels:
        row["mpi thread level"] = result.levels[size]
    return row


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "offbeat": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }

"""A measurement: which peers, which sizes, how many ranks; and what came of it, block by block."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.bench._mpi import LEVELS, run_under_mpi
from offbeat.runtime.launch import PRELOAD, Launcher, PrivateStore, Role, private_store, worker_environment

Say = Callable[[str], None]
PROBE_BLOCKS, PROBE_HURRY = 3, 10
"""The search for MPI's better thread level: blocks, and how many times fewer calls in each."""


@dataclass
class Measured:
    """Seconds per call of the slowest rank, for each block of each peer at each size."""

    ranks: int
    times: dict[int, dict[str, list[float]]] = field(default_factory=dict[int, dict[str, list[float]]])
    """By size in bytes, then by peer."""
    calls: dict[int, int] = field(default_factory=dict[int, int])
    """How many calls a block of this size averages over."""
    library: str | None = None
    """The MPI library's own words for itself."""
    levels: dict[int, str] = field(default_factory=dict[int, str])
    """The thread level that MPI was given for this size, as the faster one."""
    probed: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """What MPI took at each thread level, by size, where that was tried: where each rank has a core."""

    def median(self, size: int, peer: str) -> float:
        """Seconds per call, in the middle of the blocks."""
        return float(np.median(self.times[size][peer]))

    def add(self, other: Measured) -> None:
        """Take in what was measured at other sizes, and further blocks of the same ones."""
        for size, peers in other.times.items():
            mine = self.times.setdefault(size, {})
            for peer, seconds in peers.items():
                mine[peer] = [*mine.get(peer, []), *seconds]
        self.calls |= other.calls
        self.library = self.library or other.library


def measured(
    ranks: int, sizes: Sequence[int], peers: Sequence[str], blocks: int, say: Say, launches: int = 1
) -> Measured:
    """Measure peers in turn; with MPI among them, each size at the thread level at which MPI is faster.

    Each of the `launches` has so many blocks and processes of its own: on which pages and cores these find themselves
    is luck that lasts as long as they live.
    """
    found = Measured(ranks) if "mpi" not in peers else _settle_levels(ranks, sizes, say)
    for _ in range(launches):
        for level in LEVELS if found.levels else (None,):
            if here := [size for size in sizes if found.levels.get(size) == level]:
                found.add(_run(ranks, here, peers, blocks, say, level))
    found.times = {size: found.times[size] for size in sizes}
    return found


def _settle_levels(ranks: int, sizes: Sequence[int], say: Say) -> Measured:
    found = Measured(ranks)
    # Told of one thread, MPICH spins; where ranks share cores that takes seconds per call, and needs no trial.
    tried = LEVELS if ranks <= len(os.sched_getaffinity(0)) else LEVELS[-1:]
    if len(tried) == 1:
        found.levels = dict.fromkeys(sizes, tried[0])
        return found
    for level in tried:
        say(f"trying MPI's thread level {level}")
        probe = _run(ranks, sizes, ["mpi"], PROBE_BLOCKS, lambda _: None, level, PROBE_HURRY)
        found.probed[level] = {size: probe.median(size, "mpi") for size in sizes}
    found.levels = {size: min(LEVELS, key=lambda level: found.probed[level][size]) for size in sizes}
    return found


def _run(
    ranks: int,
    sizes: Sequence[int],
    peers: Sequence[str],
    blocks: int,
    say: Say,
    level: str | None = None,
    hurry: int = 1,
) -> Measured:
    found = Measured(ranks)

    def heard(message: Mapping[str, Any]) -> None:
        if "library" in message:
            found.library = message["library"]
            return
        if "begins" in message:
            say(f"{message['begins']} bytes on {ranks} ranks")
            return
        found.calls[message["bytes"]] = message["calls"]
        found.times[message["bytes"]] = message["seconds"]

    config = {"ranks": ranks, "sizes": list(sizes), "peers": list(peers), "blocks": blocks, "hurry": hurry}
    with private_store() as store:
        config |= {"store": store.path, "thread level": level}
        if level is None:
            _run_launched(config, heard, store)
        else:
            run_under_mpi(config, heard)
    return found


def _run_launched(config: Mapping[str, Any], heard: Callable[[Mapping[str, Any]], None], store: PrivateStore) -> None:
    with tempfile.TemporaryDirectory() as folder, Launcher(PRELOAD) as launcher:
        roles = [
            Role(
                "rank",
                rank,
                "offbeat.bench._ranks:role",
                config,
                worker_environment(rank, config["ranks"], store),
                Path(folder) / f"rank-{rank}.log",
                threads=1,
            )
            for rank in range(config["ranks"])
        ]
        launcher.run(roles, on_message=lambda _, message: heard(message))

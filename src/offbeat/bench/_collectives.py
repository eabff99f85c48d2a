"""What `offbeat bench collectives` does: measure, compare, write down."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from offbeat import limits
from offbeat._version import __version__
from offbeat.bench._measure import Measured, measured
from offbeat.bench._mpi import why_no_mpi
from offbeat.bench._show import picture as draw
from offbeat.errors import UsageError, did_you_mean
from offbeat.runtime.system.capacity import check_room, free_memory
from offbeat.statistics import ratio

PEERS = ("offbeat", "gloo", "mpi")
"""Who can be measured."""
AGAIN = "gloo again"
"""A second gloo beside the first: their ratio is the noise."""
_ITEM = 4
_BUFFERS = 6
"""Of each size that every rank has beside what it verifies with: the peers' and the sum, which is of float64."""


def collectives(
    ranks: int,
    sizes: Sequence[int],
    peers: Sequence[str],
    blocks: int,
    out: Path | None,
    picture: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Time an all-reduce of float32 by several peers in turn; answers, and on request writes and draws, the result.

    Sizes are in bytes. What cannot be measured here is left out, and the result says why.
    """
    _check(ranks, sizes, peers, blocks)
    left_out = {"mpi": why} if "mpi" in peers and (why := why_no_mpi()) else {}
    for name, why in left_out.items():
        say(f"{name} is left out: {why}")
    present = [name for name in dict.fromkeys(peers) if name not in left_out]
    if not present:
        raise UsageError(f"nobody is left to measure: {left_out}")
    found = measured(ranks, sizes, [*present, *([AGAIN] if "gloo" in present else [])], blocks, say)
    result = described(found, present, blocks) | {"left out": left_out}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw([result], picture)
    return result


def _check(ranks: int, sizes: Sequence[int], peers: Sequence[str], blocks: int) -> None:
    if ranks < 2:
        raise UsageError(f"{ranks} ranks have nothing to exchange: give 2 or more")
    limits.whole("--ranks", ranks, limits.WORKERS, why="each is a process")
    limits.whole("--blocks", blocks, limits.REPEATS)
    check_room(ranks, 1)
    if not sizes or not peers:
        raise UsageError("give at least one size and one peer to measure")
    for size in sizes:
        if size < _ITEM or size % _ITEM:
            raise UsageError(f"{size} bytes hold no whole number of float32 values: give a multiple of {_ITEM}")
        needed, free = size * ranks * (ranks + _BUFFERS), free_memory()
        if free is not None and needed > free:
            raise UsageError(
                f"{size:,} bytes on {ranks} ranks take {needed / 1e9:,.0f} GB: each holds what all of them bring, to "
                f"verify the sum, and {free / 1e9:.1f} GB are free. Measure smaller sizes, or fewer ranks."
            )
    for name in peers:
        if name not in PEERS:
            raise UsageError(f"there is no peer {name!r} to measure.{did_you_mean(name, PEERS)}")


def described(found: Measured, peers: Sequence[str], blocks: int) -> dict[str, Any]:
    """A measurement as plain data: medians, and each peer's time over the first one's."""
    result: dict[str, Any] = {
        "benchmark": "collectives",
        "operation": "all-reduce",
        "dtype": "float32",
        "ranks": found.ranks,
        "blocks": blocks,
        "peers": list(peers),
        "rows": [_row(found, size, peers) for size in found.times],
        "environment": environment(),
    }
    if found.library is not None:
        probed = {level: {str(size): t for size, t in by.items()} for level, by in found.probed.items()}
        result["mpi"] = {"library": found.library, "seconds by thread level": probed}
    return result


def _row(found: Measured, size: int, peers: Sequence[str]) -> dict[str, Any]:
    times = found.times[size]
    first = peers[0]
    row: dict[str, Any] = {
        "bytes": size,
        "calls per block": found.calls[size],
        "seconds": {name: found.median(size, name) for name in peers},
        "ratios": {f"{name} / {first}": ratio(times[name], times[first]).plain() for name in peers[1:]},
    }
    if AGAIN in times:
        row["noise"] = ratio(times[AGAIN], times["gloo"]).plain()
    if size in found.levels:
        row["mpi thread level"] = found.levels[size]
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

"""What links cost, measured when a run begins: a few exchanges of growing size, for as long as they are cheap."""

from __future__ import annotations

import time
from collections.abc import Callable

from offbeat.protocols.schedule import View
from offbeat.runtime.group import Group
from offbeat.runtime.shared.room import ONE_SHOT
from offbeat.simulate.foretelling import Exchanged, Timed

SMALLEST, LARGER = 4096, 16
"""Bytes of the first exchange, and by how much the next ones are larger."""
MOST = 1 << 24
"""Bytes of the largest: beyond, the cost of a byte changes little."""
DEAR = 0.03
"""Seconds: no exchange is made that is likely to take longer."""
_TIMES = 3
_WHAT = "measuring the links"


def measured(
    group: Group, most: int, named: Callable[[int], Exchanged], act: Callable[[int], Callable[[], object]]
) -> tuple[Timed, ...]:
    """Exchange from 4 KiB up to `most` bytes, by what `act` makes for a size; all workers call this together.

    `named` says what such an exchange is. The slowest worker's time counts, and of three the shortest:
    other work of the machine only adds to it.
    """
    found: list[Timed] = []
    most = min(max(most, 8), MOST)
    sent, size = group.bytes_sent, min(SMALLEST, most)
    while True:
        once = act(size)
        once()
        found.append(Timed(named(size), min(_timed(group, once) for _ in range(_TIMES))))
        following = min(size * LARGER, most)
        if following <= size or found[-1].seconds * following / size > DEAR:
            break
        size = following
    group.bytes_sent = sent
    return tuple(found)


def _timed(group: Group, act: Callable[[], object]) -> float:
    group.barrier(_WHAT)
    start = time.perf_counter()
    act()
    return max(1e-9, float(group.gather([time.perf_counter() - start], _WHAT).max()))


def native(what: str, nbytes: int, view: View) -> str:
    """By which algorithm the backend sums or gathers so many bytes by itself."""
    hosts = len(set(view.hosts.tolist()))
    if hosts == 1:
        return "two_shot" if what == "all_reduce" and nbytes > ONE_SHOT else "one_shot"
    return "ring" if hosts == view.size or what == "all_gather" else "hierarchical_ring"

"""What links cost, measured when a run begins: a few exchanges of growing size, for as long as they are cheap."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from offbeat.runtime.groups.group import Group
from offbeat.simulate.predicted_step import Timed

SMALLEST, LARGER = 4096, 16
"""Bytes of the first exchange, and by how much the next ones are larger."""
MOST = 1 << 24
"""Bytes of the largest: beyond, the cost of a byte changes little."""
DEAR = 0.03
"""Seconds: no exchange is made that is likely to take longer."""
_TIMES = 3
_WHAT = "measuring the links"


def measured(group: Group, most: int, act: Callable[[int], Callable[[], object]]) -> tuple[Timed, ...]:
    """Exchange from 4 KiB up to `most` bytes, by what `act` makes for a size; all workers call this together.

    The slowest worker's time counts, and of three the shortest: other work of the machine only adds to it.
    """
    with group.sent.measuring():
        return tuple(_growing(group, most, act))


def _growing(group: Group, most: int, act: Callable[[int], Callable[[], object]]) -> Iterator[Timed]:
    most = min(max(most, 8), MOST)
    size = min(SMALLEST, most)
    while True:
        once = act(size)
        group.sent.record()
        once()
        (exchanged,) = group.sent.recorded()
        seconds = min(_timed(group, once) for _ in range(_TIMES))
        yield Timed(exchanged, seconds)
        following = min(size * LARGER, most)
        if following <= size or seconds * following / size > DEAR:
            return
        size = following


def _timed(group: Group, act: Callable[[], object]) -> float:
    group.barrier(_WHAT)
    start = time.perf_counter()
    act()
    return max(1e-9, float(group.gather([time.perf_counter() - start], _WHAT).max()))

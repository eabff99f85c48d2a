"""Link costs, measured at the start of a run by a few exchanges of growing size, as long as they are cheap."""

from __future__ import annotations

import time
from collections.abc import Callable

from offbeat.runtime.groups.group import Group
from offbeat.simulate.predicted_step import Timed

SMALLEST, LARGER = 4096, 16  # Bytes of the first exchange, and the growth factor.
MOST = 1 << 24  # Bytes of the largest: beyond it the cost per byte changes little.
DEAR = 0.03  # No exchange that is likely to take more seconds is made.
_TIMES = 3
_WHAT = "measuring the links"


def measured(group: Group, most: int, act: Callable[[int], Callable[[], object]]) -> tuple[Timed, ...]:
    """Time exchanges from 4 KiB up to `most` bytes, made by `act(size)`; a collective call."""
    timings: list[Timed] = []
    most = min(max(most, 8), MOST)
    size = min(SMALLEST, most)
    with group.sent.measuring():
        while True:
            once = act(size)
            group.sent.record()
            once()
            (exchanged,) = group.sent.recorded()
            # The slowest worker's, and the shortest of three, because other load only adds to it.
            seconds = min(_timed(group, once) for _ in range(_TIMES))
            timings.append(Timed(exchanged, seconds))
            following = min(size * LARGER, most)
            if following <= size or seconds * following / size > DEAR:
                return tuple(timings)
            size = following


def _timed(group: Group, act: Callable[[], object]) -> float:
    group.barrier(_WHAT)
    start = time.perf_counter()
    act()
    return max(1e-9, float(group.gather([time.perf_counter() - start], _WHAT).max()))

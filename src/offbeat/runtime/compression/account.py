"""What compression costs and saves a worker, and what the same exchanges would have taken dense.

The first is counted as it happens. The second is measured beside it: now and then the numbers are exchanged once more
as they are, on the same links, and what comes of that is thrown away. All workers begin it together, so that nobody's
lateness counts; so they do with the compressed exchanges that it is held against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from offbeat.runtime.groups.group import Group

PROBED = 1
"""After so many compressed exchanges of a row a dense one is made to compare with: by then connections are warm."""
PROBES, CHEAP = 6, 0.1
"""Dense exchanges that are made where one takes less than so many seconds; elsewhere one is enough, and dear enough."""
COMPARING = "a dense exchange, to compare with"
_COUNTED = ("sums", "dense_bytes", "letter_bytes", "coding_seconds", "sending_seconds")
_PROBED = ("probes", "dense_seconds", "probing_seconds", "compared", "compressed_seconds")
_NAMES: tuple[str, ...] = (*_COUNTED, *_PROBED)


class CompressionAccount:
    """What compressing one row, again and again, has come to on this worker."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = dict.fromkeys(_NAMES, 0.0)
        """Exchanges, bytes before and after, seconds for coding and sending; and what dense ones took."""

    def note(self, dense_bytes: int, letter_bytes: int, coding: float, sending: float) -> None:
        """A row was exchanged, compressed."""
        for name, value in zip(_COUNTED, (1.0, dense_bytes, letter_bytes, coding, sending), strict=True):
            self.figures[name] += value

    @property
    def due(self) -> bool:
        """Whether it is time to see what the same takes dense; the same answer on all workers that exchange in step."""
        return self.figures["sums"] == PROBED and not self.figures["probes"]

    def probe(self, group: Group, act: Callable[[], object]) -> None:
        """Exchange densely, which is what `act` does, and see what that takes; all workers call this together."""
        start = time.perf_counter()
        with group.sent.measuring():
            times = timed(group, act)
        self.figures["probes"] += len(times)
        self.figures["dense_seconds"] += sum(times)
        self.figures["probing_seconds"] += time.perf_counter() - start

    @contextmanager
    def compared(self, group: Group) -> Generator[None]:
        """Around a compressed exchange: after dense ones, as many of these are timed in the same way."""
        if self.figures["compared"] >= self.figures["probes"]:
            yield
            return
        with group.sent.measuring():
            group.barrier(COMPARING)
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        with group.sent.measuring():
            took = float(group.gather([spent], COMPARING).max())
        self.figures["compared"] += 1
        self.figures["compressed_seconds"] += took


def timed(group: Group, act: Callable[[], object]) -> list[float]:
    """What something that all workers do together takes the slowest of them: several times where it is cheap."""
    times: list[float] = []
    for number in range(PROBES):
        group.barrier(COMPARING)
        begun = time.perf_counter()
        act()
        took = float(group.gather([time.perf_counter() - begun], COMPARING).max())
        if number or took > CHEAP:  # The first of several warms up.
            times.append(took)
        if took > CHEAP:
            break
    return times


def together(accounts: Sequence[CompressionAccount], group: Group) -> dict[str, float]:
    """Of all rows, the mean over the workers; all of them call this together.

    `as_dense_seconds` and `as_compressed_seconds` are what all of these exchanges would have taken if each took as
    long as those that were compared; they are left out where there was no time to compare any.
    """
    used = [account.figures for account in accounts if account.figures["sums"]]
    dense = sum(one["sums"] * one["dense_seconds"] / max(one["probes"], 1.0) for one in used)
    compressed = sum(one["sums"] * one["compressed_seconds"] / max(one["compared"], 1.0) for one in used)
    known = float(bool(used) and all(one["compared"] for one in used))
    mine = [*(sum(one[name] for one in used) for name in _NAMES), dense, compressed, known]
    means: list[float] = group.gather(mine, "the account of compression").mean(dim=0).tolist()
    names = _NAMES if means[-1] < 1 else (*_NAMES, "as_dense_seconds", "as_compressed_seconds")
    return dict(zip(names, means, strict=False))

"""What compression costs and saves a worker, compared with dense exchanges.

The compressed exchanges of a run are counted as they happen. Now and then the same numbers are exchanged dense as well,
on the same links, and the result is discarded. All workers start both kinds of measured exchange together, so that
late workers do not distort the comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from offbeat.runtime.groups.group import Group

PROBED = 1
"""Compressed exchanges of a row before the dense one to compare with: by then connections are warm."""
PROBES, CHEAP = 6, 0.1
"""Dense exchanges where one takes less than `CHEAP` seconds; elsewhere there is only one."""
COMPARING = "a dense exchange, to compare with"
_COUNTED = ("sums", "dense_bytes", "letter_bytes", "coding_seconds", "sending_seconds")
_PROBED = ("probes", "dense_seconds", "probing_seconds", "compared", "compressed_seconds")
_NAMES: tuple[str, ...] = (*_COUNTED, *_PROBED)


class CompressionAccount:
    """Totals of compressing one row on this worker."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = dict.fromkeys(_NAMES, 0.0)
        """Exchanges, bytes before and after, seconds of coding and sending; the same for dense exchanges."""

    def note(self, dense_bytes: int, letter_bytes: int, coding: float, sending: float) -> None:
        """Count a compressed exchange."""
        for name, value in zip(_COUNTED, (1.0, dense_bytes, letter_bytes, coding, sending), strict=True):
            self.figures[name] += value

    @property
    def due(self) -> bool:
        """Whether to time a dense exchange now; the same on all workers that exchange in step."""
        return self.figures["sums"] == PROBED and not self.figures["probes"]

    def probe(self, group: Group, act: Callable[[], object]) -> None:
        """Time dense exchanges, which `act` makes; all workers call this together."""
        start = time.perf_counter()
        with group.sent.measuring():
            times = timed(group, act)
        self.figures["probes"] += len(times)
        self.figures["dense_seconds"] += sum(times)
        self.figures["probing_seconds"] += time.perf_counter() - start

    @contextmanager
    def compared(self, group: Group) -> Generator[None]:
        """Around a compressed exchange: as many are timed as dense ones were."""
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
    """Seconds that a joint action takes the slowest worker, several times where it is cheap."""
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
    """Totals over all rows, averaged over the workers; all of them call this together.

    `as_dense_seconds` and `as_compressed_seconds` are what all of these exchanges would have taken at the pace of the
    compared ones; they are omitted if none was compared.
    """
    used = [account.figures for account in accounts if account.figures["sums"]]
    dense = sum(figures["sums"] * figures["dense_seconds"] / max(figures["probes"], 1.0) for figures in used)
    compressed = sum(
        figures["sums"] * figures["compressed_seconds"] / max(figures["compared"], 1.0) for figures in used
    )
    known = float(bool(used) and all(figures["compared"] for figures in used))
    mine = [*(sum(figures[name] for figures in used) for name in _NAMES), dense, compressed, known]
    means: list[float] = group.gather(mine, "the account of compression").mean(dim=0).tolist()
    names = _NAMES if means[-1] < 1 else (*_NAMES, "as_dense_seconds", "as_compressed_seconds")
    return dict(zip(names, means, strict=False))

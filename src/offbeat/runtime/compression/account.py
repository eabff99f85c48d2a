"""What compression costs and saves a worker, compared with dense exchanges.

Once in a run the same numbers are exchanged dense as well, and discarded. All workers start both kinds of measured
exchange together, so that late workers do not distort the comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from torch import Tensor

from offbeat.runtime.compression.coder import GroupLink
from offbeat.runtime.groups.group import DirectGroup, Group

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

    @contextmanager
    def counted(
        self, group: DirectGroup, row: Tensor, what: str, dense: Callable[[Tensor], object] | None = None
    ) -> Generator[GroupLink]:
        """Around the compressed exchange of a row: count it. Once, dense exchanges and as many of these are timed.

        Payloads go over the yielded link; `dense` exchanges a row uncompressed, by default as a sum.
        """
        figures = self.figures
        if figures["sums"] == PROBED and not figures["probes"]:
            copy, start = row.clone(), time.perf_counter()
            with group.sent.measuring():
                times = timed(group, lambda: group.sum(copy, COMPARING) if dense is None else dense(copy))
            figures["probes"], figures["dense_seconds"] = float(len(times)), sum(times)
            figures["probing_seconds"] += time.perf_counter() - start
        comparing = figures["compared"] < figures["probes"]
        if comparing:
            with group.sent.measuring():
                group.barrier(COMPARING)
        link, start = GroupLink(group, what), time.perf_counter()
        yield link
        spent = time.perf_counter() - start
        if comparing:
            with group.sent.measuring():
                figures["compressed_seconds"] += float(group.gather([spent], COMPARING).max())
            figures["compared"] += 1
        self.note(row.nbytes, link.nbytes, spent - link.seconds, link.seconds)


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

"""Streams with a bounded buffer: what comes too fast waits, or is skipped and counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from conftest import wait_until
from offbeat.data import bounded
from offbeat.errors import UsageError


class Source:
    """Yields numbers, and says how many it has yielded."""

    def __init__(self, count: int) -> None:
        self.count, self.yielded = count, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.yielded = number + 1
            yield number


def test_a_stream_that_blocks_loses_nothing_and_is_never_far_ahead() -> None:
    source = Source(100)
    stream = bounded(source, buffer=5)
    rest = iter(stream)
    assert next(rest) == 0
    wait_until(lambda: source.yielded >= 7, "a full buffer", 10)
    assert source.yielded == 7  # One is used, five wait, and one wants to.
    assert [0, *rest] == list(range(100))
    assert (stream.skipped, stream.yielded) == (0, 100)


def test_a_stream_that_samples_counts_what_it_skips() -> None:
    source = Source(1000)
    stream = bounded(lambda: source, buffer=10, when_full="sample")
    rest = iter(stream)
    first = next(rest)
    wait_until(lambda: source.yielded == 1000, "the end of the source", 10)
    used = [first, *rest]
    assert len(used) + stream.skipped == 1000
    assert stream.skipped >= 900
    assert used == sorted(set(used))


def test_a_source_that_fails_raises_after_what_came_before() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise OSError("the socket is closed")

    rest = iter(bounded(failing))
    assert next(rest) == 1
    with pytest.raises(OSError, match="socket is closed"):
        next(rest)


def test_a_pass_that_is_left_ends_its_thread() -> None:
    before = threading.active_count()
    rest = iter(bounded(Source(10**9), buffer=3))
    next(rest)
    rest.close()  # pyright: ignore[reportAttributeAccessIssue]
    wait_until(lambda: threading.active_count() == before, "the end of the thread", 10)


def test_policies_are_named() -> None:
    with pytest.raises(UsageError, match=r"say block or sample.*sample"):
        bounded([], when_full="sampel")
    with pytest.raises(UsageError, match="buffer = 0 makes no sense"):
        bounded([], buffer=0)

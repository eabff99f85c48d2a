"""Workers of a compressed sum as threads of one process: the reference that real workers are compared with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from offbeat.runtime.compression import Feedback


class Meeting:
    """Where the links of some threads meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.brought: list[Tensor] = [Tensor()] * size
        self.barrier = threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, row: Tensor) -> list[Tensor]:
        """What everybody brought, by rank."""
        self.brought[rank] = row.clone()
        self.barrier.wait()
        found = list(self.brought)
        self.barrier.wait()
        return found


class ThreadLink:
    """One thread's link."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.sent: list[int] = []

    def sum(self, row: Tensor) -> Tensor:
        rows = self._meeting.exchange(self.rank, row)
        self.sent.append(row.numel() * row.element_size())
        row.copy_(rows[0])
        for other in rows[1:]:
            row.add_(other)
        return row

    def gather(self, letter: Tensor, fixed: bool) -> list[Tensor]:
        self.sent.append(letter.numel())
        letters = self._meeting.exchange(self.rank, letter)
        assert not fixed or len({other.numel() for other in letters}) == 1
        return letters


def together(size: int, act: Callable[[ThreadLink], Any]) -> list[Any]:
    """What `act` answers in each of so many threads."""
    meeting, found, failed = Meeting(size), [None] * size, list[BaseException]()

    def run(rank: int) -> None:
        try:
            found[rank] = act(ThreadLink(meeting, rank))
        except BaseException as error:
            failed.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found


def summed(feedbacks: Sequence[Feedback], rows: Sequence[Tensor], idle: Sequence[slice] = ()) -> list[Tensor]:
    """The sum as each worker has it."""
    return weighted_sum(feedbacks, rows, [1.0] * len(rows), idle)


def weighted_sum(
    feedbacks: Sequence[Feedback], rows: Sequence[Tensor], weights: Sequence[float], idle: Sequence[slice]
) -> list[Tensor]:
    """The same of weighted rows, rounded as often as a worker does: lowrank makes much of the last bit."""

    def act(link: ThreadLink) -> Tensor:
        row, weight, feedback = rows[link.rank].clone(), weights[link.rank], feedbacks[link.rank]
        if weight == 1.0:
            feedback.sum(row, link, idle)
            return row
        if feedback.on:
            feedback.owing(row).add_(row, alpha=weight)
        feedback.settle(row.mul_(weight), link, idle)
        return row

    return together(len(rows), act)

"""Portions of the data, handed out to idle workers: faster ones get more, the tail goes to two, the dead's go back."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from offbeat.protocols.machine import Name


class Portions:
    """The portions of one evaluation; each counts once, whoever is first."""

    def __init__(self, count: int, *, backups: bool = True) -> None:
        self._count, self._backups = count, backups
        self._waiting = deque(range(count))
        self._holders: dict[int, list[Name]] = {}  # Of portions handed out and not finished, the oldest first.
        self._finished: set[int] = set()
        self.handed_out: Counter[Name] = Counter()
        self.duplicated: Counter[Name] = Counter()

    @property
    def over(self) -> bool:
        """Whether every portion is finished."""
        return len(self._finished) == self._count

    def hand_out(self, worker: Name) -> int | None:
        """A portion for an idle worker; None if there is nothing for it to do."""
        if self._waiting:
            portion = self._waiting.popleft()
        else:
            spare = (n for n, held in self._holders.items() if len(held) == 1 and worker not in held)
            portion = next(spare, None) if self._backups else None
            if portion is None:
                return None
            self.duplicated[worker] += 1
        self._holders.setdefault(portion, []).append(worker)
        self.handed_out[worker] += 1
        return portion

    def finish(self, portion: int) -> bool:
        """A worker has finished a portion; returns whether it is the first to do so."""
        if portion in self._finished or not 0 <= portion < self._count:
            return False
        self._finished.add(portion)
        self._holders.pop(portion, None)
        if portion in self._waiting:  # FinishedPortion by a worker that was thought to be dead.
            self._waiting.remove(portion)
        return True

    def lose(self, workers: Iterable[Name]) -> int:
        """Workers have died: what only they had is handed out again, before all others; returns how many these are."""
        dead, lost = set(workers), 0
        for portion, held in sorted(self._holders.items(), reverse=True):
            held[:] = [worker for worker in held if worker not in dead]
            if not held:
                del self._holders[portion]
                self._waiting.appendleft(portion)
                lost += 1
        return lost

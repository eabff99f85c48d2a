"""Who takes part in a run."""

from __future__ import annotations

from abc import ABC, abstractmethod

from offbeat.runtime.groups.presence import Presence


class Membership(ABC):
    """Which workers take part, and who of them does what only one does."""

    outside = False
    """Whether this worker is on its way into a run that the others have begun: it agrees on things with itself."""

    @property
    @abstractmethod
    def members(self) -> tuple[int, ...]:
        """Ranks of the workers that take part."""

    @property
    @abstractmethod
    def present(self) -> tuple[int, ...]:
        """Who took part in the last exchange."""

    @property
    @abstractmethod
    def awaited(self) -> bool:
        """Whether anybody waits to join."""

    @property
    @abstractmethod
    def leads(self) -> bool:
        """Whether this worker does what only one does: writes, tells, concludes."""

    @abstractmethod
    def leader(self) -> int:
        """The rank of the one who does what only one does, agreed by all; all workers call this together."""

    @abstractmethod
    def leave(self) -> None:
        """Say that this worker has done its last step, and wait until all others have: a team ends together."""


class StaticMembership(Membership):
    """All workers, from the beginning to the end: a run ends with the first death."""

    def __init__(self, rank: int, size: int, presence: Presence | None, patience: float) -> None:
        self._rank, self._presence, self._patience = rank, presence, patience
        self._members = tuple(range(size))

    @property
    def members(self) -> tuple[int, ...]:
        """All of them."""
        return self._members

    @property
    def present(self) -> tuple[int, ...]:
        """All of them."""
        return self._members

    @property
    def awaited(self) -> bool:
        """Nobody can join."""
        return False

    @property
    def leads(self) -> bool:
        """Worker 0 leads."""
        return self._rank == 0

    def leader(self) -> int:
        """Worker 0 leads."""
        return 0

    def leave(self) -> None:
        """Tell the others, and wait until all have come to the end."""
        if self._presence is not None:
            self._presence.leave()
            self._presence.await_others(self._patience)

    def depart(self, failed: bool) -> None:
        """Say that nothing more will come from this worker, so that nobody waits for it."""
        if self._presence is not None:
            self._presence.gone(failed)

"""What can be wrong with a run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

DEADLOCK: Final = "deadlock"
"""Workers wait for each other."""
DESYNC: Final = "desync"
"""Workers have called different things where they should have called the same."""
ENDED: Final = "ended"
"""Somebody waits for a worker that has ended."""
SILENT: Final = "silent"
"""Somebody has waited long for a worker that does something else; it may still come."""
DEAD: Final = "dead"
"""A worker or a server has died, and the run did something about it."""

NAN: Final = "nan"
"""A worker has given numbers to the others that are not finite."""
STRAGGLER: Final = "straggler"
"""One worker has cost the run a notable part of its time."""
LASTING: Final = frozenset({DEAD, NAN})
"""What stays true of a run that has gone on, and finished."""

EXIT_CODES: Final[Mapping[str, int]] = {
    DEADLOCK: 10,
    DESYNC: 11,
    ENDED: 12,
    SILENT: 13,
    DEAD: 14,
    NAN: 15,
    STRAGGLER: 0,
}
"""What `offbeat run --monitor` and `offbeat explain` end with."""


class Verdict(Struct, frozen=True):
    """What is wrong, who is to be looked at, and why."""

    kind: str
    message: str
    """In words: who waits for whom in what."""
    missing: tuple[int, ...] = ()
    """Workers whose stack says more: those that are waited for, and live."""
    stacks: Mapping[str, str] = {}
    """What those were doing, by worker."""
    who: tuple[str, ...] = ()
    """Whom it is about, where that is not in `missing`: those who have died."""

    @property
    def final(self) -> bool:
        """Whether it can never become better by itself."""
        return self.kind in (DEADLOCK, DESYNC, ENDED)

    @property
    def headline(self) -> str:
        """The verdict without stacks."""
        return f"{self.kind}: {self.message}"

    def __str__(self) -> str:
        """The verdict, then the stacks of those that are missing."""
        told = [self.headline]
        told += [f"What {who} was doing:\n{stack.rstrip()}" for who, stack in self.stacks.items()]
        return "\n".join(told)

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "kind": self.kind,
            "message": self.message,
            "missing": [worker_name(rank) for rank in self.missing],
            "stacks": dict(self.stacks),
        }


def worker_name(rank: int) -> str:
    """What a worker is called in words."""
    return f"worker {rank}"

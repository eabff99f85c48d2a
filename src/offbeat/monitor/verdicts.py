"""Verdicts: what can be wrong with a run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

DEADLOCK: Final = "deadlock"  # Workers wait for each other.
DESYNC: Final = "desync"  # Workers have made different calls where all should make the same one.
ENDED: Final = "ended"  # A wait for a worker that has ended.
SILENT: Final = "silent"  # A long wait for a worker that does something else; it may still arrive.
DEAD: Final = "dead"  # A worker or a server has died, and the run has handled it.
NAN: Final = "nan"  # A worker has sent NaN or infinite numbers to the others.
STRAGGLER: Final = "straggler"  # One worker has cost the run a notable part of its time.
LASTING: Final = frozenset({DEAD, NAN})  # Verdicts that stay true of a run that continues and finishes.

EXIT_CODES: Final[Mapping[str, int]] = {
    DEADLOCK: 10, DESYNC: 11, ENDED: 12, SILENT: 13, DEAD: 14, NAN: 15, STRAGGLER: 0,
}  # fmt: skip
"""Exit codes of `offbeat run --monitor` and `offbeat explain`."""


class Verdict(Struct, frozen=True):
    """What is wrong with a run, and which workers to look at."""

    kind: str
    message: str  # Who waits for whom in what, in words.
    missing: tuple[int, ...] = ()  # Workers whose stack tells more: those that others wait for and that are alive.
    stacks: Mapping[str, str] = {}  # Stacks of those workers, by name.
    who: tuple[str, ...] = ()  # Processes that it is about, if not in `missing`, such as dead ones.

    @property
    def final(self) -> bool:
        """Whether the run can never recover by itself."""
        return self.kind in (DEADLOCK, DESYNC, ENDED)

    @property
    def headline(self) -> str:
        """The verdict without stacks."""
        return f"{self.kind}: {self.message}"

    def __str__(self) -> str:
        """The verdict, then the stacks."""
        stacks = [f"What {name} was doing:\n{stack.rstrip()}" for name, stack in self.stacks.items()]
        return "\n".join([self.headline, *stacks])

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        missing = [worker_name(rank) for rank in self.missing]
        return {"kind": self.kind, "message": self.message, "missing": missing, "stacks": dict(self.stacks)}


def worker_name(rank: int) -> str:
    """A worker's name in sentences."""
    return f"worker {rank}"

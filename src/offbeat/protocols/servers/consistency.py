"""Which worker may start its next step: bulk synchronous, stale synchronous and asynchronous training in one predicate.

A clock counts the steps that a worker has finished. A worker with clock c may start its next step if and only if
c - min(clocks) <= s. So clocks of finished steps differ by at most s + 1. With s = 0 (`bsp`) all wait for all, but
never for ever: the slowest may always start. With s of several steps (`ssp`) a worker that pauses once holds nobody
up, if it catches up in time. Without a bound (`asp`) nobody waits.

Two rules give up on stragglers instead: with `drop` a step is complete with the first p - k gradients, with
`deadline` with those that have come by then, at least one. Gradients for a complete step are late, and discarded.
"""

from __future__ import annotations

import math

from msgspec import Struct

from offbeat.errors import UsageError


class Rule(Struct, frozen=True):
    """How far apart workers may be, and whether stragglers are waited for."""

    bound: int | None  # Steps that a worker may be ahead of the slowest when it starts one; 0 is `bsp`, None is `asp`.
    eager: bool = False  # Servers send fresh values as soon as they have them, rather than on request.
    drop: int = 0  # Workers that a step does not wait for: it is complete with the first p - drop gradients.
    deadline: float | None = None  # Seconds after which a step is complete with the gradients that have come, if any.
    coded: int = 0  # Workers that a step can do without, as others compute the same (gradient coding): nothing is lost.
    cyclic: bool = False  # Use the code that repeats parts cyclically.
    remembers: bool = False  # Replicas keep the values that gradients may still be computed from, to correct late ones.
    proves: bool = False  # An update may fail, as a program's whose result is NaN: pushes are answered after it.
    reductions: tuple[tuple[str, ...], ...] = ()
    """Sums over all shards that the update of a step takes, by level: each level's are of what those before it give."""

    def __post_init__(self) -> None:
        """Refuse invalid bounds, and dropping where no step is waited for."""
        if self.bound is not None and self.bound < 0:
            raise UsageError(f"a staleness bound of {self.bound} lets nobody start: give 0 (bsp) or more.")
        if self.drop < 0:
            raise UsageError(f"drop_slowest({self.drop}) makes no sense: give the number of workers not waited for.")
        if self.deadline is not None and not 0 < self.deadline < math.inf:
            raise UsageError(f"deadline({self.deadline}) makes no sense: give a number of seconds above 0.")
        if self.coded < 0:
            raise UsageError(f"coded({self.coded}) makes no sense: give the number of workers not waited for.")
        if self.reductions and (self.bound != 0 or self.coded):
            raise UsageError(
                "sums over all shards are of a step's gradients: they need a bound of 0 (bsp) and no code."
            )
        if self.closes and self.bound != 0:
            raise UsageError("drop_slowest, deadline and coded close a step for all: they need a bound of 0 (bsp).")

    def __str__(self) -> str:
        """The rule as it is written: `bsp`, `ssp(3, eager)`, `asp`, `drop_slowest(2)`, `deadline(0.5)`, `coded(1)`."""
        if self.coded:
            return f"coded({self.coded}{', cyclic' if self.cyclic else ''})"
        if self.drop:
            return f"drop_slowest({self.drop})"
        if self.deadline is not None:
            return f"deadline({self.deadline:g})"
        if self.bound is None:
            return "asp"
        return f"ssp({self.bound}{', eager' if self.eager else ''})" if self.bound else "bsp"

    @property
    def aggregated(self) -> bool:
        """Whether gradients of a step are summed and applied once; otherwise each is applied as it comes."""
        return self.bound == 0

    @property
    def closes(self) -> bool:
        """Whether a step may be complete before every worker has answered."""
        return self.drop > 0 or self.coded > 0 or self.deadline is not None

    def needed(self, clock: int) -> int:
        """The smallest minimum at which a worker that has finished `clock` steps may start another."""
        return 0 if self.bound is None else max(0, clock - self.bound)

    def enough(self, workers: int) -> int:
        """Gradients that complete a step of this many workers, deadline or not: at least one."""
        return max(1, workers - self.drop - self.coded)

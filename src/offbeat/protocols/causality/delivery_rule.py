"""Which rule of delivery a monitor follows, and how many seconds it waits; as options say it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from offbeat.errors import UsageError, did_you_mean

VECTOR, LAMPORT, TIME, FIFO = "vector", "lamport", "time", "fifo"
BOUNDS: Final[Mapping[str, float]] = {VECTOR: 2.0, LAMPORT: 0.2, TIME: 0.05, FIFO: 0.0}
"""The rules, and the default of what each has to be told in seconds: how long a cause may be missing, how long a
process may be silent before it is probed, how long an event may take. `fifo` needs nothing."""
LONGEST_BOUND: Final = 3600.0


class DeliveryRule(Struct, frozen=True):
    """A rule, and its number of seconds."""

    name: str = VECTOR
    bound: float | None = None  # None: the rule's default.

    def __post_init__(self) -> None:
        if self.name not in BOUNDS:
            raise UsageError(
                f"--delivery {self.name!r} is not a rule of delivery. Say {', '.join(BOUNDS)}."
                f"{did_you_mean(self.name, BOUNDS)}"
            )
        if self.bound is None:
            return
        if self.name == FIFO:
            raise UsageError("--delivery fifo waits for nothing, so --delivery-bound has no meaning. Omit it.")
        if not 0 <= self.bound <= LONGEST_BOUND or (self.bound == 0 and self.name == LAMPORT):
            raise UsageError(
                f"--delivery-bound {self.bound:g} cannot be: give seconds, more than 0 and at most {LONGEST_BOUND:g}."
            )

    @property
    def seconds(self) -> float:
        """The bound, or the rule's default."""
        return BOUNDS[self.name] if self.bound is None else self.bound

"""Whether all members of a group call the same collectives in the same order, checked at entry, before any wait.

Each member counts its calls on a group; entries with the same number belong together. No extra messages are needed: the
call is in the entry event, and is compared here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from msgspec import Struct

from offbeat.protocols.causality.histories import Call
from offbeat.protocols.machine import Name

COMPARED: Final = ("operation", "members", "shape", "dtype", "reduce", "root")


class Mismatch(Struct, frozen=True):
    """Two members of a group whose calls should match, but differ."""

    one: Name
    call: Call
    other: Name
    other_call: Call
    differs: tuple[str, ...]
    """The fields that differ: some of `COMPARED`."""
    order: bool
    """The same calls were made in a different order, as far as is known yet."""

    def __str__(self) -> str:
        """In words: both calls, and how they differ."""
        why = "the same calls in a different order" if self.order else f"different {', '.join(self.differs)}"
        return f"{self.one} is in {self.call}, but {self.other} in {self.other_call}: {why}."


class Matching:
    """The collectives entered so far, by group and number."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], dict[Name, Call]] = {}

    def enter(self, process: Name, call: Call) -> Mismatch | None:
        """A process enters a collective. Returns its mismatch with the first member there, if any."""
        entered = self._calls.setdefault((call.group, call.sequence), {})
        entered[process] = call
        other = next(iter(entered))
        differs = differences(call, entered[other])
        if not differs:
            return None
        swapped = self._made_elsewhere(other, call) or self._made_elsewhere(process, entered[other])
        return Mismatch(process, call, other, entered[other], differs, swapped)

    def forget(self, group: str, before: int) -> None:
        """Drop calls on a group before this number: all members have left them."""
        for key in [key for key in self._calls if key[0] == group and key[1] < before]:
            del self._calls[key]

    def _made_elsewhere(self, process: Name, call: Call) -> bool:
        """Whether a process made this very call under another number, where no other member made it too."""
        return any(
            group == call.group
            and number != call.sequence
            and process in calls
            and not differences(calls[process], call)
            and not _agree(calls.values())
            for (group, number), calls in self._calls.items()
        )


def _agree(calls: Collection[Call]) -> bool:
    first, *others = calls
    return bool(others) and not any(differences(first, other) for other in others)


def differences(one: Call, other: Call) -> tuple[str, ...]:
    """The fields in which two calls differ; fields that either leaves open are not compared."""
    pairs = {field: (getattr(one, field), getattr(other, field)) for field in COMPARED}
    return tuple(field for field, (a, b) in pairs.items() if a != b and (field == "root" or None not in (a, b)))

"""Do all members of a group call the same collectives in the same order? Told at entry, before anybody waits in vain.

Each member counts its calls on a group; the entries with the same number belong together. Nothing is exchanged for it:
what a member calls stands in its entry event, and is compared here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from msgspec import Struct

from offbeat.protocols.causality.histories import Call
from offbeat.protocols.machine import Name

COMPARED: Final = ("operation", "members", "shape", "dtype", "reduce", "root")


class Mismatch(Struct, frozen=True):
    """Two members of a group that have called different things where they should have called the same."""

    one: Name
    call: Call
    other: Name
    other_call: Call
    differs: tuple[str, ...]
    """In what: some of `COMPARED`."""
    order: bool
    """The same calls were made in a different order, as far as is known yet."""

    def __str__(self) -> str:
        """In words: who called what where, and in what it differs."""
        why = "the same calls in a different order" if self.order else f"different {', '.join(self.differs)}"
        return f"{self.one} is in {self.call}, but {self.other} in {self.other_call}: {why}."


class Matching:
    """The collectives that have been entered so far, by group and number."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, int], dict[Name, Call]] = {}

    def enter(self, process: Name, call: Call) -> Mismatch | None:
        """A process enters a collective. Answers with whom it does not match: the first who was there."""
        entered = self._calls.setdefault((call.group, call.sequence), {})
        entered[process] = call
        other = next(iter(entered))
        differs = differences(call, entered[other])
        if not differs:
            return None
        swapped = self._made_elsewhere(other, call) or self._made_elsewhere(process, entered[other])
        return Mismatch(process, call, other, entered[other], differs, swapped)

    def forget(self, group: str, before: int) -> None:
        """Drop what was called on a group before this number: everybody has left it."""
        for key in [key for key in self._calls if key[0] == group and key[1] < before]:
            del self._calls[key]

    def _made_elsewhere(self, process: Name, call: Call) -> bool:
        """Whether a process has made this very call under another number, where nobody else made it with it."""
        return any(
            group == call.group
            and number != call.sequence
            and process in calls
            and not differences(calls[process], call)
            and not _agree(calls.values())
            for (group, number), calls in self._calls.items()
        )


def _agree(calls: Collection[Call]) -> bool:
    """Whether several have made the same call."""
    first, *others = calls
    return bool(others) and not any(differences(first, other) for other in others)


def differences(one: Call, other: Call) -> tuple[str, ...]:
    """In what two calls that should be the same differ; what either leaves open is not compared."""
    pairs = {field: (getattr(one, field), getattr(other, field)) for field in COMPARED}
    return tuple(field for field, (a, b) in pairs.items() if a != b and (field == "root" or None not in (a, b)))

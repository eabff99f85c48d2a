"""Meetings of all live workers, at the coordinator.

Every worker hears the same outcome of a meeting, whoever dies meanwhile: which workers came, what each brought, and the
sum of their rows of numbers, if any. Rows are added as they come (`Add`), so that only one sum is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Effects, Payload
from offbeat.protocols.servers.messages import Awaiting, Bring, MeetingArrival, Met, worker_name

REMEMBERED = 256
"""Meetings whose outcome is kept, for workers that have not heard it."""


class Add(Struct, frozen=True):
    """Work: add this row to the sum of a meeting; it must be read now."""

    what: str
    kind: str
    row: Payload


class Total(Struct, frozen=True):
    """Work: the final sum of a meeting, as a payload."""

    what: str


class _Meeting(Struct):
    values: dict[int, tuple[float, ...]] = {}
    waiting: dict[int, MeetingArrival] = {}
    """Arrivals to answer."""
    over: bool = False
    summed: bool = False
    """Whether any worker has brought a row."""
    total: Payload | None = None
    """Of the rows; nothing if there are none; None before it is known, and again when all have it."""
    colour: int = 0
    """The newest colour of those that have come."""
    joining: tuple[int, ...] = ()
    """Workers that waited to join when all had come."""


class Meetings:
    """The meetings of a run, by what they are for."""

    def __init__(self) -> None:
        self._meetings: dict[str, _Meeting] = {}

    @property
    def open(self) -> bool:
        """Whether any worker waits at a meeting for others."""
        return any(meeting.waiting for meeting in self._meetings.values() if not meeting.over)

    def come(self, message: MeetingArrival, row: Payload, workers: Sequence[int], out: Effects) -> None:
        """A worker has come, perhaps not for the first time; all `workers` are expected."""
        meeting = self._meetings.setdefault(message.what, _Meeting())
        sender, header = worker_name(message.worker), {"life": message.life, "number": message.number}
        new = not meeting.over and message.worker not in meeting.values
        if new and message.kind and not row.nbytes:
            out.send(sender, Bring(**header))
            return
        if not (new or meeting.over):
            missing = tuple(worker for worker in workers if worker not in meeting.values)
            out.send(sender, Awaiting(**header, workers=missing))
        meeting.waiting[message.worker] = message
        if not meeting.over:
            meeting.values[message.worker] = message.values
            meeting.colour = max(meeting.colour, message.colour)
        if new and row.nbytes:
            meeting.summed = True
            out.start(Add(message.what, message.kind, row))

    def conclude(self, workers: Sequence[int], joining: Iterable[int], out: Effects) -> None:
        """End the meetings to which all these workers have come; later arrivals hear the outcome."""
        for what, meeting in self._meetings.items():
            if not meeting.over and all(worker in meeting.values for worker in workers):
                meeting.over, meeting.joining = True, tuple(sorted(joining))
                for other in self._meetings.values():
                    other.total = None  # A worker that comes to a meeting has heard of all before it.
                if meeting.summed:
                    out.start(Total(what), ("total", what))
                else:
                    meeting.total = NOTHING

    def summed(self, what: str, total: Payload) -> None:
        """The sum of the rows that were brought to a meeting."""
        if (meeting := self._meetings.get(what)) is not None:
            meeting.total = total

    def answer(self, out: Effects) -> tuple[float, ...] | None:
        """Answer the waiting workers of concluded meetings; returns the values for newly admitted workers, if any."""
        admitted: tuple[float, ...] | None = None
        for what, meeting in self._meetings.items():
            total = NOTHING if meeting.total is None and not meeting.summed else meeting.total
            if not meeting.over or not meeting.waiting or total is None:
                continue
            ranks = tuple(sorted(meeting.values))
            values = tuple(meeting.values[rank] for rank in ranks)
            waiting, meeting.waiting = meeting.waiting, {}
            for worker, arrival in waiting.items():
                outcome: dict[str, Any] = {"what": what, "ranks": ranks, "values": values, "waiting": meeting.joining}
                met = Met(life=arrival.life, number=arrival.number, colour=meeting.colour, **outcome)
                out.send(worker_name(worker), met, total)
                admitted = values[0] if arrival.admits else admitted
        over = [what for what, meeting in self._meetings.items() if meeting.over]
        for what in over[: max(0, len(over) - REMEMBERED)]:
            del self._meetings[what]
        return admitted

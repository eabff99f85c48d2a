"""Meetings of all live workers, at the coordinator.

A meeting is the same for all who hear of it, whoever dies meanwhile: who came, what each brought, and, where they
brought rows of numbers, the sum of those. Rows are added as they come (`Add`), so that one sum is kept and no row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from offbeat.protocols.machine import NOTHING, Effects, Payload
from offbeat.protocols.servers.messages import Awaiting, Bring, MeetingArrival, Met, worker_name

REMEMBERED = 256
"""Meetings whose outcome is kept, for those who have not heard it."""


class Add(Struct, frozen=True):
    """Work: add this row to the sum of a meeting; it is to be read now."""

    what: str
    kind: str
    row: Payload


class Total(Struct, frozen=True):
    """Work: the sum of a meeting, as a payload. Nothing is added to it any more."""

    what: str


@dataclass(slots=True)
class _Meeting:
    values: dict[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    waiting: dict[int, MeetingArrival] = field(default_factory=dict[int, MeetingArrival])
    """Whom to answer."""
    over: bool = False
    summed: bool = False
    """Whether anybody has brought a row."""
    total: Payload | None = None
    """Of the rows; nothing, if there are none; None before it is known, and again when all have it."""
    colour: int = 0
    """The newest of those who have come."""
    joining: tuple[int, ...] = ()
    """Workers that waited to join when all had come."""


class Meetings:
    """The meetings of a run, by what they are for."""

    def __init__(self) -> None:
        self._meetings: dict[str, _Meeting] = {}

    @property
    def open(self) -> bool:
        """Whether anybody waits at a meeting for others to come."""
        return any(meeting.waiting for meeting in self._meetings.values() if not meeting.over)

    def come(self, message: MeetingArrival, row: Payload, workers: Sequence[int], out: Effects) -> None:
        """A worker has come, perhaps not for the first time; all these are to come."""
        meeting = self._meetings.setdefault(message.what, _Meeting())
        who, told = worker_name(message.worker), {"life": message.life, "number": message.number}
        new = not meeting.over and message.worker not in meeting.values
        if new and message.kind and not row.nbytes:
            out.send(who, Bring(**told))
            return
        if not (new or meeting.over):
            missing = tuple(worker for worker in workers if worker not in meeting.values)
            out.send(who, Awaiting(**told, workers=missing))
        meeting.waiting[message.worker] = message
        if not meeting.over:
            meeting.values[message.worker] = message.values
            meeting.colour = max(meeting.colour, message.colour)
        if new and row.nbytes:
            meeting.summed = True
            out.start(Add(message.what, message.kind, row))

    def conclude(self, workers: Sequence[int], joining: Iterable[int], out: Effects) -> None:
        """End the meetings to which all these workers have come; one who comes later hears what was met on."""
        for what, meeting in self._meetings.items():
            if not meeting.over and all(worker in meeting.values for worker in workers):
                meeting.over, meeting.joining = True, tuple(sorted(joining))
                for other in self._meetings.values():
                    other.total = None  # Who has come to a meeting has heard of all before it.
                if meeting.summed:
                    out.start(Total(what), ("total", what))
                else:
                    meeting.total = NOTHING

    def summed(self, what: str, total: Payload) -> None:
        """The sum of the rows that were brought to a meeting."""
        if (meeting := self._meetings.get(what)) is not None:
            meeting.total = total

    def answer(self, out: Effects) -> tuple[float, ...] | None:
        """Tell those who wait, where there is all to tell; if that lets in who waits to join, what those are told."""
        admitted: tuple[float, ...] | None = None
        for what, meeting in self._meetings.items():
            total = NOTHING if meeting.total is None and not meeting.summed else meeting.total
            if not meeting.over or not meeting.waiting or total is None:
                continue
            ranks = tuple(sorted(meeting.values))
            values = tuple(meeting.values[rank] for rank in ranks)
            waiting, meeting.waiting = meeting.waiting, {}
            for worker, asked in waiting.items():
                met = Met(
                    life=asked.life,
                    number=asked.number,
                    what=what,
                    ranks=ranks,
                    values=values,
                    waiting=meeting.joining,
                    colour=meeting.colour,
                )
                out.send(worker_name(worker), met, total)
                admitted = values[0] if asked.admits else admitted
        over = [what for what, meeting in self._meetings.items() if meeting.over]
        for what in over[: max(0, len(over) - REMEMBERED)]:
            del self._meetings[what]
        return admitted

"""A space-time diagram as a trace of Perfetto's own format: packets of TrackEvent, in Protocol Buffers' encoding.

Only a few fields of the published schema are needed, so they are encoded here. Each process has a track of what it was
in; below it are tracks of its collectives, as many as overlap. A flow leads from whoever entered a collective last to
where each that it held up left, and from each sending to its receipt.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from offbeat.monitor.lanes import SECONDS, Band, Lanes

BEGIN, END, INSTANT = 1, 2, 3
_ORDER: Final = {END: 0, INSTANT: 1, BEGIN: 2}
"""What ends at a moment does so before what begins at it."""
_SEQUENCE: Final = 1
_LANES: Final = 1000
"""Tracks below a process are numbered from its own number times this."""


class _Packet(NamedTuple):
    """One event on a track."""

    time: int
    """In nanoseconds."""
    track: int
    type: int
    name: str = ""
    category: str = ""
    flows: tuple[int, ...] = ()
    """Flows that begin here, or go on."""
    ends: tuple[int, ...] = ()
    """Flows that end here."""


def track_events(lanes: Lanes) -> bytes:
    """A trace for ui.perfetto.dev; by logical time, each step of it is a millisecond."""
    below = _Slots(lanes)
    packets = [*_spans(lanes), *below.packets, *_messages(lanes), *_marks(lanes)]
    packets.sort(key=lambda packet: (packet.time, _ORDER[packet.type]))
    described = [_track(_own(lane), name, None) for lane, name in enumerate(lanes.names)]
    described += [_track(track, "collectives", parent) for track, parent in below.tracks.items()]
    return b"".join(_bytes(1, one) for one in (*described, *map(_event, packets)))


def _own(lane: int) -> int:
    return (lane + 1) * _LANES


def _nanoseconds(lanes: Lanes, time: float) -> int:
    return round(time * (1e9 if lanes.axis == SECONDS else 1e6))


def _spans(lanes: Lanes) -> Iterator[_Packet]:
    for span in lanes.spans:
        start, stop = _nanoseconds(lanes, span.start), _nanoseconds(lanes, span.stop)
        if start < stop:
            yield _Packet(
                start, _own(span.lane), BEGIN, f"{span.kind}: {span.label}" if span.label else span.kind, span.kind
            )
            yield _Packet(stop, _own(span.lane), END)


def _marks(lanes: Lanes) -> Iterator[_Packet]:
    for mark in lanes.marks:
        yield _Packet(_nanoseconds(lanes, mark.time), _own(mark.lane), INSTANT, mark.label or mark.kind, mark.kind)


def _messages(lanes: Lanes) -> Iterator[_Packet]:
    # Flows of collectives are numbered by their bands and lanes, from below; messages from above.
    for number, arrow in enumerate(lanes.arrows):
        flow = 2**63 + number
        what = f": {arrow.label}" if arrow.label else ""
        yield _Packet(_nanoseconds(lanes, arrow.start), _own(arrow.source), INSTANT, f"send{what}", "message", (flow,))
        stop = _nanoseconds(lanes, arrow.stop)
        yield _Packet(stop, _own(arrow.target), INSTANT, f"receive{what}", "message", ends=(flow,))


def _entry(band: Band) -> float:
    """When whoever came last to a collective came; infinite if that is not known, so that nobody was held up by it."""
    return next((stay.start for stay in band.stays if stay.lane == band.last), math.inf)


class _Slots:
    """Stays in collectives, on tracks on which they do not overlap."""

    def __init__(self, lanes: Lanes) -> None:
        self.tracks: dict[int, int] = {}
        """Each track, and the one that it is below."""
        self.packets: list[_Packet] = []
        self._free = defaultdict[int, list[int]](list)
        bands = sorted(lanes.bands, key=lambda band: min((stay.start for stay in band.stays), default=0.0))
        stays = sorted(
            ((stay, number) for number, band in enumerate(bands) for stay in band.stays), key=lambda one: one[0].start
        )
        for stay, number in stays:
            band = bands[number]
            start = _nanoseconds(lanes, stay.start)
            stop = max(start + 1, _nanoseconds(lanes, stay.stop))
            track = self._slot(stay.lane, start, stop)
            held = {other.lane for other in band.stays if other.lane != band.last and other.stop >= _entry(band)}
            flows = tuple(number * _LANES + lane for lane in sorted(held)) if stay.lane == band.last else ()
            self.packets.append(_Packet(start, track, BEGIN, band.label, "collective", flows))
            if stay.lane in held:
                left = number * _LANES + stay.lane
                self.packets.append(_Packet(stop, track, INSTANT, "left", "collective", ends=(left,)))
            if not stay.open:
                self.packets.append(_Packet(stop, track, END))

    def _slot(self, lane: int, start: int, stop: int) -> int:
        ends = self._free[lane]
        for number, end in enumerate(ends):
            if end < start:
                ends[number] = stop
                break
        else:
            number = len(ends)
            ends.append(stop)
        track = _own(lane) + 1 + number
        self.tracks[track] = _own(lane)
        return track


# -- Protocol Buffers; numbers of fields are those of the schema ------------------------------------------------------


def _event(packet: _Packet) -> bytes:
    told = _number(9, packet.type) + _number(11, packet.track)
    if packet.category:
        told += _bytes(22, packet.category.encode())
    if packet.name:
        told += _bytes(23, packet.name.encode())
    told += _fixed(47, packet.flows) + _fixed(48, packet.ends)
    return _number(8, packet.time) + _number(10, _SEQUENCE) + _bytes(11, told)


def _track(number: int, name: str, parent: int | None) -> bytes:
    told = _number(1, number) + _bytes(2, name.encode())
    told += b"" if parent is None else _number(5, parent)
    return _number(10, _SEQUENCE) + _bytes(60, told)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _fixed(field: int, values: Sequence[int]) -> bytes:
    return b"".join(_varint(field << 3 | 1) + struct.pack("<Q", value) for value in values)

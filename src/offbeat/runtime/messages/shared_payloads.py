"""Payloads passed by reference: memory that one process lends and another reads, on one host.

The message is only the doorbell. Lent memory must not change until the reader has said, in the protocol's own way, that
it is done. The reader maps it read-only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError, UsageError
from offbeat.runtime.collectives.one_sided.tickets import TICKET, SegmentError, open_ticket
from offbeat.runtime.messages.frames import Buffer, Bytes, MemoryReference

if TYPE_CHECKING:
    from offbeat.runtime.collectives.one_sided.segment import Segment


class LendingError(OffbeatError):
    """The memory that a reference names is missing, not ours to read, or too short."""


class _Loan(NamedTuple):
    start: int
    stop: int
    ticket: str
    serial: int
    segment: Segment


class Loans:
    """The memory that this process lends."""

    def __init__(self) -> None:
        self._loans: list[_Loan] = []
        self._last = 0

    def add(self, segment: Segment) -> None:
        """Lend this memory; its descriptor must stay open."""
        if not TICKET.fullmatch(segment.ticket):
            raise UsageError(f"Memory that is sealed (ticket {segment.ticket}) cannot be lent: lend it before.")
        self._last += 1
        start = segment.address
        self._loans.append(_Loan(start, start + segment.size, segment.ticket, self._last, segment))

    def remove(self, segment: Segment) -> None:
        """Stop lending it."""
        self._loans = [loan for loan in self._loans if loan.segment is not segment]

    def reference(self, payload: Buffer) -> MemoryReference | None:
        """The reference for a payload, if all of it is in lent memory."""
        if not self._loans:
            return None
        array = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, dtype=np.uint8)
        nbytes = array.nbytes
        if nbytes and array.flags.c_contiguous:
            start = _address(array)
            for loan in self._loans:
                if loan.start <= start and start + nbytes <= loan.stop:
                    return MemoryReference(loan.ticket, loan.serial, start - loan.start, nbytes)
        return None


def _address(array: NDArray[Any]) -> int:
    """The address of a contiguous array."""
    if array.flags.writeable:
        # Five times as fast as the other way.
        return ctypes.addressof(ctypes.c_char.from_buffer(cast("Any", array)))
    return int(array.__array_interface__["data"][0])


class Borrowed:
    """Memory of one peer, mapped by this process."""

    MOST = 64  # Segments mapped per peer; one more unmaps the oldest.

    def __init__(self, process: int) -> None:
        self._process = process
        self._mapped: dict[tuple[str, int], Bytes] = {}

    def view(self, reference: MemoryReference) -> Bytes:
        """The referenced bytes, read-only; raises `LendingError` if the reference is wrong."""
        key = (reference.ticket, reference.serial)
        memory = self._mapped.get(key)
        if memory is None:
            memory = _map(reference.ticket, self._process)
            if len(self._mapped) >= self.MOST:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[key] = memory
        stop = reference.offset + reference.nbytes
        if not 0 <= reference.offset <= stop <= memory.nbytes:
            raise LendingError(f"bytes {reference.offset:,} to {stop:,} of {memory.nbytes:,}")
        return memory[reference.offset : stop]


def _map(ticket: str, process: int) -> Bytes:
    """The memory of a ticket, if it really is memory that that process made to be shared."""
    try:
        descriptor = open_ticket(ticket, os.O_RDONLY, process)
        try:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return np.frombuffer(mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ), dtype=np.uint8)
        finally:
            os.close(descriptor)
    except (SegmentError, OSError, ValueError, OverflowError) as error:
        raise LendingError(f"the memory of ticket {ticket!r} cannot be read: {error}") from error

"""Segments: memory that several processes of one host have mapped.

A segment has no name: it is a memfd, which peers open through the process that created it. It is freed when the last
process that has it mapped is gone, however that ended.

Large ones use huge pages where possible (decision 12): a core's TLB covers a few thousand pages, which is only a few
MiB of small ones. Linux uses huge pages only where address and offset are both aligned to one.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.runtime.collectives.one_sided.tickets import FIXED_SIZE, NAME, SegmentError, open_ticket

_PAGE = mmap.PAGESIZE
_HUGE = 2 << 20
"""Bytes of a huge page, on most machines."""
_FIXED, _COLLAPSE, _REMOVE = 16, 25, 9
"""Linux's MAP_FIXED, MADV_COLLAPSE and MADV_REMOVE."""


class Segment:
    """Shared memory of a fixed size."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor: int | None = descriptor
        self.size = size
        """Bytes, in whole pages."""
        self.bytes: NDArray[np.uint8] = _mapped(descriptor, size)

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new segment of zeros, allocated now: later writes cannot run out of memory."""
        whole = _whole(size)
        try:
            descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.posix_fallocate(descriptor, 0, whole)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, FIXED_SIZE)
                segment = cls(descriptor, whole)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as error:
            raise SegmentError(f"{whole:,} bytes of shared memory could not be allocated: {error}") from error
        if whole >= _HUGE:
            # Where it is refused, small pages work too, more slowly.
            ctypes.CDLL(None).madvise(ctypes.c_void_p(segment.address), ctypes.c_size_t(whole), _COLLAPSE)
        return segment

    @classmethod
    def attach(cls, ticket: str, size: int) -> Segment:
        """The segment of `size` bytes that another process of this host has created, by its ticket."""
        opened = open_ticket(ticket, os.O_RDWR, size=_whole(size))
        try:
            return cls(opened, _whole(size))
        except (OSError, ValueError) as error:
            os.close(opened)
            raise SegmentError(f"the shared memory of ticket {ticket!r} could not be mapped: {error}") from error

    @property
    def ticket(self) -> str:
        """Text by which a peer can attach, while this process keeps the descriptor open."""
        return f"{os.getpid()}:{self._descriptor}:{self.size}"

    def seal(self) -> None:
        """Close the descriptor: no more peers can attach."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def give_back(self) -> None:
        """Free the memory and close the descriptor; peers that still have it mapped read zeros from now on."""
        ctypes.CDLL(None).madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), _REMOVE)
        self.seal()

    def array(self, offset: int, count: int, dtype: Any) -> NDArray[Any]:
        """An array of `count` elements from byte `offset` on."""
        return self.bytes[offset : offset + count * np.dtype(dtype).itemsize].view(dtype)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The same as a torch tensor."""
        raw = torch.from_numpy(self.bytes[offset : offset + count * dtype.itemsize])
        return raw.view(dtype)

    @property
    def address(self) -> int:
        """Its address in this process."""
        return int(self.bytes.ctypes.data)


def _whole(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _mapped(descriptor: int, size: int) -> NDArray[np.uint8]:
    """Map a file; a large one aligned to a huge page, inside a larger reservation."""
    if size < _HUGE:
        return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
    reserved = np.frombuffer(mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    start = -reserved.ctypes.data % _HUGE
    place = ctypes.c_void_p(reserved.ctypes.data + start)
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_SHARED | _FIXED
    address = library.mmap(place, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address != place.value:
        raise OSError(ctypes.get_errno(), "mmap failed")
    return reserved[start : start + size]

"""Keeping freed memory in this process, so that the system need not clear the same pages in every step.

See docs/decisions/0009-kept-memory.md.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_FROM_HEAP = 32 << 20  # The largest mmap threshold that glibc accepts.
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed memory in this process from now on; returns whether that works."""
    # The user's settings in the environment take precedence (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, or
    # `GLIBC_TUNABLES`).
    names = [name for name in os.environ if name.startswith("MALLOC_")]
    settings = " ".join([*names, os.environ.get("GLIBC_TUNABLES", "")]).lower()
    if any(word in settings for word in ("trim_threshold", "mmap_threshold")):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Only glibc has it.
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


class _Info(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "keep")
    )


def give_back_excess(most: int = 512 << 20) -> bool:
    """Return free memory to the system if there is more than `most` bytes of it; returns whether it did."""
    # Freed aligned blocks do not always fit the same request again (glibc before 2.38), so that free memory would grow
    # from step to step.
    library = ctypes.CDLL(None)
    inform = getattr(library, "mallinfo2", None)
    if inform is None:
        return False
    inform.restype = _Info
    return inform().free > most and bool(library.malloc_trim(ctypes.c_size_t(0)))

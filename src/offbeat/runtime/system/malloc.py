"""How this process keeps the memory that it has been given.

A training step allocates the same gradients and activations again and again. By default glibc gives large pieces back
to the system as soon as they are freed, and the system clears every page anew when they are asked for in the next
step: thousands of page faults in each step, up to a third of its time for a model of ten million parameters.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_FROM_HEAP = 32 << 20
"""What glibc takes at most as the size from which a piece is mapped by itself."""
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """From now on freed memory stays with this process, ready to be used again; answers whether that can be had.

    What the user has set in the environment goes before (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, or the
    same in `GLIBC_TUNABLES`).
    """
    told = " ".join(
        [*(name for name in os.environ if name.startswith("MALLOC_")), os.environ.get("GLIBC_TUNABLES", "")]
    )
    if any(word in told.lower() for word in ("trim_threshold", "mmap_threshold")):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Only glibc has it.
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))


class _Info(ctypes.Structure):
    """What glibc's `mallinfo2` tells."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "free", "keep")
    )


def give_back_excess(most: int = 512 << 20) -> bool:
    """If more than so many bytes are kept free, give them back to the system; answers whether they were.

    Aligned pieces that were freed do not always fit the same request again (glibc before 2.38), so that what is kept
    would grow from step to step.
    """
    library = ctypes.CDLL(None)
    inform = getattr(library, "mallinfo2", None)
    if inform is None:
        return False
    inform.restype = _Info
    return inform().free > most and bool(library.malloc_trim(ctypes.c_size_t(0)))

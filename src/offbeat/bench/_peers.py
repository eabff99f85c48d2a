"""Who can sum an array over all ranks: each peer opens its connections once, then makes a place to sum for any size."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float32]
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class PeerArray:
    """An array of this rank, and what a peer does to it."""

    data: FloatArray
    """What this rank contributes, and where the result appears."""
    call: Callable[[], object]
    """One exchange; all ranks call it."""
    sums: bool = True
    """Whether it is a sum; otherwise (a plain copy, to compare with) the array stays as it is."""


Peer = Callable[[int], PeerArray]
"""Makes a place for so many elements."""


def peer(name: str) -> Peer:
    """Open a peer by name, on every rank in the same order; `gloo again` is a second gloo, to show the noise."""
    match name.removesuffix(" again"):
        case "mpi":
            return _mpi()
        case "copy":
            return _copy
        case "zero copy":
            return _zero_copy()
        case backend:
            return _torch(backend)


def _torch(backend: str) -> Peer:
    group = _group(backend)

    def make(count: int) -> PeerArray:
        return _all_reduced(torch.empty(count), group)

    return make


def _all_reduced(tensor: Tensor, group: Any) -> PeerArray:
    # As users call it, with all that torch does around a call.
    all_reduce: Any = dist.all_reduce
    return PeerArray(tensor.numpy(), lambda: all_reduce(tensor, group=group))


def _group(backend: str) -> Any:
    return dist.new_group(backend=backend, timeout=TIMEOUT)


def _mpi() -> Peer:
    # The thread level was settled before the first import, see _ranks.py.
    mpi: Any = importlib.import_module("mpi4py.MPI")
    world: Any = mpi.COMM_WORLD

    def make(count: int) -> PeerArray:
        data: FloatArray = torch.empty(count).numpy()
        return PeerArray(data, lambda: world.Allreduce(mpi.IN_PLACE, data))

    return make


def _copy(count: int) -> PeerArray:
    data: FloatArray = torch.empty(count).numpy()
    elsewhere: FloatArray = torch.zeros(count).numpy()
    return PeerArray(data, lambda: np.copyto(elsewhere, data), sums=False)


def _zero_copy() -> Peer:
    group = _group("offbeat")

    def make(count: int) -> PeerArray:
        return _all_reduced(group.shared_tensor(count, torch.float32), group)

    return make

"""All-reduces that begin without the interpreter: one tensor, waited for, of a sort that was compiled before.

What most programs do most. `quick.c` looks the call up in a group's plans (`Runner.plans`) and starts it; where that
was not built, and for everything unusual, calls take the way of all others, which ends at the same plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions
from torch.distributed import ReduceOp

from offbeat.runtime.backend._op_queue import Finished, OpQueue
from offbeat.runtime.backend._runner import Runner
from offbeat.runtime.collectives.one_sided.kernels import OPERATIONS
from offbeat.runtime.collectives.one_sided.native import Turns, library
from offbeat.runtime.system.malloc import give_back_excess

VERSION = 2
DONE = Finished()
"""What was done before the call returned."""
profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
"""Whether torch's profiler takes notes."""


class Unbegun:
    """Where nothing begins at once."""

    asked = 0
    """How many were begun."""

    def begin(self, tensors: Any, options: Any) -> Any:
        """`DONE` if it is done; None if it is nothing for the quick way, and nothing was touched.

        Else what was begun and the code with which the library came back: then the caller has the turn, and gives it
        back when it has finished.
        """


@cache
def _quicker() -> Any:
    """The compiled one, or None where it was not built, or from another version of its source."""
    try:
        built: Any = import_module("offbeat.runtime.backend._quicker")
    except ImportError:
        return None
    # It takes torch's hash of an operation for its number, which is three times as fast to ask for.
    numbered = all(hash(ReduceOp(operation)) == int(operation) for operation in OPERATIONS)
    return built.Quicker if built.VERSION == VERSION and numbered else None


def state() -> str:
    """Whether calls of all-reduces that are known are compiled, in words."""
    if library() is None:
        return "no: they need the compiled executor"
    return (
        "in use" if _quicker() is not None else "not built: it needs a C compiler and Python's headers at installation"
    )


def quick(runner: Runner | None, line: OpQueue) -> Any:
    """Who begins the all-reduces that are compiled, of a room and of those who stand in line for it; see `Unbegun`."""
    found, quicker = library(), _quicker()
    if runner is None or found is None or quicker is None:
        return Unbegun()
    address = ctypes.cast(found.offbeat_start, ctypes.c_void_p).value
    devices = torch.accelerator.current_accelerator() is not None
    torchs = (AllreduceOptions, Tensor, torch.strided, profiling)
    waiting = (line.queue, line.lock.acquire, line.lock.release)
    return quicker(runner.plans, *waiting, DONE, *torchs, Turns, give_back_excess, devices, address)

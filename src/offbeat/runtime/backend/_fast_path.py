"""Collectives that start without the interpreter: synchronous ones of ordinary tensors, compiled before.

This is what most programs do most. `quick.c` looks the call up in a group's plans (`Runner.plans`) and starts it; where
it was not built, and for every unusual call, the ordinary path ends at the same plans.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from offbeat.runtime.backend._op_queue import Finished, OpQueue
from offbeat.runtime.backend.in_host.runner import Runner
from offbeat.runtime.collectives.one_sided.kernels import OPERATIONS
from offbeat.runtime.collectives.one_sided.native import Turns, library
from offbeat.runtime.system.malloc import give_back_excess

VERSION = 3
REDUCES, ROOTED = 1, 2
"""Flags of a collective: its options have a reduction, or a root."""
DONE = Finished()
"""The work of a call that was done before it returned."""
profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
"""Whether torch's profiler is recording."""
_begin_event: Any = torch._C._autograd._record_function_with_args_enter  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


def profile(name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event for torch's profiler; call the result, on any thread, to end it."""
    record = _begin_event(name, *tensors)
    done: Any = torch.futures.Future()
    # The profiler belongs to the caller's thread: another thread can end an event only through a future.
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, done)
    return lambda: done.set_result(None)


class Unbegun:
    """Stands in where there is no fast path."""

    asked = 0
    """Number of collectives started."""

    def begin(self, kind: int, flags: int, options: Any, outputs: Any, inputs: Any) -> Any:
        """`DONE` if the call is done; None if it is not for the fast path, and nothing was touched.

        Otherwise the plan and the code that the library returned: then the caller holds the turn, and must finish the
        collective and release it.
        """


@cache
def _quicker() -> Any:
    """The compiled class; None where it was not built, or was built from another version of its source."""
    try:
        built: Any = import_module("offbeat.runtime.backend._quicker")
    except ImportError:
        return None
    # It uses torch's hash of an operation as its number, which is three times as fast to get.
    numbered = all(hash(ReduceOp(operation)) == int(operation) for operation in OPERATIONS)
    return built.Quicker if built.VERSION == VERSION and numbered else None


def state() -> str:
    """Whether the fast path is in use, in words."""
    if library() is None:
        return "no: they need the compiled executor"
    return (
        "in use" if _quicker() is not None else "not built: it needs a C compiler and Python's headers at installation"
    )


def quick(runner: Runner | None, line: OpQueue) -> Any:
    """The fast path to a runner's plans, which respects the queue; see `Unbegun`."""
    native, quicker = library(), _quicker()
    if runner is None or native is None or quicker is None:
        return Unbegun()
    address = ctypes.cast(native.offbeat_start, ctypes.c_void_p).value
    devices = torch.accelerator.current_accelerator() is not None
    torchs = (Tensor, torch.strided, profiling)
    waiting = (line.queue, line.lock.acquire, line.lock.release)
    return quicker(runner.plans, *waiting, DONE, *torchs, Turns, give_back_excess, devices, address)

"""The quickest way to an all-reduce that was worked out before: one tensor, waited for, at a place that was seen.

What most programs do most. `quick.c` does the same without the interpreter; where it was not built, this does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.runtime.backend._checks import number_of
from offbeat.runtime.backend._line import Finished, Line
from offbeat.runtime.shared.native import Turns, library

VERSION = 1
WRITTEN = -1
"""In place of a code of the library's: the plan is for the interpreter, and not begun."""
DONE = Finished()
"""What was done before the call returned."""
profiling: Callable[[], bool] = torch.autograd._profiler_enabled  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
"""Whether torch's profiler takes notes."""
_STRIDED = torch.strided


class Begins(Protocol):
    """Begins all-reduces that were worked out before."""

    asked: int
    """How many were begun."""

    def begin(self, tensors: Any, options: Any) -> Any:
        """`DONE` if it is done; None if it is nothing for the quick way, and nothing was touched.

        Else the plan and the code with which the library came back, or `WRITTEN`: then the caller has the turn, and
        gives it back when it has finished.
        """
        ...


class Quick:
    """The same for the interpreter."""

    def __init__(self, plans: Mapping[Any, Any], line: Line, start: Callable[[int], int] | None) -> None:
        self.asked = 0
        self._plans, self._queue, self._lock, self._start = plans, line.queue, line.lock, start

    def begin(self, tensors: Any, options: Any) -> Any:
        """See `Begins`."""
        if type(options) is not AllreduceOptions or type(tensors) is not list or len(tensors) != 1 or options.asyncOp:
            return None
        (tensor,) = tensors
        if type(tensor) is not Tensor or tensor.layout is not _STRIDED or not tensor.is_contiguous():
            return None
        if tensor.is_neg() or profiling():  # Of a view that counts as negated, memory has the opposite.
            return None
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype, number_of(options.reduceOp))
        plan = self._plans.get(key)
        if plan is None or self._queue or not self._lock.acquire(False):
            return None
        self.asked += 1
        if type(plan) is not Turns:
            return plan, WRITTEN
        try:
            code = self._start(plan.address)  # pyright: ignore[reportOptionalCall]
        except BaseException:
            self._lock.release()
            raise
        if code:
            return plan, code
        self._lock.release()
        return DONE


@cache
def _quicker() -> Any:
    """The compiled one, or None where it was not built, or from another version of its source."""
    try:
        built: Any = import_module("offbeat.runtime.backend._quicker")
    except ImportError:
        return None
    return built.Quicker if built.VERSION == VERSION and number_of is hash else None


def state() -> str:
    """Whether calls of all-reduces that are known are compiled, in words."""
    if library() is None:
        return "no: they need the compiled executor"
    return (
        "in use" if _quicker() is not None else "not built: it needs a C compiler and Python's headers at installation"
    )


def quick(plans: Mapping[Any, Any], line: Line, start: Callable[[int], int] | None) -> Begins:
    """Who begins the all-reduces that were worked out in `plans`: compiled, if that was built."""
    found, quicker = library(), _quicker()
    if start is None or found is None or quicker is None:
        return Quick(plans, line, start)
    address = ctypes.cast(found.offbeat_start_turn, ctypes.c_void_p).value
    lock, torchs = line.lock, (AllreduceOptions, Tensor, _STRIDED, profiling)
    return quicker(plans, line.queue, lock.acquire, lock.release, DONE, *torchs, Turns, address)

"""Writes down the calls on one process group: what is asked, where from, and when it is done."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from offbeat.runtime.stamps import About, Mark, Recorder

_OPTIONS: Final = frozenset[Any](
    {
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        GatherOptions,
        ReduceOptions,
        ReduceScatterOptions,
        ScatterOptions,
    }
)
# A member of an enumeration is looked up and written more slowly than a number.
_ENTER, _START, _WAIT, _EXIT, _FAIL = (int(m) for m in (Mark.ENTER, Mark.START, Mark.WAIT, Mark.EXIT, Mark.FAIL))
_NAN = int(Mark.NAN)
_SINGLE = torch.float32
_Key = tuple[str, int | None, torch.dtype | None, int | None, int | None, str, int]
_OFFBEAT = str(Path(__file__).parents[2]) + os.sep
_OURS = (str(Path(torch.__file__).parent) + os.sep, _OFFBEAT, "<frozen")


class Shape(NamedTuple):
    """How a method is to be described."""

    operation: str
    given: int | None = 0
    """Which argument holds what this rank gives, if all ranks must give as much; None where they may differ."""
    rooted: bool = False
    gloo: str | None = None
    """What Gloo's own class calls it, if otherwise."""
    reduces: bool = False
    blocks: bool = False
    """Whether the call itself waits, where no options say so."""
    exchanged: int | None = None
    """Which argument holds tensors that ranks may give different amounts of."""


class Stamps:
    """Counts the calls on one group and writes them down."""

    def __init__(self, recorder: Recorder, name: str, members: Sequence[int]) -> None:
        self._recorder = recorder
        self._group = recorder.group(name)
        self._members = tuple(members)
        size = len(self._members)
        self._written = size if self._members == tuple(range(size)) else self._members
        self._calls = 0
        self._known: dict[_Key, int] = {}
        self._channels: Counter[tuple[str, int, int]] = Counter()

    def collective(self, shape: Shape, act: Callable[..., Any], args: Sequence[Any], more: dict[str, Any]) -> Any:
        """Do it, and say so before and after."""
        recorder = self._recorder
        options = args[-1] if args and type(args[-1]) in _OPTIONS else more.get("opts")
        elements = dtype = how = root = None
        tensors: Sequence[Tensor] = ()
        if shape.given is not None and len(args) > shape.given:
            given = args[shape.given]
            tensors = given if type(given) is list else [given]
            elements = tensors[0].numel() if len(tensors) == 1 else sum(tensor.numel() for tensor in tensors)
            dtype = tensors[0].dtype if tensors else None
        elif shape.exchanged is not None:
            tensors = args[shape.exchanged]
        if options is not None:
            how = int(options.reduceOp.op) if shape.reduces else None
            root = options.rootRank if shape.rooted else None
        file, line = caller()
        key = (shape.operation, elements, dtype, how, root, file, line)
        name = self._known.get(key)
        if name is None:
            name = self._describe(key)
        self._calls = sequence = self._calls + 1
        if tensors and recorder.suspicious and (shape.reduces or shape.exchanged):
            self._inspect(tensors[0], name)
        waited = shape.blocks if options is None else not options.asyncOp
        if recorder.open:
            recorder.look()
        recorder.stamp(_ENTER if waited else _START, name, sequence)
        try:
            work = act(*args, **more)
        except BaseException:
            recorder.stamp(_FAIL, name, sequence)
            raise
        return self._begun(work, name, sequence, waited)

    def _describe(self, key: _Key) -> int:
        """Say what a call is about, once for all calls like it."""
        operation, elements, dtype, how, root, file, line = key
        about = About(
            self._group,
            operation,
            self._written,
            elements,
            None if dtype is None else str(dtype).removeprefix("torch."),
            None if how is None else dist.ReduceOp.RedOpType(how).name.lower(),
            None if root is None or not 0 <= root < len(self._members) else self._members[root],
            caller=_place(file, line),
            backward=_reducing(),
        )
        self._known[key] = name = self._recorder.name((self._group, *key), lambda: about)
        return name

    def _inspect(self, tensor: Tensor, name: int) -> None:
        """Note it, the first time, if what this worker gives is not finite; looked at once in a step."""
        recorder = self._recorder
        sick = _is_sick(tensor)
        if sick is None:
            return
        recorder.suspicious = not sick and not recorder.steps  # A program without steps is looked at always.
        if sick:
            recorder.sick = True
            recorder.stamp(_NAN, name, self._calls, recorder.steps + 1)

    def _begun(self, work: Any, name: int, sequence: int, waited: bool) -> Any:
        if work is None or work.is_completed():
            self._recorder.stamp(_EXIT, name, sequence)
            return work
        return StampedWork(work, self._recorder, name, sequence, waited)

    def message(self, what: str, act: Callable[[], Any], peer: int, tag: int) -> Any:
        """Send or receive, and say so before and after; nobody is -1."""
        recorder = self._recorder
        other = self._members[peer] if 0 <= peer < len(self._members) else -1
        file, line = caller()
        self._channels[what, other, tag] += 1
        sequence = self._channels[what, other, tag]
        name = recorder.name(
            (self._group, what, other, tag, file, line),
            lambda: About(self._group, what, self._written, peer=other, tag=tag, caller=_place(file, line)),
        )
        recorder.look()
        recorder.stamp(_START, name, sequence)
        try:
            work = act()
        except BaseException:
            recorder.stamp(_FAIL, name, sequence)
            raise
        found = self._begun(work, name, sequence, False)
        if other < 0 and isinstance(found, StampedWork):
            found.sources = self._members
        return found


class StampedWork(dist._Work):  # pyright: ignore[reportPrivateUsage]
    """An operation under way, whose end is written down."""

    def __init__(self, work: Any, recorder: Recorder, name: int, sequence: int, waiting: bool) -> None:
        super().__init__()
        self._work, self._recorder, self._name, self._sequence = work, recorder, name, sequence
        self._waiting = waiting
        self._future: Any = None
        self.sources: Sequence[int] = ()
        """Of a receipt from anybody: who may have sent it, by their ranks in the group."""
        recorder.open.append(self)

    def _over(self, mark: int) -> None:
        if self in self._recorder.open:
            self._recorder.open.remove(self)
            self._recorder.stamp(mark, self._name, self._sequence, 0, self._sender() if mark == _EXIT else 0)

    def _sender(self) -> int:
        """1 + who has sent what was received from anybody; 0 if that is not known."""
        if not self.sources:
            return 0
        try:
            return 1 + self.sources[self._work._source_rank()]
        except (RuntimeError, IndexError):
            return 0

    def look(self) -> None:
        """Write its end down if it has ended."""
        # Gloo tells those who wait for its future a moment before it says so itself.
        if self._work.is_completed() or (self._future is not None and self._future.done()):
            self._over(_EXIT)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, and say so."""
        if not self._waiting:
            self._waiting = True
            self._recorder.stamp(_WAIT, self._name, self._sequence)
        try:
            answer = self._work.wait() if timeout is None else self._work.wait(timeout)
        except BaseException:
            self._over(_FAIL)
            raise
        self._over(_EXIT)
        return answer

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over, one way or the other."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is over and well."""
        return self._work.is_success()

    def exception(self) -> Any:
        """What it failed of."""
        return self._work.exception()

    def result(self) -> Any:
        """What came of it."""
        return self._work.result()

    def get_future(self) -> Any:
        """Torch's own: what follows on it is not delayed."""
        self._future = self._work.get_future()
        return self._future

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def source_rank(self) -> int:
        """From whom a message came."""
        return self._work._source_rank()


def _is_sick(tensor: Tensor) -> bool | None:
    """Whether the first number of a tensor is not finite: a loss that is not finite shows in all gradients.

    None of other than single precision: counts and reports are exchanged in double.
    """
    if tensor.dtype is not _SINGLE or not tensor.is_cpu or not tensor.numel():
        return None
    return not math.isfinite(tensor.detach().numpy().item(0))


def caller() -> tuple[str, int]:
    """The file and line of the program, beneath torch and offbeat, that asks."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _reducing() -> bool:
    """Whether DDP's reducer asks. It is no Python: right beneath us lies the call of torch's engine."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith(_OFFBEAT):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _place(file: str, line: int) -> str | None:
    return f"{Path(file).name[-120:]}:{line}" if file else None

"""Records the calls on one process group: what, from where, and when the operations complete."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as _c10d  # pyright: ignore[reportPrivateUsage]

from offbeat.runtime.events.recorder import About, Mark, Recorder

# Plain numbers: enum members are slower to look up and write.
_ENTER, _START, _WAIT, _EXIT, _FAIL = map(int, (Mark.ENTER, Mark.START, Mark.WAIT, Mark.EXIT, Mark.FAIL))
_NAN = int(Mark.NAN)
BareWork: Any = dist._Work  # pyright: ignore[reportPrivateUsage]
"""Torch's class, which is poorly annotated."""
CAPTURES = torch.backends.cuda.is_built()  # Whether CUDA graphs are possible here.


def may_ask() -> bool:
    """Whether an operation's completion may be queried: not during CUDA graph capture, which it would break."""
    return not (CAPTURES and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def handing_on(kind: type[Any]) -> type[Any]:
    """Make a class of works forward the methods that it does not define to the work it holds."""
    for method in vars(BareWork):
        if not method.startswith("__") and method not in vars(kind):

            def call(self: Any, *args: Any, _method: str = method, **more: Any) -> Any:
                return getattr(self._work, _method)(*args, **more)

            call.__name__ = method
            setattr(kind, method, call)
    return kind


@handing_on
class StampedWork(BareWork):
    """An operation in flight, or several that were started one by one, whose end is recorded."""

    def __init__(
        self, work: Any, recorder: Recorder, parts: Sequence[tuple[int, int]], waiting: bool, trails: bool
    ) -> None:
        super().__init__()
        self._work, self._recorder, self._parts = work, recorder, parts  # Names and numbers.
        self._waiting, self._trails = waiting, trails
        self._future: Any = None
        self.sources: Sequence[int] = ()  # Possible senders of a receive from any source, by rank in the group.
        recorder.open.append(self)

    def _note(self, mark: int) -> None:
        value = self._sender() if self.sources and mark == _EXIT else 0
        for name, sequence in self._parts:
            self._recorder.stamp(mark, name, sequence, 0, value)

    def _over(self, mark: int) -> None:
        if self in self._recorder.open:
            self._recorder.open.remove(self)
            self._note(mark)

    def _sender(self) -> int:
        """1 + the sender of a receive from any source; 0 if unknown."""
        try:
            return 1 + self.sources[self._work._source_rank()]
        except (RuntimeError, IndexError):
            return 0

    def look(self) -> None:
        """Record its end if it has ended."""
        # Gloo completes the future a moment before the work. On a device a future only says that the work was queued.
        done = self._future is not None and not self._trails and self._future.done()
        if done or (may_ask() and self._work.is_completed()):
            self._over(_EXIT)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, and record the wait."""
        if not self._waiting:
            self._waiting = True
            self._note(_WAIT)
        try:
            answer = self._work.wait() if timeout is None else self._work.wait(timeout)
        except BaseException:
            self._over(_FAIL)
            raise
        if self._trails:
            self.look()  # Only the device's queue waits: it has ended once it says so.
        else:
            self._over(_EXIT)
        return answer

    def synchronize(self) -> None:
        """The same as wait."""
        self.wait()

    def get_future(self) -> Any:
        """Torch's own future, so that callbacks are not delayed."""
        self._future = self._work.get_future()
        return self._future

    def __getattr__(self, name: str) -> Any:
        """Other attributes of this backend's work."""
        return getattr(self._work, name)


_OPTIONS: Final = frozenset[Any](kind for kind in vars(_c10d).values() if hasattr(kind, "asyncOp"))
_SINGLE = torch.float32
_Key = tuple[str, int | None, torch.dtype | None, int | None, int | None, str, int]
_OFFBEAT = str(Path(__file__).parents[2]) + os.sep
_OURS = (str(Path(torch.__file__).parent) + os.sep, _OFFBEAT, "<frozen")


class CallShape(NamedTuple):
    """How to describe a method of a group."""

    operation: str
    given: int | None = 0  # The argument with this rank's input, if all must give as much; None where they may differ.
    rooted: bool = False
    reduces: bool = False
    blocks: bool = False  # Whether the call itself waits, if no options say otherwise.
    exchanged: int | None = None  # The argument with tensors whose size may differ between ranks.


class Stamps:
    """Counts and records the calls on one group; each of several backends, as in "cpu:gloo,cuda:nccl", counts its own.

    Operations on the CPU and on a device may be called in a different order on another rank.
    """

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        members: Callable[[], Sequence[int]],
        by: Mapping[str, Stamps] | None = None,
    ) -> None:
        self.by = by or {}  # Those of its backends, by type of device, if it has several.
        self._recorder = recorder
        self._group = recorder.group(name)
        self._ask_members = members  # Torch knows the members only after it has made the group.
        self._calls = 0
        self._gathered: list[tuple[int, int]] | None = None
        # Without accelerators all tensors are on the CPU.
        self._devices = torch.accelerator.current_accelerator() is not None
        self._known: dict[_Key, int] = {}
        self._channels: Counter[tuple[str, int, int]] = Counter()

    def at(self, device: torch.device | None) -> Stamps:
        """The counter for calls with tensors on this device, or without any."""
        return self if device is None else self.by.get(device.type, self)

    @cached_property
    def _members(self) -> tuple[int, ...]:
        return tuple(self._ask_members())

    @cached_property
    def _written(self) -> int | tuple[int, ...]:
        size = len(self._members)
        return size if self._members == tuple(range(size)) else self._members

    def collective(self, shape: CallShape, act: Callable[..., Any], args: Sequence[Any], more: dict[str, Any]) -> Any:
        """Do it, and record its start and end."""
        recorder = self._recorder
        options = args[-1] if args and type(args[-1]) in _OPTIONS else more.get("opts")
        elements = dtype = how = root = None
        tensors: Sequence[Tensor] = ()
        if shape.given is not None and len(args) > shape.given:
            argument = args[shape.given]
            tensors = argument if type(argument) is list or type(argument) is tuple else [argument]
            elements = tensors[0].numel() if len(tensors) == 1 else sum(tensor.numel() for tensor in tensors)
            dtype = tensors[0].dtype if tensors else None
        elif shape.exchanged is not None and len(args) > shape.exchanged:
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
        waited = self._gathered is None and (shape.blocks if options is None else not options.asyncOp)
        if recorder.open:
            recorder.look()
        recorder.stamp(_ENTER if waited else _START, name, sequence)
        try:
            work = act(*args, **more)
        except BaseException:
            recorder.stamp(_FAIL, name, sequence)
            raise
        if not CAPTURES and self._gathered is None and work is not None and work.is_completed():
            recorder.stamp(_EXIT, name, sequence)  # The most frequent case, without further calls.
            return work
        return self._begun(work, name, sequence, waited, self._devices and trails(args))

    def _describe(self, key: _Key) -> int:
        """Describe a call, once for all calls like it."""
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
        """Record the first time that this worker's input is not finite; checked once per step."""
        recorder = self._recorder
        sick = _is_sick(tensor)
        if sick is None:
            return
        recorder.suspicious = not sick and not recorder.steps  # A program without steps is always checked.
        if sick:
            recorder.sick = True
            recorder.stamp(_NAN, name, self._calls, recorder.steps + 1)

    def _begun(self, work: Any, name: int, sequence: int, waited: bool, behind: bool) -> Any:
        if self._gathered is not None:
            self._gathered.append((name, sequence))
            return work
        # During graph capture nothing runs yet.
        if work is None or (CAPTURES and not may_ask()) or work.is_completed():
            self._recorder.stamp(_EXIT, name, sequence)
            return work
        return StampedWork(work, self._recorder, ((name, sequence),), waited, behind)

    def gather(self) -> None:
        """Start coalescing: operations from now on are issued together by `gathered`."""
        self._gathered = []

    def gathered(self, act: Callable[[], Any]) -> Any:
        """Issue the coalesced operations, in flight as one piece of work."""
        parts, self._gathered = self._gathered or (), None
        try:
            work = act()
        except BaseException:
            self._end(parts, _FAIL)
            raise
        if parts and work is not None and may_ask():
            return StampedWork(work, self._recorder, parts, False, self._devices)
        self._end(parts, _EXIT)
        return work

    def _end(self, parts: Sequence[tuple[int, int]], mark: int) -> None:
        for name, sequence in parts:
            self._recorder.stamp(mark, name, sequence)

    def message(self, what: str, act: Callable[[], Any], tensors: Any, peer: int, tag: int) -> Any:
        """Send or receive, and record its start and end; peer -1 means any source."""
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
        begun = self._begun(work, name, sequence, False, self._devices and trails((tensors,)))
        if other < 0 and isinstance(begun, StampedWork):
            begun.sources = self._members
        return begun


def device_of(args: Sequence[Any]) -> torch.device | None:
    """The device of the first tensor of a call; None if it has none."""
    for arg in args:
        first = arg
        while isinstance(first, list | tuple) and first:
            first: Any = first[0]
        if isinstance(first, Tensor):
            return first.device
    return None


def trails(args: Sequence[Any]) -> bool:
    """Whether waiting for a call returns before it is done: on an accelerator only its queue waits."""
    device = device_of(args)
    return device is not None and device.type != "cpu"


def _is_sick(tensor: Tensor) -> bool | None:
    """Whether the first number of a tensor is not finite: a NaN loss shows in all gradients.

    None for other than single precision: counts and reports are exchanged in double.
    """
    if tensor.dtype is not _SINGLE or not tensor.is_cpu or not tensor.numel():
        return None
    return not math.isfinite(tensor.detach().numpy().item(0))


def caller() -> tuple[str, int]:
    """The file and line of the program, outside torch and offbeat, that made the call."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _reducing() -> bool:
    """Whether DDP's reducer made the call. It is C++: directly below our frames is torch's engine."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith(_OFFBEAT):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _place(file: str, line: int) -> str | None:
    return f"{Path(file).name[-120:]}:{line}" if file else None

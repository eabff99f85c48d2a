"""Process groups that write down what is asked of them, and when it is done: Gloo's and ours.

Torch's own code calls a group's methods, whether in Python or in C++ as DDP's reducer does; here they are overridden.
Nothing is added to what is exchanged.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from offbeat.runtime.backend._core import ALIVE
from offbeat.runtime.backend._group import OffbeatGroup
from offbeat.runtime.stamps import About, Mark, Recorder

_ProcessGroup: Any = dist.ProcessGroup
_Gloo: Any = dist.ProcessGroupGloo
_OPTIONS: frozenset[type[Any]] = frozenset(
    kind
    for name, kind in vars(torch._C._distributed_c10d).items()
    if name.endswith("Options") and hasattr(kind, "asyncOp")
)
# Looking a member of an enumeration up takes a third as long as writing an event.
_ENTER, _START, _EXIT = Mark.ENTER, Mark.START, Mark.EXIT
_OURS = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[2]) + os.sep, "<frozen")


class _Shape(NamedTuple):
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


_COLLECTIVES = {
    "allreduce": _Shape("all_reduce", reduces=True),
    "allreduce_coalesced": _Shape("all_reduce_coalesced", reduces=True),
    "broadcast": _Shape("broadcast", rooted=True),
    "reduce": _Shape("reduce", rooted=True, reduces=True),
    "allgather": _Shape("all_gather", None),
    "allgather_coalesced": _Shape("all_gather_coalesced", None),
    "all_gather_single": _Shape("all_gather_into_tensor", 1, gloo="_allgather_base"),
    "_allgather_base": _Shape("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": _Shape("all_gather_coalesced", None, gloo="allgather_into_tensor_coalesced"),
    "allgather_into_tensor_coalesced": _Shape("all_gather_coalesced", None),
    "gather": _Shape("gather", None, rooted=True),
    "scatter": _Shape("scatter", None, rooted=True),
    "reduce_scatter": _Shape("reduce_scatter", None, reduces=True),
    "reduce_scatter_single": _Shape("reduce_scatter_tensor", 1, gloo="_reduce_scatter_base", reduces=True),
    "_reduce_scatter_base": _Shape("reduce_scatter_tensor", 1, reduces=True),
    "reduce_scatter_single_coalesced": _Shape(
        "reduce_scatter_coalesced", None, gloo="reduce_scatter_tensor_coalesced", reduces=True
    ),
    "reduce_scatter_tensor_coalesced": _Shape("reduce_scatter_coalesced", None, reduces=True),
    "alltoall": _Shape("all_to_all", None),
    "all_to_all_single": _Shape("all_to_all_single", None, gloo="alltoall_base"),
    "alltoall_base": _Shape("all_to_all_single", None),
    "barrier": _Shape("barrier", None),
    "monitored_barrier": _Shape("monitored_barrier", None, blocks=True),
}
_MESSAGES = {"send": "send to", "recv": "receive from", "recv_anysource": "receive from"}


class Stamps:
    """Counts the calls on one group and writes them down."""

    def __init__(self, recorder: Recorder, name: str, members: Sequence[int]) -> None:
        self._recorder = recorder
        self._group = recorder.group(name)
        self._members = tuple(members)
        self._calls = 0
        self._channels: Counter[tuple[str, int, int]] = Counter()

    def collective(self, shape: _Shape, act: Callable[..., Any], args: Sequence[Any], more: dict[str, Any]) -> Any:
        """Do it, and say so before and after."""
        options = args[-1] if args and type(args[-1]) in _OPTIONS else more.get("opts")
        elements = dtype = None
        if shape.given is not None and len(args) > shape.given:
            given = args[shape.given]
            tensors: Sequence[Tensor] = given if type(given) is list else [given]
            elements = tensors[0].numel() if len(tensors) == 1 else sum(tensor.numel() for tensor in tensors)
            dtype = tensors[0].dtype if tensors else None
        how = options.reduceOp.op if shape.reduces and options is not None else None
        root = options.rootRank if shape.rooted and options is not None else None
        file, line = caller()
        key = (self._group, shape.operation, elements, dtype, how, root, file, line)

        def about() -> About:
            return About(
                self._group,
                shape.operation,
                len(self._members) if self._members == tuple(range(len(self._members))) else self._members,
                elements,
                None if dtype is None else str(dtype).removeprefix("torch."),
                None if how is None else str(how).rpartition(".")[2].lower(),
                None if root is None or not 0 <= root < len(self._members) else self._members[root],
                caller=_place(file, line),
            )

        self._calls += 1
        waited = shape.blocks if options is None else not options.asyncOp
        return self._done(_ENTER if waited else _START, key, about, self._calls, lambda: act(*args, **more))

    def message(self, what: str, act: Callable[[], Any], peer: int, tag: int) -> Any:
        """Send or receive, and say so before and after; nobody is -1."""
        other = self._members[peer] if 0 <= peer < len(self._members) else -1
        file, line = caller()

        def about() -> About:
            return About(self._group, what, (), peer=other, tag=tag, caller=_place(file, line))

        self._channels[what, other, tag] += 1
        key = (self._group, what, other, tag, file, line)
        return self._done(_START, key, about, self._channels[what, other, tag], act)

    def _done(self, begin: Mark, key: Any, about: Callable[[], About], sequence: int, act: Callable[[], Any]) -> Any:
        recorder = self._recorder
        recorder.look()
        name = recorder.name(key, about)
        recorder.stamp(begin, name, sequence)
        try:
            work = act()
        except BaseException:
            recorder.stamp(Mark.FAIL, name, sequence)
            raise
        if work is None or work.is_completed():
            recorder.stamp(_EXIT, name, sequence)
            return work
        return StampedWork(work, recorder, name, sequence, begin is _ENTER)


class StampedWork(dist._Work):  # pyright: ignore[reportPrivateUsage]
    """An operation under way, whose end is written down."""

    def __init__(self, work: Any, recorder: Recorder, name: int, sequence: int, waiting: bool) -> None:
        super().__init__()
        self._work, self._recorder, self._name, self._sequence = work, recorder, name, sequence
        self._waiting = waiting
        self._future: Any = None
        recorder.open.append(self)

    def _over(self, mark: Mark) -> None:
        if self in self._recorder.open:
            self._recorder.open.remove(self)
            self._recorder.stamp(mark, self._name, self._sequence)

    def look(self) -> None:
        """Write its end down if it has ended."""
        # Gloo tells those who wait for its future a moment before it says so itself.
        if self._work.is_completed() or (self._future is not None and self._future.done()):
            self._over(Mark.EXIT)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for it, and say so."""
        if not self._waiting:
            self._waiting = True
            self._recorder.stamp(Mark.WAIT, self._name, self._sequence)
        try:
            answer = self._work.wait() if timeout is None else self._work.wait(timeout)
        except BaseException:
            self._over(Mark.FAIL)
            raise
        self._over(Mark.EXIT)
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


def _collective(method: str, shape: _Shape) -> Callable[..., Any]:
    def stamped(self: Any, *args: Any, **more: Any) -> Any:
        return self.stamps.collective(shape, getattr(super(self.own, self), method), args, more)

    stamped.__name__ = method
    return stamped


def _message(method: str, what: str) -> Callable[..., Any]:
    def stamped(self: Any, tensors: Any, *args: Any, **more: Any) -> Any:
        anybody = method == "recv_anysource"
        peer = -1 if anybody else (args[0] if args else more.get("dst", more.get("src", -1)))
        rest = args if anybody else args[1:]
        tag = rest[0] if rest else more.get("tag", 0)
        act = getattr(super(self.own, self), method)
        return self.stamps.message(what, lambda: act(tensors, *args, **more), peer, tag)

    stamped.__name__ = method
    return stamped


def _stamped(own: type[Any]) -> type[Any]:
    """A class whose methods are its parent's, and written down."""
    own.own = own
    for method, shape in _COLLECTIVES.items():
        setattr(own, method, _collective(method, shape))
    for method, what in _MESSAGES.items():
        setattr(own, method, _message(method, what))
    return own


class _Gloos(_ProcessGroup):
    """A Gloo group as a group in Python: everything is handed on."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        ALIVE.add(self)
        self._rank, self._size, self._store = rank, size, store
        self._gloo: Any = _Gloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """What was asked for."""
        return "gloo"

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """Its own number."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """How many ranks there are."""
        return self._size

    def get_group_store(self) -> dist.Store:
        """Where its ranks met."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._gloo._get_sequence_number_for_group()

    def _set_sequence_number_for_group(self) -> None:
        self._gloo._set_sequence_number_for_group()

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations wait that say nothing else."""
        self._gloo._set_default_timeout(timeout)

    def abort(self) -> None:
        """Give up whatever is going on here."""
        self._gloo.abort()

    def shutdown(self) -> None:
        """Leave the group."""
        self._gloo.shutdown()


def _handed_on(method: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **more: Any) -> Any:
        return getattr(self._gloo, method)(*args, **more)

    call.__name__ = method
    return call


for _method, _shape in _COLLECTIVES.items():
    setattr(_Gloos, _method, _handed_on(_shape.gloo or _method))
for _method in _MESSAGES:
    setattr(_Gloos, _method, _handed_on(_method))


class _Noted:
    """What torch notes down about a Gloo group once it is made: who is in it, and its name."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.global_ranks_in_group: Any = ()

    @property
    def group_name(self) -> str:
        """What torch calls the group."""
        return self._group.name

    @group_name.setter
    def group_name(self, name: str) -> None:
        self._group.named(name, self.global_ranks_in_group)


@_stamped
class StampedOffbeat(OffbeatGroup):
    """Our group, written down."""

    def __init__(
        self,
        recorder: Recorder,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        names: Sequence[int],
        label: str,
        host: str | None,
    ) -> None:
        super().__init__(store, rank, size, timeout, names, label, host)
        self.stamps = Stamps(recorder, _readable(label), tuple(names) or tuple(range(size)))

    def at_once(self, act: Callable[[Any], None], what: str, tensors: Sequence[Tensor] = ()) -> None:
        """What our own algorithms do in shared memory is an exchange, too."""
        self.stamps.collective(_EXCHANGE_NOW, super().at_once, (act, what, tensors), {})

    def later(self, act: Callable[[], None], what: str, tensors: Sequence[Tensor]) -> Any:
        """The same on the group's thread."""
        return self.stamps.collective(_EXCHANGE, super().later, (act, what, tensors), {})


_EXCHANGE = _Shape("exchange", None)
_EXCHANGE_NOW = _Shape("exchange", None, blocks=True)


def stamped_gloo(recorder: Recorder, base: type[Any] = _Gloos) -> None:
    """From now on, groups of this process that torch makes by the name of Gloo are written down."""

    class StampedGloo(base):
        """Made as torch makes a Gloo group."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any = c10d.default_pg_timeout) -> None:
            super().__init__(store, rank, size, timeout)
            self.named("unnamed", ())
            self.options = _Noted(self)
            recorder.kept.append(self)

        name = ""

        def named(self, name: str, members: Sequence[int]) -> None:
            """Torch has said who this is."""
            self.name = name
            self.stamps = Stamps(recorder, _readable(name), tuple(members) or tuple(range(self.getSize())))

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            """What was asked for."""
            return "gloo"

    c10d.ProcessGroupGloo = _stamped(StampedGloo)  # pyright: ignore[reportAttributeAccessIssue]


def _readable(name: str) -> str:
    return "world" if name in ("", "0", "default_pg") else name


def caller() -> tuple[str, int]:
    """The file and line of the program, beneath torch and offbeat, that asks."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _place(file: str, line: int) -> str | None:
    return f"{Path(file).name[-120:]}:{line}" if file else None

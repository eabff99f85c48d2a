"""Process groups that write down what is asked of them, and when it is done: Gloo's and ours.

Torch's own code calls a group's methods, whether in Python or in C++ as DDP's reducer does; here they are overridden.
Nothing is added to what is exchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from offbeat.runtime.backend._core import ALIVE
from offbeat.runtime.backend._group import OffbeatGroup
from offbeat.runtime.backend._stamping import Shape, Stamps
from offbeat.runtime.stamps import Recorder

_ProcessGroup: Any = dist.ProcessGroup
_Gloo: Any = dist.ProcessGroupGloo
_COLLECTIVES = {
    "allreduce": Shape("all_reduce", reduces=True),
    "allreduce_coalesced": Shape("all_reduce_coalesced", reduces=True),
    "broadcast": Shape("broadcast", rooted=True),
    "reduce": Shape("reduce", rooted=True, reduces=True),
    "allgather": Shape("all_gather", None),
    "allgather_coalesced": Shape("all_gather_coalesced", None),
    "all_gather_single": Shape("all_gather_into_tensor", 1, gloo="_allgather_base"),
    "_allgather_base": Shape("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": Shape("all_gather_coalesced", None),
    "allgather_into_tensor_coalesced": Shape("all_gather_coalesced", None),
    "gather": Shape("gather", None, rooted=True),
    "scatter": Shape("scatter", None, rooted=True),
    "reduce_scatter": Shape("reduce_scatter", None, reduces=True),
    "reduce_scatter_single": Shape("reduce_scatter_tensor", 1, gloo="_reduce_scatter_base", reduces=True),
    "_reduce_scatter_base": Shape("reduce_scatter_tensor", 1, reduces=True),
    "reduce_scatter_single_coalesced": Shape("reduce_scatter_coalesced", None, reduces=True),
    "reduce_scatter_tensor_coalesced": Shape("reduce_scatter_coalesced", None, reduces=True),
    "alltoall": Shape("all_to_all", None),
    "all_to_all_single": Shape("all_to_all_single", None, gloo="alltoall_base"),
    "alltoall_base": Shape("all_to_all_single", None),
    "barrier": Shape("barrier", None),
    "monitored_barrier": Shape("monitored_barrier", None, blocks=True),
}
_MESSAGES = {"send": "send to", "recv": "receive from", "recv_anysource": "receive from"}


def _collective(method: str, shape: Shape) -> Callable[..., Any]:
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
        # A group of torch's own around the same Gloo, for what Gloo's class does not show in Python.
        self.stock: Any = _ProcessGroup(rank, size)
        self.stock._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)

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
    shown = hasattr(_Gloo, method)

    def call(self: Any, *args: Any, **more: Any) -> Any:
        return getattr(self._gloo if shown else self.stock, method)(*args, **more)

    call.__name__ = method
    return call


for _method, _shape in _COLLECTIVES.items():
    setattr(_Gloos, _method, _handed_on(_shape.gloo or _method))
for _method in _MESSAGES:
    setattr(_Gloos, _method, _handed_on(_method))


class _Noted:
    """What torch notes down about a Gloo group once it is made: who is in it, and its name."""

    def __init__(self, group: Any) -> None:
        # Not the group itself: it should go, with its threads and sockets, as soon as it is let go.
        self._group = weakref.ref(group)
        self.global_ranks_in_group: Any = ()

    @property
    def group_name(self) -> str:
        """What torch calls the group."""
        return self._found().name

    @group_name.setter
    def group_name(self, name: str) -> None:
        self._found().named(name, self.global_ranks_in_group)

    def _found(self) -> Any:
        return self._group()


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


_EXCHANGE = Shape("exchange", None, exchanged=2)
_EXCHANGE_NOW = Shape("exchange", None, blocks=True, exchanged=2)


def stamped_gloo(recorder: Recorder, base: type[Any] = _Gloos) -> None:
    """From now on, groups of this process that torch makes by the name of Gloo are written down."""

    class StampedGloo(base):
        """Made as torch makes a Gloo group."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any = c10d.default_pg_timeout) -> None:
            recorder.kept.clear()
            super().__init__(store, rank, size, timeout)
            self.named("unnamed", ())
            self.options = _Noted(self)

        name = ""

        def named(self, name: str, members: Sequence[int]) -> None:
            """Torch has said who this is."""
            self.name = name
            self.stamps = Stamps(recorder, _readable(name), tuple(members) or tuple(range(self.getSize())))

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            """What was asked for."""
            return "gloo"

        def shutdown(self) -> None:
            """Leave the group."""
            recorder.kept.append(self._gloo)
            super().shutdown()

    c10d.ProcessGroupGloo = _stamped(StampedGloo)  # pyright: ignore[reportAttributeAccessIssue]


def _readable(name: str) -> str:
    return "world" if name in ("", "0", "default_pg") else name

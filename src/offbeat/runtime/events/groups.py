"""Process groups that write down what is asked of them, and when it is done, whatever their backend is.

Torch's own code calls a group's methods, whether in Python or in C++ as DDP's reducer does; here they are overridden.
Backends are left alone: whoever asks a group for its backend gets the very one that torch has made. Nothing is added to
what is exchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from inspect import getattr_static
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from offbeat.runtime.backend._core import ALIVE
from offbeat.runtime.backend._group import OffbeatGroup
from offbeat.runtime.events.calls import CallShape, Stamps, device_of
from offbeat.runtime.events.recorder import Recorder

_ProcessGroup: Any = dist.ProcessGroup
_Meta: Any = type(_ProcessGroup)
_COLLECTIVES = {
    "allreduce": CallShape("all_reduce", reduces=True),
    "allreduce_coalesced": CallShape("all_reduce_coalesced", reduces=True),
    "broadcast": CallShape("broadcast", rooted=True),
    "reduce": CallShape("reduce", rooted=True, reduces=True),
    "allgather": CallShape("all_gather", None),
    "allgather_coalesced": CallShape("all_gather_coalesced", None),
    "all_gather_single": CallShape("all_gather_into_tensor", 1),
    "_allgather_base": CallShape("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": CallShape("all_gather_coalesced", None),
    "allgather_into_tensor_coalesced": CallShape("all_gather_coalesced", None),
    "gather": CallShape("gather", None, rooted=True),
    "scatter": CallShape("scatter", None, rooted=True),
    "reduce_scatter": CallShape("reduce_scatter", None, reduces=True),
    "reduce_scatter_single": CallShape("reduce_scatter_tensor", 1, reduces=True),
    "_reduce_scatter_base": CallShape("reduce_scatter_tensor", 1, reduces=True),
    "reduce_scatter_single_coalesced": CallShape("reduce_scatter_coalesced", None, reduces=True),
    "reduce_scatter_tensor_coalesced": CallShape("reduce_scatter_coalesced", None, reduces=True),
    "alltoall": CallShape("all_to_all", None),
    "all_to_all_single": CallShape("all_to_all_single", None),
    "alltoall_base": CallShape("all_to_all_single", None),
    "barrier": CallShape("barrier", None),
    "monitored_barrier": CallShape("monitored_barrier", None, blocks=True),
}
_MESSAGES = {"send": "send to", "recv": "receive from", "recv_anysource": "receive from"}
_OLDER = {
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""By which name torch calls groups in Python that do not know the newer one."""
_EXCHANGES = {
    "at_once": CallShape("exchange", None, blocks=True, exchanged=2),
    "later": CallShape("exchange", None, exchanged=2),
}
"""What our own algorithms do in shared memory is an exchange, too: now, or on the group's thread."""

_Type = dist.ProcessGroup.BackendType
_TYPES = (_Type.CUSTOM, _Type.GLOO, _Type.NCCL, _Type.MPI, _Type.UCC, _Type.XCCL)

Act = Callable[[Any], Callable[..., Any]]


def _acting(base: type[Any], method: str, stock: Callable[[Any], Any]) -> Act:
    """How a method does what it did before it was written down."""
    for name in (method, _OLDER.get(method, method)):
        own = getattr_static(base, name, None)
        if own is not None and own is not getattr_static(_ProcessGroup, name, None):
            return own.__get__
    # Calling torch's own method of a group in Python would find the one that is written down, again and again.
    return lambda group: getattr(stock(group), method)


def _collective(method: str, shape: CallShape, acting: Act) -> Callable[..., Any]:
    def stamped(self: Any, *args: Any, **more: Any) -> Any:
        return self.stamps.collective(shape, acting(self), args, more)

    stamped.__name__ = method
    return stamped


def _message(method: str, what: str, acting: Act) -> Callable[..., Any]:
    def stamped(self: Any, tensors: Any, *args: Any, **more: Any) -> Any:
        anybody = method == "recv_anysource"
        peer = -1 if anybody else (args[0] if args else more.get("dst", more.get("src", -1)))
        rest = args if anybody else args[1:]
        tag = rest[0] if rest else more.get("tag", 0)
        act = acting(self)
        return self.stamps.message(what, lambda: act(tensors, *args, **more), tensors, peer, tag)

    stamped.__name__ = method
    return stamped


def _stamped(base: type[Any], stock: Callable[[Any], Any]) -> dict[str, Any]:
    """The methods of a class of groups, written down; `stock`: a group that does what the class leaves to torch."""
    shapes = _COLLECTIVES | _EXCHANGES if issubclass(base, OffbeatGroup) else _COLLECTIVES
    calls = {name: _collective(name, shape, _acting(base, name, stock)) for name, shape in shapes.items()}
    return calls | {name: _message(name, what, _acting(base, name, stock)) for name, what in _MESSAGES.items()}


class Several:
    """The calls on a group with several backends, as "cpu:gloo,cuda:nccl" has: each backend counts its own.

    An operation on the CPU and one on a device may be called in another order on another rank.
    """

    def __init__(self, usual: Stamps, by: Mapping[str, Stamps]) -> None:
        self._usual, self._by = usual, by

    def at(self, device: torch.device | None) -> Stamps:
        """Who counts the calls with tensors there, or without any."""
        return self._usual if device is None else self._by.get(device.type, self._usual)

    def collective(self, shape: CallShape, act: Callable[..., Any], args: Sequence[Any], more: dict[str, Any]) -> Any:
        """Do it, and say so before and after."""
        return self.at(device_of(args)).collective(shape, act, args, more)

    def message(self, what: str, act: Callable[[], Any], tensors: Any, peer: int, tag: int) -> Any:
        """Send or receive, and say so before and after."""
        return self.at(device_of((tensors,))).message(what, act, tensors, peer, tag)


def _counting(recorder: Recorder, group: Any, name: str, members: Callable[[], Sequence[int]]) -> Stamps | Several:
    """Who writes down what is asked of a group."""
    name = "world" if name in ("", "0", "default_pg") else name
    usual = Stamps(recorder, name, members)
    backends = {device.type: group._get_backend(device) for device in group._device_types}
    if len({id(backend) for backend in backends.values()}) < 2:
        return usual
    return Several(usual, {kind: Stamps(recorder, f"{name} on {kind}", members) for kind in sorted(backends)})


def _known(group: Any) -> Callable[[], Sequence[int]]:
    """Who is in a group, once torch says so: not before it is used for the first time."""
    # Not the group itself: it should go, with its threads and sockets, as soon as it is let go.
    kept = weakref.ref(group)

    def members() -> Sequence[int]:
        found: Any = kept()
        ranks: dict[int, int] = c10d._world.pg_group_ranks.get(found, {})  # pyright: ignore
        return sorted(ranks, key=ranks.__getitem__) or range(found.size())

    return members


def stamp_group(recorder: Recorder, group: Any, name: str, members: Sequence[int] | None = None) -> None:
    """From now on, a group that is written in Python is written down. It stays what it is, of a class below its own.

    Others have made it, and handed it out: nothing can be put in its place any more.
    """
    base = type(group)
    group.stamps = _counting(recorder, group, name, _known(group) if members is None else lambda: members)
    group.__class__ = type(f"Stamped{base.__name__}", (base,), _stamped(base, _plain))


def _plain(group: Any) -> Any:
    """A group of torch's own around the same backends, for what a group in Python leaves to torch."""
    plain = _ProcessGroup(group.rank(), group.size())
    # Torch would take backends of one type for the same.
    for device, kind in zip(group._device_types, _TYPES, strict=False):
        plain._register_backend(device, kind, group._get_backend(device))
    plain._set_default_backend(_TYPES[0])
    return plain


class TorchGroup(_ProcessGroup):
    """A group of torch's own, written down: everything is handed on to one that has the same backends."""

    recorder: Recorder
    """Where it is written down."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        ALIVE.add(self)
        self._store, self.stock = store, _ProcessGroup(store, rank, size)
        self._kinds: dict[str, Any] = {}
        self._usual: Any = None
        self.named("unnamed")

    def named(self, name: str) -> None:
        """Torch has said who this is."""
        self.stamps = _counting(self.recorder, self, name, _known(self))

    def _register_backend(self, device: torch.device, kind: Any, backend: Any) -> None:
        self._kinds[device.type] = kind
        super()._register_backend(device, kind, backend)
        self.stock._register_backend(device, kind, backend)

    def _set_default_backend(self, kind: Any) -> None:
        self._usual = kind
        super()._set_default_backend(kind)
        self.stock._set_default_backend(kind)

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self.stock._set_group_name(name)

    def _set_group_desc(self, text: str) -> None:
        super()._set_group_desc(text)
        self.stock._set_group_desc(text)

    @property
    def bound_device_id(self) -> torch.device | None:
        """The only device that its ranks use, if that is known."""
        return self.stock.bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        _ProcessGroup.bound_device_id.fset(self, device)
        self.stock.bound_device_id = device

    def get_group_store(self) -> dist.Store:
        """Where its ranks met."""
        return self._store

    def _start_coalescing(self, device: torch.device) -> None:
        super()._start_coalescing(device)
        self.stamps.at(device).gather()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.stamps.at(device).gathered(lambda: self.stock._end_coalescing(device))

    def split_group(self, *args: Any, **more: Any) -> Any:
        """A group of some of its ranks, written down, too."""
        return self._followed(self.stock.split_group(*args, **more))

    def merge_remote_group(self, *args: Any, **more: Any) -> Any:
        """A group of its ranks and others, written down, too."""
        return self._followed(self.stock.merge_remote_group(*args, **more))

    def _followed(self, made: Any) -> Any:
        if made is None:
            return None
        group = type(self)(made.get_group_store(), made.rank(), made.size())
        group.stock = made
        for device in made._device_types:
            group._register_backend(device, self._kinds[device.type], made._get_backend(device))
        group._set_default_backend(self._usual)
        group._set_group_name(made.group_name)
        group._set_group_desc(made.group_desc)
        return group

    def shutdown(self) -> None:
        """Leave the group."""
        self.recorder.kept.append(self.stock)
        super().shutdown()


for _name, _call in _stamped(_ProcessGroup, attrgetter("stock")).items():
    setattr(TorchGroup, _name, _call)


class _AnyGroup(_Meta):
    """What is a group for torch stays one, whether it is written down or not."""

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _ProcessGroup)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, _ProcessGroup)


def stamp_groups(recorder: Recorder) -> None:
    """From now on, all groups of this process that torch makes are written down, whatever their backends are."""

    class Watched(TorchGroup, metaclass=_AnyGroup):
        """What torch takes for its class of groups."""

    Watched.recorder = recorder
    register = c10d._register_pg_in_world  # pyright: ignore

    def registered(pg: Any, *args: Any, **more: Any) -> None:
        register(pg, *args, **more)
        recorder.kept.clear()
        name = c10d._world.pg_names[pg]  # pyright: ignore
        if isinstance(pg, TorchGroup):
            pg.named(name)
        else:
            stamp_group(recorder, pg, name)

    c10d.ProcessGroup = Watched  # pyright: ignore[reportAttributeAccessIssue]
    c10d._register_pg_in_world = registered  # pyright: ignore

"""Process groups that record their calls, and when these complete, whatever their backend is.

Torch calls a group's methods, in Python or, as DDP's reducer, in C++; here they are overridden. Backends are left
alone: a group still returns the very backend that torch made. Nothing is added to what is exchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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
    "gather": CallShape("gather", None, rooted=True),
    "scatter": CallShape("scatter", None, rooted=True),
    "reduce_scatter": CallShape("reduce_scatter", None, reduces=True),
    "reduce_scatter_single": CallShape("reduce_scatter_tensor", 1, reduces=True),
    "_reduce_scatter_base": CallShape("reduce_scatter_tensor", 1, reduces=True),
    "reduce_scatter_single_coalesced": CallShape("reduce_scatter_coalesced", None, reduces=True),
    "alltoall": CallShape("all_to_all", None),
    "all_to_all_single": CallShape("all_to_all_single", None),
    "barrier": CallShape("barrier", None),
    "monitored_barrier": CallShape("monitored_barrier", None, blocks=True),
}
_MESSAGES = {"send": "send to", "recv": "receive from", "recv_anysource": "receive from"}
_OLDER = {
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}  # The names by which torch calls Python groups that lack the newer ones.
_COLLECTIVES.update({older: _COLLECTIVES[newer] for newer, older in _OLDER.items()})
_EXCHANGES = {
    "at_once": CallShape("exchange", None, blocks=True, exchanged=2),
    "later": CallShape("exchange", None, exchanged=2),
}  # Exchanges of our own algorithms in shared memory: now, or on the group's thread.
_Type = dist.ProcessGroup.BackendType
_TYPES = (_Type.CUSTOM, _Type.GLOO, _Type.NCCL, _Type.MPI, _Type.UCC, _Type.XCCL)

Act = Callable[[Any], Callable[..., Any]]


def _acting(base: type[Any], method: str, stock: Callable[[Any], Any]) -> Act:
    """The implementation of a method without recording."""
    for name in (method, _OLDER.get(method, method)):
        own = getattr_static(base, name, None)
        if own is not None and own is not getattr_static(_ProcessGroup, name, None):
            return own.__get__
    # Torch's own method of a Python group would call the recording one again, forever.
    return lambda group: getattr(stock(group), method)


def _collective(method: str, shape: CallShape, acting: Act) -> Callable[..., Any]:
    def stamped(self: Any, *args: Any, **more: Any) -> Any:
        stamps = self.stamps.at(device_of(args)) if self.stamps.by else self.stamps
        return stamps.collective(shape, acting(self), args, more)

    stamped.__name__ = method
    return stamped


def _message(method: str, what: str, acting: Act) -> Callable[..., Any]:
    def stamped(self: Any, tensors: Any, *args: Any, **more: Any) -> Any:
        anybody = method == "recv_anysource"
        peer = -1 if anybody else (args[0] if args else more.get("dst", more.get("src", -1)))
        rest = args if anybody else args[1:]
        tag = rest[0] if rest else more.get("tag", 0)
        act, stamps = acting(self), self.stamps.at(device_of((tensors,)))
        return stamps.message(what, lambda: act(tensors, *args, **more), tensors, peer, tag)

    stamped.__name__ = method
    return stamped


def _stamped(base: type[Any], stock: Callable[[Any], Any]) -> dict[str, Any]:
    """The recording methods for a group class; `stock`: the group that does what the class leaves to torch."""
    shapes = _COLLECTIVES | _EXCHANGES if issubclass(base, OffbeatGroup) else _COLLECTIVES
    calls = {name: _collective(name, shape, _acting(base, name, stock)) for name, shape in shapes.items()}
    return calls | {name: _message(name, what, _acting(base, name, stock)) for name, what in _MESSAGES.items()}


def _stamps_for(recorder: Recorder, group: Any, name: str, members: Callable[[], Sequence[int]]) -> Stamps:
    name = "world" if name in ("", "0", "default_pg") else name
    backends = {device.type: group._get_backend(device) for device in group._device_types}
    several = len({id(backend) for backend in backends.values()}) > 1
    by = {kind: Stamps(recorder, f"{name} on {kind}", members) for kind in sorted(backends)} if several else {}
    return Stamps(recorder, name, members, by)


def _members_of(group: Any) -> Callable[[], Sequence[int]]:
    """The members of a group, which torch knows only once it is used."""
    # Weak: the group should be freed, with its threads and sockets, as soon as it is dropped.
    reference = weakref.ref(group)

    def members() -> Sequence[int]:
        owner: Any = reference()
        ranks: dict[int, int] = c10d._world.pg_group_ranks.get(owner, {})  # pyright: ignore
        return sorted(ranks, key=ranks.__getitem__) or range(owner.size())

    return members


def stamp_group(recorder: Recorder, group: Any, name: str, members: Sequence[int] | None = None) -> None:
    """Record a Python group from now on, by giving it a subclass of its own class.

    It has already been handed out, so nothing can be put in its place.
    """
    base = type(group)
    group.stamps = _stamps_for(recorder, group, name, _members_of(group) if members is None else lambda: members)
    group.__class__ = type(f"Stamped{base.__name__}", (base,), _stamped(base, _plain))


def _plain(group: Any) -> Any:
    """A stock torch group around the same backends, for what a Python group leaves to torch."""
    plain = _ProcessGroup(group.rank(), group.size())
    # Distinct types, because torch takes backends of one type for the same.
    for device, kind in zip(group._device_types, _TYPES, strict=False):
        plain._register_backend(device, kind, group._get_backend(device))
    plain._set_default_backend(_TYPES[0])
    return plain


class TorchGroup(_ProcessGroup):
    """A recording torch group, which forwards everything to a stock one with the same backends."""

    recorder: Recorder

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        ALIVE.add(self)
        self._store, self.stock = store, _ProcessGroup(store, rank, size)
        self._kinds: dict[str, Any] = {}
        self._default: Any = None
        self.named("unnamed")

    def named(self, name: str) -> None:
        """Set the name given by torch."""
        self.stamps = _stamps_for(self.recorder, self, name, _members_of(self))

    def _register_backend(self, device: torch.device, kind: Any, backend: Any) -> None:
        self._kinds[device.type] = kind
        super()._register_backend(device, kind, backend)
        self.stock._register_backend(device, kind, backend)

    def _set_default_backend(self, kind: Any) -> None:
        self._default = kind
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
        """The only device of its ranks, if known."""
        return self.stock.bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        _ProcessGroup.bound_device_id.fset(self, device)
        self.stock.bound_device_id = device

    def get_group_store(self) -> dist.Store:
        """The rendezvous store."""
        return self._store

    def _start_coalescing(self, device: torch.device) -> None:
        super()._start_coalescing(device)
        self.stamps.at(device).gather()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.stamps.at(device).gathered(lambda: self.stock._end_coalescing(device))

    def split_group(self, *args: Any, **more: Any) -> Any:
        """A recording group of some of its ranks."""
        return self._recording(self.stock.split_group(*args, **more))

    def merge_remote_group(self, *args: Any, **more: Any) -> Any:
        """A recording group of its ranks and others."""
        return self._recording(self.stock.merge_remote_group(*args, **more))

    def _recording(self, stock: Any) -> Any:
        if stock is None:
            return None
        group = type(self)(stock.get_group_store(), stock.rank(), stock.size())
        group.stock = stock
        for device in stock._device_types:
            group._register_backend(device, self._kinds[device.type], stock._get_backend(device))
        group._set_default_backend(self._default)
        group._set_group_name(stock.group_name)
        group._set_group_desc(stock.group_desc)
        return group

    def shutdown(self) -> None:
        """Leave the group."""
        self.recorder.kept.append(self.stock)
        super().shutdown()


for _name, _call in _stamped(_ProcessGroup, attrgetter("stock")).items():
    setattr(TorchGroup, _name, _call)


class _AnyGroup(_Meta):
    """Keeps isinstance checks true for every torch group, recording or not."""

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _ProcessGroup)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, _ProcessGroup)


def stamp_groups(recorder: Recorder) -> None:
    """Record all groups that torch makes in this process from now on, whatever their backends are."""

    class Watched(TorchGroup, metaclass=_AnyGroup):
        """Replaces torch's group class."""

    Watched.recorder = recorder
    register = c10d._register_pg_in_world  # pyright: ignore

    def register_group(pg: Any, *args: Any, **more: Any) -> None:
        register(pg, *args, **more)
        recorder.kept.clear()
        name = c10d._world.pg_names[pg]  # pyright: ignore
        if isinstance(pg, TorchGroup):
            pg.named(name)
        else:
            stamp_group(recorder, pg, name)

    c10d.ProcessGroup = Watched  # pyright: ignore[reportAttributeAccessIssue]
    c10d._register_pg_in_world = register_group  # pyright: ignore

"""Registration of the backend with torch, under its own name or in place of Gloo."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from offbeat.runtime.backend._group import OffbeatGroup

NAME = "offbeat"


@dataclass(frozen=True)
class Options:
    """Options of a new group, passed as `pg_options`."""

    host: str | None = None
    """Host identity of this rank, instead of the detected one."""


def register() -> None:
    """Register the backend with torch; calling it again does nothing."""
    if NAME.upper() in dist.Backend._plugins:  # pyright: ignore[reportPrivateUsage]
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(request: Any, options: Any) -> Any:
    from offbeat.runtime.backend._group import OffbeatGroup

    _teach_monitored_barrier()
    _teach_built_in_hooks()
    host, names = options.host if isinstance(options, Options) else None, list(request.global_ranks_in_group)
    place = request.store, request.group_rank, request.group_size
    return OffbeatGroup(*place, request.timeout, names, request.group_id, host)


def open_group(store: dist.Store, rank: int, size: int, timeout: timedelta, label: str = "") -> OffbeatGroup:
    """Open a group that torch does not know of; in a monitored run it records its calls."""
    from offbeat.runtime.backend._group import OffbeatGroup
    from offbeat.runtime.events.recorder import RECORDER

    group = OffbeatGroup(store, rank, size, timeout, label=label)
    recorder = RECORDER.get()
    if recorder is not None:
        from offbeat.runtime.events.groups import stamp_group

        stamp_group(recorder, group, label, range(size))
    return group


@cache
def _teach_monitored_barrier() -> None:
    """Torch calls a group's monitored_barrier only if its backend is named gloo; let it call ours, too."""
    stock = c10d.monitored_barrier

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        if not c10d._rank_not_in_group(group) and c10d.get_backend(group) == NAME:  # pyright: ignore[reportPrivateUsage]
            if isinstance(timeout, float):
                warnings.warn(
                    f"Please specify timeout arg as a timedelta. Converting current value of {timeout} assuming it "
                    f"represents seconds",
                    stacklevel=2,
                )
                timeout = timedelta(seconds=timeout)
            if timeout is not None:
                c10d._check_valid_timeout(timeout)  # pyright: ignore[reportPrivateUsage]
            ours: Any = c10d._get_default_group() if group is None else group  # pyright: ignore[reportPrivateUsage]
            return ours.monitored_barrier(timeout, wait_all_ranks)
        return stock(group, timeout, wait_all_ranks)

    monitored_barrier.__doc__ = stock.__doc__
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier


@cache
def _teach_built_in_hooks() -> None:
    """DDP's C++ hook for half precision works with C++ groups only; use torch's equivalent in Python for ours."""
    from torch.nn.parallel import DistributedDataParallel

    from offbeat.runtime.backend._group import OffbeatGroup

    kind: Any = DistributedDataParallel
    stock = kind._register_builtin_comm_hook

    def register_hook(self: Any, comm_hook_type: Any) -> None:
        half = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        if not (half and isinstance(self.process_group, OffbeatGroup)):
            stock(self, comm_hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        self.register_comm_hook(self.process_group, fp16_compress_hook)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    register_hook.__doc__ = stock.__doc__
    kind._register_builtin_comm_hook = register_hook


def stand_in_for_gloo() -> None:
    """From now on, create our groups in this process where Gloo groups are requested."""
    from offbeat.runtime.backend._group import OffbeatGroup

    stock: Any = dist.ProcessGroupGloo
    kind: Any = type(OffbeatGroup)

    class GlooBackendType(kind):
        """Makes real Gloo groups instances as well: torch checks the one that carries our messages."""

        def __instancecheck__(self, instance: object) -> bool:
            return super().__instancecheck__(instance) or isinstance(instance, stock)

    class StandIn(OffbeatGroup, metaclass=GlooBackendType):
        """Constructed as torch constructs a Gloo group."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any = c10d.default_pg_timeout) -> None:
            _teach_built_in_hooks()
            super().__init__(store, rank, size, timeout)
            self.options = GlooRecord()

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            return "gloo"

    class GlooRecord:
        """Attributes that torch sets on a Gloo group."""

        global_ranks_in_group: Any = ()
        group_name = ""

    c10d.ProcessGroupGloo = StandIn  # pyright: ignore[reportAttributeAccessIssue]

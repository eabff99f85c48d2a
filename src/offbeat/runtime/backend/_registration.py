"""How torch gets to know the backend, under its own name or in Gloo's place."""

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
    """What may be said of a group when it is made, as `pg_options`."""

    host: str | None = None
    """The host that this rank counts as living on, instead of the one that it finds itself on."""


def register() -> None:
    """Make the backend known to torch; more than once does no harm."""
    if NAME.upper() in dist.Backend._plugins:  # pyright: ignore[reportPrivateUsage]
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(told: Any, given: Any) -> Any:
    from offbeat.runtime.backend._group import OffbeatGroup

    _teach_monitored_barrier()
    _teach_built_in_hooks()
    host = given.host if isinstance(given, Options) else None
    names = list(told.global_ranks_in_group)
    return OffbeatGroup(told.store, told.group_rank, told.group_size, told.timeout, names, told.group_id, host)


def open_group(store: dist.Store, rank: int, size: int, timeout: timedelta, label: str = "") -> OffbeatGroup:
    """A group of ours that torch does not know; in a run that is watched, one that writes down what is asked of it."""
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
    """Torch asks for a backend named gloo before it calls a group's monitored_barrier; ours has one, too."""
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
    """DDP's hook in C++ for half precision takes results of groups in C++ only; torch has the same one in Python."""
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
    """From now on, groups of this process that are asked for by the name of Gloo are ours."""
    from offbeat.runtime.backend._group import OffbeatGroup

    stock: Any = dist.ProcessGroupGloo
    kind: Any = type(OffbeatGroup)

    class GlooBackendType(kind):
        """Torch asks whether the group that carries our messages is of Gloo's kind, too."""

        def __instancecheck__(self, instance: object) -> bool:
            """Whether it is of the kind that was put in Gloo's place, or of Gloo's."""
            return super().__instancecheck__(instance) or isinstance(instance, stock)

    class StandIn(OffbeatGroup, metaclass=GlooBackendType):
        """Made as torch makes a Gloo group."""

        def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any = c10d.default_pg_timeout) -> None:
            _teach_built_in_hooks()
            super().__init__(store, rank, size, timeout)
            self.options = GlooRecord()

        def getBackendName(self) -> str:  # noqa: N802 - torch's name
            """What was asked for."""
            return "gloo"

    class GlooRecord:
        """What torch notes down about a Gloo group."""

        global_ranks_in_group: Any = ()
        group_name = ""

    c10d.ProcessGroupGloo = StandIn  # pyright: ignore[reportAttributeAccessIssue]

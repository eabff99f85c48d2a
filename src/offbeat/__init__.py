"""offbeat: train in lockstep when it pays, off the beat when it doesn't.

The public names, imported when first used, so that `offbeat --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from offbeat._on_import import once_imported
from offbeat._version import __version__

if TYPE_CHECKING:
    from offbeat.errors import OffbeatError
    from offbeat.league import League, compare
    from offbeat.run.drive import Result, fit
    from offbeat.runtime.data.client_datasets import ClientDatasets
    from offbeat.runtime.hosts import Host, Hosts
    from offbeat.runtime.programs.task_update import programmed_update
    from offbeat.scaling import BatchSize, Scaling, batch_size, scale
    from offbeat.strategies import Strategy, parse
    from offbeat.task import Data, IterativeTask, Task, accuracy
    from offbeat.team.team import Team, init

_WHERE = {
    name: module
    for module, names in {
        "offbeat.errors": ("OffbeatError",),
        "offbeat.league": ("League", "compare"),
        "offbeat.run.drive": ("Result", "fit"),
        "offbeat.runtime.data.client_datasets": ("ClientDatasets",),
        "offbeat.runtime.hosts": ("Host", "Hosts"),
        "offbeat.runtime.programs.task_update": ("programmed_update",),
        "offbeat.scaling": ("BatchSize", "Scaling", "batch_size", "scale"),
        "offbeat.strategies": ("Strategy", "parse"),
        "offbeat.task": ("Data", "IterativeTask", "Task", "accuracy"),
        "offbeat.team.team": ("Team", "init"),
    }.items()
    for name in names
}

__all__ = ["BatchSize", "ClientDatasets", "Data", "Host", "Hosts", "IterativeTask", "League", "OffbeatError"]
__all__ += [
    "Result",
    "Scaling",
    "Strategy",
    "Task",
    "Team",
    "__version__",
    "accuracy",
    "batch_size",
    "compare",
    "fit",
    "init",
    "parse",
    "programmed_update",
]
__all__ += ["scale"]


def __getattr__(name: str) -> object:
    if name in ("data", "federated"):
        return importlib.import_module(f"offbeat.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])


def _register() -> None:
    from offbeat.runtime.backend._registration import register

    register()


# So that `dist.init_process_group("offbeat")` works after `import offbeat`, whichever of the two was imported first.
once_imported("torch.distributed", _register)

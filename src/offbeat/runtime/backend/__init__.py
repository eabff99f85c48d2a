"""The backend `offbeat` of torch.distributed: `import offbeat; dist.init_process_group("offbeat")`.

Any program that runs on Gloo runs on it. Inside a host, collectives go through shared memory; results are bitwise
equal on all ranks and in every run, because numbers are always combined in rank order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.runtime.backend._call_ids import CollectiveError, ConsequenceError, MismatchError
    from offbeat.runtime.backend._default_algorithm import GLOO, planned_algorithm
    from offbeat.runtime.backend._group import OffbeatGroup
    from offbeat.runtime.backend._registration import Options, open_group, register, stand_in_for_gloo

__all__ = [
    "GLOO",
    "CollectiveError",
    "ConsequenceError",
    "MismatchError",
    "OffbeatGroup",
    "Options",
    "open_group",
    "planned_algorithm",
    "register",
    "stand_in_for_gloo",
]
_MODULES = {
    **dict.fromkeys(("GLOO", "planned_algorithm"), "_default_algorithm"),
    **dict.fromkeys(("CollectiveError", "ConsequenceError", "MismatchError"), "_call_ids"),
    "OffbeatGroup": "_group",
}


def __getattr__(name: str) -> object:
    # Torch may be half imported when the backend is registered, and not every module can be imported then.
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, '_registration')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

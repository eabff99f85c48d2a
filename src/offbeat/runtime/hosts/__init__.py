"""The hosts of a run: which there are, what their links carry, and who lives where.

`Hosts` says what is wanted, in a file or in Python. `placed(hosts)` makes it so while it lasts, and says where each is
found. The one kind of host so far is a network namespace of this machine; another is one more entry of `_KINDS`. See
docs/hosts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType

from offbeat.runtime.hosts._namespaces import abandoned, existing, made_here, namespaces, sweep, why_not
from offbeat.runtime.hosts._placed import Placed, PlacedHost, Seat
from offbeat.runtime.hosts._wanted import Host, Hosts

_KINDS: Mapping[str, Callable[[Hosts], AbstractContextManager[Placed]]] = MappingProxyType({"namespace": namespaces})


def placed(hosts: Hosts) -> AbstractContextManager[Placed]:
    """The hosts, ready for processes, while it lasts; afterwards nothing of them is left."""
    return _KINDS[hosts.kind](hosts)


__all__ = [
    "Host",
    "Hosts",
    "Placed",
    "PlacedHost",
    "Seat",
    "abandoned",
    "existing",
    "made_here",
    "namespaces",
    "placed",
    "sweep",
    "why_not",
]

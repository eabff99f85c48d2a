"""The algorithm of a collective where the user has not chosen one: what the backend runs is what the planner costs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from offbeat.protocols.collectives import Collective
from offbeat.protocols.schedule import View
from offbeat.runtime.collectives.one_sided.arena import ONE_SHOT

GLOO: Mapping[Collective, str] = MappingProxyType(
    {Collective.ALL_REDUCE: "ring", Collective.ALL_GATHER: "ring", Collective.BROADCAST: "doubling"}
)
"""The algorithms that Gloo runs at any size, according to its source; only for collectives that are counted."""


def native(collective: Collective, nbytes: int, shares_memory: bool, several_on_a_host: bool) -> str:
    """The algorithm of the backend, for `nbytes` of each rank."""
    if not shares_memory:
        return "hierarchical_shared" if several_on_a_host and collective is Collective.ALL_REDUCE else GLOO[collective]
    if collective is Collective.ALL_REDUCE:
        return "one_shot" if nbytes <= ONE_SHOT else "two_shot"
    return "two_shot" if collective is Collective.REDUCE else "one_shot"


def planned_algorithm(collective: Collective, nbytes: int, view: View) -> str:
    """The same for ranks that have not started yet, assuming that those of one host can share memory."""
    hosts = len(set(view.hosts.tolist()))
    return native(collective, nbytes, hosts == 1, 1 < hosts < view.size)

"""Every collective in every algorithm, as schedules: data that is run, simulated, costed, checked and drawn.

In place, on one buffer of `layout.count` elements per rank, with block r being the r-th of `layout.blocks(size)`:

- all-reduce, and reduce (at the root): the sum of all; broadcast: the root's;
- reduce-scatter: rank r ends with block r of the sum; all-gather and gather (at the root): it begins with block r;
- scatter: rank r ends with block r of the root's;
- all-to-all: block t of rank s ends as block s of rank t; all blocks are equal;
- barrier: nothing, but nobody is done before all have begun; it moves one element, whose value means nothing.

What a rank's buffer holds elsewhere in the end is undefined.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from offbeat.errors import UsageError, did_you_mean
from offbeat.protocols.collectives.across_hosts import hierarchical_shared
from offbeat.protocols.collectives.simple import SIMPLE, Algorithm, Collective

__all__ = ["ALGORITHMS", "Algorithm", "Collective", "algorithm"]

_COMPOSED = (
    Algorithm(
        "hierarchical_shared",
        Collective.ALL_REDUCE,
        hierarchical_shared,
        "memory inside hosts, a ring between",
        one_sided=True,
        pieced=True,
    ),
)

ALGORITHMS: Mapping[Collective, Mapping[str, Algorithm]] = MappingProxyType(
    {
        collective: MappingProxyType(
            {each.name: each for each in (*SIMPLE, *_COMPOSED) if each.collective is collective}
        )
        for collective in Collective
    }
)
"""All algorithms, by collective and name."""


def algorithm(collective: Collective, name: str) -> Algorithm:
    """The algorithm of that name; an unknown one is refused with the valid ones and the nearest."""
    known = ALGORITHMS[collective]
    if name not in known:
        raise UsageError(f"there is no algorithm {name!r} for {collective.value}.{did_you_mean(name, known)}")
    return known[name]

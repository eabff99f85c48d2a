"""Which worker gets which place of a split replica, so that what exchanges most is on one host.

The ways of a stage sum activations in every layer, stages send activations once for each microbatch, and replicas meet
once in a step. So ways are kept on one host first, then neighbouring stages; replicas may be anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from offbeat.errors import UsageError

AUTO, IN_ORDER = "auto", "ranks"
"""Placements by name: by the hosts, and workers in the order of their ranks."""
Order = tuple[int, ...]
"""The worker at each place; places are counted by replica, then stage, then way."""


_Run = list[list[int]]
"""Stages of a replica that are on one host: for each, its workers by way."""
Item = TypeVar("Item")


class Crossings(NamedTuple):
    """What goes between hosts."""

    ways: int
    """Stages of replicas whose ways are on several hosts."""
    stages: int
    """Pairs of workers with neighbouring stages that are on different hosts."""


def chosen(setting: str, hosts: Sequence[int], stages: int, ways: int) -> Order:
    """The worker at each place, as somebody has said: auto, ranks, or the workers themselves."""
    if setting == AUTO:
        return placement(hosts, stages, ways)
    if setting == IN_ORDER:
        return tuple(range(len(hosts)))
    words = [word.strip() for word in setting.split(",")]
    if sorted(words) != sorted(map(str, range(len(hosts)))):
        raise UsageError(
            f"--placement {setting} does not place every worker once. Say {AUTO}, {IN_ORDER}, or the numbers of all "
            f"{len(hosts)} workers, separated by commas: those of replica 0, stage by stage, then of the next."
        )
    if "0" not in words[: stages * ways]:
        raise UsageError(
            f"--placement {setting} has worker 0 in another replica than the first. It draws the order of the data for "
            f"all: put its replica first."
        )
    return tuple(map(int, words))


def placement(hosts: Sequence[int], stages: int, ways: int) -> Order:
    """The worker at each place, for the host of each worker: ways on one host first, then neighbouring stages."""
    orders = tuple(range(len(hosts))), _host_by_host(hosts, stages, ways)
    # Workers in the order of their ranks unless another order is better.
    return min(orders, key=lambda order: crossings(order, hosts, stages, ways))


def crossings(order: Order, hosts: Sequence[int], stages: int, ways: int) -> Crossings:
    """What goes between hosts in an order of the workers."""
    groups = _grouped([hosts[rank] for rank in order], ways)
    split = sum(len(set(group)) > 1 for group in groups)
    neighbours = [pair for replica in _grouped(groups, stages) for pair in pairwise(replica)]
    apart = sum(one != other for before, after in neighbours for one, other in zip(before, after, strict=True))
    return Crossings(split, apart)


def _host_by_host(hosts: Sequence[int], stages: int, ways: int) -> Order:
    """Whole stages from each host, then whole replicas of these; what is left over is put together."""
    replicas: list[list[_Run]] = []
    pools: list[_Run] = []
    rest: list[int] = []
    for host in dict.fromkeys(hosts):
        members = [rank for rank, own in enumerate(hosts) if own == host]
        whole = len(members) // ways * ways
        rest += members[whole:]
        groups = _grouped(members[:whole], ways)
        complete = len(groups) // stages * stages
        replicas += [[run] for run in _grouped(groups[:complete], stages)]
        pools.append(groups[complete:])
    pools += [[group] for group in _grouped(rest, ways)]
    replicas += _put_together([pool for pool in pools if pool], stages)
    # Worker 0 in replica 0, and so on, as far as hosts let them.
    in_order = sorted(sorted(replica) for replica in replicas)
    return tuple(rank for replica in in_order for run in replica for group in run for rank in group)


def _put_together(pools: list[_Run], stages: int) -> list[list[_Run]]:
    """Replicas from stages of several hosts; a pool is divided only where none fits into what a replica still needs."""
    replicas: list[list[_Run]] = []
    while pools:
        replica: list[_Run] = []
        while needed := stages - sum(map(len, replica)):
            fitting = [pool for pool in pools if len(pool) <= needed]
            pool = max(fitting, key=len) if fitting else min(pools, key=len)
            replica.append(pool[:needed])
            del pool[:needed]
            pools = [pool for pool in pools if pool]
        replicas.append(replica)
    return replicas


def _grouped(items: Sequence[Item], size: int) -> list[list[Item]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]

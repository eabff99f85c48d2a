"""Registry of strategies by name: the built-in ones, and those of installed packages.

An entry point that fails to load is reported when it is looked up by name. Built-in names cannot be overridden.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Final

from offbeat.errors import StrategyError, did_you_mean
from offbeat.strategies._base import Strategy, verify
from offbeat.strategies.accumulate import Accumulate
from offbeat.strategies.allreduce import AllReduce
from offbeat.strategies.coded import Coded
from offbeat.strategies.compressors import COMPRESSORS
from offbeat.strategies.ddp import DDP
from offbeat.strategies.downpour import Downpour
from offbeat.strategies.elastic import Elastic
from offbeat.strategies.federated.strategy import Federated
from offbeat.strategies.gossip import Gossip
from offbeat.strategies.hogwild import Hogwild
from offbeat.strategies.language.fields import shown
from offbeat.strategies.local import Local
from offbeat.strategies.sandblaster import Sandblaster
from offbeat.strategies.server import Server
from offbeat.strategies.single import Single
from offbeat.strategies.splitting.pipeline import Pipeline
from offbeat.strategies.splitting.tensor import TensorParallel

BUILT_IN: Final[tuple[type[Strategy], ...]] = (
    *(
        Single,
        DDP,
        AllReduce,
        Server,
        Coded,
        Downpour,
        Elastic,
        Hogwild,
        Gossip,
        Federated,
        Sandblaster,
        Accumulate,
        Local,
    ),
    *COMPRESSORS,
    *(Pipeline, TensorParallel),
)
"""Built-in strategies, in the order in which they are listed."""

GROUP: Final = "offbeat.strategies"
"""The entry point group of strategies in installed packages."""


def available() -> dict[str, type[Strategy]]:
    """Every strategy that can be named: built-in ones first, then those of installed packages that load."""
    known: dict[str, type[Strategy]] = {cls.name: cls for cls in BUILT_IN}
    for name, points in sorted(_entry_points().items()):
        with contextlib.suppress(StrategyError):
            known.setdefault(name, _load(name, points))
    return known


def aliases() -> dict[str, str]:
    """Every alias, with the text it stands for."""
    return aliases_of(available().values())


def lookup(name: str) -> type[Strategy]:
    """The strategy of this name; not of an alias, see `resolve`."""
    for cls in BUILT_IN:
        if cls.name == name:
            return cls
    points = _entry_points()
    if name in points:
        return _load(name, points[name])
    raise _unknown(name, [*(cls.name for cls in BUILT_IN), *points, *aliases()])


def resolve(name: str, registry: Mapping[str, type[Strategy]] | None = None) -> type[Strategy] | str:
    """What a name stands for: a strategy, or an alias's text. `registry` replaces all known strategies."""
    if registry is None:
        # Built-in ones first, so that their names never wait for, or fail with, an installed package.
        registry = {cls.name: cls for cls in BUILT_IN}
        if name not in registry and name not in aliases_of(BUILT_IN):
            text = None if name in _entry_points() else aliases().get(name)
            return lookup(name) if text is None else text
    known_aliases = aliases_of(registry.values())
    if name not in registry and name not in known_aliases:
        raise _unknown(name, [*registry, *known_aliases])
    return registry[name] if name in registry else known_aliases[name]


def aliases_of(classes: Iterable[type[Strategy]]) -> dict[str, str]:
    """The aliases of these classes; the first to declare an alias keeps it."""
    return {alias: text for cls in reversed([*classes]) for alias, text in cls.aliases.items()}


def is_known(cls: type[Strategy]) -> bool:
    """Whether a class can be written by its name alone; entry points are not loaded to find out."""
    if cls in BUILT_IN:
        return True
    points = _entry_points().get(cls.name, [])
    return [point.value for point in points] == [f"{cls.__module__}:{cls.__qualname__}"]


def _entry_points() -> dict[str, list[metadata.EntryPoint]]:
    """Entry points of installed packages, by name; several packages may use one name."""
    by_name: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=GROUP):
        same_name = by_name.setdefault(point.name, [])
        # A package that is on the path twice (installed, and as source) has the same entry point twice.
        if point.value not in [other.value for other in same_name]:
            same_name.append(point)
    return by_name


def _load(name: str, points: list[metadata.EntryPoint]) -> type[Strategy]:
    offered = " and ".join(point.value for point in points)
    if len(points) > 1:
        raise StrategyError(f"{name!r} is offered by {offered}, so it is not clear which is meant. Write one of them.")
    try:
        cls = points[0].load()
    except Exception as error:  # whatever the module raises while it is imported
        raise StrategyError(
            f"The strategy {name!r} of an installed package ({offered}) cannot be loaded: "
            f"{type(error).__name__}: {error}. Repair or uninstall that package."
        ) from error
    if not (inspect.isclass(cls) and issubclass(cls, Strategy)):
        raise StrategyError(f"The entry point {name!r} ({offered}) is not an offbeat Strategy. Tell its authors.")
    if cls.name != name:
        raise StrategyError(
            f"The entry point {name!r} ({offered}) is a strategy named {cls.name!r}, so its text would not read "
            f"back. Its authors should make the two names equal."
        )
    verify(cls)
    return cls


def _unknown(name: str, valid: Iterable[str]) -> StrategyError:
    return StrategyError(f"Unknown strategy {shown(name)!r}.{did_you_mean(name, set(valid))}")

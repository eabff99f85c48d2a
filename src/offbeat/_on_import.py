"""Do something as soon as a module has been imported, without importing it: torch takes a second to come."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def once_imported(name: str, act: Callable[[], None]) -> None:
    """Call `act` when module `name` has been imported: now, if it has."""
    loaded = sys.modules.get(name)
    if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
        act()
    else:
        sys.meta_path.insert(0, _Hook(name, act))


class _Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act
        self._own: Any = None  # The module's own loader.

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Let the others find it, and stand in for its loader once."""
        del path, target
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._own, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As its own loader does; then act."""
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._act()

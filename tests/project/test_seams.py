"""The seams between strategies and team stay narrow: a small core, capabilities by type, classes of a readable size."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.errors import StrategyError
from offbeat.strategies import Exchange
from offbeat.strategies.worker import capabilities as _capabilities
from offbeat.strategies.worker.exchange import EveryBatch, pace_of

SOURCE = Path(offbeat.__file__).parent
CAPABILITIES: list[Any] = [
    kind for _, kind in inspect.getmembers(_capabilities, inspect.isclass) if kind.__module__ == _capabilities.__name__
]


SNAPSHOTTING = ("snapshots", "publishes", "want_snapshot", "cut")


class Least(Exchange):
    """An exchange that can do nothing but what every one must."""

    def install(self, model: object) -> None:
        """Nothing to hook."""

    def weigh(self, examples: int, total: int | None) -> None:
        """Nothing to weigh."""

    def suspend(self, held: bool) -> None:
        """Nothing to suspend."""


def least() -> Least:
    group: Any = None
    return Least(group, group)


def test_the_core_of_an_exchange_is_small() -> None:
    methods = {name for name, _ in inspect.getmembers(Exchange, inspect.isfunction) if not name.startswith("_")}
    assert methods == {"install", "weigh", "suspend", "averaged", "state_dict", "load_state_dict", "close"}
    assert Exchange.__abstractmethods__ == {"install", "weigh", "suspend"}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda kind: kind.__name__)
def test_an_exchange_has_a_capability_only_by_having_its_methods(capability: Any) -> None:
    names = [name for name in vars(capability) if not name.startswith("_")]
    assert 1 <= len(names) <= 4
    assert not isinstance(least(), capability)
    assert isinstance(type("Able", (Least,), dict.fromkeys(names, lambda *_: None))(None, None), capability)


def test_half_a_capability_is_refused_with_what_is_missing() -> None:
    halves = {"snapshots": True, "cut": lambda *_: None}
    half: Any = type("Half", (Least,), halves)(None, None)
    with pytest.raises(StrategyError, match=r"Half, .* mine, has snapshots, cut but not publishes, want_snapshot"):
        _capabilities.refuse_halves("mine", half)
    _capabilities.refuse_halves("mine", least())
    _capabilities.refuse_halves("mine", type("Whole", (Least,), dict.fromkeys(SNAPSHOTTING))(None, None))


def test_an_exchange_that_decides_nothing_about_slices_is_paced_batch_by_batch() -> None:
    pace, batches = pace_of(None, least())
    assert (type(pace), batches) == (EveryBatch, 1)


def test_no_class_outgrows_a_page() -> None:
    large: list[str] = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(part, ast.FunctionDef) for part in node.body)
                lines = (node.end_lineno or 0) - node.lineno + 1
                if methods > 20 or lines > 260:
                    large.append(f"{node.name} in {path.name}: {methods} methods, {lines} lines")
    assert not large


def test_no_strategy_needs_its_types_to_be_ignored() -> None:
    for path in SOURCE.glob("strategies/**/*.py"):
        assert "reportIncompatible" not in path.read_text(encoding="utf-8"), path.name


def test_files_that_stacks_leave_out_exist() -> None:
    from offbeat.monitor import live

    assert all(path.is_file() for path in live._STAMPING)

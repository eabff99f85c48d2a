"""How strategies are found by name, and described."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from offbeat.errors import StrategyError
from offbeat.strategies import (
    DDP,
    Accumulate,
    Axis,
    Setting,
    Single,
    Strategy,
    Traits,
    aliases,
    available,
    describe,
    overview,
    parse,
)
from offbeat.strategies.language.registry import BUILT_IN, lookup


class Mode(StrEnum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True)
class SSP(Setting):
    """Stale synchronous parallel."""

    staleness: int
    """How far the fastest may run ahead."""


@dataclass(frozen=True)
class Push(Strategy):
    """Pushes to a server.

    And says more about it here.
    """

    consistency: SSP | Literal["asp", "bsp"] = "bsp"
    """Who waits
    for whom."""
    mode: Mode = Mode.SAFE
    rate: float | None = None
    """How fast."""

    axis = Axis.EXCHANGE
    traits = Traits(synchronous=True, exact=True, elastic=True)
    aliases: ClassVar = {"bosen": "push(ssp(3))"}


@dataclass(frozen=True)
class Signs(Strategy):
    """Keeps the signs."""

    axis = Axis.COMPRESSION
    traits = Traits(synchronous=True, deterministic=True)


# --- finding them


def _offer(monkeypatch: pytest.MonkeyPatch, **values: str | list[str]) -> None:
    """Pretend that installed packages offer these strategies."""
    points = [
        metadata.EntryPoint(name, value, "offbeat.strategies")
        for name, several in values.items()
        for value in ([several] if isinstance(several, str) else several)
    ]

    def entry_points(*, group: str) -> metadata.EntryPoints:
        return metadata.EntryPoints(points).select(group=group)

    monkeypatch.setattr(metadata, "entry_points", entry_points)


def _package(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)


def test_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(
        StrategyError, match=r"Unknown strategy 'alreduce'. Did you mean 'allreduce'\? Valid: accumulate"
    ):
        lookup("alreduce")


def test_an_installed_package_offers_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch, push=f"{__name__}:Push")
    assert available()["push"] is lookup("push") is Push
    assert aliases()["bosen"] == "push(ssp(3))"
    assert parse("bosen + accumulate(2)") == Push(SSP(3)) + Accumulate(2)
    assert str(Push(SSP(3))) == "push(ssp(3))"
    assert parse(str(Push(SSP(3)))) == Push(SSP(3))
    assert [d.name for d in overview()] == [*(cls.name for cls in BUILT_IN), "push"]


def test_without_its_entry_point_a_class_is_written_by_where_it_is() -> None:
    assert str(Push(SSP(3))) == f"{__name__}:Push(ssp(3))"
    assert parse(str(Push(SSP(3)))) == Push(SSP(3))


def test_a_broken_package_is_reported_when_asked_for_and_disturbs_nobody_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _package(tmp_path, monkeypatch, "offbeat_test_broken", "raise RuntimeError('no licence')")
    _offer(
        monkeypatch,
        broken="offbeat_test_broken:Push",
        absent="offbeat_test_absent:Push",
        odd="math:pi",
        misnamed=f"{__name__}:Push",
        twice=[f"{__name__}:Push", f"{__name__}:Signs"],
        signs=[f"{__name__}:Signs", f"{__name__}:Signs"],
    )
    assert list(available()) == [*(cls.name for cls in BUILT_IN), "signs"]
    assert parse("ddp + signs") == DDP() + Signs()
    assert len(overview()) == len(BUILT_IN) + 1
    for name, message in {
        "broken": "RuntimeError: no licence",
        "absent": "ModuleNotFoundError",
        "odd": "not an offbeat Strategy",
        "misnamed": "named 'push'",
        "twice": "not clear which",
    }.items():
        with pytest.raises(StrategyError, match=message):
            parse(name)
        with pytest.raises(StrategyError, match=message):
            describe(name)


def test_a_built_in_name_cannot_be_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch, ddp=f"{__name__}:Push", sequential=f"{__name__}:Push")
    assert lookup("ddp") is DDP
    assert available()["ddp"] is DDP
    assert parse("sequential") == Single()


# --- describing them


def test_a_description_is_read_off_the_class() -> None:
    found = describe("accumulate")
    assert (found.name, found.axis, found.traits) == ("accumulate", Axis.WHEN, Accumulate.promises)
    assert found.signature == "accumulate(steps: int)"
    assert found.aliases == {"gradient_accumulation": "accumulate"}
    assert "accumulate(4)" in found.examples
    [steps] = found.fields
    assert (steps.name, steps.type, steps.default, steps.doc) == (
        "steps",
        "int",
        None,
        "Batches per exchange and update.",
    )


def test_a_description_has_the_lines_under_the_fields_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe(f"{__name__}:Push")
    assert found.summary == "Pushes to a server."
    assert found.docs == "And says more about it here."
    assert [(f.name, f.type, f.default, f.doc) for f in found.fields] == [
        ("consistency", "ssp(staleness: int) | asp | bsp", "bsp", "Who waits for whom."),
        ("mode", "fast | safe", "safe", ""),
        ("rate", "float | None", "None", "How fast."),
    ]
    assert [f.doc for f in found.settings["ssp"]] == ["How far the fastest may run ahead."]


def test_an_alias_is_described_by_the_strategy_that_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe("sequential").name == "single"
    _offer(monkeypatch, push=f"{__name__}:Push")
    assert describe("bosen").name == "push"


def test_fields_of_a_base_class_are_described_too() -> None:
    @dataclass(frozen=True)
    class Slower(Accumulate):
        """Slower."""

        pause: float = field(default=0.0, kw_only=True)
        """Seconds."""

    assert str(Slower(2, pause=1.0)) == "slower(2, pause=1.0)"
    from offbeat.strategies.language.reference import _fields  # pyright: ignore[reportPrivateUsage]

    assert [(f.name, f.doc) for f in _fields(Slower)] == [
        ("steps", "Batches per exchange and update."),
        ("pause", "Seconds."),
    ]


def test_traits_that_hang_on_the_arguments_are_described_with_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "careful.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            from offbeat.strategies import Axis, Strategy, Traits

            @dataclass(frozen=True)
            class Careful(Strategy):
                staleness: int = 0
                axis = Axis.EXCHANGE

                @property
                def traits(self):
                    return Traits(exact=self.staleness == 0)
            """
        ),
        encoding="utf-8",
    )
    assert describe(f"{tmp_path}/careful.py:Careful").traits == Traits(exact=True)
    assert parse(f"{tmp_path}/careful.py:Careful(1)").traits == Traits()


def test_describing_an_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(StrategyError, match="Did you mean 'ddp'"):
        describe("dpp")


@pytest.mark.parametrize("cls", BUILT_IN)
def test_every_field_of_every_strategy_has_its_line(cls: type[Strategy]) -> None:
    assert all(f.doc for f in describe(cls.name).fields)
    assert {d.name for d in overview()} >= {cls.name}

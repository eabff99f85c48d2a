"""What a strategy is: a value that says how a task is distributed, and sums of such values.

A strategy lies on one of three axes: what is exchanged and by whom, when, and how it is compressed. `a + b`
composes along them. Here are the values only; they know nothing of processes.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar
from urllib.parse import quote

from offbeat.errors import StrategyError
from offbeat.strategies.language.fields import (
    Setting,
    TextValue,
    fields_of,
    require,
    require_bucket,
    require_servers,
    spell_call,
)
from offbeat.task import _FILE_MODULE as FILE_MODULE  # pyright: ignore[reportPrivateUsage]

__all__ = [
    "Axis",
    "Combined",
    "Setting",
    "Strategy",
    "Traits",
    "combined",
    "require",
    "require_bucket",
    "require_servers",
]


class Axis(StrEnum):
    """What a strategy decides; a sum has at most one exchange and one when."""

    EXCHANGE = "exchange"
    """Between whom gradients or parameters move, and by which protocol."""
    WHEN = "when"
    """At which steps they move; every step if nothing is said."""
    COMPRESSION = "compression"
    """What is left of them on the way."""


@dataclass(frozen=True)
class Traits:
    """What a strategy promises; the contract suite demands exactly this of it."""

    synchronous: bool = False
    """After an exchange all replicas are identical."""
    exact: bool = False
    """Several workers compute what one process computes on the joined batch, to rounding."""
    deterministic: bool = False
    """The same seed gives the same bits."""
    elastic: bool = False
    """Workers may leave and join while it runs."""
    splits_model: bool = False
    """No worker holds the whole model, so the task must say how to take it apart."""

    def __and__(self, other: Traits) -> Traits:
        """The traits of a sum, the exchange first: a promise needs both sides; a model that one side splits is split.

        Who may leave and join is the exchange's affair alone.
        """
        return Traits(
            synchronous=self.synchronous and other.synchronous,
            exact=self.exact and other.exact,
            deterministic=self.deterministic and other.deterministic,
            elastic=self.elastic,
            splits_model=self.splits_model or other.splits_model,
        )


@dataclass(frozen=True)
class Strategy(TextValue):
    """The base of all strategies: a frozen dataclass whose fields are the arguments in its brackets."""

    axis: ClassVar[Axis]
    """What it decides."""
    promises: ClassVar[Traits] = Traits()
    """What it promises, whatever its arguments are; where they matter, `traits` says it."""
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Other names for it, each with the text it stands for."""
    examples: ClassVar[tuple[str, ...]] = ()
    """Texts worth showing on its reference page."""

    def __add__(self, other: Strategy) -> Combined:
        if not isinstance(other, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return add((self, other))

    def __str__(self) -> str:
        return spell_call(_reference(type(self)), self)

    @property
    def traits(self) -> Traits:
        """What it promises; a strategy whose promises depend on its arguments says here how."""
        return self.promises

    @classmethod
    def summary(cls) -> str:
        """The first line of its docstring."""
        text = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
        # A dataclass without a docstring is given its signature as one.
        return "" if text.startswith(f"{cls.__name__}(") else text

    def parts(self) -> tuple[Strategy, ...]:
        """The strategies that it is the sum of; itself if it is not a sum."""
        return (self,)

    def check(self, workers: int) -> None:
        """Refuse a number of workers that it cannot run with."""
        if workers < 1:
            raise StrategyError(f"{self} cannot run with {workers} workers. Ask for one or more.")

    def check_hosts(self, hosts: int) -> None:
        """Refuse to be spread over so many hosts, if it cannot be."""

    def refuses(self, other: Strategy) -> str | None:
        """Why it cannot stand in a sum with this other part; None if it can. Both sides are asked."""
        del other
        return None

    def follows(self, earlier: Sequence[Strategy]) -> str | None:
        """Why it, a compression, cannot be applied to what earlier ones leave; None if it can."""
        del earlier
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Combined(Strategy):
    """A sum in normal form: one exchange, at most one when, any number of compressions in order."""

    exchange: Strategy
    """Between whom, and by which protocol."""
    when: Strategy | None = None
    """At which steps; None is every step."""
    compressions: tuple[Strategy, ...] = ()
    """What is done to what is sent, in this order."""
    implied: bool = False
    """Whether nobody named the exchange: a later `+` may still name another. Plays no part in equality."""

    axis = Axis.EXCHANGE

    def __post_init__(self) -> None:
        """Refuse parts on the wrong axis, and parts that refuse each other."""
        _expect(self.exchange, Axis.EXCHANGE)
        if self.when is not None:
            _expect(self.when, Axis.WHEN)
        for compression in self.compressions:
            _expect(compression, Axis.COMPRESSION)
        for one, other in itertools.combinations(self.parts(), 2):
            reason = one.refuses(other) or other.refuses(one)
            if reason:
                raise StrategyError(f"{one} and {other} cannot go together: {reason.rstrip('.')}.")
        for number, compression in enumerate(self.compressions[1:], 1):
            reason = compression.follows(self.compressions[:number])
            if reason:
                raise StrategyError(
                    f"{compression} cannot follow {self.compressions[number - 1]}: {reason.rstrip('.')}."
                )

    @property
    def traits(self) -> Traits:
        """What all of its parts promise together."""
        traits, *others = (part.traits for part in self.parts())
        for other in others:
            traits &= other
        return traits

    def parts(self) -> tuple[Strategy, ...]:
        """Exchange, when, compressions; an implied exchange too."""
        when = () if self.when is None else (self.when,)
        return (self.exchange, *when, *self.compressions)

    def check(self, workers: int) -> None:
        """Refuse a number of workers that one of its parts cannot run with."""
        for part in self.parts():
            part.check(workers)

    def check_hosts(self, hosts: int) -> None:
        """Refuse hosts that one of its parts cannot be spread over."""
        for part in self.parts():
            part.check_hosts(hosts)

    def __eq__(self, other: object) -> bool:
        # `accumulate(2)` alone means `allreduce + accumulate(2)`, so the two are equal; and so are `ddp` and the
        # sum of nothing but it.
        return isinstance(other, Strategy) and self.parts() == combined(other).parts()

    def __hash__(self) -> int:
        parts = self.parts()
        if len(parts) == 2 and parts[0] == _default_exchange():
            parts = parts[1:]
        return hash(parts[0]) if len(parts) == 1 else hash(parts)

    def __str__(self) -> str:
        return " + ".join(str(part) for part in self.parts())

    def __repr__(self) -> str:
        return " + ".join(repr(part) for part in self.parts())


def combined(strategy: Strategy) -> Combined:
    """The normal form of any strategy, with its exchange, when and compressions to get at."""
    return strategy if isinstance(strategy, Combined) else add((strategy,))


def add(strategies: Iterable[Strategy]) -> Combined:
    """The normal form of a sum of any length; a second exchange or a second when is refused."""
    by_axis: dict[Axis, list[Strategy]] = {axis: [] for axis in Axis}
    for part in itertools.chain.from_iterable(map(_written_parts, strategies)):
        verify(type(part))
        by_axis[part.axis].append(part)
    for axis, why in ((Axis.EXCHANGE, "a step is exchanged in one way"), (Axis.WHEN, "there is one rhythm")):
        if len(by_axis[axis]) > 1:
            named = " and ".join(str(part) for part in by_axis[axis][:2])
            raise StrategyError(f"{named} cannot be added: each decides the {axis}, and {why}. Keep one of them.")
    exchange = by_axis[Axis.EXCHANGE]
    return Combined(
        exchange[0] if exchange else _default_exchange(),
        by_axis[Axis.WHEN][0] if by_axis[Axis.WHEN] else None,
        tuple(by_axis[Axis.COMPRESSION]),
        implied=not exchange,
    )


def _written_parts(strategy: Strategy) -> tuple[Strategy, ...]:
    """The parts without an exchange that nobody named, so that `+` is associative."""
    parts = strategy.parts()
    return parts[1:] if isinstance(strategy, Combined) and strategy.implied else parts


def verify(cls: type[Strategy]) -> None:
    """Refuse a class that its author has not finished: no dataclass, no axis, or fields that cannot be written."""
    fields_of(cls)
    if not isinstance(getattr(cls, "axis", None), Axis):
        raise StrategyError(
            f"{cls.__module__}.{cls.__qualname__} does not say what it decides. Give it `axis = Axis.EXCHANGE`, "
            f"`Axis.WHEN` or `Axis.COMPRESSION`."
        )


def _expect(part: Strategy, axis: Axis) -> None:
    if isinstance(part, Combined) or part.axis is not axis:
        raise StrategyError(f"{part} is no {axis}, so it cannot stand there in a sum. Write the sum with `+`.")


def _default_exchange() -> Strategy:
    # Imported when needed: the registry imports the strategies, which are made of what is defined here.
    from offbeat.strategies.language.registry import default_exchange

    return default_exchange()


def _reference(cls: type[Strategy]) -> str:
    """How a class is written: by its name if it is known by it, else by where it is defined."""
    from offbeat.strategies.language.registry import is_known

    if "." in cls.__qualname__ or is_known(cls):
        # A class inside a function or class cannot be found by where it is defined; its name is all there is.
        return cls.name
    module = cls.__module__
    if module != "__main__" and not module.startswith(FILE_MODULE):
        return f"{module}:{cls.__name__}"
    path = getattr(sys.modules.get(module), "__file__", None)
    return f"{_escaped(str(Path(path).resolve()))}:{cls.__name__}" if path else cls.name


def _escaped(path: str) -> str:
    """A path without the characters that end it in a strategy's text, which become `%` and their code."""
    ending = "%:+(){},='\""
    return "".join(
        quote(c, safe="", errors="surrogateescape") if c in ending or not c.isprintable() else c for c in path
    )

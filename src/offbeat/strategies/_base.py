"""Strategies: values that say how a task is distributed, and sums of them.

`a + b` composes along the axes. These are the values only; they know nothing of processes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, cast
from urllib.parse import quote

from offbeat.errors import StrategyError
from offbeat.strategies.language.fields import BUCKET, Setting, TextValue, fields_of, require, spell_call
from offbeat.task import FILE_MODULE

__all__ = ["BUCKET", "Axis", "Combined", "Setting", "Splitting", "Strategy", "Traits", "combined", "require"]


class Axis(StrEnum):
    """What a strategy decides; a sum has at most one exchange and one when."""

    EXCHANGE = "exchange"
    """Between whom gradients or parameters move, and by which protocol."""
    WHEN = "when"
    """In which steps they move; every step by default."""
    COMPRESSION = "compression"
    """How they are encoded."""
    SPLIT = "split"
    """How one replica of the model is spread over workers; by default each worker has a whole one."""


@dataclass(frozen=True)
class Traits:
    """What a strategy promises; the contract suite tests exactly this."""

    synchronous: bool = False
    """After an exchange all replicas are identical."""
    exact: bool = False
    """Several workers compute what one process computes on the joined batch, up to rounding."""
    deterministic: bool = False
    """The same seed gives the same bits."""
    elastic: bool = False
    """Workers may leave and join while it runs."""
    refuses_updates: bool = False
    """An update that is not finite is refused and counted, and the run goes on."""
    splits_model: bool = False
    """No worker holds the whole model, so the task must say how to take it apart."""

    def __and__(self, other: Traits) -> Traits:
        """The traits of a sum, the exchange first: promises need both sides, but only the exchange must be elastic."""
        return Traits(
            synchronous=self.synchronous and other.synchronous,
            exact=self.exact and other.exact,
            deterministic=self.deterministic and other.deterministic,
            elastic=self.elastic,
            refuses_updates=self.refuses_updates,
            splits_model=self.splits_model or other.splits_model,
        )


@dataclass(frozen=True)
class Strategy(TextValue):
    """Base of all strategies: a frozen dataclass whose fields are its arguments."""

    axis: ClassVar[Axis]
    """What it decides."""
    promises: ClassVar[Traits] = Traits()
    """What it promises whatever its arguments are; override `traits` where they matter."""
    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Other names for it, each with the text it stands for."""
    examples: ClassVar[tuple[str, ...]] = ()
    """Examples for its reference page."""

    def __add__(self, other: Strategy) -> Combined:
        if not isinstance(other, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        return add((self, other))

    def __str__(self) -> str:
        return spell_call(_reference(type(self)), self)

    @property
    def traits(self) -> Traits:
        """What it promises with these arguments."""
        return self.promises

    @property
    def lineage(self) -> str:
        """Its text in checkpoints: strategies of one lineage can resume each other's runs."""
        return str(self)

    @classmethod
    def summary(cls) -> str:
        """The first line of its docstring."""
        text = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
        # A dataclass without a docstring gets its signature as one.
        return "" if text.startswith(f"{cls.__name__}(") else text

    def parts(self) -> tuple[Strategy, ...]:
        """The terms of a sum; itself if it is not a sum."""
        return (self,)

    def check(self, workers: int) -> None:
        """Refuse numbers of workers that it cannot run with."""
        if workers < 1:
            raise StrategyError(f"{self} cannot run with {workers} workers. Ask for one or more.")

    def check_hosts(self, hosts: int) -> None:
        """Refuse numbers of hosts that it cannot run on."""

    def refuses(self, other: Strategy) -> str | None:
        """Why it cannot be added to this other strategy, or None. Both sides are asked."""
        del other
        return None

    def follows(self, earlier: Sequence[Strategy]) -> str | None:
        """Why it, a compressor, cannot be applied to the output of earlier ones, or None."""
        del earlier
        return None


@dataclass(frozen=True)
class Splitting(Strategy):
    """A strategy on the split axis: it spreads each replica of the model over several workers."""

    axis: ClassVar[Axis] = Axis.SPLIT
    level: ClassVar[int] = 0
    """Order among splits: workers of the highest level are neighbours in rank, those of the lowest furthest apart."""

    @property
    def spread(self) -> int:
        """Number of workers over which it spreads what it splits."""
        raise StrategyError(f"{type(self).__name__} does not say over how many workers it splits. Give it `spread`.")

    def refuses_sum(self, whole: Combined) -> str | None:
        """Why a sum that it is in cannot be, although each two of its parts go together, or None."""
        del whole
        return None


@dataclass(frozen=True, eq=False, repr=False)
class Combined(Strategy):
    """A sum in normal form: one exchange, at most one when, compressors in order, splits from the outermost inwards."""

    exchange: Strategy
    """Between whom, and by which protocol."""
    when: Strategy | None = None
    """In which steps; None is every step."""
    compressions: tuple[Strategy, ...] = ()
    """Compressors, in the order in which they are applied."""
    split: tuple[Splitting, ...] = ()
    """How each replica is spread over workers, the outermost first; empty if every worker has a whole one."""
    implied: bool = False
    """Whether the exchange is the default: a later `+` may still name another. Not part of equality."""

    axis = Axis.EXCHANGE

    def __post_init__(self) -> None:
        """Refuse parts on the wrong axis, and parts that refuse each other."""
        when = [] if self.when is None else [Axis.WHEN]
        axes = [Axis.EXCHANGE, *when, *[Axis.COMPRESSION] * len(self.compressions), *[Axis.SPLIT] * len(self.split)]
        for part, axis in zip(self.parts(), axes, strict=True):
            if isinstance(part, Combined) or part.axis is not axis:
                raise StrategyError(
                    f"{part} does not decide the {axis}, so it cannot stand there. Write a sum with `+`."
                )
        for left, right in itertools.combinations(self.parts(), 2):
            reason = left.refuses(right) or right.refuses(left)
            if reason:
                raise StrategyError(f"{left} and {right} cannot go together: {reason.rstrip('.')}.")
        for part in self.split:
            if reason := part.refuses_sum(self):
                raise StrategyError(f"{self} cannot be: {reason.rstrip('.')}.")
        for number, compression in enumerate(self.compressions[1:], 1):
            reason = compression.follows(self.compressions[:number])
            if reason:
                raise StrategyError(
                    f"{compression} cannot follow {self.compressions[number - 1]}: {reason.rstrip('.')}."
                )

    @property
    def traits(self) -> Traits:
        """What all of its parts promise together."""
        traits = functools.reduce(operator.and_, (part.traits for part in self.parts()))
        # When a worker dies, the others of its replica cannot go on.
        return replace(traits, elastic=False) if self.split else traits

    @property
    def lineage(self) -> str:
        """That of all parts."""
        return " + ".join(part.lineage for part in self.parts())

    def parts(self) -> tuple[Strategy, ...]:
        """Exchange, when, compressors, splits; an implied exchange too."""
        when = () if self.when is None else (self.when,)
        return (self.exchange, *when, *self.compressions, *self.split)

    @property
    def replica_size(self) -> int:
        """Number of workers that hold one replica of the model together."""
        return math.prod(part.spread for part in self.split)

    def replicas(self, workers: int) -> int:
        """Number of replicas of the model on this many workers; refused if they do not divide."""
        size = self.replica_size
        if workers < size or workers % size:
            spread = " + ".join(str(part) for part in self.split)
            below = workers // size * size
            numbers = f"{below} or {below + size}" if below else f"{size} or {2 * size}"
            raise StrategyError(
                f"{spread} spreads each replica of the model over {size} workers, and {workers} are not a multiple of "
                f"{size}. Ask for {numbers} workers."
            )
        return workers // size

    def check(self, workers: int) -> None:
        """Refuse numbers of workers that one of its parts cannot run with; the others see replicas as workers."""
        replicas = self.replicas(workers) if self.split and workers >= 1 else workers
        for part in self.parts():
            part.check(replicas)

    def check_hosts(self, hosts: int) -> None:
        """Refuse numbers of hosts that one of its parts cannot run on."""
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
    """The normal form of any strategy: its exchange, when and compressors."""
    return strategy if isinstance(strategy, Combined) else add((strategy,))


def add(strategies: Iterable[Strategy]) -> Combined:
    """The normal form of a sum of any length; a second exchange or a second when is refused."""
    by_axis: dict[Axis, list[Strategy]] = {axis: [] for axis in Axis}
    for strategy in strategies:
        # Without an exchange that nobody named, so that `+` is associative.
        for part in strategy.parts()[isinstance(strategy, Combined) and strategy.implied :]:
            verify(type(part))
            by_axis[part.axis].append(part)
    for axis, why in ((Axis.EXCHANGE, "a step is exchanged in one way"), (Axis.WHEN, "there is one rhythm")):
        if len(by_axis[axis]) > 1:
            named = " and ".join(str(part) for part in by_axis[axis][:2])
            raise StrategyError(f"{named} cannot be added: each decides the {axis}, and {why}. Keep one of them.")
    exchange, split = by_axis[Axis.EXCHANGE], cast("list[Splitting]", by_axis[Axis.SPLIT])
    for left, right in itertools.combinations(split, 2):
        if left.level == right.level:
            raise StrategyError(
                f"{left} and {right} cannot be added: a model is split once in each way. Keep one of them."
            )
    return Combined(
        exchange[0] if exchange else _default_exchange(),
        by_axis[Axis.WHEN][0] if by_axis[Axis.WHEN] else None,
        tuple(by_axis[Axis.COMPRESSION]),
        tuple(sorted(split, key=lambda part: part.level)),
        implied=not exchange,
    )


def verify(cls: type[Strategy]) -> None:
    """Refuse an unfinished class: not a dataclass, without an axis, or with fields that cannot be written as text."""
    fields_of(cls)
    if not isinstance(getattr(cls, "axis", None), Axis):
        raise StrategyError(
            f"{cls.__module__}.{cls.__qualname__} does not say what it decides. Give it `axis = Axis.EXCHANGE`, "
            f"`Axis.WHEN`, `Axis.COMPRESSION` or `Axis.SPLIT`."
        )


def _default_exchange() -> Strategy:
    from offbeat.strategies.allreduce import AllReduce  # Late: it imports this module.

    return AllReduce()


def _reference(cls: type[Strategy]) -> str:
    """How a class is written as text: by its name if that is registered, else by where it is defined."""
    from offbeat.strategies.language.registry import is_known

    if "." in cls.__qualname__ or is_known(cls):
        # A class inside a function or class cannot be imported by where it is defined.
        return cls.name
    module = cls.__module__
    if module != "__main__" and not module.startswith(FILE_MODULE):
        return f"{module}:{cls.__name__}"
    path = getattr(sys.modules.get(module), "__file__", None)
    if not path:
        return cls.name
    escaped = "".join(
        quote(c, safe="", errors="surrogateescape") if c in "%:+(){},='\"" or not c.isprintable() else c
        for c in str(Path(path).resolve())
    )
    return f"{escaped}:{cls.__name__}"

"""How long steps take: a base time, and what makes some of them longer.

Written as text: `transient(0.2, 0.15)` pauses a step 0.2 s with probability 0.15, `permanent(4)` makes one
worker four times slower, `pareto(0.01, 1.5)` and `lognormal(0.01, 1)` have heavy tails, `none` leaves all steps equal,
and `+` adds them up. Times are drawn for all workers and steps at once, from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Protocol

import numpy as np

from offbeat.errors import UsageError, did_you_mean
from offbeat.protocols.expressions import Value, calls
from offbeat.simulate.queues import Times

EXAMPLE = "transient(0.2, 0.15): pause 0.2 s with probability 0.15; permanent(4): one worker is 4 times slower"
BASE = 0.04  # Default seconds of an undisturbed step.


class Pauses(Protocol):
    """Something that makes steps longer."""

    def draw(self, random: np.random.Generator, base: float, steps: int, workers: int) -> Times:
        """Seconds to add: a row for each step, with a column for each worker."""
        ...


@dataclass(frozen=True)
class Transient:
    """Any step of any worker may be paused, each time for as long."""

    pause: float  # Seconds.
    probability: float  # That a step is paused; independent of all others.

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        _check(self, self.pause >= 0 and 0 <= self.probability <= 1, "a pause of 0 s or more, a probability of 0 to 1")

    def draw(self, random: np.random.Generator, base: float, steps: int, workers: int) -> Times:  # noqa: ARG002
        """Sampled pauses."""
        return np.where(random.random((steps, workers)) < self.probability, self.pause, 0.0)


@dataclass(frozen=True)
class Permanent:
    """Some workers are always slow: the first ones, as it does not matter which."""

    factor: float  # How many times longer their steps take.
    workers: int = 1  # How many are slow.

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        whole = self.workers == int(self.workers)
        _check(self, self.factor >= 1 and self.workers >= 0 and whole, "a factor of 1 or more, a number of workers")

    def draw(self, random: np.random.Generator, base: float, steps: int, workers: int) -> Times:  # noqa: ARG002
        """The same for every step of the slow ones."""
        slow = np.where(np.arange(workers) < self.workers, (self.factor - 1) * base, 0.0)
        return np.broadcast_to(slow, (steps, workers))


@dataclass(frozen=True)
class Pareto:
    """Pauses with a heavy tail: longer than x with probability (1 + x / scale) ** -shape."""

    scale: float  # Seconds.
    shape: float  # The smaller, the heavier the tail; at 1 or below the mean is infinite, at 2 or below the variance.

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        _check(self, self.scale >= 0 and self.shape > 0, "a scale of 0 s or more, a shape above 0")

    def draw(self, random: np.random.Generator, base: float, steps: int, workers: int) -> Times:  # noqa: ARG002
        """A pause for every step."""
        return self.scale * random.pareto(self.shape, (steps, workers))


@dataclass(frozen=True)
class Lognormal:
    """Pauses whose logarithm is normally distributed: most are short, a few are many times as long."""

    median: float  # Seconds.
    sigma: float  # Standard deviation of the logarithm.

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        _check(self, self.median >= 0 and self.sigma >= 0, "a median of 0 s or more, a sigma of 0 or more")

    def draw(self, random: np.random.Generator, base: float, steps: int, workers: int) -> Times:  # noqa: ARG002
        """A pause for every step."""
        return self.median * random.lognormal(0.0, self.sigma, (steps, workers))


KINDS: Mapping[str, type[Transient] | type[Permanent] | type[Pareto] | type[Lognormal]] = MappingProxyType(
    {"transient": Transient, "permanent": Permanent, "pareto": Pareto, "lognormal": Lognormal}
)
"""What can make a step longer, by the name it is written with."""


@dataclass(frozen=True)
class Stragglers:
    """How long each step of each worker takes."""

    base: float = BASE  # Seconds of an undisturbed step.
    parts: tuple[Pauses, ...] = ()  # What is added to it.

    def __post_init__(self) -> None:
        """Refuse steps that take no time."""
        if not 0 < self.base < math.inf:
            raise UsageError(f"a step of {self.base:g} s makes no sense: it must take more than 0 s.")

    @classmethod
    def parse(cls, text: str, base: float = BASE) -> Stragglers:
        """Stragglers from text such as `transient(0.2, 0.15) + permanent(4)`, or `none`."""
        parts = [part for part in calls(text, "straggler", EXAMPLE) if part != ("none", ())]
        return cls(base, tuple(_part(*part, text) for part in parts))

    def draw(self, workers: int, steps: int, seed: int = 0) -> Times:
        """Seconds that each step takes: a row for each step, with a column for each worker.

        Every part draws from a stream of its own, so that adding one leaves the others as they were.
        """
        times = np.full((steps, workers), self.base)
        for part, stream in zip(self.parts, np.random.SeedSequence(seed).spawn(len(self.parts)), strict=True):
            times += part.draw(np.random.default_rng(stream), self.base, steps, workers)
        return times


def _part(name: str, values: tuple[Value, ...], text: str) -> Pauses:
    if name not in KINDS:
        raise UsageError(f"{name!r} in {text!r} is unknown.{did_you_mean(name, [*KINDS, 'none'])}")
    kind = KINDS[name]
    names = [field.name for field in fields(kind)]
    required = sum(field.name != "workers" for field in fields(kind))
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values) or not required <= len(numbers) <= len(names):
        raise UsageError(f"{name} in {text!r} takes numbers: {name}({', '.join(names)}). For example {EXAMPLE}.")
    return kind(*numbers)  # pyright: ignore[reportArgumentType]


def _check(part: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise UsageError(f"{part} makes no sense: give {wanted}.")

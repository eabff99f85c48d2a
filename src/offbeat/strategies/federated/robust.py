"""Robust aggregation: settings of `federated` for clients that may lie."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offbeat.errors import StrategyError
from offbeat.runtime.federated.aggregation import Aggregation, UpdateLayout
from offbeat.runtime.federated.robust import BoundedMean, ColumnAggregation, KrumAggregation
from offbeat.runtime.federated.robust_rules import between, middle
from offbeat.strategies._base import Setting


@dataclass(frozen=True)
class RobustRule(Setting):
    """How updates are combined if some clients may lie."""

    needs_single_updates: ClassVar[bool] = True
    """Whether the server must see updates one by one, which secure aggregation hides."""

    @property
    @abstractmethod
    def fewest(self) -> int:
        """Updates without which the rule protects from nothing, so that the round changes nothing."""

    def check(self, updates: int) -> None:
        """Refuse rounds of too few updates."""
        if updates < self.fewest:
            raise StrategyError(
                f"{self} needs {self.fewest:,} updates in a round{self._why()}, and a round has {updates:,}. Raise "
                f"clients or fraction, or choose another rule."
            )

    def _why(self) -> str:
        return ""

    @abstractmethod
    def aggregation(self, layout: UpdateLayout) -> Aggregation:
        """What combines the updates of a round."""


@dataclass(frozen=True)
class MedianRule(RobustRule):
    """The median of each parameter's updates: right as long as fewer than half of the clients lie."""

    name: ClassVar[str] = "median"

    @property
    def fewest(self) -> int:
        """Three: among two nobody is in the majority."""
        return 3

    def aggregation(self, layout: UpdateLayout) -> Aggregation:
        """Medians, column by column."""
        return ColumnAggregation(layout, self.fewest, middle)


@dataclass(frozen=True)
class TrimmedMean(RobustRule):
    """The mean of each parameter's updates, without the largest and the smallest ones."""

    name: ClassVar[str] = "trimmed"
    share: float
    """Share of the updates that is left out at either end; more than the share of clients that may lie."""

    _ranges = (("share", lambda share: 0 < share < 0.5, "at each end less than half is left out, and more than 0"),)

    @property
    def fewest(self) -> int:
        """So many that one is left out at either end, and one remains."""
        return max(3, math.ceil(1 / self.share - 1e-9))

    def _why(self) -> str:
        return ", so that one is left out at either end"

    def aggregation(self, layout: UpdateLayout) -> Aggregation:
        """Trimmed means, column by column."""

        def trimmed(rows: Tensor) -> Tensor:
            return between(rows, int(self.share * len(rows) + 1e-9))

        return ColumnAggregation(layout, self.fewest, trimmed)


@dataclass(frozen=True)
class KrumRule(RobustRule):
    """The update that is nearest to its neighbours, or the mean of the nearest few (Multi-Krum)."""

    name: ClassVar[str] = "krum"
    byzantine: int
    """Clients in a round that may lie."""
    keep: int = 1
    """Updates of which the mean is taken; 1 is Krum, more is Multi-Krum."""

    _ranges = (
        ("byzantine", lambda count: count >= 1, "with nobody who lies the mean is better"),
        ("keep", lambda count: count >= 1, "the mean is of one update or more"),
    )

    @property
    def fewest(self) -> int:
        """2f + 3; and no more may be kept than there are honest ones."""
        return max(2 * self.byzantine + 3, self.keep + self.byzantine)

    def _why(self) -> str:
        f = self.byzantine
        if self.fewest > 2 * f + 3:
            return f" (the {self.keep} that it keeps and the {f} that lie)"
        return f" (2f + 3 with f = {f} that lie)"

    def aggregation(self, layout: UpdateLayout) -> Aggregation:
        """Distances between all pairs, and then the mean of the nearest."""
        return KrumAggregation(layout, self.fewest, self.byzantine, self.keep)


@dataclass(frozen=True)
class NormBound(RobustRule):
    """The mean by examples, of updates that are scaled down to a norm if they are longer."""

    name: ClassVar[str] = "normbound"
    needs_single_updates: ClassVar[bool] = False
    bound: float
    """Largest Euclidean norm of an update."""

    _ranges = (("bound", lambda bound: bound > 0, "an update moves the model by more than 0"),)

    @property
    def fewest(self) -> int:
        """One: each update is bounded by itself."""
        return 1

    def aggregation(self, layout: UpdateLayout) -> Aggregation:
        """The exact mean of bounded updates."""
        return BoundedMean(layout, self.bound)

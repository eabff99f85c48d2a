"""A stand-in for what a team tells its loaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from offbeat.runtime.data.loaders import Batch, Loader
from offbeat.runtime.state.random_state import State, restore, seeded


@dataclass
class Feed:
    """What a team would be told; it stops the data after `limit` batches."""

    rounds: int | None = None
    """How many batches the worker with the most has; None: this worker is alone."""
    limit: int | None = None
    random_state: Any = None
    """What a resumed team puts back at the first boundary."""
    given_out: list[Batch] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """How many batches this worker itself had, epoch by epoch."""
    left_out: list[Batch] = field(default_factory=list)
    missed: int = 0
    """Steps that are made without this worker while it does its next."""
    endings: int = 0
    looked: int = 0
    starts: list[State] | None = None
    """What worker 0's random state was when each epoch began; None: workers do not meet."""
    follows: bool = False
    """Whether this is worker 0, whose state it is."""
    steps: bool = True
    """Whether an optimizer steps on every training batch."""
    taken_back: list[int] = field(default_factory=list)
    """Examples of batches that were evaluated, though gradients were on."""
    _loader: Loader | None = None
    _begun: int = 0
    _mine: int = 0
    _calls: int = 0

    def evaluates(self, loader: Loader) -> bool:
        return False

    def took_back(self, batches: Sequence[Batch]) -> None:
        self.taken_back += [batch.examples for batch in batches]

    def asked(self, loader: Loader) -> bool:
        self._loader = loader
        if self.random_state is not None:
            restore(self.random_state)
            self.random_state = None
        return self.limit is None or len(self.given_out) < self.limit

    def given(self, batch: Batch, training: bool) -> None:
        self.given_out.append(batch)
        self.looked += not training
        if self.steps and training and self._loader is not None:
            self._loader.stepped()

    def fetching(self, training: bool) -> None:
        pass

    def anyone(self, has: bool) -> bool:
        self._calls += 1
        self._mine += has
        return has if self.rounds is None else self._calls <= self.rounds

    def agreed(self, state: State, seed: int) -> tuple[State, bool]:
        if self.starts is None:
            return seeded(seed) | {"own": state["own"]}, False
        if self.follows:
            self.starts.append(state)
        self._begun += 1
        return self.starts[self._begun - 1], self.follows

    def passed_over(self) -> int:
        missed, self.missed = self.missed, 0
        return missed

    def skipped(self, batch: Batch) -> None:
        self.left_out.append(batch)

    def ended(self) -> None:
        self.endings += 1
        self.lengths.append(self._mine)
        self._mine = self._calls = 0

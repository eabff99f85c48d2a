"""A loader whose batches are handed out in portions, the same ones in every evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from offbeat.errors import StrategyError
from offbeat.strategies.sandblaster import Sandblaster


class PortionLoader:
    """The result of `team.prepare` for a loader under sandblaster. Its batches are the same in every evaluation."""

    def __init__(self, original: DataLoader[Any], seed: int, strategy: Sandblaster) -> None:
        self._original, self._strategy = original, strategy
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._indices: list[list[int]] = [list(batch) for batch in cast("Iterable[Any]", original.batch_sampler)]
        self.examples = sum(map(len, self._indices))
        """Examples of one pass."""
        self._known: dict[tuple[int, ...], list[Any]] = {}  # Batches of portions: they come again.
        self._chosen: Sequence[int] | None = None  # Batches of the portion at hand; None outside of closures.
        self._fresh = False
        self.begun = self.ended = 0
        """Passes over the portion at hand."""

    def __len__(self) -> int:
        return len(self._indices)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)

    def __iter__(self) -> Iterator[Any]:
        if self._chosen is not None:
            return self._portion(tuple(self._chosen))
        if torch.is_grad_enabled():
            raise StrategyError(
                f"{self._strategy} has no steps of single batches: read the prepared loader inside the closure of "
                f"optimizer.step(closure), or under torch.no_grad() to evaluate."
            )
        return self._batches(range(len(self)))

    def choose(self, batches: Sequence[int] | None, fresh: bool = False) -> None:
        """Yield these batches from now on; None: all, to evaluate. If `fresh`, draw them from the dataset anew."""
        self._chosen, self._fresh, self.begun, self.ended = batches, fresh, 0, 0

    def _portion(self, chosen: tuple[int, ...]) -> Iterator[Any]:
        self.begun += 1
        if self._fresh or chosen not in self._known:
            known = list(self._batches(chosen))
            if not self._fresh:
                self._known[chosen] = known
        else:
            known = self._known[chosen]
        yield from known
        self.ended += 1

    def _batches(self, chosen: Sequence[int]) -> Iterator[Any]:
        indices = [self._indices[number] for number in chosen]
        yield from DataLoader(self._original.dataset, batch_sampler=indices, collate_fn=self._original.collate_fn)

"""What loaders report to their team (`runtime.data.loaders.Feed`): batches handed out, epochs begun and ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbeat.runtime.data.fingerprint import fingerprint
from offbeat.runtime.data.loaders import Batch, Loader, agreed_state
from offbeat.runtime.state import random_state
from offbeat.team.between_steps import Boundaries
from offbeat.team.context import Workplace


class LoaderFeed:
    """Counts what the loop is given, and lets strategy and account know."""

    def __init__(self, place: Workplace, boundaries: Boundaries) -> None:
        self._place, self._boundaries = place, boundaries
        self.batch: tuple[int, int | None] | None = None
        """Examples of the latest training batch, here and over all workers."""
        self._uncounted = False

    def asked(self, loader: Loader) -> bool:
        """A boundary: all before it is done. Resume here, write a checkpoint if due, and say whether to go on."""
        place = self._place
        here = place.memory.is_here(loader)
        if place.memory.resuming and not here:
            return True  # The checkpoint was written at another loader's boundary, which is still to come.
        if loader is place.holdings.trained_loader:
            self._count_batch()
        self._boundaries.resume()
        epochs = place.goal.epochs
        return self._boundaries.cross(over=epochs is not None and loader.trained_epochs > epochs)

    def _count_batch(self) -> None:
        """A batch is done. A loop that updates without a prepared optimizer, by hand or by Keras's, made a step."""
        if self._uncounted:
            self._uncounted = False
            self._place.ledger.steps += 1
            self._place.learned()

    def evaluates(self, loader: Loader) -> bool:
        """Whether a pass that begins now is an evaluation, though gradients are on: many scripts only call eval()."""
        loaders, models = self._place.holdings.loaders, self._place.holdings.models
        training = not models or any(model.training for model in models)
        return not training and not loader.learned and any(other.learned for other in loaders)

    def given(self, batch: Batch, training: bool) -> None:
        """A batch goes to the loop."""
        place = self._place
        if not training:
            place.reports.evaluated += batch.examples
            return
        self.batch = batch.examples, batch.total
        self._uncounted = not place.holdings.optimizers
        place.watch.examples = float(batch.examples)
        if batch.total is not None:
            place.watch.first_gradients.settled = True  # Each has its own part of the batch.
        if place.gauge is not None:
            place.gauge.begin(batch.examples, place.step)
        place.pace.begin(batch.examples, batch.total, batch.last)
        place.ledger.samples += batch.total or 0
        place.ledger.own_samples += batch.examples if batch.total is None else 0
        if "first_batch" not in place.notes:
            place.notes["first_batch"] = fingerprint(batch.content)
        place.stopwatch.switch("compute")
        place.begin_step()

    def took_back(self, batches: Sequence[Batch]) -> None:
        """A pass over the data has ended without a step: what it handed out was evaluated, not trained on."""
        ledger = self._place.ledger
        ledger.samples -= sum(batch.total or 0 for batch in batches)
        ledger.own_samples -= sum(batch.examples for batch in batches if batch.total is None)
        self._place.reports.evaluated += sum(batch.examples for batch in batches)

    def skipped(self, batch: Batch) -> None:
        """A batch was learned without this worker: it counts all the same."""
        self._place.ledger.samples += batch.total or 0

    def fetching(self, training: bool) -> None:
        """The loop waits for input."""
        if training:
            self._place.stopwatch.switch("input")

    def ended(self) -> None:
        """The loop has left its training data."""
        self._count_batch()
        self._place.stopwatch.switch("other")

    def anyone(self, has: bool) -> bool:
        """Whether any worker still has data; where workers do not wait for each other, whether this one has."""
        place = self._place
        if place.group.size == 1 or not place.exchange.lockstep:
            return has
        if not place.pace.meeting:
            return True  # Who has none left keeps the others company until they meet.
        with place.stopwatch.spent_on("communicate"):
            return bool(place.group.sum(torch.tensor([float(has)]), "the end of the data").item() > 0)

    def agreed(self, state: random_state.State, seed: int) -> tuple[random_state.State, bool]:
        """The random state to draw an epoch's data from, and whether this worker's own goes on from there."""
        place = self._place
        # Where the result is to be that of one process, workers meet for it even if they do not wait for each other.
        meeting = place.exchange.aligned or place.strategy.traits.exact
        with place.stopwatch.spent_on("communicate" if place.group.size > 1 else "other"):
            return agreed_state(place.group, meeting, state, seed)

    def passed_over(self) -> int:
        """Batches that were learned without this worker since it was last asked."""
        watch = self._place.watch
        missed, watch.missed = watch.missed, 0
        return missed * self._place.batches_per_step

"""Hooks of a team on prepared models, optimizers and loaders, and what loaders report to the team."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.data.fingerprint import fingerprint
from offbeat.runtime.data.label_skew import Parts
from offbeat.runtime.data.loaders import Batch, Loader, Share, agreed_state, divide
from offbeat.runtime.data_servers.sources import supplied_by
from offbeat.runtime.gradients.first_loss import FirstLoss
from offbeat.runtime.gradients.optimizers import ScaledRate
from offbeat.runtime.state import random_state
from offbeat.runtime.state.checkpoint_manager import Stateful
from offbeat.strategies.sandblaster import Sandblaster, SandblasterWorker
from offbeat.strategies.worker.capabilities import ModelHooks, OptimizerHooks, Sliced, StepHooks
from offbeat.strategies.worker.exchange import adopt
from offbeat.team.between_steps import Boundaries
from offbeat.team.closures.portion_closures import PortionClosures
from offbeat.team.context import Workplace


class LoaderFeed:
    """Counts the loop's batches, and informs the strategy and the ledger (`runtime.data.loaders.Feed`)."""

    def __init__(self, place: Workplace, boundaries: Boundaries) -> None:
        self._place, self._boundaries = place, boundaries
        self.resume = boundaries.resume
        """Load the checkpoint of a resumed run, if that is not done yet."""
        self.batch: tuple[int, int | None] | None = None
        """Examples of the latest training batch, on this worker and over all."""
        self._uncounted = False

    def asked(self, loader: Loader) -> bool:
        """A boundary: resume here, write a checkpoint if due, and return whether to continue."""
        place = self._place
        here = place.memory.is_here(loader)
        if place.memory.resuming and not here:
            return True  # The checkpoint was written at another loader's boundary, which comes later.
        if loader is place.holdings.trained_loader:
            self._count_batch()
        self._boundaries.resume()
        epochs = place.goal.epochs
        return self._boundaries.cross(over=epochs is not None and loader.trained_epochs > epochs)

    def _count_batch(self) -> None:
        """A batch is done; without a prepared optimizer (updates by hand, or Keras) that was a step."""
        if self._uncounted:
            self._uncounted = False
            self._place.ledger.steps += 1
            self._place.learned()

    def evaluates(self, loader: Loader) -> bool:
        """Whether a pass that begins now is an evaluation although gradients are on: many scripts only call eval()."""
        loaders, models = self._place.holdings.loaders, self._place.holdings.models
        training = not models or any(model.training for model in models)
        return not training and not loader.learned and any(other.learned for other in loaders)

    def given(self, batch: Batch, training: bool) -> None:
        """A batch is passed to the loop."""
        place = self._place
        if not training:
            place.reports.evaluated += batch.examples
            return
        place.input.end(batch)
        self.batch = batch.examples, batch.total
        self._uncounted = not place.holdings.optimizers
        place.watch.examples = float(batch.examples)
        if batch.total is not None:
            place.watch.first_gradients.settled = True  # Each worker has its own part of the batch.
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
        """A pass over the data has ended without a step: its batches were evaluated, not trained on."""
        ledger = self._place.ledger
        ledger.samples -= sum(batch.total or 0 for batch in batches)
        ledger.own_samples -= sum(batch.examples for batch in batches if batch.total is None)
        self._place.reports.evaluated += sum(batch.examples for batch in batches)

    def skipped(self, batch: Batch) -> None:
        """A batch was trained on without this worker: it counts all the same."""
        self._place.ledger.samples += batch.total or 0

    def fetching(self, training: bool) -> None:
        """The loop waits for input."""
        if training:
            self._place.input.begin()
            self._place.stopwatch.switch("input")

    def ended(self) -> None:
        """The loop has ended its pass over the training data."""
        self._count_batch()
        self._place.stopwatch.switch("other")

    def anyone(self, has: bool) -> bool:
        """Whether any worker still has data; where workers do not wait for each other, whether this one has."""
        place = self._place
        if place.group.size == 1 or not place.exchange.lockstep:
            return has
        if not place.pace.meeting:
            return True  # A worker without data takes part until all meet.
        with place.stopwatch.spent_on("communicate"):
            return bool(place.group.sum(torch.tensor([float(has)]), "the end of the data").item() > 0)

    def agreed(self, state: random_state.State, seed: int) -> tuple[random_state.State, bool]:
        """The random state from which an epoch's data is drawn, and whether this worker's own continues from it."""
        place = self._place
        # Exact strategies meet for it even if their workers do not wait for each other.
        meeting = place.exchange.aligned or place.strategy.traits.exact
        with place.stopwatch.spent_on("communicate" if place.group.size > 1 else "other"):
            state, follows = agreed_state(place.group, meeting, state, seed)
        # The workers of a replica draw alike, so all of worker 0's follow it.
        return state, follows or (place.split is not None and place.replica[0] == 0)

    def passed_over(self) -> int:
        """Batches that were trained on without this worker since the last call."""
        watch = self._place.watch
        missed, watch.missed = watch.missed, 0
        return missed * self._place.batches_per_step


class Adoption:
    """Installs the hooks of strategy and team on what a user prepares."""

    def __init__(self, place: Workplace, feed: LoaderFeed) -> None:
        self._place, self._feed = place, feed
        self._step_hooks: list[RemovableHandle] = []
        group = place.group
        looks = group.size > 1 and group.rank == 0 and place.strategy.traits.exact
        self.closures: PortionClosures | None = None
        if isinstance(rules := place.strategy.exchange, Sandblaster) and isinstance(place.exchange, SandblasterWorker):
            self.closures = PortionClosures(place, rules, place.exchange, feed.resume)
        """Makes the steps of closures on portions of the data; only under sandblaster."""
        self._first_loss = FirstLoss(group.size, lambda: feed.batch[0] if feed.batch else 0) if looks else None

    def take(self, thing: Any, split: bool) -> Any:
        """Take part in training this; returns it, or, for a loader, the divided one."""
        held = self._place.holdings
        if held.has(thing):
            return thing
        if isinstance(thing, nn.Module):
            held.models.append(thing)
            self._model(thing)
        elif isinstance(thing, Optimizer):
            held.optimizers.append(thing)
            self._optimizer(thing)
        elif isinstance(thing, Stateful) and not isinstance(thing, Iterable):
            held.others.append(thing)
        elif isinstance(thing, Iterable):
            if self._place.assignment.offer is not None:
                return self._place.assignment.offer(thing)
            if self.closures is not None:
                return self.closures.loader(cast("Iterable[Any]", thing), split)
            parts, data = Parts.parse(self._place.goal.parts), self._place.data
            make = None if data is None else supplied_by(data)
            loader = divide(cast("Iterable[Any]", thing), self._shares(split), self._feed, parts, split, make)
            held.loaders.append(loader)
            return loader
        else:
            raise UsageError(
                f"prepare() was given a {type(thing).__name__}, which is not a model, optimizer, loader or scheduler, "
                f"and has no state_dict(). Omit it."
            )
        return thing

    def _model(self, model: nn.Module) -> None:
        place = self._place
        model.to(place.device)
        place.watch.adopt(model, place.goal.check_finite)
        if self._first_loss is not None:
            self._first_loss.watch(model)
        if isinstance(place.pace, ModelHooks):
            place.pace.adopt(model)
        if place.gauge is not None:
            place.gauge.watch(model)
        if place.split is None:
            adopt(place.exchange, model)
        else:
            place.split.adopt(model)

    def _optimizer(self, optimizer: Optimizer) -> None:
        place, rate = self._place, ScaledRate(self._place.goal.rate_factor)
        self._step_hooks += rate.before_others(optimizer)
        if isinstance(place.pace, StepHooks):
            place.pace.watch(optimizer)
        place.watch.attend(optimizer)
        if self.closures is not None:
            self.closures.attend(optimizer)
        if isinstance(place.exchange, OptimizerHooks):
            place.exchange.attend(optimizer)
        self._step_hooks += rate.after_others(optimizer)
        self._step_hooks.append(optimizer.register_step_post_hook(self._after_step))

    def _after_step(self, *_: Any) -> None:
        self._place.learned()
        if self._place.disturber.active:
            self.stepped()

    def stepped(self) -> None:
        """A step was made: without loaders, the next one begins now."""
        if not self._place.holdings.loaders:
            self._place.begin_step()

    def divided(self, loader: Iterable[Any]) -> Loader:
        """A loader for evaluation, divided over the workers; it is not part of checkpoints."""
        place = self._place
        share = Share(place.group.rank, place.group.size, place.seed, -1)
        place.shares.append(share)
        return divide(loader, [share], self._feed, Parts())

    def _shares(self, split: bool) -> list[Share]:
        """The shares of this worker of a training loader's batches."""
        place = self._place
        exchange, number = place.exchange, len(place.holdings.loaders)
        if place.split is not None and not split:
            raise StrategyError(
                f"{place.strategy} spreads each replica over several workers, which must all read the same batches, so "
                f"it must divide the loader itself. Omit split=False, or use allreduce."
            )
        if not isinstance(exchange, Sliced):
            share = self._share(*place.replica, number)
            if place.split is None:  # With stages, a run ends with the first death: nobody's share is divided.
                place.shares.append(share)
            return [share]
        if not split:
            raise StrategyError(
                f"{place.strategy} decides which workers compute the same slice of a batch, so it must divide the "
                f"loader itself. Omit split=False, or use allreduce."
            )
        mine, count = exchange.slices()
        return [self._share(slice_, count, number) for slice_ in mine]

    def _share(self, slice_: int, slices: int, number: int) -> Share:
        place = self._place
        afresh = place.gauge is not None  # Noise would look smaller if batches excluded recently seen examples.
        return Share(
            slice_, slices, place.seed, number, merge=place.goal.merge, afresh=afresh, shared=place.split is not None
        )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._step_hooks:
            hook.remove()
        if self.closures is not None:
            self.closures.close()
        if self._first_loss is not None:
            self._first_loss.close()

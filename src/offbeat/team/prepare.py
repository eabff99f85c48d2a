"""How a team takes part in training what `prepare` is given: models, optimizers, loaders, and others with a state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.errors import StrategyError, UsageError
from offbeat.runtime.data.label_skew import Parts
from offbeat.runtime.data.loaders import Loader, Share, divide
from offbeat.runtime.gradients.first_loss import FirstLoss
from offbeat.runtime.gradients.learning_rate_factor import ScaledRate
from offbeat.runtime.state.prepared import Stateful
from offbeat.strategies.worker.capabilities import ModelHooks, OptimizerHooks, Sliced, StepHooks
from offbeat.strategies.worker.exchange import adopt
from offbeat.team.context import Workplace
from offbeat.team.loader_feed import LoaderFeed


class Adoption:
    """Puts the hooks of strategy and team on what a user prepares."""

    def __init__(self, place: Workplace, feed: LoaderFeed) -> None:
        self._place, self._feed = place, feed
        self._step_hooks: list[RemovableHandle] = []
        group = place.group
        looks = group.size > 1 and group.rank == 0 and place.strategy.traits.exact
        self._first_loss = FirstLoss(group.size, lambda: feed.batch[0] if feed.batch else 0) if looks else None

    def take(self, thing: Any, split: bool) -> Any:
        """Take part in training this; answers it, or, for a loader, the divided one."""
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
            parts = Parts.parse(self._place.goal.parts)
            loader = divide(cast("Iterable[Any]", thing), self._shares(split), self._feed, parts, split)
            held.loaders.append(loader)
            return loader
        else:
            raise UsageError(
                f"prepare() was given a {type(thing).__name__}, which is not a model, optimizer, loader or scheduler, "
                f"and has no state_dict(). Leave it out."
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
        adopt(place.exchange, model)

    def _optimizer(self, optimizer: Optimizer) -> None:
        place, rate = self._place, ScaledRate(self._place.goal.rate_factor)
        self._step_hooks += rate.before_others(optimizer)
        if isinstance(place.pace, StepHooks):
            place.pace.watch(optimizer)
        place.watch.attend(optimizer)
        if isinstance(place.exchange, OptimizerHooks):
            place.exchange.attend(optimizer)
        self._step_hooks += rate.after_others(optimizer)
        self._step_hooks.append(optimizer.register_step_post_hook(self._learned))
        if place.disturber.active:
            self._step_hooks.append(optimizer.register_step_post_hook(self._stepped))

    def _learned(self, *_: Any) -> None:
        self._place.learned()

    def _stepped(self, *_: Any) -> None:
        self.stepped()

    def stepped(self) -> None:
        """A step was made: without loaders, that is where the next one begins."""
        if not self._place.holdings.loaders:
            self._place.begin_step()

    def divided(self, loader: Iterable[Any]) -> Loader:
        """A loader for evaluation, divided over the workers; it plays no part in checkpoints."""
        place = self._place
        share = Share(place.group.rank, place.group.size, place.seed, -1)
        place.shares.append(share)
        return divide(loader, [share], self._feed, Parts())

    def _shares(self, split: bool) -> list[Share]:
        """What of a training loader's batches falls to this worker."""
        place = self._place
        exchange, number = place.exchange, len(place.holdings.loaders)
        if not isinstance(exchange, Sliced):
            share = self._share(place.group.rank, place.group.size, number)
            place.shares.append(share)
            return [share]
        if not split:
            raise StrategyError(
                f"{place.strategy} decides which workers compute the same slice of a batch, so it must divide the "
                f"loader itself. Leave out split=False, or use allreduce."
            )
        mine, count = exchange.slices()
        return [self._share(slice_, count, number) for slice_ in mine]

    def _share(self, slice_: int, slices: int, number: int) -> Share:
        place = self._place
        afresh = place.gauge is not None  # Noise would look smaller where a batch is what was not seen for longest.
        return Share(slice_, slices, place.seed, number, merge=place.goal.merge, afresh=afresh)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._step_hooks:
            hook.remove()
        if self._first_loss is not None:
            self._first_loss.close()

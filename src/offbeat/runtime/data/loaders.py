"""Loaders divided over the workers, so that together they see what the script alone would see.

Each batch of a script's loader is a *global batch*; every worker gets a slice of it (see `loader_sources`). One worker
alone draws what the script draws without a team, bitwise. Several draw the order of an epoch from worker 0's random
state when it begins, and worker 0 continues from there, as it would alone. A worker whose slice is empty gets one
example of weight 0, so that it takes part in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from offbeat.errors import DataError
from offbeat.protocols.partition import mixed
from offbeat.runtime.data import loader_sources as sources
from offbeat.runtime.data.label_skew import Parts
from offbeat.runtime.data.loader_sources import Batch, BatchSource, Epoch, Share
from offbeat.runtime.groups.group import Group
from offbeat.runtime.state.random_state import Draws, Lent, Own, State, capture, packed, seeded, unpacked

__all__ = ["Batch", "Feed", "Loader", "Share", "agreed_state", "divide", "generators_of", "is_divided", "source_for"]


class Feed(Protocol):
    """A loader's reports to its team."""

    def asked(self, loader: Loader) -> bool:
        """The loop requests its next training batch, all before it are done; False ends the epoch here."""
        ...

    def evaluates(self, loader: Loader) -> bool:
        """Whether a pass that begins now is an evaluation, though gradients are on."""
        ...

    def given(self, batch: Batch, training: bool) -> None:
        """A batch is about to be handed to the loop."""

    def took_back(self, batches: Sequence[Batch]) -> None:
        """A pass has ended without a step: its batches were evaluated, not trained on."""

    def fetching(self, training: bool) -> None:
        """The loop waits for input from now on."""

    def anyone(self, has: bool) -> bool:
        """Whether any worker still has data."""
        ...

    def passed_over(self) -> int:
        """Batches whose steps the others made without this worker since the last call: it skips them."""
        ...

    def skipped(self, batch: Batch) -> None:
        """A batch is skipped, as its step was made without this worker."""

    def agreed(self, state: State, seed: int) -> tuple[State, bool]:
        """The random state to draw an epoch from, and whether this worker's own continues from there."""
        ...

    def ended(self) -> None:
        """The loop has left its training data, at the end or before it."""


class Loader:
    """The result of `team.prepare` for a loader; it is iterated as before."""

    def __init__(self, original: Iterable[Any], source: BatchSource, feed: Feed, place: Share) -> None:
        self._original, self._source, self._feed, self._place = original, source, feed, place
        self._evaluations = self._missed = 0
        self.epoch = 0  # Training epochs begun.
        self.batches = 0  # Training batches handed out in the current epoch.
        self.complete = False  # Whether the current epoch has reached its end.
        self.learned = False  # Whether an optimizer has ever stepped on a batch of this loader.
        self._idle = 0
        self._pass: list[Batch] = []
        self._stepped = False
        self.resume_at: tuple[int, int] | None = None
        """Epoch and batch where a resumed run continues: epochs before it are empty, batches before it are skipped."""
        self._draws: Draws | None = None
        self._resumed: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)

    def __len__(self) -> int:
        return len(cast("Any", self._original))

    def __iter__(self) -> Iterator[Any]:
        evaluating = not torch.is_grad_enabled() or self._feed.evaluates(self)
        return self._evaluating() if evaluating else self._training()

    @property
    def trained_epochs(self) -> int:
        """Epochs begun, except passes without a step, which were unannounced evaluations."""
        return self.epoch - self._idle

    def stepped(self) -> None:
        """An optimizer has stepped: on this loader's batches, if its current pass has handed any out."""
        if self._pass:
            self.learned = self._stepped = True
            self._pass.clear()

    def _evaluating(self) -> Iterator[Any]:
        """An evaluation: no exchange follows, so a worker without examples just ends."""
        self._evaluations += 1
        seed = mixed(self._place.seed, self._place.loader, 1, self._evaluations)
        for batch in self._source.batches(Epoch(self._evaluations, 0, self._evaluation_draws(seed), seed)):
            if batch.examples:
                self._feed.given(batch, training=False)
                yield batch.content
                self._feed.fetching(training=False)

    def _evaluation_draws(self, seed: int) -> Draws:
        """Random state of an evaluation: workers may not meet for it, so the seed determines it."""
        generators = generators_of(self._original)
        state = capture(generators)
        if self._source.native:
            return Own(state, generators)
        if self._place.rank == 0:
            self._source.spend()
            for generator, known in zip(generators, state["own"], strict=True):
                generator.set_state(known)
        return Lent(seeded(seed) | {"own": state["own"]}, generators)

    def _training(self) -> Iterator[Any]:
        before = self.batches, self.complete, self._draws
        self.epoch += 1
        self.batches = 0
        self.complete = False
        if self.resume_at is not None and self.epoch < self.resume_at[0]:
            return
        self._draws = None
        self._stepped = False
        skip = self._rejoin()
        self._feed.fetching(training=True)
        try:
            # The stream is opened only after this boundary, where a resumed run restores its random state.
            if self._feed.asked(self):
                yield from self._batches(skip)
        finally:
            self._feed.ended()
            if not self._stepped:
                self._idle += 1
                self.batches, self.complete, self._draws = before
                self._feed.took_back(self._pass)
            self._pass.clear()

    def _batches(self, skip: int) -> Iterator[Any]:
        seed = mixed(self._place.seed, self._place.loader, 0, self.epoch)
        self._draws = draws = self._epoch_draws(seed, skip)
        stream = self._source.batches(Epoch(self.epoch, skip, draws, seed))
        for batch in stream if self._source.knows_end else self._together(stream):
            self.batches += 1
            if self._missed:
                self._missed -= 1
                self._feed.skipped(batch)
            else:
                self._pass.append(Batch(None, batch.examples, batch.total))
                self._feed.given(batch, training=True)
                yield batch.content
                self._feed.fetching(training=True)
                self._missed = self._feed.passed_over()
            self.complete = batch.last
            # At a boundary this worker must be where the others are.
            if not self._missed and not self._feed.asked(self):
                return
        if self.batches == 0:
            raise DataError(
                f"the training data has no batch at all (dataset of {_length(self._original)}): with drop_last it is "
                f"smaller than one batch, or its stream is empty. Use a smaller batch."
            )
        self.complete = True

    def _epoch_draws(self, seed: int, skip: int) -> Draws:
        generators = generators_of(self._original)
        saved = self._resumed if skip else {}
        if self._source.native:
            return Own(saved["start"] if skip else capture(generators), generators)
        start, follows = (saved["start"], saved["follows"]) if skip else self._feed.agreed(capture(generators), seed)
        return Lent(start, generators, follows)

    def _rejoin(self) -> int:
        if self.resume_at is None or self.epoch != self.resume_at[0]:
            return 0
        self.batches = self.resume_at[1]
        self.resume_at = None
        for generator, state in zip(generators_of(self._original), self._resumed["generators"], strict=False):
            generator.set_state(state)
        return self.batches

    def _together(self, stream: Iterator[Batch]) -> Iterator[Batch]:
        """Streams may end at different times: a worker that is done takes part until all are."""
        held: Batch | None = None
        while True:
            batch = next(stream, None)
            if not self._feed.anyone(batch is not None):
                return
            if batch is None and held is None:
                raise DataError("this worker's stream of data is empty while others have data. Give every worker some.")
            held = batch or Batch(cast("Batch", held).content, 0, None)
            yield held

    def state_dict(self, at_end: bool = False) -> dict[str, Any]:
        """Position of this worker in the data; `at_end` if the loop has finished a complete epoch."""
        if self.resume_at is not None:
            return self._resumed  # A resumed run that has not reached this loader yet.
        epoch, batches, draws = self.epoch, self.batches, self._draws
        if at_end and self.complete:
            epoch, batches = self.epoch + 1, 0
        begun = draws is not None and batches > 0
        return {
            "epoch": epoch,
            "batches": batches,
            "idle": self._idle,
            "generators": [generator.get_state() for generator in generators_of(self._original)],
            "start": draws.start if draws is not None and begun else None,
            "follows": draws is not None and draws.follows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from this state when the loop comes to its epoch."""
        self._resumed = dict(state)
        self._idle = int(state.get("idle", 0))
        if state["epoch"]:
            self.resume_at = (int(state["epoch"]), int(state["batches"]))


def agreed_state(group: Group, meeting: bool, state: State, seed: int) -> tuple[State, bool]:
    """The random state that all workers draw an epoch from, and whether this worker's own continues from there."""
    # Where they meet, it is worker 0's, so that the order is the same as without the others. Where they do not wait for
    # each other, the seed determines it.
    if not meeting:
        return seeded(seed) | {"own": state["own"]}, False
    return unpacked(group.share(packed(state), "the order of an epoch's data"), state), group.membership.leads


Make = Callable[[Iterable[Any], Share, Parts, bool], BatchSource]
"""Makes the source of a share of a loader: from the loader, the share, the parts, and whether it is to be divided."""


def divide(
    loader: Iterable[Any],
    shares: Sequence[Share],
    feed: Feed,
    parts: Parts,
    split: bool = True,
    make: Make | None = None,
) -> Loader:
    """Divide a loader over the workers, several shares in turn; `split=False` if it is already this worker's part."""
    each = [(make or source_for)(loader, share, parts, split) for share in shares]
    return Loader(loader, each[0] if len(each) == 1 else sources.InTurn(each), feed, shares[0])


def source_for(loader: Iterable[Any], place: Share, parts: Parts, split: bool) -> BatchSource:
    """The source of slices that suits a loader."""
    if not split or is_divided(loader, place):
        return sources.SlicedBatches(loader, None)
    usual = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    typed = cast("DataLoader[Any]", loader)
    streams = usual and isinstance(typed.dataset, IterableDataset)
    indexed = usual and not streams and typed.batch_sampler is not None
    if place.merge > 1 and not indexed:
        raise DataError(
            f"weak scaling makes one batch of {place.merge}, but a {type(loader).__name__} that is not a DataLoader "
            f"over a map-style dataset returns finished ones. Measure strong scaling, or use such a DataLoader."
        )
    if indexed:
        return sources.Indexed(typed, place, parts)
    if streams and parts.alpha is not None:
        raise DataError("dirichlet(alpha) needs to know all labels beforehand, which a stream does not. Use iid parts.")
    if streams and typed.batch_size is not None and place.size > 1:
        return sources.Streamed(typed, place)
    return sources.SlicedBatches(loader, place)


def is_divided(loader: Iterable[Any], place: Share) -> bool:
    """Whether a loader is each worker's own part already."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any(isinstance(s, DistributedSampler) and s.num_replicas == place.size > 1 for s in samplers)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The user's generators in a loader and its samplers."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[2], "sampler", None))
    generators = [getattr(holder, "generator", None) for holder in holders]
    return list({id(it): it for it in generators if isinstance(it, torch.Generator)}.values())


def _length(loader: Any) -> str:
    with suppress(TypeError, AttributeError):
        return f"{len(loader.dataset)} examples"
    return "unknown size"

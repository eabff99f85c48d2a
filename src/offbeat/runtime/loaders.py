"""Loaders divided over the workers, so that together they see what one process would.

Whatever loader a script has, each of its batches is a *global batch*; every worker gets a slice of it:

- a `DataLoader` over a map-style dataset: the slice is taken from the batch sampler's indices, so that a worker loads
  only its own examples. Samplers draw from lent random state, the same on every worker, fixed by seed and epoch.
- a `DataLoader` over an iterable dataset: every worker reads the stream and keeps its slice of each batch. The dataset
  draws from lent random state too, so that all workers read the same stream.
- anything else that can be iterated: its finished batches are cut along their first dimension.

A worker whose slice is empty gets one example that counts for nothing, so that it takes part in the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from offbeat.errors import DataError
from offbeat.protocols.partition import Indices, batches_of_parts, dirichlet, mine, mixed, share
from offbeat.runtime.parts import Parts, labels_of
from offbeat.runtime.randomness import Lent, seed_everything
from offbeat.runtime.slicing import cut, examples_in

_AHEAD = 256
"""Batches of indices drawn from a sampler at a time; swapping random state costs too much to do it for each."""


@dataclass(frozen=True)
class Batch:
    """A worker's slice of one global batch."""

    content: Any
    examples: int
    """How many of the examples count; 0 for a worker that only keeps the others company."""
    total: int | None
    """How many examples all workers have together; None if only the exchange will tell."""
    last: bool = False
    """Whether this is known to be the last batch of the epoch."""


@dataclass
class Share:
    """Which worker asks, and what fixes the order of the data."""

    rank: int
    size: int
    seed: int
    loader: int
    """The loader's number in this run, so that two loaders shuffle differently."""
    members: tuple[int, ...] = ()
    """The workers that are alive, who share what the dead would have had; empty: all are."""
    merge: int = 1
    """How many of the loader's batches make one global batch."""
    afresh: bool = False
    """Whether every batch is drawn from all examples, whatever was seen before, instead of in passes over them."""

    @property
    def position(self) -> tuple[int, int]:
        """Its place among the living, and how many they are."""
        if self.rank not in self.members:
            return self.rank, self.size
        return self.members.index(self.rank), len(self.members)

    @property
    def ranks(self) -> list[int]:
        """Whose parts fall to this worker: its own, and of those of the dead every so manieth."""
        at, count = self.position
        dead = [rank for rank in range(self.size) if self.members and rank not in self.members]
        return [self.rank, *(rank for i, rank in enumerate(dead) if i % count == at)]


class Feed(Protocol):
    """What a loader tells its team."""

    def asked(self, loader: Loader) -> bool:
        """The next training batch is asked for, all before it are done; False ends the epoch here."""
        ...

    def given(self, batch: Batch, training: bool) -> None:
        """A batch is about to be handed to the loop."""
        ...

    def fetching(self, training: bool) -> None:
        """The loop has come for its next batch: from now on it waits for input."""
        ...

    def anyone(self, has: bool) -> bool:
        """Whether any worker still has data."""
        ...

    def passed_over(self) -> int:
        """Batches that were learned without this worker since it was last asked: they are not its any more."""
        ...

    def skipped(self, batch: Batch) -> None:
        """A batch is left out, as its step was made without this worker."""
        ...

    def ended(self) -> None:
        """The loop has left its training data, at the end or before it."""
        ...


class Source(ABC):
    """One way of taking a worker's slices out of a user's loader."""

    knows_end = True
    """Whether all workers know alone when an epoch ends."""

    @abstractmethod
    def batches(self, epoch: int, skip: int, seed: int) -> Iterator[Batch]:
        """The slices of one epoch, from batch `skip` on; empty slices hold one example that does not count."""


class Loader:
    """What `team.prepare` gives back for a loader: iterate it as before."""

    def __init__(self, original: Iterable[Any], source: Source, feed: Feed, place: Share) -> None:
        self._original, self._source, self._feed, self._place = original, source, feed, place
        self._looks = 0
        self._missed = 0
        self.epoch = 0
        """Training epochs begun."""
        self.batches = 0
        """Training batches handed out in the current epoch."""
        self.complete = False
        """Whether the current epoch has been gone through to its end."""
        self.resume_at: tuple[int, int] | None = None
        """Where a resumed run goes on: epochs before it yield nothing, batches before it are skipped."""
        self._generator_states: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)

    def __len__(self) -> int:
        return len(cast("Any", self._original))

    def __iter__(self) -> Iterator[Any]:
        return self._training() if torch.is_grad_enabled() else self._looking()

    def _looking(self) -> Iterator[Any]:
        """An evaluation: no exchange follows, so a worker without examples just ends."""
        self._looks += 1
        seed = mixed(self._place.seed, self._place.loader, 1)
        for batch in self._source.batches(self._looks, 0, seed):
            if batch.examples:
                self._feed.given(batch, training=False)
                yield batch.content
                self._feed.fetching(training=False)

    def _training(self) -> Iterator[Any]:
        self.epoch += 1
        self.batches = 0
        self.complete = False
        if self.resume_at is not None and self.epoch < self.resume_at[0]:
            return
        skip = self._rejoin()
        self._generator_states = [generator.get_state() for generator in generators_of(self._original)]
        self._feed.fetching(training=True)
        try:
            # The stream is opened only after this boundary, where a resumed run gets its random state back.
            if self._feed.asked(self):
                yield from self._handed_out(skip)
        finally:
            self._feed.ended()

    def _handed_out(self, skip: int) -> Iterator[Any]:
        stream = self._source.batches(self.epoch, skip, mixed(self._place.seed, self._place.loader, 0))
        for batch in stream if self._source.knows_end else self._together(stream):
            self.batches += 1
            if self._missed:
                self._missed -= 1
                self._feed.skipped(batch)
            else:
                self._feed.given(batch, training=True)
                yield batch.content
                self._feed.fetching(training=True)
                self._missed = self._feed.passed_over()
            self.complete = batch.last
            # Before a boundary this worker is where the others are.
            if not self._missed and not self._feed.asked(self):
                return
        if self.batches == 0:
            raise DataError(
                f"the training data gave no batch at all (dataset of {_length(self._original)}): with drop_last it is "
                f"smaller than one batch, or its stream is empty. Use a smaller batch."
            )
        self.complete = True

    def _rejoin(self) -> int:
        if self.resume_at is None or self.epoch != self.resume_at[0]:
            return 0
        self.batches = self.resume_at[1]
        self.resume_at = None
        for generator, state in zip(generators_of(self._original), self._generator_states, strict=False):
            generator.set_state(state)
        return self.batches

    def _together(self, stream: Iterator[Batch]) -> Iterator[Batch]:
        """Streams may end at different times: whoever is done keeps the others company until all are."""
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
        """Where in the data this worker stands; `at_end` if the loop is through with an epoch that is complete."""
        epoch, batches, generators = self.epoch, self.batches, list(self._generator_states)
        if self.resume_at is not None:
            epoch, batches = self.resume_at  # A resumed run that has not come to this loader yet.
        elif at_end and self.complete:
            epoch, batches = self.epoch + 1, 0
            generators = [generator.get_state() for generator in generators_of(self._original)]
        return {"epoch": epoch, "batches": batches, "generators": generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where the state was taken, when the loop comes to that epoch."""
        self._generator_states = list(state["generators"])
        if state["epoch"]:
            self.resume_at = (int(state["epoch"]), int(state["batches"]))


def divide(loader: Iterable[Any], shares: Sequence[Share], feed: Feed, parts: Parts, split: bool = True) -> Loader:
    """The loader, divided over the workers; `split=False` if each worker's loader is its own part already.

    A worker with several shares gets its slices of every batch one after the other.
    """
    sources = [_source_for(loader, share, parts, split) for share in shares]
    return Loader(loader, sources[0] if len(sources) == 1 else InTurn(sources), feed, shares[0])


def _source_for(loader: Iterable[Any], place: Share, parts: Parts, split: bool) -> Source:
    if not split or _already_divided(loader, place):
        return Whole(loader, place)
    if place.merge > 1 and not _is_indexed(loader):
        raise DataError(
            f"weak scaling makes one batch of {place.merge}, but a {type(loader).__name__} that is no DataLoader over "
            f"a map-style dataset hands out finished ones. Measure strong scaling, or give such a DataLoader."
        )
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return Cut(loader, place)
    given = cast("DataLoader[Any]", loader)
    if given.batch_sampler is None and not isinstance(given.dataset, IterableDataset):
        return Cut(loader, place)
    if isinstance(given.dataset, IterableDataset):
        if parts.alpha is not None:
            raise DataError(
                "dirichlet(alpha) needs to know all labels beforehand, which a stream does not. Use iid parts."
            )
        return Cut(loader, place) if given.batch_size is None else Streamed(given, place)
    return Indexed(given, place, parts)


def _is_indexed(loader: Iterable[Any]) -> bool:
    """Whether a loader's batches are known as indices before they are loaded."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    return loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset)


def _already_divided(loader: Iterable[Any], place: Share) -> bool:
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any(isinstance(s, DistributedSampler) and s.num_replicas == place.size > 1 for s in samplers)


class Indexed(Source):
    """A DataLoader over a map-style dataset."""

    def __init__(self, loader: DataLoader[Any], place: Share, parts: Parts) -> None:
        self._place = place
        self._sampler = loader.batch_sampler
        self._dataset = loader.dataset
        self._parts = self._skewed(loader, parts)
        self._global_batch = (loader.batch_size or 0) * place.merge
        plain = loader.batch_size is not None and type(loader.sampler) in (RandomSampler, SequentialSampler)
        self._afresh = place.afresh and plain
        self._tensors = _tensors_of(loader)
        self._elsewhere = loader.num_workers > 0
        self._following = _Following()
        dataset = _Seeded(loader.dataset) if self._elsewhere else loader.dataset
        self._inner = None if self._tensors else _like(loader, dataset, batch_sampler=self._following)

    def _skewed(self, loader: DataLoader[Any], parts: Parts) -> list[Indices] | None:
        if parts.alpha is None or self._place.size == 1:
            return None
        if loader.batch_size is None:
            raise DataError(
                "dirichlet(alpha) cannot be used with a batch sampler of your own: it decides who gets what itself."
            )
        if type(loader.sampler) not in (RandomSampler, SequentialSampler):
            raise DataError(
                f"dirichlet(alpha) goes through the whole dataset, but the loader's {type(loader.sampler).__name__} "
                f"may leave examples out. Give a Subset of the dataset instead of a sampler, or use iid parts."
            )
        return dirichlet(labels_of(loader.dataset), self._place.size, parts.alpha, self._place.seed)

    def batches(self, epoch: int, skip: int, seed: int) -> Iterator[Batch]:
        """Slices of the sampler's batches, loaded by a DataLoader like the user's."""
        plan = islice(self._planned(epoch, seed), skip, None)
        if self._tensors is not None:
            for indices, batch in plan:
                chosen = torch.as_tensor(indices)
                yield Batch([tensor[chosen] for tensor in self._tensors], batch.examples, batch.total, batch.last)
            return
        given: deque[Batch] = deque()
        self._following.indices = self._noted(plan, given, mixed(seed, epoch, self._place.rank), skip)
        for content in cast("DataLoader[Any]", self._inner):
            batch = given.popleft()
            yield Batch(content, batch.examples, batch.total, batch.last)

    def _noted(self, plan: Iterator[Any], given: deque[Batch], seed: int, skip: int) -> Iterator[list[Any]]:
        """The plan's indices; what belongs to them is kept until their examples arrive, some batches later."""
        for number, (indices, batch) in enumerate(plan, skip):
            given.append(batch)
            yield [mixed(seed, number), *indices] if self._elsewhere else indices

    def _planned(self, epoch: int, seed: int) -> Iterator[tuple[list[Any], Batch]]:
        """The worker's indices for every global batch, with one batch of foresight to know the last."""
        slices = self._from_parts(epoch, seed) if self._parts else self._from_sampler(epoch, seed)
        waiting: tuple[list[Any], int, int] | None = None
        for piece in slices:
            if waiting is not None:
                yield waiting[0], Batch(None, waiting[1], waiting[2])
            waiting = piece
        if waiting is not None:
            yield waiting[0], Batch(None, waiting[1], waiting[2], last=True)

    def _from_sampler(self, epoch: int, seed: int) -> Iterator[tuple[list[Any], int, int]]:
        lent = Lent(mixed(seed, epoch))
        drawn = self._drawn(np.random.default_rng(mixed(seed, epoch))) if self._afresh else iter
        with lent.use():
            stream = iter(cast("Iterable[list[Any]]", self._sampler))
        while True:
            with lent.use():
                block = list(islice(stream, _AHEAD * self._place.merge))
            for whole in drawn(_merged(block, self._place.merge)):
                part = list(mine(whole, *self._place.position))
                yield part or list(whole[-1:]), len(part), len(whole)
            if len(block) < _AHEAD * self._place.merge:
                return

    def _drawn(self, random: np.random.Generator) -> Callable[[list[list[Any]]], Iterator[list[Any]]]:
        """In place of each batch, as many examples drawn from all of them."""
        count = len(cast("Any", self._dataset))
        return lambda batches: (random.choice(count, len(batch), replace=False).tolist() for batch in batches)

    def _from_parts(self, epoch: int, seed: int) -> Iterator[tuple[list[Any], int, int]]:
        parts = cast("list[Indices]", self._parts)
        stand_in = next(part for part in parts if len(part))[:1].tolist()
        for slices in batches_of_parts(parts, self._global_batch, seed, epoch):
            part = [index for rank in self._place.ranks for index in slices[rank].tolist()]
            yield part or stand_in, len(part), sum(len(piece) for piece in slices)


def _merged(batches: list[list[Any]], count: int) -> list[list[Any]]:
    """One batch of every so many."""
    if count == 1:
        return batches
    return [[index for batch in batches[at : at + count] for index in batch] for at in range(0, len(batches), count)]


class Streamed(Source):
    """A DataLoader over an iterable dataset; every worker reads the stream and keeps its slice of each batch."""

    knows_end = False

    def __init__(self, loader: DataLoader[Any], place: Share) -> None:
        self._place = place
        self._stream = _SlicedStream(loader, place.rank, place.size)
        self._collate = _as_it_is if loader.num_workers else loader.collate_fn
        self._inner = _like(loader, self._stream, batch_size=None, collate_fn=_as_it_is)

    def batches(self, epoch: int, skip: int, seed: int) -> Iterator[Batch]:
        """Slices of consecutive batches of the stream."""
        self._stream.seed.fill_(mixed(seed, epoch))
        for part, examples, total in islice(self._inner, skip, None):
            yield Batch(self._collate(part), examples, total if self._place.size == 1 else None)


class Cut(Source):
    """Anything else: batches are taken as they come and cut along their first dimension."""

    knows_end = False

    def __init__(self, loader: Iterable[Any], place: Share) -> None:
        self._loader, self._place = loader, place

    def batches(self, epoch: int, skip: int, seed: int) -> Iterator[Batch]:
        """Slices of the finished batches."""
        for batch in islice(_lent(self._loader, mixed(seed, epoch)), skip, None):
            content, examples, total = cut(batch, *self._place.position)
            yield Batch(content, examples, total if self._place.size == 1 else None)


class Whole(Source):
    """A loader that is this worker's part already: only counted."""

    knows_end = False

    def __init__(self, loader: Iterable[Any], place: Share) -> None:
        self._loader, self._place = loader, place

    def batches(self, epoch: int, skip: int, seed: int) -> Iterator[Batch]:
        """The batches as they are."""
        for content in islice(_lent(self._loader, mixed(seed, epoch, self._place.rank)), skip, None):
            yield Batch(content, examples_in(content) or 1, None)


class InTurn(Source):
    """Several slices of every batch, one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.knows_end = sources[0].knows_end

    def batches(self, epoch: int, skip: int, seed: int) -> Iterator[Batch]:
        """The slices of each batch. What all workers have together counts with the last of them."""
        whole, rest = divmod(skip, len(self._sources))
        streams = [source.batches(epoch, whole, seed) for source in self._sources]
        slices = (piece for batch in zip(*streams, strict=True) for piece in self._of_one(batch))
        yield from islice(slices, rest, None)

    def _of_one(self, batch: tuple[Batch, ...]) -> Iterator[Batch]:
        *first, last = batch
        for piece in first:
            yield Batch(piece.content, piece.examples, 0)
        yield last


def _lent(things: Iterable[Any], seed: int) -> Iterator[Any]:
    """The things, while whatever makes them draws from random state of its own."""
    lent = Lent(seed)
    with lent.use():
        stream = iter(things)
    while True:
        with lent.use():
            thing = next(stream, _END)
        if thing is _END:
            return
        yield thing


_END = object()


class _Following:
    """A batch sampler that gives the indices which the iteration that is just beginning has put there."""

    def __init__(self) -> None:
        self.indices: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.indices


class _Seeded(Dataset[Any]):
    """A dataset in a loading process: every batch begins with the seed for whatever is random in loading it.

    So what a batch holds depends neither on which process loads it nor on what was loaded before.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[Any]) -> Any:
        seed, *wanted = indices
        seed_everything(seed)
        many = getattr(self.dataset, "__getitems__", None)
        return many(wanted) if many else [self.dataset[index] for index in wanted]


class _SlicedStream(IterableDataset[Any]):
    """An iterable dataset whose items are this worker's slices: (slice, how many count, size of the whole batch)."""

    def __init__(self, loader: DataLoader[Any], rank: int, size: int) -> None:
        self.dataset = loader.dataset
        self.seed = torch.zeros((), dtype=torch.int64)
        """Fixes what the stream draws in the epoch that is to begin; loading processes that live on see it change."""
        if loader.persistent_workers:
            self.seed.share_memory_()
        self._batch_size = cast("int", loader.batch_size)
        self._drop_last, self._collate = loader.drop_last, loader.collate_fn
        self._rank, self._size = rank, size

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        # Slices differ in length, so collating draws differently on each worker: it has no part in what is lent.
        loading = get_worker_info()
        if loading:
            seed_everything(mixed(int(self.seed), self._rank, loading.id))
        for whole in _lent(self._batches(), mixed(int(self.seed), loading.id if loading else 0)):
            start, stop = share(len(whole), self._rank, self._size)
            part = whole[start:stop] or whole[-1:]
            yield self._collate(part) if loading else part, stop - start, len(whole)

    def _batches(self) -> Iterator[list[Any]]:
        stream = iter(self.dataset)
        while whole := list(islice(stream, self._batch_size)):
            if len(whole) < self._batch_size and self._drop_last:
                return
            yield whole


def _begin(user: Callable[[int], None] | None, number: int) -> None:
    """What a loading process does first: show the user's own dataset, and do what the user asked for."""
    info = cast("Any", get_worker_info())
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if user is not None:
        user(number)


def _as_it_is(item: Any) -> Any:
    return item


def _like(loader: DataLoader[Any], dataset: Any, **changed: Any) -> DataLoader[Any]:
    """A DataLoader with the settings of another one, and random state of its own."""
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": partial(_begin, loader.worker_init_fn) if loader.num_workers else None,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "generator": torch.Generator(),
    }
    return DataLoader(dataset, **(settings | changed))


def _tensors_of(loader: DataLoader[Any]) -> tuple[Tensor, ...] | None:
    """The tensors of a loader whose batches can be had by indexing them, which is many times faster than collating."""
    simple = (
        type(loader.dataset) is TensorDataset
        and loader.collate_fn is default_collate
        and loader.num_workers == 0
        and not loader.pin_memory
    )
    return cast("TensorDataset", loader.dataset).tensors if simple else None


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a user gave to a loader and its samplers."""
    holders = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    holders.append(getattr(holders[2], "sampler", None))
    found: list[torch.Generator] = []
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in found):
            found.append(generator)
    return found


def _length(loader: Any) -> str:
    try:
        return f"{len(loader.dataset)} examples"
    except (TypeError, AttributeError):
        return "unknown size"

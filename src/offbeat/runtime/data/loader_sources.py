"""Sources of a worker's slices, one for each kind of loader (see runtime.data.loaders).

Each makes the same random draws as the user's loader, in the same order: at the start of an epoch, a `DataLoader`
creates an iterator of its sampler, draws a seed for its loading processes, and requests the first batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from offbeat.errors import DataError
from offbeat.protocols.partition import Indices, batches_of_parts, dirichlet, mine, mixed, share
from offbeat.runtime.data.batch_slicing import cut, examples_in
from offbeat.runtime.data.label_skew import Parts, labels_of
from offbeat.runtime.state.random_state import Draws, Lent, capture, seed_everything

Slice = tuple[list[Any], int, int]
"""A worker's indices in a global batch, how many count, and the examples of the whole batch."""
_AHEAD = 256  # Batches of indices drawn from a sampler at a time; swapping random state for each would cost too much.


@dataclass(frozen=True)
class Batch:
    """A worker's slice of one global batch."""

    content: Any
    examples: int  # Number of examples; 0 if this worker's slice is empty and its content has weight 0.
    total: int | None  # Examples of all workers together; None if only the exchange will tell.
    last: bool = False  # Whether this is known to be the last batch of the epoch.


@dataclass
class Share:
    """A worker's share of the data, and what determines its order."""

    rank: int
    size: int
    seed: int
    loader: int  # Number of the loader in this run, so that two loaders shuffle differently.
    members: tuple[int, ...] = ()  # The live workers, which share the parts of the dead; empty: all are alive.
    merge: int = 1  # Batches of the loader in one global batch.
    afresh: bool = False  # Whether every batch is drawn from all examples, instead of in passes over them.
    shared: bool = False  # Whether other workers read the same share: those with the other stages of a model.

    @property
    def alone(self) -> bool:
        """Whether this worker is the only one that reads the data."""
        return self.size == 1 and not self.shared

    @property
    def position(self) -> tuple[int, int]:
        """Its position among the live workers, and their number."""
        if self.rank not in self.members:
            return self.rank, self.size
        return self.members.index(self.rank), len(self.members)

    @property
    def ranks(self) -> list[int]:
        """The ranks whose parts this worker takes: its own, and its share of the dead."""
        at, count = self.position
        dead = [rank for rank in range(self.size) if self.members and rank not in self.members]
        return [self.rank, *(rank for i, rank in enumerate(dead) if i % count == at)]


@dataclass(frozen=True)
class Epoch:
    """One pass over the data."""

    number: int  # From 1.
    skip: int  # Batches that a resumed run has already had.
    draws: Draws  # Random state that determines the data.
    seed: int  # Determines all other draws.


class BatchSource(ABC):
    """Base of sources of a worker's slices."""

    knows_end = True  # Whether each worker knows by itself when an epoch ends.
    native = False  # Whether this worker gets all batches of the user's loader, and makes its draws.

    @abstractmethod
    def batches(self, epoch: Epoch) -> Iterator[Batch]:
        """The slices of one epoch; empty slices hold one example of weight 0."""

    @abstractmethod
    def spend(self) -> None:
        """Make and discard the draws of the user's loader from the global generators before its first batch."""


class Indexed(BatchSource):
    """A DataLoader over a map-style dataset."""

    def __init__(self, loader: DataLoader[Any], place: Share, parts: Parts) -> None:
        self._loader, self._place = loader, place
        self.native = place.alone
        self._parts = self._skewed(loader, parts)
        self._global_batch = (loader.batch_size or 0) * place.merge
        self._plain = loader.batch_size is not None and type(loader.sampler) in (RandomSampler, SequentialSampler)
        self._afresh = place.afresh and self._plain
        self._tensors = _tensors_of(loader)
        self._elsewhere = loader.num_workers > 0
        self._following = _Following()
        self._bases = BaseSeeds(loader)
        self._inner = None if self._tensors else self._like_it()

    def _like_it(self) -> DataLoader[Any]:
        """The user's loader, with indices from here."""
        changes = {"batch_sampler": self._following, "generator": self._bases.drawn}
        loader = self._loader
        if self.native or not self._elsewhere:
            return _like(loader, loader.dataset, worker_init_fn=loader.worker_init_fn, **changes)
        return _like(loader, _Seeded(loader.dataset), **changes)

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
                f"may skip examples. Use a Subset of the dataset instead of a sampler, or iid parts."
            )
        return dirichlet(labels_of(loader.dataset), self._place.size, parts.alpha, self._place.seed)

    def batches(self, epoch: Epoch) -> Iterator[Batch]:
        """Slices of the sampler's batches, loaded by a DataLoader like the user's."""
        if not (self.native and self._elsewhere):
            return self._loaded(epoch)
        # The draws of loading processes depend on what they have loaded: a resumed run loads what it skips.
        return epoch.draws.stream(lambda: self._loaded(replace(epoch, skip=0)), epoch.skip)

    def _loaded(self, epoch: Epoch) -> Iterator[Batch]:
        plan = self._planned(epoch)
        if self._tensors is not None:
            for indices, batch in plan:
                chosen = torch.from_numpy(np.array(indices))  # Torch takes several times as long to read a list.
                # Samplers of torch's own draw no negative index, which selecting does not know.
                rows = [t.index_select(0, chosen) if self._plain else t[chosen] for t in self._tensors]
                yield Batch(rows, batch.examples, batch.total, batch.last)
            return
        pending: deque[Batch] = deque()
        seed = mixed(epoch.seed, self._place.rank)

        def indices_of_plan() -> Iterator[list[Any]]:
            for number, (indices, batch) in enumerate(plan, epoch.skip):
                pending.append(batch)  # Until its examples arrive, some batches later.
                yield [mixed(seed, number), *indices] if self._elsewhere and not self.native else indices

        self._following.indices = indices_of_plan()
        for content in cast("DataLoader[Any]", self._inner):
            batch = pending.popleft()
            yield Batch(content, batch.examples, batch.total, batch.last)

    def _planned(self, epoch: Epoch) -> Iterator[tuple[list[Any], Batch]]:
        """The worker's indices of every global batch; the last is marked."""
        if self.native and self._elsewhere:
            # Opened at once: the seed of the loading processes is drawn before they start, then the first batch.
            return self._counted(self._opened(epoch), epoch.skip)
        if self.native:
            return self._counted(self._wholes(epoch), epoch.skip)
        return _with_last(piece() for piece in self.pieces(epoch))

    def pieces(self, epoch: Epoch) -> Iterator[Callable[[], Slice]]:
        """For each global batch, what cuts this worker's slice of it, by the members of that moment."""
        if self._parts:
            return islice(self._from_parts(epoch.number), epoch.skip, None)
        return (partial(self._cut, whole) for whole in self._wholes(epoch))

    def _wholes(self, epoch: Epoch) -> Iterator[list[Any]]:
        return epoch.draws.stream(lambda: self._opened(epoch), epoch.skip, _AHEAD)

    def _opened(self, epoch: Epoch) -> Iterator[list[Any]]:
        """The global batches, as indices."""
        stream = iter(cast("Iterable[list[Any]]", self._loader.batch_sampler))
        self._bases.draw(epoch.number)
        if self._place.merge > 1:
            stream = _merged(stream, self._place.merge)
        return self._drawn(stream, epoch.seed) if self._afresh else stream

    def _cut(self, whole: list[Any]) -> Slice:
        part = list(mine(whole, *self._place.position))
        return part or list(whole[-1:]), len(part), len(whole)

    def _counted(self, wholes: Iterable[list[Any]], skip: int) -> Iterator[tuple[list[Any], Batch]]:
        """All indices, drawn when needed, as without a team: so only their number tells the last."""
        try:
            count = -(-len(cast("Any", self._loader.batch_sampler)) // self._place.merge)
        except (TypeError, AttributeError, NotImplementedError):
            count = None
        for number, whole in enumerate(wholes, skip + 1):
            yield whole, Batch(None, len(whole), len(whole), last=number == count)

    def _drawn(self, batches: Iterable[list[Any]], seed: int) -> Iterator[list[Any]]:
        """For each batch, as many examples drawn from the whole dataset."""
        random, count = np.random.default_rng(seed), len(cast("Any", self._loader.dataset))
        return (random.choice(count, len(batch), replace=False).tolist() for batch in batches)

    def _from_parts(self, epoch: int) -> Iterator[Callable[[], Slice]]:
        parts, seed = cast("list[Indices]", self._parts), mixed(self._place.seed, self._place.loader)
        stand_in = next(part for part in parts if len(part))[:1].tolist()

        def cut_parts(slices: list[Indices]) -> Slice:
            part = [index for rank in self._place.ranks for index in slices[rank].tolist()]
            return part or stand_in, len(part), sum(len(piece) for piece in slices)

        for slices in batches_of_parts(parts, self._global_batch, seed, epoch):
            yield partial(cut_parts, slices)

    def spend(self) -> None:
        """Make the sampler's draws before its first batch, and draw the seed for loading processes."""
        stream = iter(cast("Iterable[Any]", self._loader.batch_sampler))
        self._bases.draw(1)
        next(stream, None)


def _with_last(pieces: Iterator[Slice]) -> Iterator[tuple[list[Any], Batch]]:
    """Indices and batches, one batch ahead to mark the last."""
    for piece, following in pairwise(chain(pieces, [None])):
        indices, examples, total = cast("Slice", piece)
        yield indices, Batch(None, examples, total, last=following is None)


def _merged(batches: Iterator[list[Any]], count: int) -> Iterator[list[Any]]:
    """Every `count` batches joined into one."""
    while some := list(islice(batches, count)):
        yield [index for batch in some for index in batch]


class Streamed(BatchSource):
    """A DataLoader over an iterable dataset; every worker reads the stream and keeps its slice of each batch."""

    knows_end = False

    def __init__(self, loader: DataLoader[Any], place: Share) -> None:
        self._loader, self._place = loader, place
        self._stream = _SlicedStream(loader, place.rank, place.size)
        self._bases = BaseSeeds(loader)
        here = {"batch_size": None, "collate_fn": _as_it_is, "generator": self._bases.drawn}
        self._inner = _like(loader, self._stream, **here) if loader.num_workers else None

    def batches(self, epoch: Epoch) -> Iterator[Batch]:
        """Slices of consecutive batches of the stream."""
        if self._inner is None:
            for whole in epoch.draws.stream(lambda: self._opened(epoch.number), epoch.skip):
                part, examples = self._stream.slice_of(whole)
                yield Batch(cast("Any", self._loader.collate_fn)(part), examples, None)
            return
        for _ in epoch.draws.stream(lambda: iter([self._bases.draw(epoch.number)]), min(epoch.skip, 1)):
            pass
        # Persistent loading processes are seeded by this from their second epoch on.
        self._stream.seed.fill_(0 if epoch.number == 1 else epoch.seed)
        for content, examples in islice(self._inner, epoch.skip, None):
            yield Batch(content, examples, None)

    def _opened(self, epoch: int) -> Iterator[list[Any]]:
        self._bases.draw(epoch)
        return self._stream.wholes()

    def spend(self) -> None:
        """Draw the seed for loading processes."""
        self._bases.draw(1)


class SlicedBatches(BatchSource):
    """Any other iterable: its batches are cut along their first dimension; without a place they are only counted."""

    knows_end = False

    def __init__(self, loader: Iterable[Any], place: Share | None) -> None:
        self._loader, self._place = loader, place
        self.native = place is None or place.alone
        self._usual = getattr(loader, "batch_size", None) or 1

    def batches(self, epoch: Epoch) -> Iterator[Batch]:
        """Slices of the finished batches."""
        for batch in epoch.draws.stream(lambda: iter(self._loader), epoch.skip):
            if self._place is None:
                yield Batch(batch, examples_in(batch) or 1, None)
            elif self.native:
                count = examples_in(batch) or self._usual
                yield Batch(batch, count, count)
            else:
                content, examples, total = cut(batch, *self._place.position)
                yield Batch(content, examples, total if self._place.size == 1 else None)

    def spend(self) -> None:
        """Draw the seed for loading processes, if there can be any."""
        if isinstance(self._loader, DataLoader):
            BaseSeeds(cast("DataLoader[Any]", self._loader)).draw(1)


class InTurn(BatchSource):
    """Several slices of every batch, one after the other."""

    def __init__(self, sources: Sequence[BatchSource]) -> None:
        self._sources = sources
        self.knows_end = sources[0].knows_end

    def batches(self, epoch: Epoch) -> Iterator[Batch]:
        """The slices of each batch; the total of all workers counts with the last of them."""
        whole, rest = divmod(epoch.skip, len(self._sources))
        first, *more = self._sources
        streams = [first.batches(replace(epoch, skip=whole))]
        streams += [source.batches(replace(epoch, skip=whole, draws=epoch.draws.again())) for source in more]
        slices = (
            replace(piece, total=0, last=False) if piece is not batch[-1] else piece
            for batch in zip(*streams, strict=True)
            for piece in batch
        )
        yield from islice(slices, rest, None)

    def spend(self) -> None:
        """Make the draws of one of them."""
        self._sources[0].spend()


class BaseSeeds:
    """The seeds that a DataLoader draws for its loading processes, even if it has none."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._begun = False
        self.drawn = torch.Generator()  # Repeats the last draw: for a loader whose processes need the same seed.

    def draw(self, epoch: int) -> None:
        """Draw as the loader does at the start of an epoch; persistent processes keep their seed."""
        if self._loader.persistent_workers and (self._begun or epoch > 1):
            return
        self._begun = True
        generator = self._loader.generator
        self.drawn.set_state(torch.get_rng_state() if generator is None else generator.get_state())
        torch.empty((), dtype=torch.int64).random_(generator=generator)


class _Following:
    """A batch sampler whose indices are set before each iteration."""

    def __init__(self) -> None:
        self.indices: Iterator[list[Any]] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        return self.indices


class _Seeded(torch_data.Dataset[Any]):
    """A dataset in a loading process: a batch depends only on its seed, which its indices begin with."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[Any]) -> Any:
        seed, *rest = indices
        seed_everything(seed)
        many = getattr(self.dataset, "__getitems__", None)
        return many(rest) if many else [self.dataset[index] for index in rest]


class _SlicedStream(IterableDataset[Any]):
    """An iterable dataset whose items, in loading processes, are this worker's collated slices and their sizes."""

    def __init__(self, loader: DataLoader[Any], rank: int, size: int) -> None:
        self.dataset = loader.dataset
        self.seed = torch.zeros((), dtype=torch.int64)
        """Seed of the stream in the coming epoch; 0: the seed of the loading process."""
        self._lasting = loader.persistent_workers
        if self._lasting:
            self.seed.share_memory_()
        self._batch_size = cast("int", loader.batch_size)
        self._drop_last, self._collate = loader.drop_last, loader.collate_fn
        self._rank, self._size = rank, size

    def slice_of(self, whole: list[Any]) -> tuple[list[Any], int]:
        """Take this worker's slice of a batch, and its number of examples."""
        start, stop = share(len(whole), self._rank, self._size)
        return whole[start:stop] or whole[-1:], stop - start

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        loading = cast("Any", torch_data.get_worker_info())
        if self._lasting and int(self.seed):
            seed_everything(mixed(int(self.seed), loading.id))
        lent = Lent(capture())
        # Slices differ in length, so collating draws differently on each worker: it gets a seed of its own.
        seed_everything(mixed(loading.seed, int(self.seed), self._rank))
        for whole in lent.stream(self.wholes):
            part, examples = self.slice_of(whole)
            yield self._collate(part), examples

    def wholes(self) -> Iterator[list[Any]]:
        """Consecutive batches of the stream."""
        stream = iter(self.dataset)
        while whole := list(islice(stream, self._batch_size)):
            if len(whole) < self._batch_size and self._drop_last:
                return
            yield whole


def _begin(user: Callable[[int], None] | None, number: int) -> None:
    """Initialize a loading process: expose the user's dataset, and call the user's worker_init_fn."""
    info = cast("Any", torch_data.get_worker_info())
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if user is not None:
        user(number)


def _as_it_is(item: Any) -> Any:
    return item


def _like(loader: DataLoader[Any], dataset: Any, **changed: Any) -> DataLoader[Any]:
    """A DataLoader with the settings of another one."""
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor")
    settings: dict[str, Any] = {name: getattr(loader, name) for name in (*kept, "persistent_workers", "in_order")}
    settings["worker_init_fn"] = partial(_begin, loader.worker_init_fn) if loader.num_workers else None
    return DataLoader(dataset, **(settings | changed))


def _tensors_of(loader: DataLoader[Any]) -> tuple[Tensor, ...] | None:
    """The tensors of a loader whose batches can be indexed from them, which is many times faster than collating."""
    simple = (
        type(loader.dataset) is TensorDataset
        and loader.collate_fn is torch_data.default_collate
        and loader.num_workers == 0
        and not loader.pin_memory
    )
    return cast("TensorDataset", loader.dataset).tensors if simple else None

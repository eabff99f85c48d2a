"""Sources of a worker's slices that data servers prepare: the same slices, in the same order, as without them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from offbeat.errors import DataError
from offbeat.protocols.data_servers.passes import Piece
from offbeat.protocols.partition import mixed
from offbeat.runtime.data.label_skew import Parts
from offbeat.runtime.data.loader_sources import BaseSeeds, Batch, BatchSource, Epoch, Indexed, Share, Slice
from offbeat.runtime.data.loaders import is_divided
from offbeat.runtime.data_servers.link import DataLink
from offbeat.runtime.data_servers.orders import Chosen, Stretch, encoded, plain_indices
from offbeat.runtime.state.random_state import packed, unpacked


class SuppliedBatches(BatchSource):
    """A DataLoader over a map-style dataset, whose examples a data server reads; only the indices are drawn here."""

    def __init__(self, loader: DataLoader[Any], place: Share, parts: Parts, link: DataLink) -> None:
        self._plan, self._place, self._link = Indexed(loader, place, parts), place, link
        self.native = place.alone

    def batches(self, epoch: Epoch) -> Iterator[Batch]:
        """The slices of one epoch."""
        seed = mixed(epoch.seed, self._place.rank)

        def pieces() -> Iterator[Piece[Slice]]:
            for number, cut in enumerate(self._plan.pieces(epoch), epoch.skip):
                yield self._piece(cut, mixed(seed, number))

        division = lambda: (self._place.rank, *self._place.members)  # noqa: E731
        for content, (_, examples, total), last in self._link.batches(epoch.skip, pieces(), division):
            yield Batch(content, examples, total, last)

    def _piece(self, cut: Callable[[], Slice], seed: int) -> Piece[Slice]:
        def piece() -> tuple[Any, Slice]:
            slice_ = cut()
            return encoded(Chosen(self._place.loader, seed, plain_indices(slice_[0]))), slice_

        return piece

    def spend(self) -> None:
        """Make the sampler's draws before its first batch."""
        self._plan.spend()


class SuppliedStream(BatchSource):
    """A DataLoader over an iterable dataset, which a data server reads for this worker."""

    knows_end = False

    def __init__(self, loader: DataLoader[Any], place: Share, link: DataLink) -> None:
        self._place, self._link, self._bases = place, link, BaseSeeds(loader)
        self.native = place.alone

    def batches(self, epoch: Epoch) -> Iterator[Batch]:
        """Slices of consecutive batches of the stream, until it ends."""
        begin = packed(epoch.draws.start).numpy().tobytes()
        for _ in epoch.draws.stream(lambda: iter([self._bases.draw(epoch.number)]), min(epoch.skip, 1)):
            pass
        place, seed = self._place, mixed(epoch.seed, self._place.rank)

        def pieces() -> Iterator[Piece[None]]:
            number = epoch.skip
            while True:
                wish = Stretch(place.loader, mixed(seed, number), begin, place.rank, place.size)
                yield lambda wish=wish: (encoded(wish), None)
                number += 1

        for supplied in self._link.batches(epoch.skip, pieces(), lambda: None):
            if supplied.content is None:
                return
            content, examples, begun = supplied.content
            if begun is not None:  # The first batch: the worker's own draws follow those of opening the stream.
                row = torch.from_numpy(np.frombuffer(begun, dtype=np.uint8).copy())
                epoch.draws.go_on(unpacked(row, epoch.draws.start))
            yield Batch(content, examples, None)

    def spend(self) -> None:
        """Draw the seed for loading processes."""
        self._bases.draw(1)


def supplied_by(link: DataLink) -> Callable[[Iterable[Any], Share, Parts, bool], BatchSource]:
    """What makes sources that read from data servers, and refuses loaders that these cannot read."""

    def make(loader: Iterable[Any], place: Share, parts: Parts, split: bool) -> BatchSource:
        if (reason := unreadable(loader)) is not None:
            raise DataError(f"data servers cannot read this loader: {reason}")
        typed = cast("DataLoader[Any]", loader)
        if not split or is_divided(loader, place):
            raise DataError(
                "data servers prepare batches of a loader that is divided here, and this one is each worker's own "
                "part. Give prepare() a loader over all of the data, without a DistributedSampler or split=False."
            )
        if isinstance(typed.dataset, IterableDataset):
            if parts.alpha is not None or place.merge > 1:
                raise DataError("a stream can be divided evenly only, batch by batch. Use iid parts, or omit streams.")
            return SuppliedStream(typed, place, link)
        return SuppliedBatches(typed, place, parts, link)

    return make


def unreadable(loader: Any) -> str | None:
    """Why a data server cannot read the examples of a loader; None if it can."""
    if not (isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__):
        return (
            f"a {type(loader).__name__} hands out finished batches, whose examples cannot be asked for by number. "
            f"Give prepare() a torch DataLoader, or omit --data-servers."
        )
    typed = cast("DataLoader[Any]", loader)
    if isinstance(typed.dataset, IterableDataset):
        if typed.batch_size is None:
            return "with batch_size=None its stream yields finished batches. Give the DataLoader a batch_size."
        return None
    if typed.batch_sampler is None:
        return "with batch_size=None each example is a finished batch. Give the DataLoader a batch_size."
    if not hasattr(type(typed.dataset), "__getitem__") and not hasattr(typed.dataset, "__getitems__"):
        return (
            f"its dataset, a {type(typed.dataset).__name__}, cannot be indexed. Give it __getitem__ and __len__, or "
            f"derive it from IterableDataset."
        )
    return None

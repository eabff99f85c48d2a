"""Prepares batches in a data server: reads and decodes the examples of an order, and collates them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from offbeat.data.bounded_stream import BoundedStream
from offbeat.errors import DataError
from offbeat.protocols.data_servers.messages import Order
from offbeat.protocols.data_servers.server import PrepareBatch
from offbeat.protocols.machine import Name, Payload
from offbeat.protocols.partition import share
from offbeat.runtime.data.loader_sources import BaseSeeds
from offbeat.runtime.data.loaders import generators_of
from offbeat.runtime.data_servers.batch_format import Memory, written
from offbeat.runtime.data_servers.orders import Chosen, Index, Stretch, decoded
from offbeat.runtime.state.random_state import Lent, capture, packed, seed_everything, unpacked

_PASSES = 8
"""Passes over streams that one worker may have at a time; older ones are read anew if they go on."""
_LONGEST = 20_000  # Characters of a traceback; a header has room for 64 KiB.


class Preparer:
    """Prepares the batches of a data server's loaders."""

    def __init__(
        self, name: Name, loaders: Callable[[int], DataLoader[Any]], allocate: Callable[[int], Memory]
    ) -> None:
        self._name, self._loaders, self._allocate = name, loaders, allocate
        self._streams: dict[tuple[Name, int], StreamReader] = {}
        self._bounded: dict[int, BoundedStream] = {}
        self.examples = 0
        self.seconds = 0.0

    def prepare(self, task: PrepareBatch) -> Payload | str:
        """The batch of an order, or why there is none."""
        order, wish = task.order, decoded(task.payload)
        try:
            loader = self._loaders(wish.loader)
            if isinstance(wish, Chosen):
                seed_everything(wish.seed)
                batch = cast("Any", loader.collate_fn)(self._examples(loader.dataset, wish.indices))
                self.examples += len(wish.indices)
            else:
                batch = self._slice(loader, task.worker, order, wish)
            memory = written(batch, self._allocate)
        except Exception as error:
            return self._explained(error)
        return Payload(memory.nbytes, memory)

    def _examples(self, dataset: Any, indices: Sequence[Index]) -> list[Any]:
        many = getattr(dataset, "__getitems__", None)
        if many is not None:
            return many(list(indices))
        examples: list[Any] = []
        for index in indices:
            try:
                examples.append(dataset[index])
            except Exception as error:
                error.add_note(f"It was example {index!r} of {type(dataset).__name__}.")
                raise
        return examples

    def _slice(self, loader: DataLoader[Any], worker: Name, order: Order, wish: Stretch) -> Any:
        place = (worker, order.loader)
        if isinstance(loader.dataset, BoundedStream):
            self._bounded[wish.loader] = loader.dataset
        reader = self._streams.get(place)
        if reader is None or not reader.goes_on(order, wish):
            reader = self._streams[place] = StreamReader(loader, order.turn, wish)
            mine = [other for other in self._streams if other[0] == worker]
            for old in mine[:-_PASSES]:
                del self._streams[old]
        whole = reader.batch(order.number)
        seed_everything(wish.seed)
        if whole is None:
            return None
        start, stop = share(len(whole), wish.rank, wish.size)
        part = whole[start:stop] or whole[-1:]
        self.examples += stop - start
        begun = reader.opened if order.number == 0 else None
        return [cast("Any", loader.collate_fn)(part), stop - start, begun]

    @property
    def skipped(self) -> int:
        """Examples that bounded streams have left out."""
        return sum(stream.skipped for stream in self._bounded.values())

    def _explained(self, error: Exception) -> str:
        lines = traceback.format_exception(error)
        ours = f"{type(error).__name__}: {error}" if not isinstance(error, DataError) else str(error)
        return f"{self._name} could not prepare a batch: {ours}\n{''.join(lines)[-_LONGEST:].rstrip()}"


class StreamReader:
    """One worker's pass over a stream: whole batches by number, read in order from the beginning."""

    KEPT = 16  # Batches kept for orders that come again or out of order.

    def __init__(self, loader: DataLoader[Any], turn: int, wish: Stretch) -> None:
        self._turn, self._begin = turn, wish.begin
        generators = generators_of(loader)
        state = unpacked(torch.from_numpy(np.frombuffer(wish.begin, dtype=np.uint8).copy()), capture(generators))
        self._draws = Lent(state, generators)
        self._batches = self._draws.stream(lambda: _wholes(loader))
        self.opened: bytes | None = None
        """Random state after the first batch was drawn."""
        self._next = 0
        self._kept: dict[int, list[Any]] = {}

    def goes_on(self, order: Order, wish: Stretch) -> bool:
        """Whether this order can be met without reading from the beginning again."""
        same = (order.turn, wish.begin) == (self._turn, self._begin)
        return same and (order.number >= self._next or order.number in self._kept)

    def batch(self, number: int) -> list[Any] | None:
        """The examples of a batch; None after the end."""
        while self._next <= number:
            whole = next(self._batches, None)
            if self._next == 0:
                self.opened = packed(self._draws.now).numpy().tobytes()
            if whole is None:
                return None
            self._kept[self._next] = whole
            self._kept.pop(self._next - self.KEPT, None)
            self._next += 1
        return self._kept[number]


def _wholes(loader: DataLoader[Any]) -> Iterator[list[Any]]:
    """Consecutive batches of a stream, not collated."""
    BaseSeeds(loader).draw(1)  # As a DataLoader does before it opens the stream.
    stream = iter(cast("IterableDataset[Any]", loader.dataset))
    size = cast("int", loader.batch_size)
    while whole := list(islice(stream, size)):
        if len(whole) < size and loader.drop_last:
            return
        yield whole

"""Tables larger than memory: map-style datasets of rows, of which a few parts are in memory at a time."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from offbeat import limits
from offbeat.data.columns import Row, check_types, chosen, row_of
from offbeat.data.part_order import PartSampler, drawn_seed, groups_of_rows
from offbeat.errors import DataError

MEMORY = 256 << 20
"""Bytes of parts that a table keeps in memory, unless it says otherwise; at least one part is kept."""


class TablePart(NamedTuple):
    """A part of a table that is read at once: a row group, a record batch, or a block of lines."""

    file: str
    number: int  # Within its file.
    rows: int


class PartReader(ABC):
    """Reads the parts of files of one format."""

    @abstractmethod
    def parts(self) -> Sequence[TablePart]:
        """All parts, in order; reads no rows if the format says how many there are."""

    @abstractmethod
    def schema(self) -> Any:
        """The columns and types, the same in every file."""

    @abstractmethod
    def read(self, part: TablePart, columns: Sequence[str]) -> Any:
        """The rows of a part, as a pyarrow table of these columns."""


class _PartRows(NamedTuple):
    rows: dict[str, Row]
    nbytes: int


class Table(Dataset[Any]):
    """Rows of files as examples: dictionaries by column, or tuples if columns are named.

    Numbers are tensors, lists of fixed size tensors of that shape, text and bytes are themselves. Only parts that are
    needed are read, where they lie, and the latest are kept. Use `sampler` or `shuffled` for an order that does not
    read a part anew for each row.
    """

    def __init__(
        self,
        reader: PartReader,
        columns: Sequence[str] | None,
        transform: Callable[[Any], Any] | None,
        memory: int,
        where: str,
    ) -> None:
        limits.whole("memory =", memory, limits.BYTES)
        self._reader, self._transform, self._memory, self._where = reader, transform, memory, where
        schema = reader.schema()
        self.columns = chosen(schema.names, columns, where)
        """The columns that are read."""
        self._named = columns is None
        check_types({name: schema.field(name).type for name in self.columns}, where)
        self._parts = list(reader.parts())
        self._ends = np.cumsum([part.rows for part in self._parts], dtype=np.int64).tolist()
        self._held: OrderedDict[int, _PartRows] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Table({self._where}: {len(self):,} rows in {len(self._parts)} parts, {', '.join(self.columns)})"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several rows; each part is read once for all of them."""
        places = [self._place(int(index)) for index in indices]
        rows: list[Any] = [None] * len(places)
        for part in sorted({part for part, _ in places}):
            held = self._part(part)
            for position, (of, row) in enumerate(places):
                if of == part:
                    rows[position] = self._example(held, row)
        return rows

    def _place(self, index: int) -> tuple[int, int]:
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"row {index} of {len(self):,}: {self._where} has no such row")
        part = bisect_right(self._ends, at)
        return part, at - (self._ends[part - 1] if part else 0)

    def _example(self, held: _PartRows, row: int) -> Any:
        values = {name: value(row) for name, value in held.rows.items()}
        example = values if self._named else tuple(values[name] for name in self.columns)
        return example if self._transform is None else self._transform(example)

    def _part(self, number: int) -> _PartRows:
        with self._lock:
            held = self._held.get(number)
            if held is None:
                held = self._held[number] = self._read(self._parts[number])
                while len(self._held) > 1 and sum(each.nbytes for each in self._held.values()) > self._memory:
                    self._held.popitem(last=False)
            self._held.move_to_end(number)
            return held

    def _read(self, part: TablePart) -> _PartRows:
        where = f"{part.file}, part {part.number}"
        try:
            table = self._reader.read(part, self.columns)
        except (OSError, ValueError) as error:  # Pyarrow's own errors are these.
            raise DataError(f"{where} cannot be read: {error}. It may be damaged, or have changed.") from error
        if table.num_rows != part.rows:
            raise DataError(f"{where} had {part.rows} rows and has {table.num_rows} now: it was changed meanwhile.")
        arrays = {name: table.column(name).combine_chunks() for name in self.columns}
        flat = {name: array.chunk(0) if hasattr(array, "chunk") else array for name, array in arrays.items()}
        return _PartRows({name: row_of(array, name, where) for name, array in flat.items()}, table.nbytes)

    @property
    def part_lengths(self) -> list[int]:
        """Rows of each part."""
        return [part.rows for part in self._parts]

    def sampler(self, buffer: int = 10_000, generator: Any = None) -> PartSampler:
        """A sampler that shuffles parts, and rows within `buffer` rows of parts."""
        return PartSampler(self.part_lengths, buffer, generator)

    def shuffled(self, buffer: int = 10_000) -> ShuffledTable:
        """The rows as a stream in such an order, anew in every pass."""
        return ShuffledTable(self, buffer)


class ShuffledTable(IterableDataset[Any]):
    """The rows of a table as a stream: parts in random order, and rows shuffled within a buffer.

    Each pass draws one number from torch's global generator. `state_dict` has the cursor of a pass, for loops that
    save it themselves: after `load_state_dict`, the next pass goes on from there without reading what was read.
    """

    def __init__(self, table: Table, buffer: int) -> None:
        limits.whole("buffer =", buffer, limits.COUNT)
        self.table, self._buffer = table, buffer
        self._seed: int | None = None
        self._position = 0
        self._resumed = False

    def __iter__(self) -> Iterator[Any]:
        seed, first = drawn_seed(), 0
        if self._resumed and self._seed is not None:
            seed, first, self._resumed = self._seed, self._position, False
        self._seed, self._position = seed, first
        shared = get_worker_info()
        place = 0
        for group in groups_of_rows(self.table.part_lengths, self._buffer, seed):
            if place + len(group) > first:
                for row in group[max(0, first - place) :].tolist():
                    self._position += 1
                    # Several loading processes share the rows.
                    if shared is None or self._position % shared.num_workers == shared.id:
                        yield self.table[row]
            place += len(group)

    def state_dict(self) -> dict[str, Any]:
        """The cursor: the seed of the pass, and how many rows it has yielded."""
        return {"seed": self._seed, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this cursor in the next pass."""
        self._seed, self._position = state["seed"], int(state["position"])
        self._resumed = True

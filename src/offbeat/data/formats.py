"""Readers of Parquet, CSV and Arrow files: their parts are row groups, blocks of lines, and record batches."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

from offbeat import limits
from offbeat.data.columns import pyarrow
from offbeat.data.tables import MEMORY, PartReader, Table, TablePart
from offbeat.errors import DataError

Files = str | Path | Sequence[str | Path]
Transform = Callable[[Any], Any] | None
BLOCK = 8 << 20
"""Bytes of a CSV file that are parsed at once."""


def parquet(
    files: Files, columns: Sequence[str] | None = None, *, transform: Transform = None, memory: int = MEMORY
) -> Table:
    """Rows of Parquet files, read by row groups.

    Args:
        files: A file, a folder, a pattern such as `data/*.parquet`, or a list of files; all of one schema.
        columns: The columns of an example, as a tuple in this order; None: all, as a dictionary.
        transform: Applied to each example, as to decode an image.
        memory: Bytes of row groups to keep.

    """
    paths = paths_of(files, ".parquet")
    return Table(_Parquet(paths), columns, transform, memory, _in_words(paths))


def arrow(
    files: Files, columns: Sequence[str] | None = None, *, transform: Transform = None, memory: int = MEMORY
) -> Table:
    """Rows of Arrow IPC files (also called Feather), memory-mapped, by record batches; arguments as of `parquet`."""
    paths = paths_of(files, ".arrow")
    return Table(_Arrow(paths), columns, transform, memory, _in_words(paths))


def csv(
    files: Files,
    columns: Sequence[str] | None = None,
    *,
    types: Mapping[str, str] | None = None,
    delimiter: str = ",",
    transform: Transform = None,
    memory: int = MEMORY,
) -> Table:
    """Rows of CSV files whose first line names the columns, by blocks of lines.

    The files are read once to count their rows. Types are those of the first block of the first file, unless `types`
    names them, such as `{"price": "float32"}`; a value of another type further on is refused. Values have no line
    breaks in them. Other arguments are as of `parquet`.
    """
    paths = paths_of(files, ".csv")
    return Table(_Csv(paths, dict(types or {}), delimiter), columns, transform, memory, _in_words(paths))


def paths_of(files: Files, suffix: str) -> list[str]:
    """The files that a path, folder, pattern or list names, in order."""
    if isinstance(files, str | Path):
        path = Path(files)
        if path.is_dir():
            names = sorted(str(each) for each in path.rglob(f"*{suffix}"))
            if not names:
                raise DataError(f"the folder {path} has no {suffix} files. Give the files themselves, or a pattern.")
            return names
        if any(sign in str(files) for sign in "*?[") and not path.exists():
            names = sorted(glob.glob(str(files), recursive=True))  # noqa: PTH207 (a Path takes no absolute patterns)
            if not names:
                raise DataError(f"no file matches {str(files)!r} (looked in {Path.cwd()}).")
            return names
        files = [files]
    names = [str(file) for file in files]
    if not names:
        raise DataError("a table was given no files. Name at least one.")
    for name in names:
        if not Path(name).is_file():
            raise DataError(
                f"There is no file {name!r} (looked in {Path.cwd()}). Data is read where it lies: it must be at this "
                f"path on every machine that reads it."
            )
    return names


def _in_words(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"


def _check_same(first: Any, other: Any, path: str, reference: str) -> None:
    """Refuse a file whose columns or types are not those of the first."""
    if other.equals(first):
        return
    missing = [name for name in first.names if name not in other.names]
    changed = [name for name in first.names if name in other.names and other.field(name).type != first.field(name).type]
    if missing:
        what = f"lacks the column {missing[0]!r}"
    elif changed:
        what = f"has {other.field(changed[0]).type} in column {changed[0]!r}, and not {first.field(changed[0]).type}"
    elif extra := [name for name in other.names if name not in first.names]:
        what = f"has a further column {extra[0]!r}"
    else:
        return  # Another order of the columns, or other metadata: columns are read by name.
    raise DataError(f"{path} {what}, as {reference} has: files of one table have the same columns and types.")


class _Opened(PartReader):
    """What formats share: files that are opened once per process, after a fork too."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    @cached_property
    def _first(self) -> Any:
        return self._schema_of(self._paths[0])

    def schema(self) -> Any:
        first = self._first
        for path in self._paths[1:]:
            _check_same(first, self._schema_of(path), path, self._paths[0])
        return first

    def _schema_of(self, path: str) -> Any:
        raise NotImplementedError


def _refused(path: str, what: str, error: Exception) -> DataError:
    return DataError(f"{path} is not {what}: {error}. Use the function of offbeat.data for its format.")


class _Parquet(_Opened):
    def _open(self, path: str) -> Any:
        pyarrow()
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            return ParquetFile(path)
        except (ArrowException, OSError) as error:
            raise _refused(path, "a Parquet file", error) from error

    def _schema_of(self, path: str) -> Any:
        return self._open(path).schema_arrow

    def parts(self) -> list[TablePart]:
        parts: list[TablePart] = []
        for path in self._paths:
            known = self._open(path).metadata
            rows = (known.row_group(number).num_rows for number in range(known.num_row_groups))
            parts += [TablePart(path, number, count) for number, count in enumerate(rows) if count]
        return parts

    def read(self, part: TablePart, columns: Sequence[str]) -> Any:
        # Opened each time: loading processes and data servers must not share the position in a file.
        return self._open(part.file).read_row_group(part.number, columns=list(columns), use_threads=False)


class _Arrow(_Opened):
    def _open(self, path: str) -> Any:
        module = pyarrow()
        try:
            return module.ipc.open_file(module.memory_map(path))
        except (module.ArrowException, OSError) as error:
            raise _refused(
                path, "an Arrow IPC file (a stream of record batches must be written as a file)", error
            ) from error

    def _schema_of(self, path: str) -> Any:
        return self._open(path).schema

    def parts(self) -> list[TablePart]:
        parts: list[TablePart] = []
        for path in self._paths:
            file = self._open(path)
            rows = (file.get_batch(number).num_rows for number in range(file.num_record_batches))
            parts += [TablePart(path, number, count) for number, count in enumerate(rows) if count]
        return parts

    def read(self, part: TablePart, columns: Sequence[str]) -> Any:
        batch = self._open(part.file).get_batch(part.number)
        return pyarrow().Table.from_batches([batch]).select(list(columns))


class _Csv(_Opened):
    def __init__(self, paths: Sequence[str], types: dict[str, str], delimiter: str) -> None:
        super().__init__(paths)
        self._wanted, self._delimiter = types, delimiter
        limits.whole("the length of delimiter =", len(delimiter), 1)
        self._blocks: dict[str, list[tuple[int, int]]] = {}

    def _schema_of(self, path: str) -> Any:
        header = self._header(path)
        if path != self._paths[0]:
            # The types of other files are checked block by block, when they are counted.
            module, first = pyarrow(), self._first
            fields = [first.field(name) if name in first.names else module.field(name, "null") for name in header]
            return module.schema(fields)
        start, stop = next(iter(self._bounds(path)), (0, 0))
        return self._parsed(path, start, stop, header, self._types()).schema

    def _types(self) -> dict[str, Any]:
        module = pyarrow()
        types: dict[str, Any] = {}
        for name, text in self._wanted.items():
            try:
                types[name] = module.type_for_alias(text)
            except ValueError as error:
                raise DataError(
                    f"types={{{name!r}: {text!r}}}: {text!r} is not a type. Say float32, int64 …"
                ) from error
        return types

    def _header(self, path: str) -> list[str]:
        with Path(path).open("rb") as file:
            line = file.readline(BLOCK)
        if not line.strip():
            raise DataError(f"{path} is empty: the first line of a CSV file names its columns.")
        from pyarrow import csv as reader

        options = reader.ParseOptions(delimiter=self._delimiter)
        return reader.read_csv(BytesIO(line), parse_options=options).column_names

    def _bounds(self, path: str) -> list[tuple[int, int]]:
        """Where the blocks of whole lines begin and end."""
        known = self._blocks.get(path)
        if known is not None:
            return known
        bounds: list[tuple[int, int]] = []
        with Path(path).open("rb") as file:
            file.readline()
            start = file.tell()
            while True:
                file.seek(BLOCK, 1)
                file.readline()
                stop = min(file.tell(), Path(path).stat().st_size)
                if stop <= start:
                    break
                bounds.append((start, stop))
                start = stop
        self._blocks[path] = bounds
        return bounds

    def _parsed(self, path: str, start: int, stop: int, header: list[str], types: Mapping[str, Any]) -> Any:
        module = pyarrow()
        from pyarrow import csv as reader

        with Path(path).open("rb") as file:
            file.seek(start)
            block = file.read(stop - start)
        try:
            return reader.read_csv(
                module.BufferReader(block),
                read_options=reader.ReadOptions(column_names=header, use_threads=False, block_size=max(len(block), 1)),
                parse_options=reader.ParseOptions(delimiter=self._delimiter),
                convert_options=reader.ConvertOptions(column_types=dict(types)),
            )
        except module.ArrowInvalid as error:
            raise DataError(
                f"{path}, lines from byte {start:,} on: {error}. Types are those of the first lines of "
                f"{self._paths[0]}, unless types={{...}} names others, such as 'float64' or 'string'."
            ) from error

    def _fixed(self) -> dict[str, Any]:
        return {name: self._first.field(name).type for name in self._first.names}

    def parts(self) -> list[TablePart]:
        parts: list[TablePart] = []
        types = self._fixed()
        for path in self._paths:
            header = self._header(path)
            for number, (start, stop) in enumerate(self._bounds(path)):
                rows = self._parsed(path, start, stop, header, types).num_rows
                if rows:
                    parts.append(TablePart(path, number, rows))
        return parts

    def read(self, part: TablePart, columns: Sequence[str]) -> Any:
        start, stop = self._bounds(part.file)[part.number]
        return self._parsed(part.file, start, stop, self._header(part.file), self._fixed()).select(list(columns))

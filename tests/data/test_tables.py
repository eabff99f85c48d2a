"""Tables in Parquet, CSV and Arrow files as datasets: values, parts, order, cursors and refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import offbeat
from offbeat.data import Table
from offbeat.errors import DataError, UsageError

pa = pytest.importorskip("pyarrow")
ROWS = 1000


def table(rows: int = ROWS, first: int = 0) -> Any:
    numbers = list(range(first, first + rows))
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "x": pa.array([number / 8 for number in numbers], pa.float32()),
            "even": pa.array([number % 2 == 0 for number in numbers]),
            "image": pa.array([[[n, n + 1], [n + 2, n + 3]] for n in numbers], pa.list_(pa.list_(pa.int16(), 2), 2)),
            "words": pa.array([list(range(n % 4)) for n in numbers], pa.list_(pa.int32())),
            "name": pa.array([f"row {n}" for n in numbers]),
        }
    )


def written(folder: Path, kind: str, columns: list[str] | None = None, rows: int = ROWS, name: str = "table") -> Path:
    path = folder / f"{name}.{kind}"
    data = table(rows) if columns is None else table(rows).select(columns)
    if kind == "parquet":
        from pyarrow import parquet

        parquet.write_table(data, path, row_group_size=64)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, data.schema) as writer:
            writer.write_table(data, max_chunksize=64)
    else:
        from pyarrow import csv

        csv.write_csv(data, path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_are_tensors_of_the_columns_types(tmp_path: Path, kind: str) -> None:
    rows: Table = getattr(offbeat.data, kind)(written(tmp_path, kind))
    assert len(rows) == ROWS
    assert rows.part_lengths == [64] * 15 + [40]
    row = rows[77]
    assert (row["id"].dtype, row["x"].dtype, row["even"].dtype) == (torch.int64, torch.float32, torch.bool)
    assert (int(row["id"]), float(row["x"]), bool(row["even"]), row["name"]) == (77, 77 / 8, False, "row 77")
    assert row["image"].tolist() == [[77, 78], [79, 80]]
    assert [rows[n]["words"].tolist() for n in (76, 77, 79)] == [[], [0], [0, 1, 2]]
    assert int(rows[-1]["id"]) == ROWS - 1
    with pytest.raises(IndexError, match="row 1000 of 1,000"):
        rows[ROWS]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "csv"])
def test_a_loader_over_named_columns_gets_batches(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.data.formats.BLOCK", 500)  # Many blocks of lines.
    rows: Table = getattr(offbeat.data, kind)(written(tmp_path, kind, ["id", "x"]), ["x", "id"])
    assert len(rows.part_lengths) > 5
    batches = list(DataLoader(rows, batch_size=32, sampler=rows.sampler(buffer=200)))
    ids = [int(number) for _, ids in batches for number in ids]
    assert sorted(ids) == list(range(ROWS))
    assert ids != sorted(ids)
    assert all(float(x) == int(number) / 8 for xs, ids in batches for x, number in zip(xs, ids, strict=True))


def test_a_folder_is_one_table_and_few_parts_are_in_memory(tmp_path: Path) -> None:
    for number in range(3):
        written(tmp_path, "parquet", name=f"part-{number}")
    rows = offbeat.data.parquet(tmp_path, ["id"], memory=600)  # One part has 512 bytes.
    assert len(rows) == 3 * ROWS
    reads: Counter[int] = Counter()
    read = rows._read  # pyright: ignore[reportPrivateUsage]

    def counted(part: Any) -> Any:
        reads[part.number] += 1
        return read(part)

    rows._read = counted  # pyright: ignore[reportPrivateUsage]
    for index in rows.sampler(buffer=1):
        rows[index]
    assert sum(reads.values()) == 48  # Each part once, though one at a time is in memory.
    assert len(rows._held) == 1  # pyright: ignore[reportPrivateUsage]
    rows.__getitems__([0, 100, 1, 101])
    assert sum(reads.values()) <= 48 + 2


def test_a_shuffled_stream_goes_on_from_its_cursor(tmp_path: Path) -> None:
    rows = offbeat.data.parquet(written(tmp_path, "parquet"), ["id"])
    torch.manual_seed(3)
    whole = [int(number) for (number,) in rows.shuffled(buffer=150)]
    assert sorted(whole) == list(range(ROWS))
    torch.manual_seed(3)
    stream = rows.shuffled(buffer=150)
    rest = iter(stream)
    first = [int(next(rest)[0]) for _ in range(401)]
    later = rows.shuffled(buffer=150)
    later.load_state_dict(stream.state_dict())
    assert first + [int(number) for (number,) in later] == whole
    assert [int(number) for (number,) in later] != whole  # The next pass has an order of its own.


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: offbeat.data.parquet(t / "nowhere.parquet"), "There is no file .*nowhere.parquet"),
        (lambda t: offbeat.data.parquet(t / "*.pq"), "no file matches"),
        (lambda t: offbeat.data.parquet(t / "table.parquet", ["id", "imag"]), "no column 'imag'.*image"),
        (lambda t: offbeat.data.parquet(t / "table.csv"), "is not a Parquet file.*offbeat.data"),
        (lambda t: offbeat.data.arrow(t / "table.parquet"), "is not an Arrow IPC file"),
        (lambda t: offbeat.data.csv(t / "empty.csv"), "is empty"),
        (lambda t: offbeat.data.csv(t / "table.csv", types={"id": "int99"}), "int99.* is not a type"),
        (lambda t: offbeat.data.csv([t / "table.csv", t / "broken.csv"]), "broken.csv, lines from byte .*'many'"),
        (lambda t: offbeat.data.parquet([t / "table.parquet", t / "other.parquet"]), "lacks the column 'x'"),
        (lambda t: offbeat.data.parquet(t / "times.parquet"), "column 'at' .* timestamp.*cannot become a tensor"),
        (lambda t: offbeat.data.parquet(t / "gaps.parquet")[0], "column 'x' .* no value in row 2"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_file_and_the_column(tmp_path: Path, call: Any, words: str) -> None:
    from pyarrow import parquet

    written(tmp_path, "parquet")
    written(tmp_path, "parquet", ["id"], name="other")
    written(tmp_path, "csv", ["id", "x"])
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "broken.csv").write_text("id,x\n1,2.0\nmany,3.0\n")
    parquet.write_table(pa.table({"at": pa.array([1], pa.timestamp("ms"))}), tmp_path / "times.parquet")
    parquet.write_table(pa.table({"x": pa.array([1.0, 2.0, None])}), tmp_path / "gaps.parquet")
    with pytest.raises(DataError, match=f"(?s){words}"):
        call(tmp_path)


def test_a_text_is_no_list_of_columns(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"write \['id'\]"):
        offbeat.data.parquet(written(tmp_path, "parquet"), "id")

"""Data larger than memory, and streams faster than training: tables in files, read part by part, and bounded buffers.

`parquet`, `csv` and `arrow` give map-style datasets whose examples are tensors; they need pyarrow
(`pip install 'offbeat[data]'`). `bounded` reads any stream through a buffer with a policy. See docs/data.md.
"""

from offbeat.data.bounded_stream import BoundedStream, bounded
from offbeat.data.formats import arrow, csv, parquet
from offbeat.data.part_order import PartSampler
from offbeat.data.tables import ShuffledTable, Table

__all__ = ["BoundedStream", "PartSampler", "ShuffledTable", "Table", "arrow", "bounded", "csv", "parquet"]

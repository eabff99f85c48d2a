"""Standard output and error of a command: streams that survive their reader, JSON that every parser takes, failures.

`offbeat run ... | head -1` must not end the run: once the reader is gone, output is dropped, and the command goes on.
Short commands end instead, as other Unix tools do.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import select
import signal
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.table import Table

LONG_COMMANDS = ("run", "compare", "scale", "batch-size", "bench", "check", "watch", "federated")
"""Commands that go on when the reader of their output is gone."""
NOBODY_READS = 128 + signal.SIGPIPE
"""Exit code of short commands then, as of tools ended by SIGPIPE."""

_CONTROLS = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")


class FailedError(Exception):
    """A failure with a partial result, which `--format json` prints beside the error."""

    def __init__(self, cause: BaseException, known: Mapping[str, Any]) -> None:
        super().__init__(str(cause))
        self.cause, self.known = cause, known


def print_failure(error: BaseException, code: int, message: str, known: Mapping[str, Any]) -> None:
    """Print an error as JSON, with the partial result."""
    from offbeat.runtime.run.result import failure

    print_json({**known, "error": {**failure(error), "message": message, "exit_code": code}})


def print_json(data: Any) -> None:
    """Print one JSON value; NaN and infinities, which JSON does not have, become null."""
    from offbeat.statistics import finite  # Needs numpy, which would slow down `offbeat --help`.

    print(json.dumps(finite(data)))


def printable(text: str) -> str:
    """A text with control characters escaped, because terminals obey them."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_plain(text: str) -> None:
    """Print a text that may come from a stranger's file."""
    print(printable(text))


def figures(columns: Iterable[str], names: int = 1, gap: int = 2) -> Table:
    """A table without lines: columns of names to the left, then right-aligned columns of figures."""
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < names else "right", no_wrap=True)
    return table


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, even one that no parser accepts."""
    own = words[: words.index("--")] if "--" in words else words
    return "--format=json" in own or ("--format", "json") in pairwise(own)


@contextmanager
def tolerant_streams(goes_on: bool) -> Generator[None]:
    """Stdout and stderr that may lose their reader; unless it `goes_on`, the command then ends quietly."""
    _open_standard_descriptors()
    usual = sys.stdout, sys.stderr
    raw = [
        _Tolerant(number, goes_on) if _is_standard(stream, number) else None for number, stream in enumerate(usual, 1)
    ]
    sys.stdout, sys.stderr = (
        stream if own is None else _like(stream, own) for stream, own in zip(usual, raw, strict=True)
    )
    try:
        yield
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        sys.stdout, sys.stderr = usual
    for name, own in zip(("stdout", "stderr"), raw, strict=True):
        if own is not None and own.lost is not None and own.lost.errno != errno.EPIPE:
            with suppress(OSError):
                print(f"error: {name} could not be written: {own.lost.strerror}.", file=sys.stderr)
            sys.exit(1)


class _Tolerant(io.FileIO):
    """A descriptor that leads to /dev/null once it cannot be written."""

    def __init__(self, number: int, goes_on: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self._goes_on = goes_on
        self.lost: OSError | None = None  # Why it could not be written.

    def write(self, data: Any, /) -> int:
        """Write, or drop the data once that fails."""
        try:
            while (count := super().write(data)) is None:  # pyright: ignore[reportUnnecessaryComparison]
                select.select([], [self], [])  # Another program has made it non-blocking.
            return count
        except OSError as error:
            self.lost = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
        if not self._goes_on and self.lost.errno == errno.EPIPE:
            raise SystemExit(NOBODY_READS)
        return memoryview(data).nbytes


def _open_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that the caller closed, so that no file opened later takes their place."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (open as long as the process)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _is_standard(stream: TextIO, number: int) -> bool:
    """Whether this is the process's own stream; tests replace it."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):
        return False


def _like(stream: TextIO, raw: io.RawIOBase) -> TextIO:
    usual = cast("io.TextIOWrapper", stream)
    usual.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=usual.encoding,
        errors=usual.errors,
        line_buffering=usual.line_buffering,
        write_through=usual.write_through,
    )

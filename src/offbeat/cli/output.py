"""Standard output and error of a command: streams that survive their reader, JSON that every parser takes, failures.

`offbeat run ... | head -1` must not end the run: once nobody reads, what is printed is lost, and the command goes on.
Short commands end instead, as other Unix tools do.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import select
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, TextIO, cast

LONG_COMMANDS = ("run", "compare", "scale", "batch-size", "bench", "check", "watch")
"""Those that go on when nobody reads what they print."""
NOBODY_READS = 128 + signal.SIGPIPE
"""The exit code of short commands then, as shells show that of tools that SIGPIPE has ended."""

_CONTROLS = re.compile(r"[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\U0010ffff]")


class FailedError(Exception):
    """A command has failed after there was something to tell: what `--format json` prints beside the error."""

    def __init__(self, cause: BaseException, known: Mapping[str, Any]) -> None:
        super().__init__(str(cause))
        self.cause, self.known = cause, known


def print_failure(error: BaseException, code: int, message: str, known: Mapping[str, Any]) -> None:
    """Print an error as JSON, with what else is known."""
    from offbeat.runtime.run.result import failure

    print_json({**known, "error": {**failure(error), "message": message, "exit_code": code}})


def print_json(data: Any) -> None:
    """Print one JSON value; numbers that JSON does not have, NaN and infinities, become null."""
    print(json.dumps(_finite(data)))


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in cast("Mapping[Any, Any]", data).items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in cast("Sequence[Any]", data)]
    return data


def printable(text: str) -> str:
    """A text from a file of somebody else's, in which control characters are written out: terminals obey them."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PlainConsole:
    """Prints texts that may come from elsewhere, line by line, without colours."""

    def print(self, text: str) -> None:
        """One text, with its lines."""
        print(printable(text))


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, also one with mistakes in it that no parser gets through."""
    own = words[: words.index("--")] if "--" in words else words
    return "--format=json" in own or ("--format", "json") in pairwise(own)


@contextmanager
def tolerant_streams(goes_on: bool) -> Generator[None]:
    """Stdout and stderr that may lose their reader; a command that does not go on without one is ended quietly."""
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
    """A descriptor that leads nowhere once it cannot be written."""

    def __init__(self, number: int, goes_on: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self._goes_on = goes_on
        self.lost: OSError | None = None
        """Why it could not."""

    def write(self, data: Any, /) -> int:
        """As usual, as long as that works."""
        try:
            while (count := super().write(data)) is None:  # pyright: ignore[reportUnnecessaryComparison]
                select.select([], [self], [])  # Another program has made it not block.
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
    """A caller may have closed some of 0, 1 and 2, and a file that is opened later must not take their place."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 (open as long as the process)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _is_standard(stream: TextIO, number: int) -> bool:
    """Whether this is the process's own stream; tests put others there."""
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

"""Reading the logs of roles: new lines, and the last ones."""

from __future__ import annotations

import codecs
from pathlib import Path

_AT_MOST = 1024 * 1024
_TAIL = 8192


class LogFollower:
    """Reads what is appended to a log file, in whole lines; the file need not exist yet. `whole`: from its start."""

    def __init__(self, path: Path, whole: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() and not whole else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""

    def new_text(self) -> str:
        """The lines completed since the last call; a carriage return ends a line too, for progress bars."""
        # Long text comes in non-empty pieces over several calls. A line longer than a piece is cut.
        data = self._read()
        before = len(self._unfinished)
        self._unfinished += self._decoder.decode(data)
        end = max(self._unfinished.rfind("\n", before), self._unfinished.rfind("\r", before)) + 1
        if not end and len(data) == _AT_MOST:  # A line that never ends must not grow without bound.
            end = len(self._unfinished)
        text, self._unfinished = self._unfinished[:end], self._unfinished[end:]
        return text

    def rest(self) -> str:
        """Everything up to the end of the file, an unfinished last line included; for when the writer has ended."""
        text = ""
        while data := self._read():
            text += self._decoder.decode(data)
        text, self._unfinished = self._unfinished + text + self._decoder.decode(b"", final=True), ""
        return text

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read(_AT_MOST)
        except OSError:  # Not there yet, or no descriptor is free: the next call reads it.
            return b""
        self._position += len(data)
        return data


def last_lines(path: Path, count: int = 10) -> str:
    """The last lines of a log; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-count:])

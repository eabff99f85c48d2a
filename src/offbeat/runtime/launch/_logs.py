"""Reading the logs of roles: what is new, and what came last."""

from __future__ import annotations

import codecs
from pathlib import Path

_AT_MOST = 1024 * 1024
_TAIL = 8192


class LogFollower:
    """Gives what is added to a log file, in whole lines; the file need not exist yet. `whole`: what is there, too."""

    def __init__(self, path: Path, whole: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() and not whole else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""

    def new_text(self) -> str:
        """The lines completed since the last call; a carriage return ends a line too, for progress bars.

        Of much text it is a part, which is not empty: the next calls give the rest. A line of more than that is cut.
        """
        data = self._read()
        begun = len(self._unfinished)
        self._unfinished += self._decoder.decode(data)
        end = max(self._unfinished.rfind("\n", begun), self._unfinished.rfind("\r", begun)) + 1
        if not end and len(data) == _AT_MOST:  # A line without an end must not be gathered for ever.
            end = len(self._unfinished)
        text, self._unfinished = self._unfinished[:end], self._unfinished[end:]
        return text

    def rest(self) -> str:
        """Everything up to the file's end, a last line without an end included: for when the writer has ended."""
        text = ""
        while more := self._read():
            text += self._decoder.decode(more)
        text, self._unfinished = self._unfinished + text + self._decoder.decode(b"", final=True), ""
        return text

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read(_AT_MOST)
        except OSError:  # Not there yet, or no descriptor is free: what follows it comes with the next call.
            return b""
        self._position += len(data)
        return data


def last_lines(path: Path, count: int = 10) -> str:
    """The last lines of a log, or nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-count:])

"""An agent's half of the run folder: what was written to it since the last look, to be sent home."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PIECE = 1024 * 1024
"""Bytes of a file in one piece."""


class FolderMirror:
    """Follows the files of a folder: what is appended, and files that are new or have been replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sent: dict[str, tuple[int, int]] = {}
        """Inode and bytes of each file that are on their way."""

    def known(self, path: str) -> None:
        """Do not send back what came from home."""
        state = (self._folder / path).stat()
        self._sent[path] = (state.st_ino, state.st_size)

    def news(self) -> Iterator[tuple[str, int, bytes]]:
        """Pieces of files that are not on their way yet: path, offset, bytes. Drafts, whose names have a dot, wait."""
        # Manifests come last, so that a checkpoint that has one is complete.
        for path in sorted(self._files(), key=lambda path: (path.name == "manifest.json", str(path))):
            yield from self._of(path)

    def _files(self) -> Iterator[Path]:
        for folder, folders, files in os.walk(self._folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (Path(folder) / name for name in files if not name.startswith("."))

    def _of(self, path: Path) -> Iterator[tuple[str, int, bytes]]:
        name = str(path.relative_to(self._folder))
        inode, sent = self._sent.get(name, (0, -1))
        try:
            with path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != inode or state.st_size < sent:
                    sent = -1
                if state.st_size == sent:
                    return
                file.seek(max(0, sent))
                while (data := file.read(PIECE)) or sent < 0:
                    yield name, max(0, sent), data
                    sent = max(0, sent) + len(data)
                    self._sent[name] = (state.st_ino, sent)
        except FileNotFoundError:
            return  # Replaced or removed meanwhile: the next look has what is there then.

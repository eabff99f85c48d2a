"""The rounds of a federated run, a line of JSON each, in the run's folder: for `offbeat explain` and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat.errors import OutputError

ROUNDS_FILE: Final = "rounds.jsonl"


class RoundLog:
    """Appends rounds to the file of a run; without a folder, does nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / ROUNDS_FILE

    def write(self, outcome: Any, updates: int, refused: int) -> None:
        """Append one round."""
        if self._path is None:
            return
        line = {"updates": updates, "refused": refused, **msgspec.to_builtins(outcome)}
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise OutputError(f"{self._path} cannot be written: {error}. Free some space and resume.") from error


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run, in order; of a round that was repeated after a resume, the last."""
    path = folder / ROUNDS_FILE
    if not path.exists():
        return []
    rounds: dict[int, dict[str, Any]] = {}
    for line in path.read_bytes().splitlines():
        try:
            entry = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue  # The last line of a run that was killed while it wrote.
        rounds[int(entry["number"])] = entry
    return [rounds[number] for number in sorted(rounds)]

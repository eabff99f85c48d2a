"""What clients keep between rounds, in files: a simulated client has a file of its own, and no memory.

A file is named after its round. A run that resumes at an earlier round finds the newest file that is not later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.errors import CheckpointError, OutputError

OWED = "owed"
"""The name, in a client's state, of what it has not sent yet."""
_SUFFIX = ".safetensors"
_PER_FOLDER = 1_000


@dataclass
class ClientState:
    """The tensors that a client keeps."""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class ClientStates:
    """The files of all clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, client: int, before: int) -> ClientState:
        """What a client kept in its last round before this one; empty if it took part in none."""
        rounds = [number for number in self._rounds(client) if number < before]
        if not rounds:
            return ClientState()
        path = self._path(client, max(rounds))
        try:
            return ClientState(load_file(path))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"The state of client {client} cannot be read: {path}: {error}.") from error

    def write(self, client: int, number: int, state: ClientState, safe: int) -> None:
        """Keep a client's state of this round; older ones go that no checkpoint needs: those before round `safe`."""
        path = self._path(client, number)
        draft = path.with_suffix(".draft")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in state.tensors.items()}, draft)
            draft.replace(path)
        except (OSError, SafetensorError) as error:
            raise OutputError(f"{path} cannot be written: {error}. Free some space and resume the run.") from error
        needed = max((known for known in self._rounds(client) if known <= safe), default=0)
        for known in self._rounds(client):
            if known < needed:
                self._path(client, known).unlink(missing_ok=True)

    def forget(self, client: int, number: int) -> None:
        """Remove what was kept in this round, because the client's update does not count after all."""
        self._path(client, number).unlink(missing_ok=True)

    def _rounds(self, client: int) -> list[int]:
        folder = self._path(client, 0).parent
        return [int(path.stem) for path in folder.glob(f"*{_SUFFIX}") if path.stem.isdigit()]

    def _path(self, client: int, number: int) -> Path:
        group = client // _PER_FOLDER * _PER_FOLDER
        return self._folder / f"{group:06d}" / f"{client:06d}" / f"{number}{_SUFFIX}"

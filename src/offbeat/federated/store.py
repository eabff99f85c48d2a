"""What a federated server keeps on disk: its state after every event, the model after every round, pending updates."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file

from offbeat.errors import CheckpointError, OutputError
from offbeat.federated.description import StatisticForms, bad_statistics
from offbeat.protocols.federated.federation_state import FederationState
from offbeat.runtime.run.untrusted_files import parse_json
from offbeat.runtime.state.checkpoint import metadata_of, write_state
from offbeat.runtime.state.tensor_tree import put_together

FOLDER: Final = "federation"
"""The folder, in that of the run, of everything a server needs to go on."""
_STATE: Final = "state.json"
_STATISTICS: Final = "statistics.json"


class ServerStore:
    """Files from which a killed server goes on; each is replaced atomically."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._last = b""

    def load(self) -> FederationState | None:
        """The state of an earlier process; None if there was none."""
        path = self._folder / _STATE
        if not path.exists():
            return None
        try:
            self._last = path.read_bytes()
            return msgspec.json.decode(self._last, type=FederationState)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. The server cannot go on from it.") from error

    def save(self, state: FederationState) -> None:
        """Keep the state, if it has changed."""
        content = msgspec.json.encode(state)
        if content == self._last:
            return
        path = self._folder / _STATE
        draft = path.with_suffix(".draft")
        with _Writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(content)
            draft.replace(path)
        self._last = content
        self._forget_updates(state.number if state.phase in ("gathering", "summing", "closing") else None)

    def write_model(self, number: int, state: Mapping[str, Any]) -> None:
        """Keep the model after a round; the one from before that round stays until the next."""
        self._write(self._model(number), state)
        for path in self._folder.glob("model-*.safetensors"):
            known = path.stem.removeprefix("model-")
            if known.isdigit() and int(known) < number - 1:
                path.unlink(missing_ok=True)

    def read_model(self, number: int) -> dict[str, Any]:
        """The model after a round."""
        return _read(self._model(number))

    def write_update(self, number: int, client: int, update: Mapping[str, Any]) -> None:
        """Keep a client's update until its round is closed."""
        self._write(self._updates(number) / f"{client}.safetensors", update)

    def read_update(self, number: int, client: int) -> dict[str, Any]:
        """An update that was kept."""
        return _read(self._updates(number) / f"{client}.safetensors")

    def write_statistics(self, forms: StatisticForms) -> None:
        """Keep what the clients of an iterative task sum, which the first of them said."""
        path = self._folder / _STATISTICS
        draft = path.with_suffix(".draft")
        with _Writing(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(msgspec.json.encode(forms))
            draft.replace(path)

    def read_statistics(self) -> StatisticForms:
        """What clients sum; empty if none has said it."""
        path = self._folder / _STATISTICS
        if not path.exists():
            return {}
        try:
            forms = msgspec.json.decode(path.read_bytes(), type=StatisticForms)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. The server cannot go on from it.") from error
        if why := bad_statistics(forms):
            raise CheckpointError(f"{path} was changed: {why}. The server cannot go on from it.")
        return forms

    def _forget_updates(self, number: int | None) -> None:
        """No single update stays but of the open round: one that was killed as it closed is closed again from them."""
        for path in self._folder.glob("round-*"):
            if number is None or path != self._updates(number):
                with suppress(OSError):
                    shutil.rmtree(path)

    def _model(self, number: int) -> Path:
        return self._folder / f"model-{number}.safetensors"

    def _updates(self, number: int) -> Path:
        return self._folder / f"round-{number}"

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        draft = path.with_suffix(".draft")
        with _Writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_state(draft, state)
            draft.replace(path)


class _Writing:
    """Reports a failed write of a path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError | SafetensorError):
            raise OutputError(f"{self._path} cannot be written: {error}. Free some space, and resume.") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", put_together(parse_json(metadata_of(path)["data"]), load_file(path)))
    except (SafetensorError, ValueError, KeyError, OSError, TypeError, StopIteration) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from error

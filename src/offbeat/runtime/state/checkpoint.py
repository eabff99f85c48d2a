"""Atomic checkpoints.

A folder `step-<n>` has a file with the state shared by all workers, one with each worker's own, and a manifest with the
checksums of all. It is renamed into place once everything is on disk; only then the previous one is removed,
again by a rename: a kill at any moment leaves the last complete one, and no reader finds a partial one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from offbeat.errors import CheckpointError
from offbeat.runtime.groups.group import Group
from offbeat.runtime.run.untrusted_files import is_folder, is_there, parse_json, plain_name, read_object, regular_file
from offbeat.runtime.state.tensor_tree import put_together, take_apart

FORMAT = 1
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
MANIFEST = "manifest.json"
CERTIFICATE = "certificate.json"  # An extra file that only snapshots have.
SHARED = "shared.safetensors"
_OWN = "worker-"
_REMOVED = ".gone-"


class _ManifestFile(msgspec.Struct):
    bytes: int
    blake2b: str


class _Manifest(msgspec.Struct):
    format: int
    files: dict[str, _ManifestFile]
    step: int = 0
    workers: int = 0
    identity: dict[str, Any] = {}
    summary: dict[str, Any] = {}


class Checkpoints:
    """The checkpoints of one run, in one folder; the previous one is kept until a new one is complete."""

    def __init__(
        self,
        folder: Path,
        group: Group,
        identity: Mapping[str, Any],
        relaid: Callable[[str, str], bool] = lambda _before, _now: False,
        machines: tuple[int, ...] = (),
    ) -> None:
        self.folder = folder
        self._relaid = relaid
        self._machines = machines
        self._group = group
        # What must match for a run to resume from one of them, as it will be read: tuples become lists.
        self.identity: dict[str, Any] = json.loads(json.dumps(dict(identity)))

    def save(
        self,
        step: int,
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
        summary: Mapping[str, Any],
        files: Sequence[Callable[[Path], None]] = (),
    ) -> Path:
        """Write the leader's shared state and each worker's own; a collective call.

        The leader calls `files` with the folder, to add further ones.
        """
        leader = self._group.membership.leader()
        leads = leader == self._group.rank
        # Machines that share no files have a folder each, with the parts of their own workers.
        keeps = self._keeper(leader) == self._group.rank
        final = draft = self.folder / f".draft-{step:09d}"

        def begin() -> None:
            if keeps:
                _sweep(self.folder)
                draft.mkdir(parents=True)

        def write() -> None:
            if leads:
                write_state(draft / SHARED, shared)
                for add in files:
                    add(draft)
            write_state(draft / file_of(self._group.rank), own)

        def finish() -> None:
            nonlocal final
            if keeps:
                final = publish(draft, self.folder, step, self._group.size, self.identity, summary)

        for act in (begin, write, finish):
            failure = ""
            try:
                act()
            except (OSError, SafetensorError, CheckpointError) as error:
                failure = f"{getattr(error, 'strerror', None) or error} ({draft})"
            self._agree(failure)
            if leader not in self._group.membership.present:
                break  # The leader has died: this one is abandoned, and the previous one is still the newest.
        return final

    def _keeper(self, leader: int) -> int:
        """The worker that keeps the folder of this machine."""
        if not self._machines or self._machines[leader] == self._machines[self._group.rank]:
            return leader
        here = self._machines[self._group.rank]
        return min(rank for rank in self._group.membership.present if self._machines[rank] == here)

    def _agree(self, failure: str) -> None:
        """Continue only if no worker failed; all raise together, so that none is left waiting."""
        failed = self._group.gather([1.0 if failure else 0.0], "writing a checkpoint")
        if failed.sum() == 0:
            return
        if self._group.membership.leads:
            _sweep(self.folder)
        kept = newest(self.folder)
        tail = f" The one before, {kept.name}, is intact: fix the cause and --resume." if kept else ""
        who = ", ".join(str(rank) for rank, bad in zip(self._group.membership.members, failed, strict=False) if bad)
        raise CheckpointError(f"a checkpoint could not be written (worker {who}): {failure or 'see its log'}.{tail}")

    def load(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """The newest checkpoint's shared state, this worker's own, and the summary; refuses another run's."""
        path = newest(self.folder)
        if path is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}, so there is nothing to resume from.")
        manifest = read_manifest(path)
        before = manifest["identity"]
        moves = self._moves(before)
        for key, mine in self.identity.items():
            theirs = before.get(key)
            if theirs != mine and not (moves and key in ("strategy", "workers")):
                raise CheckpointError(
                    f"{path} belongs to another run: its {key} is {theirs!r}, this run's is {mine!r}. "
                    f"Resume with the same {key}, or start a new run without --resume."
                )
        own = self._moved(path, manifest) if moves else self._own_state(path, manifest)
        if CERTIFICATE in manifest["files"]:
            from offbeat.runtime.state.snapshots import put_in_place

            put_in_place(path, own, self._group)
            return {**own["replicas"], "others": own["others"]}, own, manifest["summary"]
        return _read_state(path / SHARED, manifest), own, manifest["summary"]

    def _moves(self, before: Mapping[str, Any]) -> bool:
        """Whether the model was spread over workers in another way."""
        old, new = before.get("strategy"), self.identity.get("strategy")
        if not (isinstance(old, str) and isinstance(new, str)):
            return False
        same = old == new and before.get("workers") == self.identity.get("workers")
        return not same and self._relaid(old, new)

    def _moved(self, path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
        """A state for this worker from one of another layout: what is the same on all workers, and worker 0's draws."""
        own = _read_state(path / file_of(0), manifest)
        things = own.get("things", {})
        if not things.get("pace", {}).get("updating", True):
            raise CheckpointError(
                f"{path} was written within an accumulated update, whose sums are spread as the model was. Resume with "
                f"strategy {manifest['identity'].get('strategy')}, on {manifest['workers']} workers."
            )
        for name in ("exchange", "pace", "split", *(("random",) if self._group.rank else ())):
            things.pop(name, None)
        return own

    def _own_state(self, path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
        """The state of this worker; one that had died takes another's state without its random generators."""
        name = file_of(self._group.rank)
        others = sorted(file for file in manifest["files"] if file.startswith(_OWN))
        if name in manifest["files"] or self._group.rank >= manifest["workers"] or not others:
            return _read_state(path / name, manifest)
        own = _read_state(path / others[0], manifest)
        own.get("things", {}).pop("random", None)
        return own


def publish(
    draft: Path, folder: Path, step: int, workers: int, identity: Mapping[str, Any], summary: Mapping[str, Any]
) -> Path:
    """Write a draft's manifest, move it to its final path, and remove older checkpoints."""
    names = sorted(file.name for file in draft.iterdir())
    manifest = {
        "format": FORMAT,
        "step": step,
        "workers": workers,
        "identity": dict(identity),
        "summary": dict(summary),
        "files": {name: fingerprint(draft / name, "blake2b") for name in names},
    }
    write_text(draft / MANIFEST, json.dumps(manifest | {"checksum": digest(manifest)}, indent=1))
    _sync_folder(draft)
    final = _move(draft, folder, step)
    _sync_folder(folder)
    for old in _all(folder)[:-1]:
        remove(old)
    for left in folder.glob(f"{_REMOVED}*"):
        shutil.rmtree(left, ignore_errors=True)
    return final


def remove(path: Path) -> None:
    """Remove a checkpoint or draft atomically: it is renamed first, so that no reader finds a partial one."""
    # A reader that still finds it under its name afterwards has read all of it. What a kill leaves is removed later.
    hidden = path.with_name(f"{_REMOVED}{path.name.lstrip('.')}-{secrets.token_hex(4)}")
    with suppress(OSError):  # Another process may have removed it.
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _move(draft: Path, folder: Path, step: int) -> Path:
    """Rename a draft to its final path: a step saved again goes beside the former, which stays until then."""
    while True:  # A snapshot of the same step may take the path just now.
        taken = [attempt for known, attempt in map(_number, _all(folder)) if known == step]
        final = folder / (f"step-{step:09d}" + (f".{max(taken) + 1}" if taken else ""))
        try:
            return draft.rename(final)
        except OSError:
            if not final.exists():
                raise


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint in a folder."""
    return next(reversed(_all(folder)), None)


def newest_step(folder: Path) -> int:
    """The step of the newest complete checkpoint in a folder; 0 if there is none."""
    path = newest(folder)
    return 0 if path is None else _number(path)[0]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked against its files."""
    try:
        manifest = read_object(path / MANIFEST)
        files = msgspec.convert(manifest, _Manifest).files
        known = manifest["format"]
        whole = manifest.pop("checksum", None) == digest(manifest) if known == FORMAT else True
        for name in files:
            plain_name(name)
    except (OSError, ValueError) as error:
        _refuse_gone(path)
        raise CheckpointError(
            f"{path} is damaged: its manifest cannot be read ({error}). Use an older checkpoint."
        ) from error
    if known != FORMAT:
        raise CheckpointError(f"{path} has format {known}, this version of offbeat reads format {FORMAT}.")
    if not whole:
        raise CheckpointError(f"{path} is damaged: {MANIFEST} is not what was written (another checksum).")
    for name, expected in files.items():
        try:
            actual = fingerprint(path / name, "blake2b", expected.bytes)
        except (OSError, ValueError) as error:
            _refuse_gone(path)
            raise CheckpointError(f"{path} is damaged: {name} cannot be read ({error}).") from error
        if actual != {"bytes": expected.bytes, "blake2b": expected.blake2b}:
            raise CheckpointError(
                f"{path} is damaged: {name} is not what was written ({actual['bytes']} bytes, {expected.bytes} "
                f"expected, or another checksum). Remove that folder to resume from an older checkpoint."
            )
    return manifest


def _refuse_gone(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(
            f"{path} is not there (any more): a run removes a checkpoint once the next one is written. Use the newest "
            f"of {path.parent}."
        )


def _all(folder: Path) -> list[Path]:
    if not is_folder(folder):
        return []
    complete = (path for path in folder.iterdir() if _NAME.fullmatch(path.name) and is_there(path / MANIFEST))
    return sorted((path for path in complete if not path.is_symlink()), key=_number)


def _number(path: Path) -> tuple[int, int]:
    """The step of a checkpoint, and the attempt at it."""
    match = cast("re.Match[str]", _NAME.fullmatch(path.name))
    return int(match[1]), int(match[2] or 0)


def _sweep(folder: Path) -> None:
    """Remove what a kill left behind: drafts and half-removed checkpoints."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith((".draft-", _REMOVED)) or (
            _NAME.fullmatch(path.name) and not (path / MANIFEST).exists()
        ):
            shutil.rmtree(path, ignore_errors=True)


def file_of(rank: int) -> str:
    """The name of a worker's file."""
    return f"{_OWN}{rank}.safetensors"


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write nested plain data and tensors to disk."""
    tensors: dict[str, Any] = {}
    write_tensors(path, tensors, {"data": json.dumps(take_apart(state, "state", tensors))})


def write_tensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write tensors and text to disk, synchronously."""
    save_file(dict(tensors), path, metadata=dict(metadata))
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read_state(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    if path.name not in manifest["files"]:
        raise CheckpointError(
            f"{path.parent} has no state for this worker ({path.name}): it was written by {manifest['workers']} "
            f"workers."
        )
    try:
        tensors = load_file(path)
        data = parse_json(metadata_of(path)["data"])
        return cast("dict[str, Any]", put_together(data, tensors))
    except (SafetensorError, ValueError, KeyError, OSError, TypeError, StopIteration) as error:
        raise CheckpointError(f"{path} is damaged and cannot be read: {error}") from error


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with regular_file(path), safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


def fingerprint(path: Path, kind: Literal["blake2b", "sha256"], size: int | None = None) -> dict[str, Any]:
    """A file's size and checksum; with an unexpected size it is not read, and the checksum is empty."""
    with regular_file(path) as file:
        actual = os.fstat(file.fileno()).st_size
        if size is not None and size != actual:
            return {"bytes": actual, kind: ""}
        hashed = hashlib.file_digest(file, "sha256" if kind == "sha256" else lambda: hashlib.blake2b(digest_size=16))
    return {"bytes": actual, kind: hashed.hexdigest()}


def digest(manifest: Mapping[str, Any]) -> str:
    """A checksum of plain data."""
    as_read = json.loads(json.dumps(manifest))  # Keys become text, which sorts differently from numbers.
    return hashlib.blake2b(json.dumps(as_read, sort_keys=True).encode(), digest_size=16).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write text to disk, synchronously."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

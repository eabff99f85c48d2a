"""The launcher's half of the run folder: what agents send lands below it, bounded, and checkpoints are put together."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from offbeat.errors import RunError
from offbeat.runtime.run.folder import RUN_FILE
from offbeat.runtime.run.untrusted_files import read_object
from offbeat.runtime.state.checkpoint import MANIFEST, SHARED, digest, write_text

MOST_FILES = 100_000
"""Files that one agent may send."""
MOST_BYTES = 4 * 2**40
"""Bytes that one agent may send."""
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_DEEPEST = 6
_DRAFT = ".draft-step-of-"
_STEP = re.compile(r"checkpoint/(step-\d+(?:\.\d+)?)/([^/]+)")


class CollectedFiles:
    """Writes what agents send of their run folders into the launcher's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._machines: set[str] = set()
        self._elastic = False
        self._bytes: dict[str, int] = {}
        self._files: dict[str, set[str]] = {}
        self._manifests: dict[str, dict[str, dict[str, Any]]] = {}
        """Of each incomplete checkpoint: manifests by machine."""
        self._published: tuple[int, ...] = ()
        """The newest checkpoint that is complete."""
        self._lock = threading.Lock()

    def expect(self, machines: Iterable[str], elastic: bool = False) -> None:
        """The machines whose workers write checkpoints, and so have a part of each.

        `elastic`: the run continues without lost machines, and so do its checkpoints.
        """
        with self._lock:
            self._machines, self._elastic = set(machines), elastic

    def lose(self, machine: str) -> None:
        """No more parts come from this machine."""
        with self._lock:
            if self._elastic:
                self._machines.discard(machine)
                # Begun when it was there: nobody has what it did not send.
                self._manifests = {step: parts for step, parts in self._manifests.items() if machine in parts}
                self._publish_complete()

    def take(self, machine: str, name: str, offset: int, data: memoryview) -> None:
        """Write a piece of a file; at offset 0 the file begins anew."""
        files = self._files.setdefault(machine, set())
        files.add(name)
        self._bytes[machine] = self._bytes.get(machine, 0) + len(data)
        if len(files) > MOST_FILES or self._bytes[machine] > MOST_BYTES or offset < 0:
            raise RunError(
                f"machine {machine} sent more than {MOST_FILES:,} files or {MOST_BYTES:,} bytes of its run folder: "
                f"no run writes so much. It was not kept."
            )
        step = _STEP.fullmatch(name)
        with self._lock:
            if step is None:
                self._write(self._path(name), offset, data)
                return
            if _number(step[1]) <= self._published:
                return  # A machine that was slow: the others have gone beyond it.
            arriving = self._folder / "checkpoint" / f"{_DRAFT}{step[1]}"
            if step[2] != MANIFEST:
                self._write(self._path(f"checkpoint/{step[1]}/{step[2]}", arriving / step[2]), offset, data)
                return
            self._write(arriving / f".{MANIFEST}-{machine}", offset, data)
            with suppress(ValueError, OSError):
                manifest = _with_files(read_object(arriving / f".{MANIFEST}-{machine}"))
                self._manifests.setdefault(step[1], {})[machine] = manifest
                self._publish_complete()

    def _path(self, name: str, instead: Path | None = None) -> Path:
        parts = name.split("/")
        if len(parts) > _DEEPEST or not all(_PART.fullmatch(part) for part in parts) or name == RUN_FILE:
            raise RunError(f"an agent sent a file {name[:200]!r}, which does not belong into a run folder.")
        return instead or self._folder.joinpath(*parts)

    def _write(self, path: Path, offset: int, data: memoryview) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(self._folder):
            raise RunError(f"{path} would lead out of the run folder.")
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if offset else os.O_TRUNC)
        descriptor = os.open(path, flags, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(offset)
            file.write(data)

    def _publish_complete(self) -> None:
        for step, parts in list(self._manifests.items()):
            has_shared = any(SHARED in part["files"] for part in parts.values())
            if self._machines and self._machines <= set(parts) and has_shared:
                self._manifests.pop(step, None)
                self._publish(step, list(parts.values()))

    def _publish(self, step: str, manifests: list[dict[str, Any]]) -> None:
        folder = self._folder / "checkpoint"
        draft, final = folder / f"{_DRAFT}{step}", folder / step
        files = {name: entry for part in manifests for name, entry in cast("dict[str, Any]", part["files"]).items()}
        for extra in draft.glob(".*"):
            extra.unlink()
        whole = {name: value for name, value in manifests[0].items() if name != "checksum"} | {"files": files}
        write_text(draft / MANIFEST, json.dumps(whole | {"checksum": digest(whole)}, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        self._published = _number(step)
        self._manifests = {name: parts for name, parts in self._manifests.items() if _number(name) > self._published}
        # Older ones, and drafts of which a machine has removed its part before it was sent.
        for older in (*folder.glob("step-*"), *folder.glob(f"{_DRAFT}*")):
            if _number(older.name) < self._published:
                shutil.rmtree(older, ignore_errors=True)

    def discard_drafts(self) -> None:
        """Nothing more comes: what is incomplete stays so."""
        with self._lock:
            self._manifests.clear()
            for left in (self._folder / "checkpoint").glob(f"{_DRAFT}*"):
                shutil.rmtree(left, ignore_errors=True)


def _with_files(manifest: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(manifest.get("files"), dict):
        raise ValueError("a manifest without files")
    return manifest


def _number(step: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", step))

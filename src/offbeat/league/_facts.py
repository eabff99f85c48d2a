"""What a comparison must state to be repeatable: commit, versions, data, script."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any, cast

from torch.utils.data import Dataset, TensorDataset

from offbeat.errors import OffbeatError
from offbeat.run.job import Job, Script
from offbeat.runtime.data.fingerprint import fingerprint
from offbeat.runtime.launch import threads_for
from offbeat.runtime.run.folder import environment
from offbeat.runtime.state.random_state import Lent, seeded

EXAMPLES = 64
"""Number of examples of each part that are hashed, of data that is not in tensors."""


def facts_of(job: Job) -> dict[str, Any]:
    """All facts known before the first run."""
    text = job.what.path if isinstance(job.what, Script) else job.what.source
    file = Path(text) if text.endswith(".py") else None
    return {
        "commit": _commit_of(Path.cwd() if file is None else file.resolve().parent),
        "environment": {name: value for name, value in environment().items() if name != "command"},
        "data": _data(job),
        "source": None if file is None else _hash_of(file),
        "crowded": crowded(job.workers, job.threads),
    }


def crowded(workers: int, threads: int | None) -> str | None:
    """A warning if more threads compute than there are cores."""
    cores = len(os.sched_getaffinity(0))
    each = threads or threads_for(workers)
    if workers * each <= cores:
        return None
    return (
        f"{workers} workers with {each} thread{'s' if each > 1 else ''} each share {cores} cores: they steal each "
        f"other's time, so times to the target say little about machines with enough cores."
    )


def _commit_of(folder: Path) -> str | None:
    """The commit of a folder, with `+` if files have changed since; None outside of a repository."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _hash_of(file: Path) -> str | None:
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return None


def _data(job: Job) -> dict[str, Any]:
    """The hash of a task's data, and what was hashed; a script's is known after its first run's first batch."""
    if isinstance(job.what, Script):
        return {"hash": None, "of": "the first training batch of worker 0 in the first run"}
    try:
        with Lent(seeded(0)).use():  # Examples may be changed at random whenever they are read.
            data = job.what.build().data()
            parts = [hashed(data.train), hashed(data.validation)]
    except OffbeatError:
        raise
    except Exception as error:  # Whatever user-defined data raises: the workers will report it better.
        return {"hash": None, "of": f"nothing: {type(error).__name__} while reading it"}
    return {"hash": fingerprint([part[0] for part in parts]), "of": parts[0][1]}


def hashed(part: Dataset[Any]) -> tuple[str, str]:
    """The hash of a part of the data, and what was hashed of it."""
    if isinstance(part, TensorDataset):
        return fingerprint(list(part.tensors), most=None), "the tensors of the training and validation parts"
    try:
        count = len(cast("Any", part))
        first = [cast("Any", part)[i] for i in range(min(count, EXAMPLES))]
    except TypeError:
        count, first = -1, list(itertools.islice(iter(cast("Any", part)), EXAMPLES))
    return fingerprint([count, first]), f"the first {EXAMPLES} examples of each part, and their number"

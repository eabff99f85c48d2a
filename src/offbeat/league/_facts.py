"""What a league must state so that it can be repeated: commit, versions, data, script."""

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
"""Of data that does not lie in tensors, how many examples of each part are read."""


def facts_of(job: Job) -> dict[str, Any]:
    """Everything that is known before the first run."""
    return {
        "commit": commit_of(_place(job)),
        "environment": {name: value for name, value in environment().items() if name != "command"},
        "data": _data(job),
        "source": source_of(job),
        "crowded": crowded(job.workers, job.threads),
    }


def crowded(workers: int, threads: int | None) -> str | None:
    """A warning where more threads compute than there are cores."""
    cores = len(os.sched_getaffinity(0))
    each = threads or threads_for(workers)
    if workers * each <= cores:
        return None
    return (
        f"{workers} workers with {each} thread{'s' if each > 1 else ''} each share {cores} cores: they steal each "
        f"other's time, so times to the target say little about machines with enough cores."
    )


def commit_of(folder: Path) -> str | None:
    """The commit that a folder is at, `+` if files have changed since; None outside of a repository."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def source_of(job: Job) -> str | None:
    """A hash of the script or of the task's file, if it is one."""
    path = _file(job)
    try:
        return None if path is None else hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return None


def _file(job: Job) -> Path | None:
    text = job.what.path if isinstance(job.what, Script) else job.what.source
    return Path(text) if text.endswith(".py") else None


def _place(job: Job) -> Path:
    path = _file(job)
    return Path.cwd() if path is None else path.resolve().parent


def _data(job: Job) -> dict[str, Any]:
    """The hash of a task's data, and what was hashed; a script's is known when its first run has had a batch."""
    if isinstance(job.what, Script):
        return {"hash": None, "of": "the first training batch of worker 0 in the first run"}
    try:
        with Lent(seeded(0)).use():  # Examples may be changed at random whenever they are read.
            data = job.what.build().data()
            parts = [hashed(data.train), hashed(data.validation)]
    except OffbeatError:
        raise
    except Exception as error:  # Whatever people's own data raises: the workers will say it better.
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

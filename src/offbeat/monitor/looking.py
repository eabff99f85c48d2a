"""Looks at a run while it goes, a few times a second: a look reads memory that the workers write anyway."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import structs

from offbeat.errors import UsageError
from offbeat.monitor.judging import Judge, how_it_ended
from offbeat.monitor.verdicts import DESYNC, Verdict, worker_name
from offbeat.runtime.launch import Outcome
from offbeat.runtime.stamps import FOLDER, Reader, events_file, stack_file
from offbeat.runtime.watched import ask

EVERY: Final = 0.4
"""Seconds between looks."""
PATIENCE: Final = 10.0
"""Seconds of waiting for a worker that does something else, until that is said."""
ANSWER: Final = 0.5
"""Seconds for a worker to write its stack."""

_EVERYBODYS: Final = (
    "<frozen runpy>",
    "/offbeat/runtime/launch/",
    "/offbeat/runtime/backend/_stamp",
    "/c10d_logger.py",
    " in _run_script",
    " in _work",
    " in work",
)


class Watch:
    """The events of a run under way."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        self._judge = Judge()
        self._readers: dict[int, Reader] = {}
        self._next = 0.0
        self._warned: set[int] = set()
        self._failed = False
        self._raised = False  # a worker has raised an error that is not about its peers
        self._died = False
        (folder / FOLDER).mkdir(exist_ok=True)
        for rank in range(workers):
            for file in (events_file(folder, rank), stack_file(folder, rank)):
                file.unlink(missing_ok=True)

    def look(self) -> Verdict | None:
        """A verdict that has become certain, or a worker that has been missing for long, each said once."""
        now = time.monotonic()
        if now < self._next or self._failed:
            return None
        self._next = now + EVERY
        moved = self._read()
        found = self._judge.final(moved)
        if found is None:
            found = self._judge.silent(now, PATIENCE)
            if found is None or self._warned.issuperset(found.missing):
                return None
            self._warned.update(found.missing)
        return self._with_stacks(found)

    def ended(self, outcome: Outcome) -> None:
        """A process of the run has ended; those that the run can do without are not waited for."""
        error, rank = outcome.error, outcome.role.rank
        if outcome.role.kind != "worker" or outcome.role.expendable:
            return
        if error is not None:
            interrupted = error.type_name == "KeyboardInterrupt"
            self._raised = self._raised or not (error.communication or interrupted)
        elif outcome.exit_code == 0 or not self._failed:
            # Once something has failed, the others are ended by the launcher, and that explains nothing.
            self._judge.ended[rank] = how_it_ended(outcome.exit_code, outcome.signal)
            self._died = self._died or outcome.exit_code != 0
        self._failed = self._failed or outcome.exit_code != 0

    def after_failure(self) -> tuple[Verdict | None, bool]:
        """The verdict on a run that has failed, and whether it says more than the failure, which only followed.

        Gloo may crash on sizes that differ, so that after a desync a death explains nothing.
        """
        self._read()
        found = self._judge.final()
        followed = not self._died or (found is not None and found.kind == DESYNC)
        return found, followed and not self._raised

    def _read(self) -> set[int]:
        """Take in what is new; answers who has done something since the last look."""
        for rank in range(self._workers):
            if rank not in self._readers:
                with suppress(UsageError):  # It has not begun yet.
                    self._readers[rank] = Reader(events_file(self._folder, rank))
        moved = {rank for rank, reader in self._readers.items() if reader.written != reader.read}
        for rank in moved:
            self._judge.feed(rank, self._readers[rank].new())
        return moved

    def _with_stacks(self, verdict: Verdict) -> Verdict:
        """Ask those who are missing what they are doing."""
        asked = [rank for rank in verdict.missing if rank in self._readers]
        for rank in asked:
            ask(self._readers[rank].pid)
        deadline = time.monotonic() + ANSWER
        files = {rank: stack_file(self._folder, rank) for rank in asked}
        while not all(file.stat().st_size for file in files.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # A stack is written line by line.
        told = {worker_name(rank): _own_part(file.read_text(errors="replace")) for rank, file in files.items()}
        return structs.replace(verdict, stacks={who: stack for who, stack in told.items() if stack})


def _own_part(stack: str) -> str:
    """A stack without the frames that every worker has: where it was started, and where its calls are written down."""
    frames = [line for line in stack.splitlines() if line.startswith("  File")]
    return "\n".join(line for line in frames if not any(part in line for part in _EVERYBODYS))

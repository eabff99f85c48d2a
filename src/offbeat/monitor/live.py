"""Looks at a run while it goes, a few times a second: a look reads memory that the workers write anyway."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import structs

from offbeat.errors import UsageError
from offbeat.monitor.cpu_wait import QueueWriter
from offbeat.monitor.deadlocks import UNJUDGED, Judge, how_it_ended
from offbeat.monitor.delivery import Heard, Listener
from offbeat.monitor.load import recorded
from offbeat.monitor.staleness_and_nans import Unfit, unfit
from offbeat.monitor.stragglers import ENOUGH, Blame, blame
from offbeat.monitor.verdicts import DESYNC, NAN, SILENT, STRAGGLER, Verdict, worker_name
from offbeat.runtime.events.recorder import FOLDER, Reader, events_file, stack_file
from offbeat.runtime.events.worker import ask
from offbeat.runtime.launch import RoleOutcome
from offbeat.runtime.run.procfs import stat_fields

EVERY: Final = 0.4
"""Seconds between looks."""
AGE: Final = 0.05
"""Seconds after which nothing older than an event is still being written down, so that it is judged."""
PATIENCE: Final = 10.0
"""Seconds of waiting for a worker that does something else, until that is said."""
ANSWER: Final = 0.5
"""Seconds for a worker to write its stack."""
STOPPED: Final = 0.8
"""Seconds for which a process that others wait for is stopped, until that is said."""
RECENT: Final = 4096
"""How many events of each worker are compared to find one that holds the others up."""
IDLE: Final = 2
"""Looks between which a worker must not have computed to count as waiting inside torch."""
NOTICE: Final = 1.0
"""Seconds for a run to notice that somebody has died, before that is said."""

_SERVERS: Final = "servers"
_LAUNCHER: Final = "launcher"
"""Who tells the monitor something beside the workers."""

_FRAME: Final = re.compile(r'\s*File "(?P<file>[^"]*)", line \d+ in (?P<name>.*)')
_OFFBEAT: Final = Path(__file__).parents[1]
_STAMPING: Final = (_OFFBEAT / "runtime/events/groups.py", _OFFBEAT / "runtime/events/calls.py")
_STARTING: Final = frozenset({"_run_script", "_work", "work"})
"""Functions of ours in which every worker is."""


class _End(NamedTuple):
    """A process has ended."""

    process: str
    how: str
    early: bool = False
    """Before the run did, which can do without it."""


class LiveWatch:
    """The events of a run under way."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        self._judge = Judge()
        self._ranks = {worker_name(rank): rank for rank in range(workers)}
        self._listener = Listener([*self._ranks, _SERVERS, _LAUNCHER], AGE)
        self._readers: dict[int, Reader] = {}
        self._servers: dict[str, Reader] = {}
        self._files: dict[int, int] = {}
        self._next = 0.0
        self._warned: set[int] = set()
        self._still: dict[int, tuple[int, int]] = {}
        self._stopped: dict[int, float] = {}
        self._dead: dict[str, float] = {}
        self._mourned: frozenset[str] = frozenset()
        self._sick, self._told_sick = 0, False
        self._compare_at = 2 * ENOUGH
        self._slow: set[str] = set()
        self._failed = False
        self._raised = False  # a worker has raised an error that is not about its peers
        self._died = False
        self._queues = QueueWriter(folder)
        (folder / FOLDER).mkdir(exist_ok=True)
        for file in (folder / FOLDER).glob("*-*.*"):
            file.unlink(missing_ok=True)

    def look(self) -> Verdict | None:
        """A verdict that has become certain, or something that is worth saying, each said once."""
        now = time.monotonic()
        if now < self._next or self._failed:
            return None
        self._next = now + EVERY
        moved = self._read(now)
        self._queues.note(now, {rank: reader.pid for rank, reader in self._readers.items()})
        found = self._judge.final(moved, self._idle(moved))
        if found is not None:
            return self._with_stacks(found)
        return (
            self._deaths(now) or self._unfit() or self._stopping(now, moved) or self._silent(now) or self._straggling()
        )

    def _idle(self, moved: Collection[int]) -> set[int]:
        """Who is in the midst of backward and has neither done nor computed anything for some looks."""
        still: dict[int, tuple[int, int]] = {}
        for rank in self._judge.in_backward() - set(moved):
            if (spent := _computed(self._readers[rank].pid)) is not None:
                before, looks = self._still.get(rank, (-1, 0))
                still[rank] = (spent, looks + 1 if before == spent else 0)
        self._still = still
        return {rank for rank, (_, looks) in still.items() if looks >= IDLE}

    def _unfit(self) -> Verdict | None:
        """Numbers that are not finite, a look after they were first seen: by then they have reached whom they reach."""
        seen, self._sick = self._sick, self._judge.unfit
        if not seen or self._told_sick:
            return None
        found: list[Unfit] = []
        with suppress(UsageError):  # A file may be about to be made anew, by a worker that takes another's place.
            events = recorded(self._folder)
            found = unfit(events.stamps, events.servers)
        self._told_sick = bool(found)
        if not found:
            return None
        return Verdict(NAN, f"{'; '.join(map(str, found[:3]))}.", who=tuple(dict.fromkeys(one.worker for one in found)))

    def _straggling(self) -> Verdict | None:
        """A worker that costs the run a notable part of its time, looked for ever less often: that takes a while."""
        if self._judge.progress < self._compare_at:
            return None
        self._compare_at *= 2
        found: list[Blame] = []
        with suppress(UsageError):
            events = recorded(self._folder)
            recent = {rank: some[-RECENT:] for rank, some in events.stamps.items()}
            found = [one for one in blame(recent, events.servers, events.queues) if one.straggler]
        found = [one for one in found if one.worker not in self._slow]
        self._slow.update(one.worker for one in found)
        told = tuple(one.worker for one in found)
        return Verdict(STRAGGLER, f"{'; '.join(map(str, found))}.", who=told) if found else None

    def _deaths(self, now: float) -> Verdict | None:
        """Somebody has died, and the run has done something about it, or has had the time to."""
        found = self._judge.served.deaths()
        if found is None or self._mourned.issuperset(found.who):
            return None
        news = set(found.who) - self._mourned
        for name in news:
            self._dead.setdefault(name, now)
        if not news <= self._judge.served.noticed and now - max(self._dead[name] for name in news) < NOTICE:
            return None
        self._mourned = frozenset(found.who)
        return found

    def _stopping(self, now: float, moved: Collection[int]) -> Verdict | None:
        """A process that others wait for has been stopped for a while: it does not even compute."""
        late = self._judge.awaited(now, 0.0)
        still = {rank for rank in late if rank not in moved and rank in self._readers and self._is_stopped(rank)}
        self._stopped = {rank: self._stopped.get(rank, now) for rank in still}
        news = [rank for rank, since in self._stopped.items() if now - since >= STOPPED and rank not in self._warned]
        if not news:
            return None
        self._warned.update(news)
        told = [
            f"{worker_name(other)} is stopped (by SIGSTOP, or by a debugger) and does not answer, while "
            f"{worker_name(late[other][1])} waits for it in {late[other][2]}"
            for other in news
        ]
        return Verdict(SILENT, f"{'; '.join(told)}. It may be continued.", tuple(news))

    def _is_stopped(self, rank: int) -> bool:
        return stat_fields(self._readers[rank].pid)[:1] in (["T"], ["t"])

    def _silent(self, now: float) -> Verdict | None:
        """Somebody has been waited for for long: it is asked what it does."""
        found = self._judge.silent(now, PATIENCE)
        if found is None or self._warned.issuperset(found.missing):
            return None
        self._warned.update(found.missing)
        found = self._with_stacks(found)
        mute = [worker_name(rank) for rank in found.missing if worker_name(rank) not in found.stacks]
        if not mute:
            return found
        return structs.replace(
            found, message=f"{found.message} Asked for its stack, {' and '.join(mute)} said nothing."
        )

    def ended(self, outcome: RoleOutcome) -> None:
        """A process of the run has ended; of those that the run can do without it is said, and that is all."""
        error, rank = outcome.error, outcome.role.rank
        if outcome.role.expendable:
            if outcome.signal is not None and not self._failed and outcome.role.kind == "worker":
                self._saw(_End(worker_name(rank), how_it_ended(outcome.exit_code, outcome.signal), early=True))
            self._failed = self._failed or (outcome.role.kind == "worker" and error is not None)
            return
        if outcome.role.kind != "worker":
            return
        if error is not None:
            interrupted = error.type_name == "KeyboardInterrupt"
            self._raised = self._raised or not (error.communication or interrupted)
        elif outcome.exit_code == 0 or not self._failed:
            # Once something has failed, the others are ended by the launcher, and that explains nothing.
            self._saw(_End(worker_name(rank), how_it_ended(outcome.exit_code, outcome.signal)))
            self._died = self._died or outcome.exit_code != 0
        self._failed = self._failed or outcome.exit_code != 0

    def lost_server(self, name: str, outcome: RoleOutcome) -> None:
        """A server's process has ended before the run did."""
        if not self._failed and outcome.signal is not None:
            self._saw(_End(name, how_it_ended(outcome.exit_code, outcome.signal), early=True))

    def _saw(self, end: _End) -> None:
        """The launcher has seen a process end: what that one did before is judged before it."""
        now = time.monotonic()
        self._listener.hear(_LAUNCHER, now, end, now)

    def after_failure(self) -> tuple[Verdict | None, bool]:
        """The verdict on a run that has failed, and whether it says more than the failure, which only followed.

        Gloo may crash on sizes that differ, so that after a desync a death explains nothing.
        """
        self._read(time.monotonic())
        self._take(self._listener.due(float("inf")))
        found = self._judge.final() or self._judge.served.deaths()
        followed = not self._died or (found is not None and found.kind == DESYNC)
        return found, followed and not self._raised and found is not None and found.final

    def _read(self, now: float) -> set[int]:
        """Take in what is old enough; answers who has done something since the last look."""
        for path in (self._folder / FOLDER).glob("server-*.events"):
            if path.name not in self._servers:
                with suppress(UsageError):
                    self._servers[path.name] = Reader(path)
        for rank in range(self._workers):
            self._open(rank)
        moved = {rank for rank, reader in self._readers.items() if reader.written != reader.read}
        servers = ((_SERVERS, reader) for reader in self._servers.values())
        for name, reader in [*servers, *((worker_name(rank), self._readers[rank]) for rank in moved)]:
            reader.keep()
            for stamp in reader.new():
                if stamp.mark not in UNJUDGED:
                    self._listener.hear(name, stamp.time, stamp, now)
        self._take(self._listener.due(now))
        return moved

    def _take(self, heard: Iterable[Heard]) -> None:
        """Judge what has been put in order: events, and ends of processes."""
        for name, what in heard:
            if isinstance(what, _End) and what.early:
                self._judge.served.gone[what.process] = what.how
            elif isinstance(what, _End):
                self._judge.ended[self._ranks[what.process]] = what.how
            elif name == _SERVERS:
                self._judge.feed_server([what])
            else:
                self._judge.feed(self._ranks[name], [what])

    def _open(self, rank: int) -> None:
        """Find a worker's events; if another process has taken its place, that one's."""
        path = events_file(self._folder, rank)
        with suppress(UsageError, FileNotFoundError):  # It has not begun yet.
            inode = path.stat().st_ino
            if self._files.get(rank) == inode:
                return
            reader = Reader(path)
            if rank in self._files:
                self._take(self._listener.due(float("inf")))
                self._judge.reborn(rank)
            self._files[rank], self._readers[rank] = inode, reader

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
    frames = ((line, found) for line in stack.splitlines() if (found := _FRAME.fullmatch(line)) is not None)
    return "\n".join(line for line, found in frames if not _is_everybodys(Path(found["file"]), found["name"]))


def _is_everybodys(file: Path, name: str) -> bool:
    ours = file.is_relative_to(_OFFBEAT) and name in _STARTING
    elsewhere = file == Path("<frozen runpy>") or file.name == "c10d_logger.py"
    return ours or elsewhere or file in _STAMPING or file.parent == _OFFBEAT / "runtime/launch"


def _computed(pid: int) -> int | None:
    """How long a process's main thread has computed, in ticks; None if it is not asleep now."""
    status = stat_fields(f"{pid}/task/{pid}")
    return int(status[11]) + int(status[12]) if status[:1] == ["S"] else None

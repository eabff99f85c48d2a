"""Watches a run while it is going, a few times a second, by reading memory that the workers write anyway."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import structs

from offbeat.errors import UsageError
from offbeat.monitor.cpu_wait import QueueWriter
from offbeat.monitor.deadlocks import UNJUDGED, Judge, how_it_ended
from offbeat.monitor.history import recorded
from offbeat.monitor.staleness_and_nans import Unfit, unfit
from offbeat.monitor.stragglers import ENOUGH, Blame, blame
from offbeat.monitor.verdicts import DESYNC, NAN, SILENT, STRAGGLER, Verdict, worker_name
from offbeat.protocols.causality.delivery import ByTime, Delivery, EventReport
from offbeat.protocols.machine import Effect, Name, Received, Start, Timer
from offbeat.runtime.events.recorder import FOLDER, Reader, events_file, stack_file
from offbeat.runtime.events.worker import ask
from offbeat.runtime.launch import RoleOutcome
from offbeat.runtime.run.procfs import stat_fields

EVERY: Final = 0.4  # Seconds between looks.
AGE: Final = 0.05  # Seconds after which an event is judged, because nothing older is still being recorded.
PATIENCE: Final = 10.0  # Seconds of waiting for a worker that does something else before that is reported.
ANSWER: Final = 0.5  # Seconds for a worker to write its stack.
STOPPED: Final = 0.8  # Seconds for which a process that others wait for is stopped before that is reported.
RECENT: Final = 4096  # Number of events of each worker that are compared to find a straggler.
IDLE: Final = 2  # Looks between which a worker must not have computed to count as waiting inside torch.
NOTICE: Final = 1.0  # Seconds for a run to notice a death before that is reported.

_SERVERS, _LAUNCHER = "servers", "launcher"  # Sources of events beside the workers.

_FRAME: Final = re.compile(r'\s*File "(?P<file>[^"]*)", line \d+ in (?P<name>.*)')
_OFFBEAT: Final = Path(__file__).parents[1]
_STAMPING: Final = (_OFFBEAT / "runtime/events/groups.py", _OFFBEAT / "runtime/events/calls.py")
_STARTING: Final = frozenset({"_run_script", "_work", "work"})  # Functions of ours that are on every worker's stack.


class Listener:
    """Puts the events of all processes into the order of time, a fixed delay after they happened.

    All processes of a host read the same clock, and their records are in memory at once. So events that are at least
    `delta` seconds old show the run as it was at that moment, whichever file is read first.
    """

    def __init__(self, names: Sequence[Name], delta: float) -> None:
        self._counts = dict.fromkeys(names, 0)
        self._machine = ByTime(names, delta)
        self._ready: list[Effect] = []

    def hear(self, name: Name, time: float, what: Any, now: float) -> None:
        """Take in an event of a process at that time."""
        self._counts[name] += 1
        self._ready += self._machine.on(Received(name, EventReport(self._counts[name], time, event=what)), now)

    def due(self, now: float) -> Iterator[tuple[Name, Any]]:
        """Processes and events that are old enough, in order; with an infinite time, all of them."""
        effects, self._ready = [*self._ready, *self._machine.on(Timer("look"), now)], []
        for effect in effects:
            if isinstance(effect, Start) and isinstance(effect.work, Delivery):
                yield effect.work.process, effect.work.report.event


class _End(NamedTuple):
    """The end of a process."""

    process: str
    how: str
    early: bool = False  # Whether the run goes on without it.


class LiveWatch:
    """The events of a run in progress, and verdicts on it."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self._workers = folder, workers
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
        self._unfit_seen, self._unfit_reported = 0, False
        self._compare_at = 2 * ENOUGH
        self._slow: set[str] = set()
        self._failed = False
        self._raised = False  # A worker has raised an error that is not about its peers.
        self._died = False
        self._queues = QueueWriter(folder)
        (folder / FOLDER).mkdir(exist_ok=True)
        for file in (folder / FOLDER).glob("*-*.*"):
            file.unlink(missing_ok=True)

    def look(self) -> Verdict | None:
        """A verdict that has become certain, or something else worth reporting; each is reported once."""
        now = time.monotonic()
        if now < self._next or self._failed:
            return None
        self._next = now + EVERY
        moved = self._read(now)
        self._queues.note(now, {rank: reader.pid for rank, reader in self._readers.items()})
        verdict = self._judge.final(moved, self._idle(moved))
        if verdict is not None:
            return self._with_stacks(verdict)
        return (
            self._deaths(now) or self._unfit() or self._stopping(now, moved) or self._silent(now) or self._straggling()
        )

    def _idle(self, moved: Collection[int]) -> set[int]:
        """Workers in the middle of backward that have neither moved nor computed for some looks."""
        still: dict[int, tuple[int, int]] = {}
        for rank in self._judge.in_backward() - set(moved):
            pid = self._readers[rank].pid
            status = stat_fields(f"{pid}/task/{pid}")
            if status[:1] == ["S"]:
                ticks = int(status[11]) + int(status[12])
                before, looks = self._still.get(rank, (-1, 0))
                still[rank] = (ticks, looks + 1 if before == ticks else 0)
        self._still = still
        return {rank for rank, (_, looks) in still.items() if looks >= IDLE}

    def _unfit(self) -> Verdict | None:
        """NaN or infinite numbers, a look after they first appear: by then they have spread as far as they will."""
        seen, self._unfit_seen = self._unfit_seen, self._judge.unfit
        if not seen or self._unfit_reported:
            return None
        cases: list[Unfit] = []
        with suppress(UsageError):  # A file may be about to be replaced, by a worker that takes another's place.
            events = recorded(self._folder)
            cases = unfit(events.stamps, events.servers)
        self._unfit_reported = bool(cases)
        workers = tuple(dict.fromkeys(case.worker for case in cases))
        return Verdict(NAN, f"{'; '.join(map(str, cases[:3]))}.", who=workers) if cases else None

    def _straggling(self) -> Verdict | None:
        """Stragglers, looked for ever less often because that takes a while."""
        if self._judge.progress < self._compare_at:
            return None
        self._compare_at *= 2
        slow: list[Blame] = []
        with suppress(UsageError):
            events = recorded(self._folder)
            recent = {rank: own[-RECENT:] for rank, own in events.stamps.items()}
            slow = [one for one in blame(recent, events.servers, events.queues) if one.straggler]
        slow = [one for one in slow if one.worker not in self._slow]
        workers = tuple(one.worker for one in slow)
        self._slow.update(workers)
        return Verdict(STRAGGLER, f"{'; '.join(map(str, slow))}.", who=workers) if slow else None

    def _deaths(self, now: float) -> Verdict | None:
        """Deaths that the run has handled, or has had the time to."""
        verdict = self._judge.served.deaths()
        if verdict is None or self._mourned.issuperset(verdict.who):
            return None
        fresh = set(verdict.who) - self._mourned
        for name in fresh:
            self._dead.setdefault(name, now)
        if not fresh <= self._judge.served.noticed and now - max(self._dead[name] for name in fresh) < NOTICE:
            return None
        self._mourned = frozenset(verdict.who)
        return verdict

    def _stopping(self, now: float, moved: Collection[int]) -> Verdict | None:
        """Processes that others wait for and that have been stopped for a while."""
        late = self._judge.awaited(now, 0.0)
        idle = [rank for rank in late if rank not in moved and rank in self._readers]
        still = {rank for rank in idle if stat_fields(self._readers[rank].pid)[:1] in (["T"], ["t"])}
        self._stopped = {rank: self._stopped.get(rank, now) for rank in still}
        fresh = [rank for rank, since in self._stopped.items() if now - since >= STOPPED and rank not in self._warned]
        if not fresh:
            return None
        self._warned.update(fresh)
        words = [
            f"{worker_name(other)} is stopped (by SIGSTOP, or by a debugger) and does not answer, while "
            f"{worker_name(late[other][1])} waits for it in {late[other][2]}"
            for other in fresh
        ]
        return Verdict(SILENT, f"{'; '.join(words)}. It may be continued.", tuple(fresh))

    def _silent(self, now: float) -> Verdict | None:
        """Workers that others have awaited for long, with their stacks."""
        verdict = self._judge.silent(now, PATIENCE)
        if verdict is None or self._warned.issuperset(verdict.missing):
            return None
        self._warned.update(verdict.missing)
        verdict = self._with_stacks(verdict)
        mute = [worker_name(rank) for rank in verdict.missing if worker_name(rank) not in verdict.stacks]
        if not mute:
            return verdict
        words = f"{verdict.message} Asked for its stack, {' and '.join(mute)} said nothing."
        return structs.replace(verdict, message=words)

    def ended(self, outcome: RoleOutcome) -> None:
        """A process of the run has ended; the end of one that the run can do without is only noted."""
        error, rank, is_worker = outcome.error, outcome.role.rank, outcome.role.kind == "worker"
        how = how_it_ended(outcome.exit_code, outcome.signal)
        if not is_worker:
            return
        if outcome.role.expendable:
            if outcome.signal is not None and not self._failed:
                self._saw(_End(worker_name(rank), how, early=True))
            self._failed = self._failed or error is not None
            return
        if error is not None:
            interrupted = error.type_name == "KeyboardInterrupt"
            self._raised = self._raised or not (error.communication or interrupted)
        elif outcome.exit_code == 0 or not self._failed:
            # After a failure the launcher ends the others, and that explains nothing.
            self._saw(_End(worker_name(rank), how))
            self._died = self._died or outcome.exit_code != 0
        self._failed = self._failed or outcome.exit_code != 0

    def lost_server(self, name: str, outcome: RoleOutcome) -> None:
        """A server's process has ended before the run did."""
        if not self._failed and outcome.signal is not None:
            self._saw(_End(name, how_it_ended(outcome.exit_code, outcome.signal), early=True))

    def _saw(self, end: _End) -> None:
        """Queue the end of a process behind its own events."""
        now = time.monotonic()
        self._listener.hear(_LAUNCHER, now, end, now)

    def after_failure(self) -> tuple[Verdict | None, bool]:
        """The verdict on a run that has failed, and whether it explains the failure.

        Gloo may crash on sizes that differ, so that after a desync a death explains nothing.
        """
        self._read(time.monotonic())
        self._take(self._listener.due(float("inf")))
        verdict = self._judge.final() or self._judge.served.deaths()
        followed = not self._died or (verdict is not None and verdict.kind == DESYNC)
        return verdict, followed and not self._raised and verdict is not None and verdict.final

    def _read(self, now: float) -> set[int]:
        """Take in events that are old enough; returns the workers that have moved since the last look."""
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

    def _take(self, events: Iterable[tuple[Name, Any]]) -> None:
        """Judge events and ends of processes, which are in order now."""
        for name, what in events:
            if isinstance(what, _End) and what.early:
                self._judge.served.gone[what.process] = what.how
            elif isinstance(what, _End):
                self._judge.ended[self._ranks[what.process]] = what.how
            elif name == _SERVERS:
                self._judge.feed_server([what])
            else:
                self._judge.feed(self._ranks[name], [what])

    def _open(self, rank: int) -> None:
        """Open a worker's events file; if another process has taken its place, that one's."""
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
        """Add the stacks of the missing workers."""
        files = {rank: stack_file(self._folder, rank) for rank in verdict.missing if rank in self._readers}
        for rank in files:
            ask(self._readers[rank].pid)
        deadline = time.monotonic() + ANSWER
        while not all(file.stat().st_size for file in files.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)  # A stack is written line by line.
        stacks = {worker_name(rank): _own_frames(file.read_text(errors="replace")) for rank, file in files.items()}
        return structs.replace(verdict, stacks={name: stack for name, stack in stacks.items() if stack})


def _own_frames(stack: str) -> str:
    """A stack without the frames that every worker has: where it was started, and where its calls are recorded."""
    frames = ((line, match) for line in stack.splitlines() if (match := _FRAME.fullmatch(line)) is not None)
    return "\n".join(line for line, match in frames if not _is_common(Path(match["file"]), match["name"]))


def _is_common(file: Path, name: str) -> bool:
    ours = file.is_relative_to(_OFFBEAT) and name in _STARTING
    elsewhere = file == Path("<frozen runpy>") or file.name == "c10d_logger.py"
    return ours or elsewhere or file in _STAMPING or file.parent == _OFFBEAT / "runtime/launch"

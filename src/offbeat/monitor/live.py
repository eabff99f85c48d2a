"""Watches a run while it is going, a few times a second: takes events in, puts them in order, and judges them."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import structs

from offbeat.errors import UsageError
from offbeat.monitor.cpu_wait import QueueWriter
from offbeat.monitor.deadlocks import UNJUDGED, Judge, how_it_ended
from offbeat.monitor.history import recorded
from offbeat.monitor.intake.causes import LOCAL, WorkerCauses, of_server
from offbeat.monitor.intake.order import CausalOrder
from offbeat.monitor.intake.sources import EventBatch, EventSource, FolderSource
from offbeat.monitor.staleness_and_nans import Unfit, unfit
from offbeat.monitor.stragglers import ENOUGH, Blame, blame
from offbeat.monitor.verdicts import DESYNC, NAN, SILENT, STRAGGLER, Verdict, worker_name
from offbeat.protocols.causality.clock_stamps import Occurrence
from offbeat.protocols.causality.delivery_rule import DeliveryRule
from offbeat.protocols.machine import Name
from offbeat.runtime.events.recorder import Mark
from offbeat.runtime.launch import RoleOutcome

EVERY: Final = 0.4  # Seconds between looks.
PATIENCE: Final = 10.0  # Seconds of waiting for a worker that does something else before that is reported.
STOPPED: Final = 0.8  # Seconds for which a process that others wait for is stopped before that is reported.
RECENT: Final = 4096  # Number of events of each worker that are compared to find a straggler.
IDLE: Final = 2  # Looks between which a worker must not have computed to count as waiting inside torch.
NOTICE: Final = 1.0  # Seconds for a run to notice a death before that is reported.

_FRAME: Final = re.compile(r'\s*File "(?P<file>[^"]*)", line \d+ in (?P<name>.*)')
_OFFBEAT: Final = Path(__file__).parents[1]
_STAMPING: Final = (_OFFBEAT / "runtime/events/groups.py", _OFFBEAT / "runtime/events/calls.py")
_STARTING: Final = frozenset({"_run_script", "_work", "work"})  # Functions of ours that are on every worker's stack.


class _End(NamedTuple):
    """The end of a process: the last event of its history."""

    process: str
    how: str
    early: bool = False  # Whether the run goes on without it.
    at: float = 0.0


class _Rebirth(NamedTuple):
    """Another process has taken a worker's place: the first event of its history."""

    rank: int


class LiveWatch:
    """The events of a run in progress, and verdicts on it."""

    def __init__(
        self, folder: Path, workers: int, rule: DeliveryRule | None = None, source: EventSource | None = None
    ) -> None:
        self._folder = folder
        self._judge = Judge()
        self._ranks = {worker_name(rank): rank for rank in range(workers)}
        self._source = source or FolderSource(folder, workers)
        self.order = CausalOrder(list(self._ranks), rule or DeliveryRule())
        self._out: set[str] = set()  # Workers that have left or ended.
        self._causes = {name: WorkerCauses(rank, self._out) for name, rank in self._ranks.items()}
        self._ends: list[_End] = []  # Ends of processes whose last events may not be here yet.
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

    def look(self) -> Verdict | None:
        """A verdict that has become certain, or something else worth reporting; each is reported once."""
        now = time.monotonic()
        if now < self._next or self._failed:
            return None
        self._next = now + EVERY
        moved = self._read(now)
        self._queues.note(now, self._ranks.values(), lambda rank: self._source.without_core(worker_name(rank)))
        verdict = self._judge.final(moved, self._idle(moved))
        if verdict is not None and self.order.is_consistent(now):
            return self._with_stacks(verdict)
        return (
            self._deaths(now) or self._unfit() or self._stopping(now, moved) or self._silent(now) or self._straggling()
        )

    def _idle(self, moved: Collection[int]) -> set[int]:
        """Workers in the middle of backward that have neither moved nor computed for some looks."""
        still: dict[int, tuple[int, int]] = {}
        for rank in self._judge.in_backward() - set(moved):
            state = self._source.state(worker_name(rank))
            if state is not None and state.main == "S":
                before, looks = self._still.get(rank, (-1, 0))
                still[rank] = (state.ticks, looks + 1 if before == state.ticks else 0)
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
        late = self._judge.awaited(self._known_until(now), 0.0)
        states = {rank: self._source.state(worker_name(rank)) for rank in late if rank not in moved}
        still = {rank for rank, state in states.items() if state is not None and state.stopped}
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

    def _known_until(self, now: float) -> float:
        """The time up to which all workers are known: who is not heard of may have done what others wait for."""
        return min(self._source.known_until(name, now) for name in self._ranks)

    def _silent(self, now: float) -> Verdict | None:
        """Workers that others have awaited for long, with their stacks."""
        verdict = self._judge.silent(self._known_until(now), PATIENCE)
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
        """The end of a process, which is judged after all of its own events."""
        self._ends.append(end._replace(at=time.monotonic()))

    def after_failure(self) -> tuple[Verdict | None, bool]:
        """The verdict on a run that has failed, and whether it explains the failure.

        Gloo may crash on sizes that differ, so that after a desync a death explains nothing.
        """
        now = time.monotonic()
        self._read(now, at_last=True)
        self._take(self.order.due(now, all_of_it=True))
        verdict = self._judge.final() or self._judge.served.deaths()
        followed = not self._died or (verdict is not None and verdict.kind == DESYNC)
        return verdict, followed and not self._raised and verdict is not None and verdict.final

    def _read(self, now: float, at_last: bool = False) -> set[int]:
        """Take in what has come and judge what is in order; returns the workers that have moved since the last look."""
        moved: set[int] = set()
        for batch in self._source.batches():
            rank = self._ranks.get(batch.process)
            if rank is not None:
                moved.add(rank)
            self._hear(batch, rank, now)
        for end in [end for end in self._ends if at_last or self._source.is_complete(end.process)]:
            self._ends.remove(end)
            self._out.add(end.process)
            self.order.hear(end.process, Occurrence(time=end.at, event=end), now)
            self.order.ended(end.process, now)
        self._take(self.order.due(now))
        return moved

    def _hear(self, batch: EventBatch, rank: int | None, now: float) -> None:
        """Put a process's events into the order."""
        name = batch.process
        causes = None if rank is None else self._causes[name]
        if rank is not None and batch.reborn:
            self._out.discard(name)
            causes = self._causes[name] = WorkerCauses(rank, self._out)
            self.order.hear(name, Occurrence(time=now, event=_Rebirth(rank)), now)
        if causes is not None and batch.dropped:
            causes.dropped()
        for stamp in batch.stamps:
            if stamp.mark in LOCAL:
                continue
            if stamp.mark in (Mark.LEAVE, Mark.END):
                self._out.add(name)
            self.order.hear(name, of_server(stamp) if causes is None else causes.of(stamp), now)

    def _take(self, events: Iterable[tuple[Name, Any]]) -> None:
        """Judge events and ends of processes, which are in order now."""
        for name, what in events:
            if isinstance(what, _End) and what.early:
                self._judge.served.gone[what.process] = what.how
            elif isinstance(what, _End):
                self._judge.ended[self._ranks[what.process]] = what.how
            elif isinstance(what, _Rebirth):
                self._judge.reborn(what.rank)
            elif what.mark in UNJUDGED:
                continue
            elif name in self._ranks:
                self._judge.feed(self._ranks[name], [what])
            else:
                self._judge.feed_server([what])

    def _with_stacks(self, verdict: Verdict) -> Verdict:
        """Add the stacks of the missing workers."""
        names = [worker_name(rank) for rank in verdict.missing]
        stacks = {name: _own_frames(stack) for name, stack in self._source.stacks(names).items()}
        return structs.replace(verdict, stacks={name: stack for name, stack in stacks.items() if stack})


def _own_frames(stack: str) -> str:
    """A stack without the frames that every worker has: where it was started, and where its calls are recorded."""
    frames = ((line, match) for line in stack.splitlines() if (match := _FRAME.fullmatch(line)) is not None)
    return "\n".join(line for line, match in frames if not _is_common(Path(match["file"]), match["name"]))


def _is_common(file: Path, name: str) -> bool:
    ours = file.is_relative_to(_OFFBEAT) and name in _STARTING
    elsewhere = file == Path("<frozen runpy>") or file.name == "c10d_logger.py"
    return ours or elsewhere or file in _STAMPING or file.parent == _OFFBEAT / "runtime/launch"

"""What is known of a run's servers: how far each worker has come, who takes part, and who has died on the way.

Workers tell it by their pushes, servers by the views they know. A worker waits in a pull for those whose clock is below
what the rule asks for; a worker that is out of the view is waited for by nobody, so no death is a deadlock here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from offbeat.monitor.verdicts import DEAD, Verdict, worker_name
from offbeat.protocols.causality.deadlock import natural
from offbeat.runtime.events.recorder import About, Mark, Stamp
from offbeat.runtime.events.servers import PULL, PUSH

SILENT = "gave no sign of life and was declared dead"


class _ServerView(NamedTuple):
    epoch: int
    workers: frozenset[int]
    primaries: tuple[str, ...]


class ServerState:
    """The servers of a run, as far as its events tell."""

    def __init__(self) -> None:
        self.left: set[int] = set()
        """Workers that have done their part."""
        self.gone: dict[str, str] = {}
        """Workers and servers whose process has ended before the run did, and how."""
        self._clocks: dict[int, int] = {}
        self._floor = 0
        self._joined: set[int] = set()
        self._before: dict[int, int] = {}
        self._views: list[_ServerView] = []

    def note(self, rank: int, stamp: Stamp, about: About) -> None:
        """A worker has asked for something."""
        if stamp.mark is not Mark.START:
            return
        if about.operation == PUSH and stamp.value:
            self._clocks[rank] = stamp.step + 1
            self._joined.discard(rank)
        elif about.operation == "load":
            self._floor = max(self._floor, stamp.step)

    def note_step(self, rank: int, count: int) -> None:
        """A worker steps: where there are no servers, nothing else says how far it is."""
        if self._views and not self._views[-1].primaries:
            self._clocks[rank] = count
            self._joined.discard(rank)

    def note_view(self, stamp: Stamp, about: About) -> None:
        """A server knows of a view; or a worker does, where there are no servers."""
        if not self._views or stamp.sequence > self._views[-1].epoch:
            members = about.members if isinstance(about.members, tuple) else range(about.members)
            self._views.append(_ServerView(stamp.sequence, frozenset(members), about.servers))

    def reborn(self, rank: int) -> None:
        """Another process has taken a worker's place; how far it is it will tell."""
        self._before[rank] = self.clock(rank)
        self._clocks.pop(rank, None)
        self._joined.add(rank)
        self.left.discard(rank)

    @property
    def exists(self) -> bool:
        """Whether the run has servers, as far as is known."""
        return bool(self._views)

    def takes_part(self, rank: int) -> bool:
        """Whether others wait for this worker."""
        return rank not in self.left and (not self._views or rank in self._views[-1].workers)

    def clock(self, rank: int) -> int:
        """Steps that a worker has finished."""
        return max(self._clocks.get(rank, 0), self._floor)

    def awaited(self, rank: int, about: About, step: int) -> tuple[set[int], int]:
        """Whom a worker's pull for a step waits for, and how many of them must come further."""
        if about.operation != PULL or about.bound is None or not self._views:
            return set(), 0
        needed = step - about.bound
        others = [other for other in self._views[-1].workers if other != rank and self.takes_part(other)]
        behind = {other for other in others if other not in self._joined and self.clock(other) < needed}
        return behind, max(0, len(behind) - about.spare)

    def in_words(self, about: About, step: int, behind: set[int]) -> str:
        """A request, and how far those are that it waits for."""
        if about.operation != PULL:
            return f"the answer to a {about.operation} of step {step}"
        told = [f"{worker_name(other)} has finished {_steps(self.clock(other))}" for other in sorted(behind)]
        return " ".join([f"a pull of {about.words} for step {step}", *([f"({', '.join(told)})"] if told else [])])

    # -- deaths -------------------------------------------------------------------------------------------------------

    def deaths(self) -> Verdict | None:
        """Who has died, and what the run did about it; None if nobody has."""
        told = {**self._dead_workers(), **self._dead_servers()}
        if not told:
            return None
        return Verdict(DEAD, f"{'; '.join(told[name] for name in natural(told))}.", who=tuple(natural(told)))

    @property
    def noticed(self) -> frozenset[str]:
        """Of the dead, those that the view has left out already."""
        if not self._views:
            return frozenset()
        last, first = self._views[-1], self._views[0]
        workers = {worker_name(rank) for rank in first.workers - last.workers}
        return frozenset(workers | {name for name in self.gone if name not in last.primaries})

    def _dead_workers(self) -> dict[str, str]:
        told: dict[str, str] = {}
        for rank in sorted({rank for view in self._views[:1] for rank in view.workers}):
            name = worker_name(rank)
            out = any(rank not in view.workers for view in self._views)
            if rank in self.left or not (out or name in self.gone):
                continue
            how = self.gone.get(name, SILENT)
            reached = self._before.get(rank, self.clock(rank))
            told[name] = f"{name} {how} after {_steps(reached)}{self._after(rank, out)}"
        return told

    def _after(self, rank: int, out: bool) -> str:
        last = self._views[-1]
        if not out:
            return ", and the others have not yet heard of it"
        if rank in last.workers:
            return ", and another has taken its place"
        still = natural(worker_name(other) for other in last.workers if other not in self.left)
        return " ".join([", and the run went on without it", *([f"({', '.join(still)})"] if still else [])])

    def _dead_servers(self) -> dict[str, str]:
        told: dict[str, str] = {}
        served = [view.primaries for view in self._views]
        deposed = {
            old: new
            for one, other in pairwise(served)
            for old, new in zip(one, other, strict=True)
            if old and old != new
        }
        for name in [*deposed, *(name for name in self.gone if name.startswith("server") and name not in deposed)]:
            how = self.gone.get(name, SILENT)
            if deposed.get(name):
                after = f"{deposed[name]} has taken over its part of the parameters"
            elif name in deposed or (served and name in served[-1]):
                after = "no other server is known to have its part of the parameters"
            else:
                after = "it only kept a copy"
            told[name] = f"{name} {how}, and {after}"
        return told


def _steps(clock: int) -> str:
    return f"step {clock}" if clock else "no step"

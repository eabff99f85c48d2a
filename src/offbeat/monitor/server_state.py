"""The state of a run's servers: how far each worker has come, who takes part, and who has died.

Workers report it by their pushes, servers by the views they know. A worker waits in a pull for those whose clock is
below what the rule asks for; no worker waits for one that is out of the view, so a death is never a deadlock here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from offbeat.monitor.verdicts import DEAD, Verdict, worker_name
from offbeat.protocols.causality.deadlock import natural
from offbeat.runtime.events.recorder import About, Mark, Stamp
from offbeat.runtime.events.servers import PULL, PUSH

SILENT = "gave no sign of life and was declared dead"


def members_of(about: About) -> tuple[int, ...]:
    """Ranks of the workers in a call's group."""
    return tuple(range(about.members)) if isinstance(about.members, int) else about.members


class _ServerView(NamedTuple):
    epoch: int
    workers: frozenset[int]
    primaries: tuple[str, ...]


class ServerState:
    """The servers of a run, as far as its events tell."""

    def __init__(self) -> None:
        self.left: set[int] = set()  # Workers that have done their part.
        self.gone: dict[str, str] = {}  # Workers and servers whose process ended before the run did, and how.
        self._clocks: dict[int, int] = {}
        self._floor = 0
        self._joined: set[int] = set()
        self._before: dict[int, int] = {}
        self._views: list[_ServerView] = []

    def note(self, rank: int, stamp: Stamp, about: About) -> None:
        """A worker sends a request."""
        if stamp.mark is not Mark.START:
            return
        if about.operation == PUSH and stamp.value:
            self._set_clock(rank, stamp.step + 1)
        elif about.operation == "load":
            self._floor = max(self._floor, stamp.step)

    def note_step(self, rank: int, count: int) -> None:
        """A worker steps: without servers, nothing else says how far it is."""
        if self._views and not self._views[-1].primaries:
            self._set_clock(rank, count)

    def _set_clock(self, rank: int, clock: int) -> None:
        self._clocks[rank] = clock
        self._joined.discard(rank)

    def note_view(self, stamp: Stamp, about: About) -> None:
        """A server, or without servers a worker, knows of a view."""
        if not self._views or stamp.sequence > self._views[-1].epoch:
            self._views.append(_ServerView(stamp.sequence, frozenset(members_of(about)), about.servers))

    def reborn(self, rank: int) -> None:
        """Another process has taken a worker's place; its own events will say how far it is."""
        self._before[rank] = self.clock(rank)
        self._clocks.pop(rank, None)
        self._joined.add(rank)
        self.left.discard(rank)

    @property
    def exists(self) -> bool:
        """Whether the run is known to have servers."""
        return bool(self._views)

    def takes_part(self, rank: int) -> bool:
        """Whether others wait for this worker."""
        return rank not in self.left and (not self._views or rank in self._views[-1].workers)

    def clock(self, rank: int) -> int:
        """Number of steps that a worker has finished."""
        return max(self._clocks.get(rank, 0), self._floor)

    def awaited(self, rank: int, about: About, step: int) -> tuple[set[int], int]:
        """Workers that a worker's pull for a step waits for, and how many of them must advance."""
        if about.operation != PULL or about.bound is None or not self._views:
            return set(), 0
        needed = step - about.bound
        others = [other for other in self._views[-1].workers if other != rank and self.takes_part(other)]
        behind = {other for other in others if other not in self._joined and self.clock(other) < needed}
        return behind, max(0, len(behind) - about.spare)

    def in_words(self, about: About, step: int, behind: set[int]) -> str:
        """A request, and how far the workers are that it waits for."""
        if about.operation != PULL:
            return f"the answer to a {about.operation} of step {step}"
        clocks = [f"{worker_name(other)} has finished {_steps(self.clock(other))}" for other in sorted(behind)]
        return " ".join([f"a pull of {about.words} for step {step}", *([f"({', '.join(clocks)})"] if clocks else [])])

    # -- deaths -------------------------------------------------------------------------------------------------------

    def deaths(self) -> Verdict | None:
        """Dead workers and servers, and how the run handled it; None if there are none."""
        words = {**self._dead_workers(), **self._dead_servers()}
        if not words:
            return None
        return Verdict(DEAD, f"{'; '.join(words[name] for name in natural(words))}.", who=tuple(natural(words)))

    @property
    def noticed(self) -> frozenset[str]:
        """The dead that the current view excludes already."""
        if not self._views:
            return frozenset()
        last, first = self._views[-1], self._views[0]
        workers = {worker_name(rank) for rank in first.workers - last.workers}
        return frozenset(workers | {name for name in self.gone if name not in last.primaries})

    def _dead_workers(self) -> dict[str, str]:
        words: dict[str, str] = {}
        for rank in sorted({rank for view in self._views[:1] for rank in view.workers}):
            name = worker_name(rank)
            out = any(rank not in view.workers for view in self._views)
            if rank in self.left or not (out or name in self.gone):
                continue
            reached = self._before.get(rank, self.clock(rank))
            how = self.gone.get(name, SILENT)
            words[name] = f"{name} {how} after {_steps(reached)}, and {self._aftermath(rank, out)}"
        return words

    def _aftermath(self, rank: int, out: bool) -> str:
        last = self._views[-1]
        if not out:
            return "the others have not yet heard of it"
        if rank in last.workers:
            return "another has taken its place"
        still = natural(worker_name(other) for other in last.workers if other not in self.left)
        return " ".join(["the run went on without it", *([f"({', '.join(still)})"] if still else [])])

    def _dead_servers(self) -> dict[str, str]:
        words: dict[str, str] = {}
        primaries = [view.primaries for view in self._views]
        successors = {
            old: new
            for before, after in pairwise(primaries)
            for old, new in zip(before, after, strict=True)
            if old and old != new
        }
        lost = [name for name in self.gone if name.startswith("server") and name not in successors]
        for name in [*successors, *lost]:
            if successors.get(name):
                after = f"{successors[name]} has taken over its part of the parameters"
            elif name in successors or (primaries and name in primaries[-1]):
                after = "no other server is known to have its part of the parameters"
            else:
                after = "it only kept a copy"
            words[name] = f"{name} {self.gone.get(name, SILENT)}, and {after}"
        return words


def _steps(clock: int) -> str:
    return f"step {clock}" if clock else "no step"

"""The contract of schedules: proved symbolically, played with numbers in virtual time, run on real processes.

A schedule of a collective must bring every contribution where it belongs, exactly once, for every number of ranks; a
mixing schedule must leave every rank with the weighted sum that its matrix gives.
"""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from offbeat.errors import RunError, ScheduleError, UsageError
from offbeat.protocols.checker import CheckReport, check, check_mixing
from offbeat.protocols.collectives import Algorithm, Collective
from offbeat.protocols.schedule import FloatArray, Layout, Op, Schedule, View
from offbeat.runtime.collectives.two_sided import compile_schedule, run
from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.rank_environment import where
from offbeat.simulate.values import play_values
from offbeat.task import load_module
from offbeat.user_protocols import OwnSchedule

PROVED: Final = tuple(range(1, 34))  # Numbers of ranks that a schedule is proved for.
PLAYED: Final = (2, 3, 4, 6, 9)  # Numbers of ranks for plays with numbers in virtual time.
ORDERS: Final = 5  # Seeds of such a play: each has another order of messages.
REAL: Final = (2, 3, 4)  # Numbers of real processes that it is run on.
PATIENCE: Final = timedelta(seconds=20)  # How long a process waits for another.

Matrix = Callable[[int], FloatArray]  # The mixing matrix for a number of ranks.
Say = Callable[[str], None]


class Bound(Struct, frozen=True):
    """Lower bounds of a collective's cost, reported beside a schedule's."""

    port_bytes: float  # Bytes through the busiest port.
    hops: int  # Hops, if a port carries one message at a time.


def bound(collective: Collective, size: int, nbytes: int) -> Bound:
    """The known lower bound for a buffer of `nbytes` on `size` ranks."""
    hops = math.ceil(math.log2(size)) if size > 1 else 0
    others = (size - 1) / size * nbytes
    least = {
        Collective.ALL_REDUCE: 2 * others,
        Collective.BROADCAST: nbytes if size > 1 else 0.0,
        Collective.REDUCE: nbytes if size > 1 else 0.0,
        Collective.BARRIER: 0.0,
    }
    return Bound(least.get(collective, others), hops)


class ScheduleReport(Struct, frozen=True):
    """Result of checking a correct schedule."""

    name: str
    sizes: Mapping[int, CheckReport]  # By the number of ranks: rounds, hops and bytes.
    bounds: Mapping[int, Bound]  # By the number of ranks; empty for mixing, which has none.
    layout: Callable[[int], Layout]  # What was exchanged, by the number of ranks.
    simulated: int  # Plays with numbers in virtual time.
    real: tuple[int, ...]  # Numbers of real processes that it ran on.
    unrun: str = ""  # Why it ran on none.


def check_schedule(
    schedule: Schedule | Algorithm | OwnSchedule,
    collective: Collective = Collective.ALL_REDUCE,
    *,
    matrix: Matrix | None = None,
    launcher: Launcher | None = None,
    say: Say | None = None,
) -> ScheduleReport:
    """Prove a schedule, play it in virtual time, and run it on real processes.

    Args:
        schedule: A function of view and layout that yields rounds, or an `Algorithm`.
        collective: What it implements, unless it is an `Algorithm`.
        matrix: Instead of a collective: the matrix by which it mixes, for each number of ranks.
        launcher: Starts the processes; None: run on none.
        say: Called with what is being done.

    Raises:
        ScheduleError: it is wrong; names the number of ranks, the round, and the problem.

    """
    subject = Subject.of(schedule, collective, matrix)
    report: Say = say or (lambda _: None)
    report(f"proving it for {PROVED[0]} to {PROVED[-1]} ranks")
    reports = prove_schedule(subject)
    report(f"playing it with numbers in virtual time, {ORDERS} orders for each of {len(PLAYED)} sizes")
    plays = play_schedule(subject)
    unrun = subject.why_not_run() if launcher is not None else "no launcher was given"
    if launcher is not None and not unrun:
        for size in REAL:
            report(f"running it on {size} processes")
            run_schedule(subject, size, launcher)
    real = () if unrun else REAL
    bounds = {} if matrix else {p: bound(subject.collective, p, subject.nbytes(p)) for p in reports}
    return ScheduleReport(subject.name, reports, bounds, subject.layout, plays, real, unrun)


class Subject(Struct, frozen=True):
    """A schedule, and what it promises."""

    schedule: Schedule
    collective: Collective
    matrix: Matrix | None
    name: str
    source: str | None  # The file or module that other processes import it from.

    @classmethod
    def of(cls, given: Schedule | Algorithm | OwnSchedule, collective: Collective, matrix: Matrix | None) -> Subject:
        """From any form of a schedule."""
        if isinstance(given, OwnSchedule):
            return cls(given.schedule, given.collective, matrix, given.name, given.source)
        if isinstance(given, Algorithm):
            return cls(given.schedule, given.collective, matrix, given.name, _source(given.schedule))
        return cls(given, collective, matrix, getattr(given, "__name__", "schedule"), _source(given))

    def layout(self, size: int) -> Layout:
        """Blocks of unequal length, where allowed; a root that is not always the first rank."""
        count = 2 * size if self.collective is Collective.ALL_TO_ALL else 2 * size + 1
        return Layout(count, root=size // 2)

    def nbytes(self, size: int) -> int:
        """Bytes of a rank's buffer."""
        layout = self.layout(size)
        return layout.count * layout.itemsize

    def views(self, size: int) -> list[View]:
        """All on one host, and, unless it reads memory, spread over two."""
        together = View.of(size)
        return [together] if self.one_sided(together) else [together, View.of(size, [r % 2 for r in range(size)])]

    def one_sided(self, view: View) -> bool:
        """Whether ranks read each other's memory."""
        rounds = self.schedule(view, self.layout(view.size))
        return any(one.op is Op.FETCH for one in rounds)

    def why_not_run(self) -> str:
        """Why it cannot run on real processes; empty if it can."""
        if self.one_sided(View.of(2)):
            return "it reads other ranks' memory, which messages between processes cannot do"
        if self.source is None:
            return "it is not a function of a module, so other processes cannot import it"
        return ""

    def wrong(self, size: int, how: str, what: object) -> ScheduleError:
        """The error for a number of ranks, with how it was detected."""
        return ScheduleError(f"{self.name} is wrong for {size} ranks, {how}: {what}.")


def _source(schedule: Schedule) -> str | None:
    """Where a function can be imported from by name; None for closures and the like."""
    module = inspect.getmodule(schedule)
    name = getattr(schedule, "__name__", "")
    if module is None or getattr(module, name, None) is not schedule:
        return None
    return module.__file__ or module.__name__


def prove_schedule(subject: Subject) -> dict[int, CheckReport]:
    """Run the checker for every size; a ScheduleError names the one that fails."""
    reports: dict[int, CheckReport] = {}
    for size in PROVED:
        layout = subject.layout(size)
        try:
            for view in subject.views(size):
                if subject.matrix is None:
                    reports[size] = check((subject.schedule, subject.collective), view, layout)
                else:
                    reports[size] = check_mixing(subject.schedule, subject.matrix(size), view, layout)
        except ScheduleError as error:
            raise subject.wrong(size, "by the checker's proof", error) from error
        except Exception as error:
            raise subject.wrong(size, "as it fails itself", f"{type(error).__name__}: {error}") from error
    return reports


def play_schedule(subject: Subject) -> int:
    """Play with numbers in virtual time, in several orders; returns the number of plays."""
    plays = 0
    for size in PLAYED:
        view, layout = subject.views(size)[-1], subject.layout(size)
        given = [brought(subject.matrix is not None, layout.count, rank) for rank in range(size)]
        for seed in range(ORDERS):
            try:
                ends = play_values(subject.schedule, view, layout, given, seed)
            except ScheduleError as error:
                raise subject.wrong(size, f"in virtual time (seed {seed})", error) from error
            for rank in range(size):
                words = verified(subject, given, ends[rank], layout, rank)
                if words:
                    raise subject.wrong(size, f"in virtual time (seed {seed})", words)
            plays += 1
    return plays


def run_schedule(subject: Subject, size: int, launcher: Launcher) -> None:
    """Run on real processes, over messages; a ScheduleError says what they ended with."""
    source = subject.source
    if source is None:
        raise UsageError(f"{subject.name} cannot be imported by other processes: define it at the top of a module.")
    config = {
        "source": str(Path(source).resolve()) if source.endswith(".py") else source,
        "name": subject.name,
        "collective": subject.collective.value,
        "matrix": None if subject.matrix is None else subject.matrix(size).tolist(),
    }
    store, seen = serve_store(), dict[int, str]()
    with tempfile.TemporaryDirectory(prefix="offbeat-check-") as folder:
        roles = [
            Role(
                kind="worker",
                rank=rank,
                entry=f"{__name__}:worker",
                config=config,
                environment=worker_environment(rank, size, store.port),
                log=Path(folder) / f"{rank}.log",
                threads=1,
            )
            for rank in range(size)
        ]
        try:
            launcher.run(roles, on_message=lambda _role, said: seen.update({int(said["rank"]): str(said["wrong"])}))
        except RunError as error:
            raise subject.wrong(size, "on real processes", error) from error
    for _, words in sorted(seen.items()):
        if words:
            raise subject.wrong(size, "on real processes", words)
    if len(seen) < size:
        raise subject.wrong(size, "on real processes", f"only {len(seen)} of them came to an end")


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One process: runs the schedule, and reports wrong values."""
    module, name = load_module(config["source"]), str(config["name"])
    value = getattr(module, name)
    schedule = value.schedule if isinstance(value, Algorithm) else value
    matrix = None if config["matrix"] is None else np.array(config["matrix"])
    subject = Subject(
        schedule, Collective(config["collective"]), None if matrix is None else (lambda _: matrix), name, None
    )
    group = DirectGroup(where(), PATIENCE, torch.device("cpu"))
    view, layout = subject.views(group.size)[-1], subject.layout(group.size)
    given = [brought(matrix is not None, layout.count, rank) for rank in range(group.size)]
    tensor = torch.from_numpy(given[group.rank].copy())
    try:
        run(compile_schedule(schedule, view, layout, group.rank), tensor, group.process_group)
        wrong = verified(subject, given, tensor.numpy(), layout, group.rank)
    except Exception as error:
        wrong = f"rank {group.rank} fails with {type(error).__name__}: {error}"
    control.send({"rank": group.rank, "wrong": wrong})
    with suppress(Exception):  # Another process may have failed, and reports that itself.
        group.barrier()
    group.close()


def brought(mixes: bool, count: int, rank: int) -> NDArray[Any]:
    """A rank's initial buffer: integers, which sum exactly; floats for mixing."""
    numbers = np.random.default_rng(1000 * count + rank).integers(0, 1000, count)
    return numbers.astype(np.float64) if mixes else numbers


def verified(subject: Subject, given: Sequence[NDArray[Any]], end: NDArray[Any], layout: Layout, rank: int) -> str:
    """What is wrong with a rank's final buffer; empty if it is right."""
    if subject.matrix is not None:
        expected = subject.matrix(len(given))[rank] @ np.stack(given)
        off = np.flatnonzero(~np.isclose(end, expected, rtol=1e-9, atol=1e-9))
        start = 0
    else:
        start, expected = _expected(subject.collective, given, layout, rank)
        off = np.flatnonzero(end[start : start + len(expected)] != expected)
    if not len(off):
        return ""
    at = int(off[0])
    return f"rank {rank} ends with {end[start + at]} at {start + at}, where {expected[at]} belongs"


def _expected(
    collective: Collective, given: Sequence[NDArray[Any]], layout: Layout, rank: int
) -> tuple[int, NDArray[Any]]:
    """Where the result at a rank begins, and what must be there."""
    size, root = len(given), layout.root
    cuts = cast("list[int]", layout.blocks(size).tolist())
    low, high = cuts[rank], cuts[rank + 1]
    total = np.sum(given, axis=0)
    gathered = np.concatenate([one[cuts[r] : cuts[r + 1]] for r, one in enumerate(given)])
    at_root = slice(None) if rank == root else slice(0, 0)
    if collective is Collective.ALL_TO_ALL:
        return 0, np.concatenate([one.reshape(size, -1)[rank] for one in given])
    return {
        Collective.ALL_REDUCE: (0, total),
        Collective.REDUCE: (0, total[at_root]),
        Collective.REDUCE_SCATTER: (low, total[low:high]),
        Collective.BROADCAST: (0, given[root]),
        Collective.SCATTER: (low, given[root][low:high]),
        Collective.ALL_GATHER: (0, gathered),
        Collective.GATHER: (0, gathered[at_root]),
        Collective.BARRIER: (0, total[:0]),
    }[collective]

"""Short runs for measuring: what is run, and how many steps fill a given time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from offbeat import limits
from offbeat.errors import UsageError
from offbeat.run.drive import WARM, Result, drive
from offbeat.run.job import Job, Script, target_of
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal
from offbeat.task import AnyTask, IterativeTask, TaskReference

FIRST_STEPS = 20
"""Steps of the first run, which warms up and shows how long a step takes."""
FEWEST_STEPS = 30
_BUSY = ("input", "compute", "communicate", "wait", "bubble")
"""Kinds of time that steps take; evaluations, checkpoints and reports are not among them."""
_NEVER = "score=1e300"  # A target that no score reaches: a measuring run continues to its last step.

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Runs:
    """Short runs of one target."""

    what: Script | TaskReference
    launcher: Launcher
    out: Path
    threads: int
    seed: int
    tell: Tell

    @property
    def is_iterative(self) -> bool:
        """Whether it is a task that is not gradient descent."""
        return isinstance(self.what, TaskReference) and issubclass(self.what.find(), IterativeTask)

    def once(self, workers: int, strategy: str, steps: int, merge: int = 1, gauge: int | None = None) -> Result:
        """Run it for the given number of steps; a script without a team has nothing to measure."""
        target = None if isinstance(self.what, Script) else _NEVER
        goal = Goal(
            strategy=strategy, steps=steps, seed=self.seed, target=target, checkpoint_every=1 << 40, merge=merge,
            gauge=gauge,
        )  # fmt: skip
        result = drive(Job(self.what, goal, workers, self.threads, self.out), launcher=self.launcher)
        if not result.seconds_by_kind:
            raise UsageError(
                f"{self.what} never called offbeat.init(), so its steps cannot be counted. Use `with offbeat.init() as "
                f"team` and team.prepare(...) in it."
            )
        if not result.steps:
            raise UsageError(
                f"{self.what} has made no step with an optimizer that was given to team.prepare(...). Give it to "
                f"prepare()."
            )
        return result

    def length(self, steps: int | None, seconds: float, workers: int, strategy: str, merge: int = 1) -> int:
        """The number of steps: as requested, or as many as fill the time, by a short run that is not counted."""
        if steps is not None:
            return steps
        self.tell(f"a first run of {self.what}, to see how long a step takes")
        first = self.once(workers, strategy, FIRST_STEPS, merge)
        return max(FEWEST_STEPS, round(first.steps * seconds / busy_seconds(first)))


@contextmanager
def runs_of(
    target: AnyTask | str,
    arguments: Sequence[str],
    threads: int,
    seed: int,
    out: str | Path | None,
    launcher: Launcher | None,
    tell: Tell,
) -> Generator[Runs]:
    """Runs of a target, in a folder that is kept only if it was named."""
    what = target_of(target, arguments)
    with (
        TemporaryDirectory(prefix="offbeat-") if out is None else nullcontext(str(out)) as folder,
        nullcontext(launcher) if launcher else Launcher(WARM) as starter,
    ):
        yield Runs(what, starter, Path(folder), threads, seed, tell)


def busy_seconds(result: Result) -> float:
    """Seconds that a run's steps took, without evaluations, checkpoints and reports."""
    return max(1e-9, sum(result.seconds_by_kind.get(kind, 0.0) for kind in _BUSY))


def check_options(steps: int | None, seconds: float, threads: int, seed: int) -> None:
    """Refuse values that make no sense."""
    if steps is not None:
        limits.whole("--steps", steps, limits.COUNT)
    limits.seconds("--seconds", seconds)
    limits.whole("--threads", threads, limits.THREADS)
    limits.seed("--seed", seed)

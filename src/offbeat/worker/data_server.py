"""What the process of a data server does: make the run's loaders as its workers do, and prepare their batches.

A task is made from its reference. Of a script, the part before its first pass over a prepared loader is run: nothing
is pickled, and the loaders are those that the script itself makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, cast

from torch.utils.data import DataLoader

from offbeat.errors import DataError, TaskError, UsageError
from offbeat.runtime.data_servers.plan import DataServerPlan
from offbeat.runtime.data_servers.process import DataServerProcess
from offbeat.runtime.launch import Control
from offbeat.runtime.run.settings import ASSIGNED, Assignment, Goal
from offbeat.runtime.state.random_state import seed_everything
from offbeat.task import Task, TaskReference
from offbeat.worker.loop import run_script
from offbeat.worker.task_data import data_of, loader_over


def hand_out(config: Mapping[str, Any], control: Control) -> None:
    """The entry function of a data server's process."""
    goal = Goal.from_plain(config["goal"])
    process = DataServerProcess(
        DataServerPlan.from_plain(config["plan"]),
        int(config["number"]),
        control.send,
        disturb=config["disturb"],
        seed=goal.seed or 0,
        fired=config.get("disturbed", ()),
    )
    if goal.seed is not None:
        seed_everything(goal.seed)  # As in the workers: examples may be drawn when the data is made.
    if not config.get("script"):
        loader = _loader_of(TaskReference(**config["task"]))
        process.serve(lambda _number: loader)
        return
    offers = ScriptLoaders(process, config["script"])
    # One worker that exchanges nothing, and reports to nobody.
    alone = dataclasses.replace(goal, strategy="single", steps=None, disturb=(), watch=False, data_servers=0)
    ASSIGNED.set(Assignment(goal=alone, offer=offers.take))
    run_script(config["script"], config["arguments"])
    raise UsageError(
        f"data servers could not read the data of {config['script']}: it ended without iterating a loader that "
        f"team.prepare() has returned. Give prepare() the training loader, or omit --data-servers."
    )


def _loader_of(reference: TaskReference) -> DataLoader[Any]:
    task = reference.build()
    if not isinstance(task, Task):
        raise TaskError(f"{type(task).__name__} reads its data in parts, not in batches: omit --data-servers.")
    return loader_over(data_of(task).train, task.global_batch, task.collate, shuffle=True)


class ScriptLoaders:
    """The loaders of a script in a data server, which serves when the script begins its first pass over one."""

    def __init__(self, process: DataServerProcess, script: str) -> None:
        self._process, self._script = process, script
        self._loaders: list[Any] = []

    def take(self, loader: Any) -> OfferedLoader:
        """A loader that the script prepares."""
        self._loaders.append(loader)
        return OfferedLoader(loader, self._serve)

    def _serve(self) -> NoReturn:
        self._process.serve(self._loader)
        raise AssertionError("a data server serves until it is ended")

    def _loader(self, number: int) -> DataLoader[Any]:
        if number >= len(self._loaders):
            raise DataError(
                f"{self._script} prepares its loader {number} (counted from 0) after its first pass over another one, "
                f"and a data server runs the script only up to there. Prepare all loaders before the first pass."
            )
        return cast("DataLoader[Any]", self._loaders[number])


class OfferedLoader:
    """A prepared loader in a data server: as the original, but a pass over it is where serving begins."""

    def __init__(self, original: Any, serve: Callable[[], NoReturn]) -> None:
        self._original, self._serve = original, serve
        self.resume_at = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._original, name)

    def __len__(self) -> int:
        return len(self._original)

    def __iter__(self) -> Iterator[Any]:
        self._serve()

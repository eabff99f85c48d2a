"""Running the scripts of this folder on real processes, and comparing what their workers left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.errors import OffbeatError
from offbeat.run.drive import Result, drive
from offbeat.run.job import Job, Script
from offbeat.runtime.hosts import Hosts
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal

HERE = Path(__file__).parent
TOLERANCE = 1e-5


def run_script(
    launcher: Launcher, folder: Path, script: str, *arguments: str | Path, workers: int = 1, **goal: Any
) -> Result:
    """What `offbeat run script --workers N -- arguments` does, on a fork server that is already there."""
    resume, threads, hosts = goal.pop("resume", None), goal.pop("threads", 1), goal.pop("hosts", None)
    what = Script(str(HERE / script), tuple(map(str, arguments)))
    return drive(Job(what, Goal(**goal), workers, threads, folder / "runs", resume, hosts=hosts), launcher=launcher)


def left(out: Path, workers: int) -> list[dict[str, Any]]:
    """What each worker has left."""
    return [torch.load(f"{out}-{rank}.pt", weights_only=False) for rank in range(workers)]


def same(one: dict[str, Any], other: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Fail unless the two states are equal: bit for bit with a tolerance of 0."""
    assert list(one) == list(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        if tolerance == 0:
            assert torch.equal(value, other[name]), f"{name} differs by {_distance(value, other[name])}"
        else:
            torch.testing.assert_close(
                other[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.shape == other.shape else float("nan")


class Matrix:
    """All cases of a script under any strategy, run in one go: one team after the other, in the same processes."""

    def __init__(self, launcher: Launcher, folder: Path, script: str, cases: Sequence[str]) -> None:
        self._launcher, self._folder, self._script, self._cases = launcher, folder, script, cases
        self._done: dict[str, str] = {}

    def outcome(
        self, case: str, strategy: str, workers: int, cases: Sequence[str] | None = None, apart: bool = False
    ) -> list[dict[str, Any]]:
        """What each worker left; run alone if running all together did not get that far.

        `apart` if each worker is on a host of its own.
        """
        name = f"{strategy}-{workers}" + ("-apart" if apart else "")
        folder = self._folder / name.replace(" ", "")
        goal: dict[str, Any] = {"strategy": strategy, "timeout": 30.0}
        if apart:
            goal["hosts"] = Hosts.alike(workers)
        if name not in self._done:
            self._done[name] = "done"
            names = self._cases if cases is None else cases
            try:
                run_script(self._launcher, folder, self._script, folder / "left", *names, workers=workers, **goal)
            except OffbeatError as error:
                self._done[name] = str(error)
        out = folder / "left" / case
        if not all(Path(f"{out}-{rank}.pt").exists() for rank in range(workers)):
            run_script(self._launcher, folder, self._script, folder / "left", case, workers=workers, **goal)
        if not Path(f"{out}-0.pt").exists():
            pytest.fail(f"{case} left nothing: {self._done[name]}")
        return left(out, workers)

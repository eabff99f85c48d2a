"""Scripts that are killed and resumed, compared with runs that were not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_scripts.running import left, run_script, same

from offbeat.errors import RunError
from offbeat.runtime.launch import Launcher


def run_killed(launcher: Launcher, folder: Path, kills: str, data: str, style: str, **goal: Any) -> list[dict]:
    """Run the script, resume it as often as it is killed, and answer what its workers left in the end."""
    out, workers = folder / "left", goal.pop("workers", 2)
    words, resume = (out, kills, data, style), None
    for _ in kills.split(",") if kills else ():
        with pytest.raises(RunError, match=r"killed|SIGKILL|died"):
            run_script(launcher, folder, "resuming.py", *words, workers=workers, resume=resume, **goal)
        resume = folder / "runs" / "latest"
    run_script(launcher, folder, "resuming.py", *words, workers=workers, resume=resume, **goal)
    if kills:
        assert len(Path(f"{out}-struck").read_text()) == len(kills.split(",")), "every kill has struck"
    return left(out, workers)


def compare(launcher: Launcher, folder: Path, kills: str, data: str, style: str, **goal: Any) -> None:
    goal = {"checkpoint_every": 2, "timeout": 30.0, "strategy": "allreduce"} | goal
    expected = run_killed(launcher, folder / "whole", "", data, style, **goal)
    found = run_killed(launcher, folder / "killed", kills, data, style, **goal)
    for one, other in zip(expected, found, strict=True):
        same(one["state"], other["state"], tolerance=0)
        assert one["facts"] == other["facts"]

"""A run that goes on from a checkpoint keeps one account: metrics, targets and results as if it had never stopped."""

from __future__ import annotations

import json
from pathlib import Path

from offbeat.run.drive import drive, fit
from offbeat.run.job import Job, Script
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import METRICS_FILE
from offbeat.runtime.run.settings import Goal
from offbeat.testing._tasks import CurveTask


def steps_reported(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / METRICS_FILE).read_text().splitlines()]


def test_metrics_of_a_resumed_run_are_those_of_one_that_was_never_cut(tmp_path: Path, launcher: Launcher) -> None:
    whole = fit(CurveTask(str(tmp_path)), workers=2, epochs=4, out=tmp_path / "whole", launcher=launcher)
    cut = fit(CurveTask(str(tmp_path)), workers=2, steps=12, out=tmp_path / "cut", launcher=launcher)
    assert steps_reported(cut.run) == [5, 10, 12]  # The budget ran out in the third epoch, which was judged there.
    resumed = fit(CurveTask(str(tmp_path)), epochs=4, out=tmp_path / "cut", resume=cut.run, launcher=launcher)
    assert steps_reported(resumed.run) == steps_reported(whole.run) == [5, 10, 15, 20]
    assert (resumed.steps, resumed.samples, resumed.score) == (whole.steps, whole.samples, whole.score)


def test_a_higher_target_is_not_reached_because_a_lower_one_was(tmp_path: Path, launcher: Launcher) -> None:
    first = fit(CurveTask(str(tmp_path)), target=-10.0, epochs=2, out=tmp_path, launcher=launcher)
    assert first.reached_target is True
    again = fit(CurveTask(str(tmp_path)), target=10.0, epochs=3, out=tmp_path, resume=first.run, launcher=launcher)
    assert again.reached_target is False
    assert again.epochs == 3


def test_a_script_may_end_itself_inside_the_team(tmp_path: Path, launcher: Launcher) -> None:
    script = tmp_path / "ending.py"
    script.write_text(
        "import sys, torch, offbeat\n"
        "model = torch.nn.Linear(2, 1)\n"
        "with offbeat.init() as team:\n"
        "    model = team.prepare(model)\n"
        "    team.report(quality=0.5)\n"
        "    sys.exit(0)\n"
    )
    result = drive(Job(Script(str(script)), Goal(), workers=2, out=tmp_path), launcher=launcher)
    assert result.metrics == {"quality": 0.5}


STREAM = """
import torch, offbeat
from torch.utils.data import DataLoader, IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        source = torch.Generator().manual_seed(0)
        return (torch.randn(3, generator=source) for _ in range(37))

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.init() as team:
    model, optimizer, loader = team.prepare(model, optimizer, DataLoader(Stream(), batch_size=8))
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            (model(batch) - 1).square().mean().backward()
            optimizer.step()
        team.report(weight=model.weight.sum())
"""


def test_a_seed_covers_what_is_made_before_init_and_streams_are_counted_exactly(
    tmp_path: Path, launcher: Launcher
) -> None:
    script = tmp_path / "stream.py"
    script.write_text(STREAM)
    jobs = [Job(Script(str(script)), Goal(seed=3), workers=workers, out=tmp_path) for workers in (1, 2, 3)]
    results = [drive(job, launcher=launcher) for job in jobs]
    assert [result.samples for result in results] == [74, 74, 74]
    assert [result.steps for result in results] == [10, 10, 10]
    assert max(abs(result.metrics["weight"] - results[0].metrics["weight"]) for result in results) < 1e-5

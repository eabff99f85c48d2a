"""A watched pipeline shows which stage computed which microbatch when, and `offbeat explain` speaks of its cut."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.app import app
from offbeat.monitor import recorded
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.export import chrome_trace
from offbeat.run.drive import drive
from offbeat.run.job import Job, target_of
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal

STEPS, MICROBATCHES = 3, 8


@pytest.mark.slow
def test_the_diagram_of_a_watched_pipeline_shows_microbatches_messages_and_waits(
    launcher: Launcher, tmp_path: Path
) -> None:
    goal = Goal(strategy="pipeline(2)", steps=STEPS, watch=True)
    drive(Job(target_of("offbeat.tasks.text"), goal, 2, 1, tmp_path), launcher=launcher)
    run = (tmp_path / "latest").resolve()
    events = recorded(run)
    diagram = Scene.of(events.stamps).diagram(shapes=10**6)
    for lane in range(2):
        spans = [span for span in diagram.spans if span.lane == lane]
        for kind, word in (("microbatch forward", "forward"), ("microbatch backward", "backward")):
            labels = Counter(span.label for span in spans if span.kind == kind)
            assert labels == {f"{word} #{n} of part {lane} of the model": STEPS for n in range(MICROBATCHES)}
        assert any(span.kind == "wait" for span in spans)
        ends = [span.stop for span in spans]
        assert all(span.start >= before - 1e-9 for span, before in zip(spans[1:], ends, strict=False))
    there = [arrow for arrow in diagram.arrows if arrow.label.startswith("activations")]
    back = [arrow for arrow in diagram.arrows if arrow.label.startswith("gradients")]
    assert len(there) == len(back) == STEPS * MICROBATCHES
    assert {(arrow.source, arrow.target) for arrow in there} == {(0, 1)}
    assert {(arrow.source, arrow.target) for arrow in back} == {(1, 0)}
    assert all(arrow.start <= arrow.stop for arrow in (*there, *back))
    names = [event["name"] for event in chrome_trace(diagram)["traceEvents"]]
    assert sum("microbatch forward: forward #3" in name for name in names) == 2 * STEPS
    told = CliRunner().invoke(app, ["explain", str(run)]).stdout
    assert "stage 0" in told
    assert "is the slowest" in told
    stages = json.loads(CliRunner().invoke(app, ["explain", str(run), "--format", "json"]).stdout)["stages"]
    assert stages["slowest"] in (0, 1)
    assert 0 < stages["evenness"] <= 1
    assert stages["advice"]["step_seconds"] > 0

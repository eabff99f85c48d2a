"""Draw space_time.svg around a pause in a real run whose worker 1 is paused from time to time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from offbeat import fit
from offbeat.monitor import recorded
from offbeat.monitor.diagram.build import Scene
from offbeat.monitor.diagram.cuts import parse_cut
from offbeat.monitor.diagram.model import Diagram
from offbeat.monitor.diagram.svg import save

DISTURBED = ("worker *: pace 25ms", "worker 1: pause 120ms every 500ms")
AROUND = 0.14
"""Seconds to show before and after the middle of the pause."""


def pictured() -> Diagram:
    """Draw the part of a run around worker 1's longest wait, with the causal past of its next event."""
    with tempfile.TemporaryDirectory() as folder:
        result = fit(
            "offbeat.tasks.digits", "allreduce", workers=3, threads=1, steps=80, target=2.0, watch=True,
            disturb=DISTURBED, out=folder,
        )  # fmt: skip
        events = recorded(result.run)
    scene = Scene.of(events.stamps, "digits on 3 workers, allreduce; worker 1 is stopped for 120 ms", events.dropped)
    own = [span for span in scene.diagram().spans if span.kind == "compute" and span.lane == 1 and span.start > 1.0]
    longest = max(own, key=lambda span: span.stop - span.start)
    middle = (longest.start + longest.stop) / 2
    number = (
        int(scene.times[1].searchsorted(longest.stop)) + 2
    )  # It enters the all-reduce that the others wait in, and leaves.
    cut = f"past worker 1:{number}"
    return scene.diagram((middle - AROUND, middle + AROUND), {cut: parse_cut(scene.run, scene.times, cut, scene.stop)})


if __name__ == "__main__":
    save(pictured(), Path(__file__).with_suffix(".svg"))

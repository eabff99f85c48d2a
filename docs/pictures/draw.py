"""Draws draw-ring.svg and draw-ssp.svg, the pictures of docs/draw.md, as `offbeat draw` does."""

from __future__ import annotations

from pathlib import Path

from offbeat.drawing import Setting, picture, timeline_of
from offbeat.monitor.pictures import write
from offbeat.simulate.network import Network
from offbeat.simulate.stragglers import Stragglers

HERE = Path(__file__).parent
NETWORK = "10Gbit,50us"


def pictured() -> None:
    """Both of them, beside this file."""
    for name, text, workers, steps, slow in (
        ("draw-ring", "allreduce(ring)", 4, None, "none"),
        ("draw-ssp", "server(consistency=ssp(3))", 4, 6, "permanent(2)"),
    ):
        setting = Setting(
            tuple(range(workers)),
            Network.parse(NETWORK),
            steps=steps,
            stragglers=Stragglers.parse(slow, 0.04),
        )
        timeline = timeline_of(text, setting)
        write(picture(timeline, f"{workers} workers, 100MB, {NETWORK}; stragglers: {slow}"), HERE / f"{name}.svg")


if __name__ == "__main__":
    pictured()

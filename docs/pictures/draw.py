"""Draw the pictures of docs/draw.md, docs/pipelines.md and docs/sandblaster.md, as `offbeat draw` does."""

from __future__ import annotations

from pathlib import Path

from offbeat.draw import Scenario, picture, timeline_of
from offbeat.monitor.diagram.svg import write
from offbeat.simulate.network import Network
from offbeat.simulate.servers.stragglers import Stragglers
from offbeat.simulate.units import parse_size

HERE = Path(__file__).parent
NETWORK = "10Gbit,50us"
PIPELINES = (
    ("draw-1f1b", "pipeline(4)"),
    ("draw-interleaved", "pipeline(4, interleaved, chunks=2)"),
    ("draw-zero-bubble", "pipeline(4, zero_bubble)"),
)


def pictured() -> None:
    """Draw all, beside this file."""
    for name, text, size, steps, slow in (
        ("draw-ring", "allreduce(ring)", "100MB", None, "none"),
        ("draw-ssp", "server(consistency=ssp(3))", "10MB", 8, "permanent(2)"),
    ):
        setting = Scenario(
            tuple(range(4)),
            Network.parse(NETWORK),
            parse_size(size),
            steps,
            stragglers=Stragglers.parse(slow, 0.04),
        )
        timeline = timeline_of(text, setting)
        write(picture(timeline, f"4 workers, {size}, {NETWORK}; stragglers: {slow}"), HERE / f"{name}.svg")
    text = "sandblaster(shards=2, portions=8)"
    setting = Scenario(
        tuple(range(3)), Network.parse(NETWORK), parse_size("10MB"), stragglers=Stragglers.parse("none", 0.2)
    )
    write(picture(timeline_of(text, setting), f"3 workers, 10MB, {NETWORK}"), HERE / "sandblaster-simulated.svg")
    for name, text in PIPELINES:
        setting = Scenario(tuple(range(4)), Network.parse(NETWORK), parse_size("100KB"), microbatches=8)
        timeline = timeline_of(text, setting)
        write(picture(timeline, ". ".join((f"4 workers, 100KB, {NETWORK}", *timeline.notes))), HERE / f"{name}.svg")


if __name__ == "__main__":
    pictured()

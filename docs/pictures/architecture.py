"""Draw architecture.png: the layers of the code, and the processes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, SOFT = "#1f2933", "#52606d"
LAYERS = [
    ("cli", "run · compare · explain · doctor · draw · check · bench …", "#dbeafe"),
    ("league · scaling · bench · draw · testing", "runs compared · speed-up · peers · pictures · contracts", "#dbeafe"),
    ("run · worker · team", "one run · the lifetime of a worker · the team inside a loop", "#dcfce7"),
    ("strategies", "allreduce · server · local · gossip · hogwild · compressors · yours", "#fef9c3"),
    ("monitor", "events, their causal order, verdicts · diagram · page", "#fef9c3"),
    ("runtime", "launch · collectives · backend · messages · servers · gradients · data · state · events", "#fde8d7"),
    ("simulate", "the same protocols in virtual time", "#f3e8ff"),
    ("protocols", "pure schedules and machines: no I/O, no clock", "#f3e8ff"),
    ("task · errors", "what is learned; what can go wrong", "#e5e7eb"),
]


def box(axes: Any, x: float, y: float, w: float, h: float, color: str, title: str, text: str = "") -> None:
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.02,rounding_size=0.12", fc=color, ec=SOFT, lw=1))
    axes.text(
        x + w / 2,
        y + h * (0.62 if text else 0.5),
        title,
        ha="center",
        va="center",
        fontsize=11,
        weight="bold",
        color=INK,
    )
    if text:
        axes.text(x + w / 2, y + h * 0.26, text, ha="center", va="center", fontsize=8, color=SOFT)


def arrow(
    axes: Any,
    start: tuple[float, float],
    stop: tuple[float, float],
    text: str,
    at: tuple[float, float],
    style: str = "-|>",
) -> None:
    axes.add_patch(
        FancyArrowPatch(start, stop, arrowstyle=style, mutation_scale=12, lw=1.2, color=INK, shrinkA=2, shrinkB=2)
    )
    axes.text(*at, text, fontsize=8, color=INK, ha="center", va="center", backgroundcolor="white")


def layers(axes: Any) -> None:
    axes.set_title("Layers: imports point down only", loc="left", fontsize=12, color=INK)
    for i, (title, text, color) in enumerate(LAYERS):
        box(axes, 0.1, 6.35 - 0.78 * i, 5.8, 0.6, color, title, text)
        if i:
            axes.annotate(
                "", (3, 6.97 - 0.78 * i), (3, 7.12 - 0.78 * i), arrowprops={"arrowstyle": "-|>", "color": SOFT}
            )
    axes.set(xlim=(0, 6), ylim=(0, 7.1))


def processes(axes: Any) -> None:
    axes.set_title("A run: real processes", loc="left", fontsize=12, color=INK)
    box(axes, 0.2, 5.4, 2.6, 1.2, "#dcfce7", "launcher", "checks, serves the store, shows")
    box(axes, 4.6, 5.4, 2.6, 1.2, "#fde8d7", "fork server", "has torch imported")
    box(axes, 0.2, 2.5, 2.6, 1.4, "#dbeafe", "worker 0", "your loop or task, and a team")
    box(axes, 4.6, 2.5, 2.6, 1.4, "#dbeafe", "worker 1", "your loop or task, and a team")
    box(
        axes,
        0.2,
        0.3,
        7.0,
        1.1,
        "#e5e7eb",
        "runs/<time>-<task>-<strategy>/",
        "run.json · metrics.jsonl · logs/ · checkpoint/ · model.safetensors",
    )
    arrow(axes, (2.85, 6.0), (4.55, 6.0), "roles", (3.7, 6.2))
    arrow(axes, (5.9, 5.38), (5.9, 3.95), "fork", (5.9, 4.7))
    arrow(axes, (4.6, 5.38), (2.5, 3.95), "fork", (3.75, 4.8))
    arrow(axes, (1.0, 3.95), (1.0, 5.38), "progress, result,\nexceptions", (1.0, 4.7))
    arrow(axes, (2.85, 3.2), (4.55, 3.2), "buckets of gradients\n+ examples, arrivals", (3.7, 3.62), "<|-|>")
    arrow(axes, (1.5, 2.48), (1.5, 1.45), "", (1.5, 2.0))
    arrow(axes, (5.9, 2.48), (5.9, 1.45), "", (5.9, 2.0))
    axes.set(xlim=(0, 7.4), ylim=(0, 7.1))


def main() -> None:
    """Draw and save."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6.2), gridspec_kw={"width_ratios": [6, 7.4]})
    layers(left)
    processes(right)
    for axes in (left, right):
        axes.axis("off")
    figure.tight_layout()
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()

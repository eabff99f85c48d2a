"""Write docs/bars.md, every performance goal and its measured value, and README's figures, from benchmarks/results/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROGRAMS = (
    *("collectives", "calls", "gossip", "training", "sharding", "tensor", "stages", "pipelines"),
    *("predicted_pipelines", "stress", "servers"),
    *("staleness", "hogwild", "simulated_servers", "compressors", "slow_links", "sick_runs", "stamping", "page"),
    *("laws", "noise_scale", "league", "secure_aggregation", "programs", "sandblaster", "federated"),
    *("fedavg_mnist", "data_servers", "engines", "ordering"),
)
HEAD = """# Bars

Performance goals, and what was measured. A bar holds if the better end of the interval reaches it and the median is
within 5 % of it. Missed bars come first. Made from `benchmarks/results/` by `python docs/bars.py`, on a machine with 2
shared cores, where the same program varies by 10 % and more from run to run.
"""


def line(bar: dict[str, Any]) -> str:
    """Return one bar as a table row."""
    goal = " and ".join(f"{key} {bar[key]:g}" for key in ("at least", "at most") if key in bar)
    value = bar["found"]
    shown = (
        f"{value['median']:.3g} [{value['low']:.3g}, {value['high']:.3g}]" if isinstance(value, dict) else str(value)
    )
    return f"| {'holds' if bar['holds'] else '**missed**'} | {bar['bar']} | {goal} | {shown} |"


def results(name: str) -> dict[str, Any] | None:
    """Return what a program has stored; None before its first run."""
    path = ROOT / f"benchmarks/results/{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name in PROGRAMS:
        link = f"[benchmarks/{name}.py](../benchmarks/{name}.py)"
        stored = results(name)
        if stored is None:
            parts.append(f"## {name}\n\n{link}: not measured on a quiet machine yet.\n")
            continue
        bars = stored.get("bars", [])
        if not bars:
            parts.append(f"## {name}\n\n{link}: {'holds' if stored['holds'] else '**missed**'}.\n")
            continue
        rows = [line(bar) for bar in sorted(bars, key=lambda bar: bar["holds"])]
        if missing := stored.get("not measured"):
            link += f"; not measured yet: {', '.join(missing)}"
        parts.append(
            "\n".join([f"## {name}\n\n{link}\n\n| | bar | goal | measured [95 %] |\n|---|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


def readme() -> str:
    """Return the README with the figures of the bars that it names."""
    text = (ROOT / "README.md").read_text()
    for name in PROGRAMS:
        for bar in (results(name) or {}).get("bars", []):
            shown = line(bar).split(" | ")[-1].removesuffix(" |")
            row = re.compile(rf"^\| {re.escape(bar['bar'])} \| .* \|$", re.MULTILINE)
            text = row.sub(lambda _, bar=bar, shown=shown: f"| {bar['bar']} | {shown} |", text)
    return text


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme())
    (ROOT / "docs/bars.md").write_text(page())

"""Writes docs/bars.md: every bar that was set, and what was measured, from benchmarks/results/*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROGRAMS = (
    *("collectives", "training", "stress", "servers", "staleness", "hogwild", "simulated_servers"),
    *("compressors", "slow_links", "sick_runs", "stamping", "page", "laws", "noise_scale", "league"),
)
HEAD = """# Bars

What was to be reached, and what was measured. A bar holds if the better end of the interval reaches it and the median
is within 5 % of it. Missed bars stand first. Made from `benchmarks/results/` by `python docs/bars.py`; the machine has
2 shared cores, on which the same program differs by 10 % and more from run to run.
"""


def line(bar: dict[str, Any]) -> str:
    """One bar as a row of a table."""
    wanted = " and ".join(f"{key} {bar[key]:g}" for key in ("at least", "at most") if key in bar)
    found = bar["found"]
    shown = (
        f"{found['median']:.3g} [{found['low']:.3g}, {found['high']:.3g}]" if isinstance(found, dict) else str(found)
    )
    return f"| {'holds' if bar['holds'] else '**missed**'} | {bar['bar']} | {wanted} | {shown} |"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name in PROGRAMS:
        stored = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        bars = stored.get("bars", [])
        link = f"[benchmarks/{name}.py](../benchmarks/{name}.py)"
        if not bars:
            parts.append(f"## {name}\n\n{link}: {'holds' if stored['holds'] else '**missed**'}.\n")
            continue
        rows = [line(bar) for bar in sorted(bars, key=lambda bar: bar["holds"])]
        parts.append(
            "\n".join([f"## {name}\n\n{link}\n\n| | bar | wanted | measured [95 %] |\n|---|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs/bars.md").write_text(page())

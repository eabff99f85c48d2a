"""How long one waits before anything happens.

Claims: `offbeat --help` answers in under 0.5 s without importing torch; importing offbeat (and everything behind its
public names) adds at most 0.3 s to `import torch`; with a warm fork server a run's workers are training a fraction of
a second after they were asked for.

The commands are run in turn, block by block; `python -c pass` twice is the A/A pair that shows the noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat.run.drive import WARM, fit
from offbeat.runtime.launch import Launcher

RESULTS = Path(__file__).parent / "results"
HELP_BAR, IMPORT_BAR = 0.5, 0.3
EVERYTHING = "import torch, offbeat; [getattr(offbeat, name) for name in offbeat.__all__]"
COMMANDS = {
    "python": [sys.executable, "-c", "pass"],
    "python again": [sys.executable, "-c", "pass"],
    "help": [sys.executable, "-m", "offbeat", "--help"],
    "torch": [sys.executable, "-c", "import torch"],
    "torch and offbeat": [sys.executable, "-c", EVERYTHING],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def verify() -> None:
    """Help really helps, and really does without torch."""
    shown = subprocess.run(COMMANDS["help"], check=True, capture_output=True, text=True).stdout
    assert "run" in shown, shown
    assert "doctor" in shown, shown
    heavy = "import sys, offbeat.cli.app; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", heavy], check=True)


def warm_starts(blocks: int) -> list[float]:
    """Seconds from asking for a run of two workers to their first batch, with a warm fork server."""
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder, Launcher(WARM) as launcher:
        for _ in range(blocks + 1):
            result = fit("offbeat.tasks.digits", workers=2, steps=1, out=folder, launcher=launcher)
            assert result.steps == 1
            found.append(result.startup_seconds)
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "startup.json")
    options = parser.parse_args()
    verify()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for block in range(-1, options.blocks):
        for name, command in COMMANDS.items():
            elapsed = seconds(command)
            if block >= 0:
                times[name].append(elapsed)
    added = np.array(times["torch and offbeat"]) - np.array(times["torch"])
    figures: dict[str, Any] = {
        "help seconds": float(np.median(times["help"])),
        "import seconds added to torch": float(np.median(added)),
        "warm start seconds, 2 workers": float(np.median(warm_starts(options.blocks))),
        "noise: python again minus python": float(
            np.median(np.array(times["python again"]) - np.array(times["python"]))
        ),
        "blocks": options.blocks,
    }
    figures["holds"] = figures["help seconds"] < HELP_BAR and figures["import seconds added to torch"] < IMPORT_BAR
    for name, value in figures.items():
        print(f"{name:36} {value:.3f}" if isinstance(value, float) else f"{name:36} {value}")
    machine = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    options.out.write_text(
        json.dumps({"benchmark": "startup", "environment": machine, "results": figures}, indent=2) + "\n"
    )
    if not figures["holds"]:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

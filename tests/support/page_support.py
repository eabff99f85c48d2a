"""What the tests of the page share: run folders as processes leave them, made without starting any."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offbeat.runtime.events.recorder import About, Mark, Recorder, events_file

SUM = About("world", "all_reduce", 2, 4, "float32", "sum", caller="train.py:88")
Write = Callable[[list[Recorder]], None]


def run_folder(path: Path, write: Write | None = None, workers: int = 2, **entries: Any) -> Path:
    """A folder of a run that has finished, with what `write` stamps as its events and two lines of metrics."""
    (path / "logs").mkdir(parents=True)
    config = {"workers": workers, "goal": {"strategy": "allreduce", "target": "score=0.9"}, "what": {"script": "a.py"}}
    started = {"started": "2026-01-01T00:00:00+0000", "command": ["offbeat"]}
    known = {"config": config, "environment": started, "state": "finished", "verdict": None} | entries
    (path / "run.json").write_text(json.dumps(known))
    for rank in range(workers):
        (path / "logs" / f"worker-{rank}.log").write_text(f"hello from {rank}\n")
    kinds = {"input": 0.1, "compute": 0.6, "communicate": 0.2, "wait": 0.1, "evaluate": 0.0, "other": 0.0}
    lines = [
        {"step": 10 * i, "epoch": i, "samples": 100 * i, "seconds": float(i), "loss": 1 / i, "score": 0.4 * i}
        | {"seconds_by_kind": {kind: i * spent for kind, spent in kinds.items()}, "staleness": {"0": i, "1": 2 * i}}
        for i in (1, 2)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if write is not None:
        write([Recorder(events_file(path, rank), rank) for rank in range(workers)])
    return path


def sums(count: int, last: int = 1, late: float = 0.0, end: bool = True) -> Write:
    """All workers enter so many sums, one of them last, and later by some seconds; then they end."""

    def write(recorders: list[Recorder]) -> None:
        names = [recorder.name("sum", lambda: SUM) for recorder in recorders]
        ranks = [rank for rank in range(len(recorders)) if rank != last]
        for number in range(1, count + 1):
            for rank in [*ranks, last]:
                if rank == last:
                    time.sleep(late)
                recorders[rank].stamp(Mark.ENTER, names[rank], number)
            for rank, recorder in enumerate(recorders):
                recorder.stamp(Mark.EXIT, names[rank], number)
                recorder.step()
        for recorder in recorders if end else []:
            recorder.stamp(Mark.END)

    return write

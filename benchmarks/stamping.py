"""What it costs to write events down: steps with and without, interleaved, each in two processes of its own.

Claims, with 2 workers of 1 thread, for the digits CNN and the 10-million-parameter MLP under stock
DistributedDataParallel on Gloo and under `allreduce`: a step of a run that is watched takes at most 1.01 of the time of
one that is not (the lower end of the interval), and the events of a step times the processor time of one are at most
1 % of the step.

Blocks take turns as in `training.py`; those who are watched are also looked at by the monitor, as in a real run, and
note input and computing in every step, as loaders do. Two copies of those that are not watched show the noise floor.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from offbeat.bench import environment, ratio
from offbeat.monitor import LiveWatch
from offbeat.runtime.events.calls import CallShape, Stamps
from offbeat.runtime.events.recorder import COMPUTING, INPUT, RECORDER, Reader, Recorder, events_file
from offbeat.runtime.events.worker import written_down
from offbeat.runtime.launch import Control, Launcher, Role, serve_store, worker_environment
from offbeat.runtime.run.rank_environment import where
from training import WARM_UP, WORKS, team

RESULTS = Path(__file__).parent / "results"
TRIED = ("digits CNN, batch 64, SGD", "mlp, batch 64, SGD")
WAYS = ("ddp", "allreduce")
PLAIN, AGAIN, WATCHED = "plain", "plain again", "watched"
MOST = 0.01


def worker(config: Mapping[str, Any], control: Control) -> None:
    """One of the two processes of a variant: it trains when it is its variant's turn, and sleeps otherwise."""
    work, rank, watched = WORKS[config["work"]], where().rank, config["variant"] == WATCHED
    turns = dist.TCPStore("127.0.0.1", config["turns"], is_master=False, timeout=timedelta(seconds=900))
    folder = Path(config["folder"])
    torch.manual_seed(0)
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    inputs, target = work.draw(work.batch, torch.Generator().manual_seed(rank))
    writing = written_down(folder, rank, ours=False) if watched else nullcontext()
    with writing, team(config["way"], work, model, optimizer) as (called, meet):
        recorder = RECORDER.get()

        def step() -> None:
            if recorder is not None:
                recorder.turn(INPUT)
                recorder.turn(COMPUTING)
            optimizer.zero_grad()
            work.loss(called(inputs), target).backward()
            optimizer.step()

        for _ in range(3):
            step()
        control.send({"ready": rank})
        for block, turn in enumerate(config["own turns"], -WARM_UP):
            turns.wait([f"turn {turn}"])
            meet()
            before = Reader(events_file(folder, rank)).written if watched else 0
            start = time.perf_counter()
            for _ in range(work.steps):
                step()
            elapsed = (time.perf_counter() - start) / work.steps
            events = (Reader(events_file(folder, rank)).written - before) / work.steps if watched else 0.0
            meet()
            if block >= 0:
                control.send({"number": config["number"], "block": block, "seconds": elapsed, "events": events})
            if turns.add(f"done {turn}", 1) == 2:
                turns.set(f"turn {turn + 1}", "")


def measured(name: str, way: str, blocks: int, launcher: Launcher) -> dict[str, Any]:
    """Block times with and without events, and how many events a step has."""
    variants = (PLAIN, WATCHED, AGAIN)
    times: list[dict[int, float]] = [{} for _ in variants]
    events: list[float] = []
    ready: list[int] = []
    turns, count = serve_store(), len(variants)
    with tempfile.TemporaryDirectory() as folder:
        homes = [Path(folder) / variant.replace(" ", "-") for variant in variants]
        for home in homes:
            home.mkdir()
        watch = LiveWatch(homes[1], 2)

        def heard(_: Role, message: Mapping[str, Any]) -> None:
            if "ready" in message:
                ready.append(message["ready"])
                if len(ready) == 2 * count:
                    turns.set("turn 0", "")
                return
            known = times[message["number"]]
            known[message["block"]] = max(known.get(message["block"], 0.0), message["seconds"])
            if message["events"]:
                events.append(message["events"])

        def tick() -> None:
            watch.look()

        rounds = range(blocks + WARM_UP)
        stores = [serve_store() for _ in variants]
        roles = [
            Role(
                "worker", 2 * number + rank, f"{Path(__file__).stem}:worker",
                {
                    "work": name, "way": way, "variant": variant, "number": number, "folder": str(homes[number]),
                    "turns": turns.port, "own turns": [r * count + (number - r) % count for r in rounds],
                },
                worker_environment(rank, 2, stores[number].port), Path(folder) / f"{number}-{rank}.log", threads=1,
            )
            for number, variant in enumerate(variants)
            for rank in range(2)
        ]  # fmt: skip
        launcher.run(roles, on_message=heard, on_tick=tick)
    by_block = {
        variant: [known[block] for block in range(blocks)] for variant, known in zip(variants, times, strict=True)
    }
    return judged(by_block, float(np.median(events)))


def nanoseconds_of_an_event() -> float:
    """Processor time of an event of a collective, everything about it included."""
    options: Any = AllreduceOptions()
    options.asyncOp = False
    done = SimpleNamespace(is_completed=lambda: True)
    given = [torch.ones(1000)]
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "a.events", 0)
        stamps = Stamps(recorder, "world", lambda: (0, 1))
        shape = CallShape("all_reduce", reduces=True)
        found: list[float] = []
        for _ in range(15):
            start = time.process_time()
            for _ in range(2000):
                recorder.step()
                stamps.collective(shape, lambda *_: done, (given, options), {})
            found.append((time.process_time() - start) / 2000 / 3)
    return 1e9 * float(np.median(found))


def judged(times: Mapping[str, Sequence[float]], events: float) -> dict[str, Any]:
    """The ratio with its interval, and what the events of a step cost by themselves."""
    both = [(a + b) / 2 for a, b in zip(times[PLAIN], times[AGAIN], strict=True)]
    over = ratio(times[WATCHED], both)
    each = nanoseconds_of_an_event()
    share = events * each * 1e-9 / float(np.median(both))
    return {
        "milliseconds": {name: 1e3 * float(np.median(own)) for name, own in times.items()},
        "watched / plain": over.plain(),
        "plain again / plain (noise)": ratio(times[AGAIN], times[PLAIN]).plain(),
        "events per step": events,
        "nanoseconds per event": each,
        "events of a step, of its time": share,
        "blocks": len(both),
        "holds": {"ratio": over.low <= 1 + MOST, "share": share <= MOST},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS / "stamping.json")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with Launcher() as launcher:
        for name in TRIED:
            for way in WAYS:
                results[f"{name}, {way}"] = found = measured(name, way, options.blocks, launcher)
                print(f"{name}, {way}: {found}", flush=True)
    bars = [
        {
            "bar": f"{name}, {what}",
            "at most": 1 + MOST if what == "ratio" else MOST,
            "found": found["watched / plain"] if what == "ratio" else found["events of a step, of its time"],
            "holds": found["holds"][what],
        }
        for name, found in results.items()
        for what in ("ratio", "share")
    ]
    stored = {
        "benchmark": "stamping",
        "holds": all(bar["holds"] for bar in bars),
        "environment": environment(),
        "bars": bars,
        "results": results,
    }
    options.out.write_text(json.dumps(stored, indent=2) + "\n")
    if not stored["holds"]:
        sys.exit("a bar was missed")


if __name__ == "__main__":
    main()

"""Random kills and stops of stages, on real processes: ten in `make chaos`, two in `make test`.

The run ends in time and names who failed, nothing is left, and it goes on from its checkpoint as if uninterrupted.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from own_scripts.running import left, run_script, same

from offbeat.errors import OffbeatError
from offbeat.runtime.launch import Launcher
from offbeat.testing._checks import traces

TIMEOUT = 5.0
ENDLESS = ("--steps", "100000")
STRATEGIES = (
    *(("pipeline(2)", 2), ("pipeline(2, gpipe)", 2), ("pipeline(2, zero_bubble)", 2), ("pipeline(3)", 3)),
    *(("pipeline(2, interleaved, chunks=2)", 2), ("allreduce + pipeline(2)", 4)),
)


def strike(out: Path, rank: int, sign: signal.Signals, step: int, delay: float, struck: threading.Event) -> None:
    """Send a signal to a worker at some time after it has begun a step."""
    file, deadline = Path(f"{out}-{rank}.pid"), time.monotonic() + 60
    while time.monotonic() < deadline:
        words = file.read_text().split() if file.exists() else []
        if len(words) == 2 and int(words[1]) >= step:
            time.sleep(delay)  # A random point in the steps that follow.
            os.kill(int(words[0]), sign)
            struck.set()
            return
        time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_stage_that_fails_is_named_and_the_run_goes_on_from_its_checkpoint(
    seed: int, launcher: Launcher, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    strategy, workers = chance.choice(STRATEGIES)
    sign = (signal.SIGKILL, signal.SIGSTOP)[seed % 2]
    victim, out, before = chance.randrange(workers), tmp_path / "out", traces()
    struck = threading.Event()
    arguments = (out, victim, sign, chance.randrange(8, 40), chance.random() * 0.05, struck)
    thread = threading.Thread(target=strike, args=arguments)
    thread.start()
    began = time.monotonic()
    goal = {"strategy": strategy, "workers": workers, "timeout": TIMEOUT}
    with pytest.raises(OffbeatError) as failure:
        run_script(launcher, tmp_path, "splitting.py", out, *ENDLESS, checkpoint_every=4, **goal)
    thread.join()
    assert struck.is_set(), failure.value
    assert time.monotonic() - began < 120
    assert f"worker {victim}" in str(failure.value), (strategy, sign, failure.value)
    if sign == signal.SIGKILL:
        stages = int(strategy.split("pipeline(")[1][0])
        assert f"stage {victim % stages}" in str(failure.value), (strategy, failure.value)
    assert traces() <= before
    processes = [int(file.read_text().split()[0]) for file in tmp_path.glob("out-*.pid")]
    assert len(processes) == workers
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    run = next((tmp_path / "runs").glob("2*"))
    last = max(int(path.name.rpartition("-")[2]) for path in (run / "checkpoint").glob("step-*"))
    run_script(launcher, tmp_path, "splitting.py", out, *ENDLESS, resume=run, steps=last + 3, **goal)
    run_script(launcher, tmp_path, "splitting.py", tmp_path / "one", *ENDLESS, steps=last + 3, strategy="single")
    [expected] = left(tmp_path / "one", 1)
    for result in left(out, workers):
        same(expected["model"], result["model"], 1e-10)

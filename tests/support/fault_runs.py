"""Runs with parameter servers under faults, and what must be true of them afterwards."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_support import wait_until
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import offbeat
from offbeat.run.drive import Result, fit
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.folder import MODEL_FILE

EXAMPLES, BATCH = 48, 12
STEPS_OF_AN_EPOCH = EXAMPLES // BATCH
IN_FLIGHT = 2
"""Pushes of one worker that may not be answered yet when it dies, where it does not wait for answers."""


class Counter(nn.Module):
    """Numbers that count the updates: each gradient is -1 everywhere, and is subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(7))


@dataclass(eq=False)
class Tally(offbeat.Task):
    """Learns nothing but how often it was updated, and notes who has seen which examples, a line for each batch."""

    folder: str

    def __post_init__(self) -> None:
        self.global_batch = BATCH
        self.score_by_parts = True
        self.evaluate_batch = 5

    def model(self) -> nn.Module:
        return Counter()

    def data(self) -> offbeat.Data:
        points = TensorDataset(torch.arange(EXAMPLES, dtype=torch.float32))
        return offbeat.Data(points, points, points)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        return SGD(params, lr=1.0)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with seen_by(Path(self.folder), os.environ["RANK"]).open("a") as file:
            file.write(" ".join(str(int(number)) for number in batch[0]) + "\n")
        return -model.weight.sum()

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        """The mean of the examples: that of all of them, if every one is looked at by one worker."""
        numbers = torch.cat([batch[0] for batch in data])
        return float(numbers.mean())


WHOLE = (EXAMPLES - 1) / 2
"""What `Tally` scores on all of its examples."""


def seen_by(folder: Path, rank: int | str) -> Path:
    """Where a worker notes what it has seen."""
    return folder / f"seen-{rank}"


def batches_seen(folder: Path, rank: int) -> list[list[int]]:
    """The examples of each batch of a worker."""
    path = seen_by(folder, rank)
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(word) for word in line.split()] for line in lines]


def seen_in_last_epoch(folder: Path, ranks: Iterable[int]) -> list[int]:
    """The examples that these workers have seen in their last epoch, in order."""
    return sorted(n for rank in ranks for batch in batches_seen(folder, rank)[-STEPS_OF_AN_EPOCH:] for n in batch)


def parameters(result: Result) -> dict[str, Tensor]:
    """The model that a run has left."""
    return load_file(result.run / MODEL_FILE)


def applied(account: dict[str, Any]) -> int:
    """Pushes that a shard has applied; the state that was put there in the beginning was answered as one, too."""
    return account["pushes"]["applied"]


# -- processes of a run ------------------------------------------------------------------------------------------------


def writing_to(log: Path) -> list[int]:
    """Processes whose errors go to a log, or to any log in a folder; guards, which end with their owners, are not."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            file = (entry / "fd" / "2").readlink()
            if log in (file, file.parent) and b"_guard.py" not in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def assert_nothing_is_left(run: Path) -> None:
    """No process, and no thread of the coordinator's."""
    logs = (run / "logs").resolve()
    wait_until(lambda: not writing_to(logs), "the end of all processes", 10)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("offbeat")] == []


@dataclass
class Blow:
    """A kill from outside, at any moment: so long after a worker has noted so many lines of what it has seen."""

    log: str
    """Of whom: `server-0.1`."""
    rank: int
    lines: int
    seconds: float


@contextmanager
def struck(blow: Blow | None, folder: Path, runs: Path) -> Iterator[None]:
    """The run inside, which notes what it sees in a folder and is the latest of these runs, is dealt this blow."""
    if blow is None:
        yield
        return
    over = threading.Event()

    def strike() -> None:
        path = seen_by(folder, blow.rank)
        while not path.exists() or path.read_text().count("\n") < blow.lines:
            if over.wait(0.001):
                return
        time.sleep(blow.seconds)
        for pid in writing_to((runs / "latest").resolve() / "logs" / f"{blow.log}.log"):
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=strike, name="blow")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# -- random schedules of faults ----------------------------------------------------------------------------------------


@dataclass
class Schedule:
    """A strategy, and what happens to its processes."""

    strategy: str
    workers: int
    disturb: list[str]
    blow: Blow | None = None
    killed: dict[int, int] = field(default_factory=dict[int, int])
    """Workers that will not come to the end, and the step at which they are stopped."""
    aggregated: bool = True
    """Whether a step is one update, whoever takes part in it."""
    everybody: bool = True
    """Whether all live workers are waited for."""


STEPS = 24
RULES = ("bsp", "bsp", "ssp(1)", "ssp(3)", "ssp(2, eager)", "asp", "drop_slowest(1)", "deadline(2.0)")


def random_schedule(seed: int) -> Schedule:
    """Kills and stops, short ones and such that are taken for deaths, of workers and servers; one of each is spared."""
    chance = random.Random(seed)
    rule, workers, shards = chance.choice(RULES), chance.randint(2, 3), chance.randint(1, 2)
    drawn = Schedule(
        f"server(shards={shards}, replicas=1, consistency={rule})",
        workers,
        ["worker *: pace 10ms"],
        aggregated=rule == "bsp" or rule.startswith(("drop", "deadline")),
        everybody=not rule.startswith(("drop", "deadline")),
    )
    for worker in chance.sample(range(workers), chance.randint(0, workers - 1)):
        step, fault = chance.randint(1, STEPS - STEPS_OF_AN_EPOCH - 1), chance.choice(("kill", "stop 200ms", "stop 2s"))
        drawn.disturb.append(f"worker {worker}: {fault} at step {step}")
        if fault != "stop 200ms":
            drawn.killed[worker] = step
    for shard in chance.sample(range(shards), chance.randint(0, shards)):
        fault = chance.choice(("kill", "kill", "stop 200ms", "stop 2s"))
        drawn.disturb.append(f"server {shard}: {fault} at step {chance.randint(1, STEPS - 3)}")
    if len(drawn.disturb) == 1 or chance.random() < 0.3:
        # Servers that nothing else happens to, so that a copy is left of every shard.
        free = [k for k in range(shards) if not any(said.startswith(f"server {k}:") for said in drawn.disturb)]
        if free:
            name = f"server-{chance.choice(free)}.{chance.randint(0, 1)}"
            spared = min(set(range(workers)) - set(drawn.killed))
            drawn.blow = Blow(name, spared, chance.randint(1, STEPS // 2), chance.random() * 0.05)
    return drawn


def _disturbed(schedule: Schedule, launcher: Launcher, folder: Path) -> Result:
    with struck(schedule.blow, folder, folder / "runs"):
        result = fit(
            Tally(str(folder)),
            schedule.strategy,
            workers=schedule.workers,
            steps=STEPS,
            seed=7,
            target=1e9,
            timeout=60.0,
            disturb=schedule.disturb,
            out=folder / "runs",
            launcher=launcher,
        )
    assert_nothing_is_left(result.run)
    return result


def survive(schedule: Schedule, launcher: Launcher, folder: Path) -> Result:
    """Run under these faults, and see that nothing was lost, doubled or left behind."""
    result = _disturbed(schedule, launcher, folder)
    told = f"{schedule}: died {result.died}, disturbances {result.disturbances}, servers {result.servers}"
    assert result.disturbances["asked"] == result.disturbances["fired"], told
    assert {f"worker {rank}" for rank in schedule.killed} == {name for name in result.died if "worker" in name}, told
    assert result.steps == STEPS, told
    assert result.score == pytest.approx(WHOLE), told
    survivors = set(range(schedule.workers)) - set(schedule.killed)
    if schedule.everybody:
        seen = seen_in_last_epoch(folder, survivors)
        assert seen == list(range(EXAMPLES)), f"{told}; seen {seen}"
    _assert_exactly_once(schedule, result, len(survivors), told)
    return result


def _assert_exactly_once(schedule: Schedule, result: Result, survivors: int, told: str) -> None:
    most = survivors * STEPS + sum(schedule.killed.values())
    # A worker that does not wait for answers may have died before its last pushes were let in.
    fewest = most if schedule.aggregated else most - IN_FLIGHT * len(schedule.killed)
    for account in result.servers:
        if schedule.everybody:
            assert fewest <= applied(account) <= most, told
        assert account["version"] == (STEPS if schedule.aggregated else applied(account)), told
    values = parameters(result)["weight"]
    if schedule.aggregated or not schedule.killed:
        assert bool(((values - STEPS).abs() < 1e-3).all()), f"{told}; counted {values}"
    else:
        between = (values > fewest / schedule.workers - 1e-3) & (values < most / survivors + 1e-3)
        assert bool(between.all()), f"{told}; counted {values}"


# -- gossip ------------------------------------------------------------------------------------------------------------


def random_gossip(seed: int) -> Schedule:
    """Kills and stops of workers that mix in pairs, at steps and at any moment; one is spared."""
    chance = random.Random(seed)
    workers = chance.randint(3, 4)
    drawn = Schedule(f"gossip({chance.choice(('ring', 'complete'))}, asynchronous=True)", workers, [])
    drawn.disturb.append("worker *: pace 10ms")
    unlucky = chance.sample(range(workers), chance.randint(1, workers - 1))
    for worker in unlucky[1:]:
        step, fault = chance.randint(1, STEPS - STEPS_OF_AN_EPOCH - 1), chance.choice(("kill", "stop 200ms", "stop 2s"))
        drawn.disturb.append(f"worker {worker}: {fault} at step {step}")
        if fault != "stop 200ms":
            drawn.killed[worker] = step
    lines = chance.randint(1, STEPS - STEPS_OF_AN_EPOCH - 1)
    drawn.blow = Blow(f"worker-{unlucky[0]}", unlucky[0], lines, chance.random() * 0.02)
    drawn.killed[unlucky[0]] = lines
    return drawn


def survive_gossip(schedule: Schedule, launcher: Launcher, folder: Path) -> Result:
    """Run under these faults, and see that the living have come to the end and nothing was left behind."""
    result = _disturbed(schedule, launcher, folder)
    told = f"{schedule}: died {result.died}, disturbances {result.disturbances}"
    assert {f"worker {rank}" for rank in schedule.killed} == set(result.died), told
    assert result.steps == STEPS, told
    assert result.score == pytest.approx(WHOLE), told
    survivors = set(range(schedule.workers)) - set(schedule.killed)
    assert seen_in_last_epoch(folder, survivors) == list(range(EXAMPLES)), told
    return result

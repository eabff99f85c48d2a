"""What one step, or one pause, on servers must not do to what follows: spoil it, lose a setting, give up a shard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import write
from fault_runs import parameters
from own_scripts.running import same
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

import offbeat as library
from offbeat.protocols.machine import Ended, Payload, Received, Start, Timer
from offbeat.protocols.servers.consistency import Rule
from offbeat.protocols.servers.coordinator import CoordinatorMachine
from offbeat.protocols.servers.messages import ClusterView, Heartbeat, Push, PushRefused
from offbeat.protocols.servers.replica.shard import Shard
from offbeat.protocols.servers.replica.works import Update
from offbeat.run.drive import Result, drive, fit
from offbeat.run.job import Job, Script
from offbeat.runtime.launch import Launcher
from offbeat.runtime.run.settings import Goal
from offbeat.runtime.servers.updater import is_number, settings_of

NOT_A_NUMBER = """\
import torch, offbeat

torch.manual_seed(1)
with offbeat.init(check_finite=False) as team:
    model = torch.nn.Linear(3, 1)
    model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    spoilt = 0
    for step in range(24):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        spoilt += not bool(loss.isfinite())
        loss.backward()
        if team.rank == 1 and step == 4:
            model.weight.grad[0, 2] = float("nan")
        optimizer.step()
    with team.averaged(model):
        team.report(spoilt=float(spoilt))
"""

RATES = """\
import torch, offbeat

with offbeat.init() as team:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = team.prepare(model, torch.optim.SGD(model.parameters(), lr=float(team.rank)))
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    with team.averaged(model):
        team.report(weight=float(model.weight))
"""


def run(launcher: Launcher, folder: Path, script: str, strategy: str) -> Result:
    """Two workers on this script."""
    job = Job(
        Script(str(write(folder / "loop.py", script))), Goal(strategy=strategy, timeout=60.0), 2, 1, folder / "runs"
    )
    return drive(job, launcher=launcher)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "server(consistency=ssp(3))",
        "server(consistency=ssp(3, eager))",
        "server + topk(0.5)",
        "server + sign",
        "downpour(fetch=4)",
    ],
)
def test_one_gradient_that_is_nan_spoils_no_other_step_of_its_worker(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    result = run(launcher, tmp_path, NOT_A_NUMBER, strategy)
    (server,) = result.servers
    assert (server["pushes"]["refused"], server["pushes"]["applied"]) == (1, 2 * 24 - 1)
    assert result.metrics["spoilt"] == 0, "steps whose loss was not finite"


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["asp", "ssp(2)", "ssp(2, eager)"])
def test_each_push_moves_by_the_rate_of_its_own_sender(launcher: Launcher, tmp_path: Path, rule: str) -> None:
    """Worker 0 has a rate of 0, worker 1 one of 1: as schedulers have it that are not in the same step."""
    result = run(launcher, tmp_path, RATES, f"server(consistency={rule})")
    assert result.metrics["weight"] == pytest.approx(-8 / 2)


def test_settings_that_come_with_an_unfit_gradient_hold_from_then_on() -> None:
    shard = Shard(Rule(0), ClusterView.of(1, 1))
    told = Push(worker=0, life=0, number=0, clock=0, settings=({"lr": 0.5},))
    assert shard.apply(PushRefused(told, "NaN"), Payload(8, None)).answers[0].status == "refused"
    (*_, update) = shard.apply(Push(worker=0, life=0, number=1, clock=1), Payload(8, None)).works
    assert isinstance(update, Update)
    assert update.settings == ({"lr": 0.5},)


def test_rates_that_numpy_computed_are_numbers() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=float(np.float32(0.5)))
    optimizer.param_groups[0]["lr"] = np.float32(0.25)
    ((rate,),) = [[group["lr"]] for group in settings_of(optimizer)]
    assert is_number(rate)
    assert (type(rate), rate) == (float, 0.25)


@dataclass(eq=False)
class Idle(library.Task):
    """A line, and a layer that nothing goes through, which weight decay would shrink if it were taken for trained."""

    global_batch: int = 4

    def model(self) -> nn.Module:
        return nn.ModuleDict({"line": nn.Linear(1, 1), "idle": nn.Linear(3, 3)})

    def data(self) -> library.Data:
        numbers = torch.linspace(-1, 1, 64).unsqueeze(1)
        points = TensorDataset(numbers, 3 * numbers)
        return library.Data(points, points, points)

    def optimizer(self, params: Iterable[Any]) -> Optimizer:
        return SGD(params, lr=0.1, weight_decay=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model["line"](batch[0]), batch[1])  # pyright: ignore[reportIndexIssue]

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        return -sum(float(self.loss(model, batch)) for batch in data)


@pytest.mark.slow
def test_a_sum_that_is_pushed_after_a_resume_lacks_what_it_lacked_before(launcher: Launcher, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 1, "out": tmp_path / "runs", "launcher": launcher, "seed": 5}
    task, strategy = Idle(), "downpour(push=2, fetch=2)"
    whole = fit(task, strategy, steps=11, **options)
    cut = fit(task, strategy, steps=7, **options)
    options.pop("seed")
    resumed = fit(task, strategy, steps=11, resume=cut.run, **options)
    same(parameters(whole), parameters(resumed), tolerance=0)


def tick(machine: CoordinatorMachine, number: int, *alive: str) -> list[Any]:
    """A quarter of a second later these give a sign of life; answers what the coordinator starts."""
    for name in alive:
        machine.on(Received(name, Heartbeat(machine.view.epoch)), number * 0.25)
    return [effect.work for effect in machine.on(Timer("tick"), number * 0.25) if isinstance(effect, Start)]


def test_the_last_copies_of_a_shard_are_not_given_up_for_being_silent() -> None:
    machine = CoordinatorMachine(ClusterView.of(1, 1, 1))
    machine.begin(0.0)
    for number in range(40):
        servers = ["server 0.0", "server 0.1"] if number < 2 else ["server 0.1"] if number > 30 else []
        started = tick(machine, number, "worker 0", *servers)
        assert number > 30 or started == [], "both may come back"
    assert (machine.lost, machine.view.primaries) == ((), ("server 0.1",)), "one has, so the other is not waited for"
    machine.on(Ended("server 0.1"), 10.0)
    assert machine.lost == (0,)


def test_a_server_that_never_came_is_given_up() -> None:
    machine = CoordinatorMachine(ClusterView.of(1, 1))
    machine.begin(0.0)
    for number in range(4 * 61):
        tick(machine, number, "worker 0")
    assert machine.lost == (0,)

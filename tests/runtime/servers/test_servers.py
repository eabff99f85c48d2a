"""Parameter servers without faults: under bsp they compute what one process does, whatever the optimizer and loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import Offbeat, in_process, write
from fault_runs import applied, parameters
from own_scripts.running import left, run_script, same
from torch import Tensor, nn, optim
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

import offbeat as library
from offbeat.errors import StrategyError
from offbeat.run.drive import Result, fit
from offbeat.runtime.launch import Launcher

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "Adam": lambda params: optim.Adam(params, lr=0.02, betas=(0.8, 0.95), amsgrad=True),
    "AdamW": lambda params: optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "Adadelta": lambda params: optim.Adadelta(params, lr=0.5, rho=0.8, weight_decay=0.01),
    "Adamax": lambda params: optim.Adamax(params, lr=0.02),
    "NAdam": lambda params: optim.NAdam(params, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda params: optim.RAdam(params, lr=0.02),
    "ASGD": lambda params: optim.ASGD(params, lr=0.1, t0=5),
    "Rprop": lambda params: optim.Rprop(params, lr=0.01),
    "LBFGS": lambda params: optim.LBFGS(params, lr=0.1),
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.1),
}
LATER = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
]


class Partly(nn.Module):
    """A model with a layer that nothing goes through, and one that every other batch goes through."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.first, self.idle, self.seldom, self.rest = model[0], nn.Linear(8, 8), nn.Linear(8, 8), model[1:]
        self.batches = 0

    def forward(self, x: Tensor) -> Tensor:
        self.batches += self.training
        hidden = self.first(x)
        return self.rest(hidden + self.seldom(hidden) if self.batches % 2 else hidden)


@dataclass(eq=False)
class Sine(library.Task):
    """Learn a sine with any of torch's optimizers, with or without groups and a schedule."""

    optimizer_name: str = "SGD"
    grouped: bool = False
    halved_every: int = 0
    unused: bool = False

    def __post_init__(self) -> None:
        self.global_batch = 10

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        return Partly(model) if self.unused else model

    def data(self) -> library.Data:
        numbers = torch.linspace(-1, 1, 37).unsqueeze(1)
        points = TensorDataset(numbers, (3 * numbers).sin())
        return library.Data(points, points, points)

    def optimizer(self, params: Iterable[Parameter]) -> Optimizer:
        given: list[Any] = list(params)
        if self.grouped:
            # Out of their order, one group with a rate of its own, and one parameter that is not trained.
            given = [{"params": [given[3], given[0]], "lr": 0.003}, {"params": [given[2]]}]
        return OPTIMIZERS[self.optimizer_name](given)

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return StepLR(optimizer, self.halved_every, gamma=0.5) if self.halved_every else None

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def score(self, model: nn.Module, data: Iterable[Any]) -> float:
        return -sum(float(nn.functional.mse_loss(model(x), y, reduction="sum")) for x, y in data)


Learn = Callable[..., Result]


@pytest.fixture
def learn(launcher: Launcher, tmp_path: Path) -> Learn:
    def run(task: Sine, strategy: str, workers: int) -> Result:
        options: dict[str, Any] = {"steps": 20, "seed": 2, "target": 1e9, "timeout": 60.0}
        return fit(task, strategy, workers=workers, launcher=launcher, out=tmp_path / "runs", **options)

    return run


def as_in_one_process(learn: Learn, task: Sine, strategy: str, workers: int) -> Result:
    """A run whose parameters equal those of one process to 1e-5."""
    alone, served = learn(task, "single", 1), learn(task, strategy, workers)
    same(parameters(alone), parameters(served), tolerance=1e-5)
    assert served.score == pytest.approx(alone.score, abs=1e-4)
    return served


@pytest.mark.parametrize("name", ["SGD", "momentum", "Adagrad", "RMSprop", "Adam", "AdamW", *LATER])
def test_every_optimizer_on_shards_computes_what_it_does_on_the_whole(learn: Learn, name: str) -> None:
    result = as_in_one_process(learn, Sine(name), "server(shards=2)", 2)
    assert [account["version"] for account in result.servers] == [20, 20]
    assert [applied(account) for account in result.servers] == [40, 40]


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_parameter_groups_keep_their_own_settings(learn: Learn, name: str) -> None:
    as_in_one_process(learn, Sine(name, grouped=True), "server(shards=3)", 2)


@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_a_parameter_that_gets_no_gradient_is_left_alone_as_in_one_process(learn: Learn, name: str) -> None:
    alone, served = learn(Sine(name, unused=True), "single", 1), learn(Sine(name, unused=True), "server(shards=3)", 2)
    same(parameters(alone), parameters(served), tolerance=1e-6)
    idle = {key: value for key, value in parameters(alone).items() if key.startswith("idle")}
    assert len(idle) == 2
    same(idle, {key: parameters(served)[key] for key in idle}, tolerance=0.0)


@pytest.mark.parametrize("strategy", ["server(shards=2)", "server(replicas=1)"])
def test_what_a_scheduler_changes_reaches_the_servers(learn: Learn, strategy: str) -> None:
    as_in_one_process(learn, Sine("momentum", halved_every=3), strategy, 2)
    as_in_one_process(learn, Sine("Adam", grouped=True, halved_every=7), strategy, 2)


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_an_optimizer_that_needs_the_whole_vector_is_refused_with_the_reason(learn: Learn, name: str) -> None:
    with pytest.raises(StrategyError, match=f"servers cannot run {name}: each has only a slice of the parameters"):
        learn(Sine(name), "server", 2)


def test_rprop_is_refused_where_each_push_is_a_step_of_its_own(learn: Learn) -> None:
    with pytest.raises(StrategyError, match=r"servers cannot run Rprop.*do not follow the learning rate"):
        learn(Sine("Rprop"), "server(consistency=asp)", 2)


@pytest.mark.slow
def test_copies_and_workers_do_not_change_what_is_computed(learn: Learn) -> None:
    as_in_one_process(learn, Sine("Adam"), "server(shards=2, replicas=1)", 3)
    as_in_one_process(learn, Sine("Adam"), "server", 1)
    as_in_one_process(learn, Sine("momentum"), "server(consistency=ssp(0))", 2)


@pytest.mark.slow
def test_more_shards_than_numbers_leave_some_empty(learn: Learn) -> None:
    result = as_in_one_process(learn, Sine("SGD"), "server(shards=30)", 1)
    assert len(result.servers) == 30


# -- loops of one's own ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["plain", "schedule_per_epoch", "schedule_per_batch", "parameter_groups", "two_losses", "evaluated"]
)
def test_a_loop_of_ones_own_ends_with_the_parameters_of_one_process(
    launcher: Launcher, tmp_path: Path, case: str
) -> None:
    states: list[dict[str, Any]] = []
    for strategy, workers in (("single", 1), ("server(shards=2)", 2)):
        out = tmp_path / strategy
        run_script(launcher, tmp_path, "loops.py", out, case, workers=workers, strategy=strategy, timeout=30.0)
        states += [one["state"] for one in left(out / case, workers)]
    alone, *served = states
    for state in served:
        same(alone, state)


LOOP = """\
import torch, offbeat
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
points = torch.randn(40, 3)
with offbeat.init() as team:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    train = DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model, optimizer, train = team.prepare(model, optimizer, train)
    for _ in range(3):
        for x, y in train:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    with team.averaged(model):
        team.report(weight=float(model.weight.sum()))
"""


def test_a_script_runs_on_servers_from_the_command_line(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offbeat: Offbeat = in_process(launcher, tmp_path, monkeypatch, capsys)
    write(tmp_path / "script.py", LOOP)
    weights: list[float] = []
    result: dict[str, Any] = {}
    for words in (("--strategy", "single"), ("--strategy", "server(shards=2)", "--workers", "2")):
        said = offbeat("run", "script.py", *words, "--seed", "1", "--format", "json")
        assert said.code == 0, said.err
        result = json.loads(said.out)
        assert result["steps"] == 15
        weights.append(result["metrics"]["weight"])
    assert weights[1] == pytest.approx(weights[0], abs=1e-5)
    assert [account["version"] for account in result["servers"]] == [15, 15]

"""Servers go on from the state that an optimizer has when training begins."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, optim
from torch.nn import Parameter
from torch.optim import Optimizer

from offbeat.errors import StrategyError
from offbeat.protocols.machine import Payload
from offbeat.protocols.servers.replica.works import ReadShard, Restore, Update
from offbeat.runtime.servers.shard_state import Numbers
from offbeat.runtime.servers.updater import Recipe, settings_of
from offbeat.strategies.servers.optimizer import first_of
from offbeat.strategies.servers.parameter_row import ParameterRow, refuse_different_models

SHARDS = 2
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "sums of its own": (optim.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}),
    "most squares": (optim.Adam, {"amsgrad": True}),
    "centred": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "plain": (optim.SGD, {}),
}


def model() -> tuple[list[Parameter], list[dict[str, Any]]]:
    """A matrix, a number and a vector; the last in a group of its own."""
    parameters = [Parameter(torch.linspace(-1, 1, n).reshape(s)) for n, s in ((6, (2, 3)), (1, ()), (4, (4,)))]
    return parameters, [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}]


def stepped(optimizer: Optimizer, parameters: list[Parameter], seed: int, without: int | None = None) -> list[Tensor]:
    """One step with random gradients; answers them in a row each."""
    chance = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=chance)
        parameter.grad = None if number == without else gradient
    optimizer.step()
    return [torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in parameters]


def served(optimizer: Optimizer, row: ParameterRow) -> list[Numbers]:
    """What holds each shard, started from the optimizer."""
    shards: list[Numbers] = []
    for shard in range(SHARDS):
        groups = [group["params"] for group in optimizer.param_groups]
        recipe = Recipe(
            optimizer=type(optimizer).__name__,
            ranges=tuple(row.ranges(group, shard) for group in groups),
            pieces=tuple(row.ranges(group, shard, joined=False) for group in groups),
            settings=settings_of(optimizer),
        )
        state = first_of(optimizer, recipe, row, shard)
        numbers = Numbers(lambda _segment: None)
        numbers.do(Restore(Payload(state.nbytes, state), 0))
        shards.append(numbers)
    return shards


@pytest.mark.parametrize("without", [None, 1], ids=["all alike", "one a step behind"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_servers_go_on_where_the_optimizer_was(name: str, without: int | None) -> None:
    parameters, groups = model()
    kind, settings = OPTIMIZERS[name]
    optimizer = kind(groups, lr=0.1, **settings)
    for seed in range(3):
        stepped(optimizer, parameters, seed, without if seed == 1 else None)
    row = ParameterRow(parameters, SHARDS)
    shards = served(optimizer, row)
    for seed in range(3, 6):
        gradient = torch.cat(stepped(optimizer, parameters, seed))
        for shard, numbers in enumerate(shards):
            raw = row.shard(gradient, shard).numpy().view(np.uint8)
            numbers.do(Update(seed, 1.0, (), payload=Payload(raw.nbytes, raw)))
    for shard, numbers in enumerate(shards):
        torch.testing.assert_close(
            torch.from_numpy(numbers.do(ReadShard()).handle.copy()), row.shard(row.values, shard)
        )


def test_neighbours_with_the_same_count_of_steps_stay_joined() -> None:
    parameters, groups = model()
    optimizer = optim.Adam(groups, lr=0.1)
    stepped(optimizer, parameters, 0)
    (first, *_) = served(optimizer, ParameterRow(parameters, SHARDS))
    assert first.updater is not None
    assert first.updater.recipe.ranges == (((0, 5),), ())


class Meeting:
    """Stands in for a group: what every worker has brought is known when the last one comes."""

    def __init__(self, rank: int, brought: list[list[float]]) -> None:
        self.rank, self._brought = rank, brought

    def gather(self, values: list[float], _what: str) -> Tensor:
        self._brought.append(values)
        return torch.tensor(self._brought, dtype=torch.float64)


@pytest.mark.parametrize(
    ("shape", "kind", "refused"),
    [
        ((2, 3), optim.SGD, ""),
        ((3, 2), optim.SGD, "others have 6 in 1, of other shapes"),
        ((2, 3), optim.Adam, "worker 1 has 6 numbers .float32. in 1 parameters under Adam with 1 groups"),
        ((7,), optim.SGD, "worker 1 has 7 numbers"),
    ],
)
def test_workers_that_do_not_train_the_same_are_refused(shape: tuple[int, ...], kind: Any, refused: str) -> None:
    brought: list[list[float]] = []
    first, other = Parameter(torch.zeros(2, 3)), Parameter(torch.zeros(shape))
    refuse_different_models(Meeting(0, brought), ParameterRow([first], SHARDS), optim.SGD([first], lr=0.1))  # type: ignore
    expected: Any = pytest.raises(StrategyError, match=refused) if refused else nullcontext()
    with expected:
        refuse_different_models(Meeting(1, brought), ParameterRow([other], SHARDS), kind([other], lr=0.1))  # type: ignore

"""L-BFGS as a coroutine over registers: the same iterates as torch's, whatever the number of shards."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from offbeat.protocols.sandblaster.commands import encoded, reduced
from offbeat.protocols.sandblaster.lbfgs import Evaluate, Iteration, Lbfgs
from offbeat.protocols.sandblaster.messages import PARAMETERS, POINT, Gather, Gathered
from offbeat.runtime.sandblaster.registers import Registers
from offbeat.tasks.logistic import Logistic

Objective = Generator[object, object, Iteration]


class Shards:
    """Registers in this process, and an objective that is computed on the joined vector."""

    def __init__(self, start: NDArray[np.float64], shards: int, objective) -> None:
        self._cuts = np.linspace(0, len(start), shards + 1).astype(int)[1:-1]
        self._shards = [Registers() for _ in range(shards)]
        self._objective = objective
        self._sent: set[str] = set()
        for shard, part in zip(self._shards, np.split(start, self._cuts), strict=True):
            shard.load(part)

    def joined(self, name: str) -> NDArray[np.float64]:
        return np.concatenate([shard.row(name) for shard in self._shards])

    def answer(self, request: object) -> tuple[float, ...]:
        if not isinstance(request, Evaluate):
            commands = encoded(request, self._sent)
            return reduced(request, [shard.carry_out(commands) for shard in self._shards])
        loss, gradient = self._objective(self.joined(POINT))
        for shard, part in zip(self._shards, np.split(gradient, self._cuts), strict=True):
            shard.carry_out([Gather(0, 1)])
            shard.gather(0, part)
            shard.carry_out([Gathered(request.gradient)])
        return (loss,)

    def iterate(self, optimizer: Lbfgs) -> Iteration:
        asking = optimizer.iterate()
        request = next(asking)
        while True:
            try:
                request = asking.send(self.answer(request))
            except StopIteration as end:
                return end.value


def logistic(features: int = 60):
    task = Logistic(examples=1000, features=features, penalty=1e-4)

    def objective(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        loss, gradient = task._objective(torch.from_numpy(weights))
        return float(loss), gradient.numpy()

    return objective


def rosenbrock(point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    at = torch.from_numpy(point).requires_grad_()
    loss = (100 * (at[1:] - at[:-1] ** 2) ** 2 + (1 - at[:-1]) ** 2).sum()
    loss.backward()
    assert at.grad is not None
    return float(loss.detach()), at.grad.numpy()


def by_torch(start: NDArray[np.float64], objective, iterations: int, history: int) -> list[NDArray[np.float64]]:
    iterates: list[NDArray[np.float64]] = []
    for count in range(1, iterations + 1):
        at = torch.from_numpy(start.copy())
        solver = torch.optim.LBFGS(
            [at],
            max_iter=count,
            max_eval=10_000,
            history_size=history,
            line_search_fn="strong_wolfe",
            tolerance_grad=1e-12,
            tolerance_change=1e-15,
        )

        def closure(at: torch.Tensor = at) -> float:
            loss, gradient = objective(at.detach().numpy().copy())
            at.grad = torch.from_numpy(gradient)
            return loss

        solver.step(closure)
        iterates.append(at.numpy())
    return iterates


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize(
    ("objective", "start", "history"),
    [(logistic(), np.zeros(60), 10), (rosenbrock, np.full(10, -1.2), 10), (rosenbrock, np.full(10, -1.2), 3)],
    ids=["logistic", "rosenbrock", "short history"],
)
def test_iterates_are_those_of_torch(objective, start, history: int, shards: int) -> None:
    vectors, optimizer = Shards(start, shards, objective), Lbfgs(history, 1e-12, 1e-15)
    for expected in by_torch(start, objective, 20, history):
        vectors.iterate(optimizer)
        np.testing.assert_allclose(vectors.joined(PARAMETERS), expected, atol=1e-6, rtol=0)


def test_it_stops_at_the_optimum_and_says_why() -> None:
    vectors, optimizer = Shards(np.zeros(60), 2, logistic()), Lbfgs()
    last = vectors.iterate(optimizer)
    while not last.stopped:
        last = vectors.iterate(optimizer)
        assert last.number < 200
    assert last.gradient < 1e-4
    assert abs(last.loss - Logistic(examples=1000, features=60, penalty=1e-4).optimum()) < 1e-8
    assert vectors.iterate(optimizer).stopped

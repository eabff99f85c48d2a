"""Closures under sandblaster, with shards and coordinator in this process: torch's iterates, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from offbeat.errors import DataError, NonFiniteError, OffbeatWarning, StrategyError
from offbeat.protocols.sandblaster.commands import encoded, reduced
from offbeat.protocols.sandblaster.lbfgs import Evaluate, Lbfgs
from offbeat.protocols.sandblaster.messages import PARAMETERS, POINT, Gather, Gathered, IterationEnd
from offbeat.runtime.sandblaster.registers import Registers
from offbeat.strategies.sandblaster import Sandblaster
from offbeat.team.closures.portion_closures import PortionClosures

PORTIONS = 5
STRATEGY = Sandblaster(portions=PORTIONS)


class Link:
    """One shard and the coordinator, without processes."""

    def __init__(self) -> None:
        self._registers, self._optimizer, self._sent = Registers(), Lbfgs(10), set[str]()

    def load(self, row: np.ndarray) -> None:
        self._registers.load(row)

    def read(self) -> np.ndarray:
        return self._registers.row(PARAMETERS)

    def iterate(self, compute: Callable[..., Any]) -> IterationEnd:
        asking = self._optimizer.iterate()
        answer, registers = None, self._registers
        while True:
            try:
                request = asking.send(answer) if answer else next(asking)
            except StopIteration as end:
                last = end.value
                fields = (last.loss, last.gradient, last.step, last.evaluations, last.stopped)
                return IterationEnd(0, last.number, *fields, {}, {}, 0)
            if isinstance(request, Evaluate):
                registers.carry_out([Gather(1, PORTIONS)])
                losses = []
                for portion in range(PORTIONS):
                    loss, gradient = compute(portion, registers.row(POINT).copy())
                    losses.append(loss)
                    registers.gather(portion, gradient)
                registers.carry_out([Gathered(request.gradient)])
                answer = (sum(losses),)
            else:
                answer = reduced(request, [registers.carry_out(encoded(request, self._sent))])


class Searching:
    """A worker's exchange with that shard."""

    def __init__(self) -> None:
        self.link, self.evaluations = Link(), 0
        self.start = self.link.load

    def ended(self, end: IterationEnd) -> int:
        made, self.evaluations = end.evaluations - self.evaluations, end.evaluations
        return made


class Bench:
    """A small regression, and what a team would prepare."""

    def __init__(self, workers: int = 1, **settings: Any) -> None:
        inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.train = TensorDataset(inputs, (inputs.square().sum(1, keepdim=True) > 5).double())
        self.model = nn.Linear(6, 1, dtype=torch.float64)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        chosen = {"max_iter": 4, "line_search_fn": "strong_wolfe", "history_size": 10} | settings
        self.optimizer = LBFGS(self.model.parameters(), **chosen)
        self.loader: Any = DataLoader(self.train, batch_size=6, shuffle=True)
        self.warned: list[str] = []
        place: Any = SimpleNamespace(
            seed=1,
            device="cpu",
            step=0,
            notes={},
            group=SimpleNamespace(size=workers, barrier=lambda _: None, membership=SimpleNamespace(leads=True)),
            watch=SimpleNamespace(first_gradients=SimpleNamespace(settled=False), warn=self.warned.append),
            stopwatch=SimpleNamespace(spent_on=lambda _: nullcontext()),
            ledger=SimpleNamespace(samples=0),
            reports=SimpleNamespace(last_loss=0.0),
        )
        self.place = place
        worker: Any = Searching()
        self.closures = PortionClosures(place, STRATEGY, worker, lambda: None)

    def prepare(self) -> Bench:
        self.loader = self.closures.loader(self.loader, True)
        self.closures.attend(self.optimizer)
        return self

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        penalty = 0.01 * sum(w.square().sum() for w in self.model.parameters()) * len(x)
        each = nn.functional.binary_cross_entropy_with_logits(self.model(x), y, reduction="sum")
        return (each + penalty) / len(self.train)

    def closure(self) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for x, y in self.loader:
            loss = self.loss(x, y)
            loss.backward()
            total += loss.item()
        return total

    @property
    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


@pytest.mark.parametrize("settings", [{}, {"max_iter": 1}, {"max_iter": 20}, {"max_eval": 2}])
def test_steps_with_a_closure_over_the_loader_are_those_of_torch(settings: dict[str, int]) -> None:
    alone, together = Bench(**settings), Bench(**settings).prepare()
    for _ in range(5):
        expected, loss = (bench.optimizer.step(bench.closure) for bench in (alone, together))
        np.testing.assert_allclose(together.weights, alone.weights, atol=1e-9)
    assert float(loss) <= float(expected) + 1e-12  # torch returns the loss before the step, and this the one after it.
    assert together.place.notes["sandblaster"]["iterations"] > 4
    assert together.place.ledger.samples == 40 * together.place.notes["sandblaster"]["evaluations"]
    assert all(not parameter.grad.any() for parameter in together.model.parameters())


def test_a_loader_deals_whole_batches_and_the_same_ones_every_time() -> None:
    bench = Bench().prepare()
    with torch.no_grad():
        first, second = ([x for x, _ in bench.loader] for _ in range(2))
    assert [len(x) for x in first] == [6] * 6 + [4]
    assert len(bench.loader) == 7
    assert bench.loader.dataset is bench.train
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def repeat(bench: Bench) -> Any:
    return bench.closure() + bench.closure()


def leave_early(bench: Bench) -> Any:
    return next(bench.loss(x, y) for x, y in bench.loader)


def ignore_the_loader(bench: Bench) -> Any:
    return bench.loss(*bench.train.tensors)


def average(bench: Bench) -> Any:
    losses = [bench.loss(x, y) for x, y in bench.loader]
    return sum(losses) / len(losses)


def penalize_each_call(bench: Bench) -> Any:
    total = sum(bench.loss(x, y) for x, y in bench.loader) + sum(w.square().sum() for w in bench.model.parameters())
    total.backward()
    return total


def add_noise(bench: Bench) -> Any:
    return bench.closure() + torch.rand(())


def forget(bench: Bench) -> Any:
    bench.closure()


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (repeat, "began 2 passes and ended 2"),
        (leave_early, "began 1 passes and ended 0"),
        (ignore_the_loader, "did not read a prepared loader"),
        (average, "they have to be sums"),
        (penalize_each_call, "put penalties into the losses of batches"),
        (add_noise, "the loss is random"),
        (forget, "returned nothing at step 0"),
    ],
)
def test_closures_whose_losses_do_not_add_up_are_refused(mistake: Callable[[Bench], Any], words: str) -> None:
    bench = Bench().prepare()
    with pytest.raises((StrategyError, NonFiniteError), match=words):
        bench.optimizer.step(lambda: mistake(bench))


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"line_search_fn": None}, "strong_wolfe only"), ({"lr": 0.5}, "begins its line search with a step of 1")],
)
def test_another_line_search_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        Bench(**settings).prepare()


def test_other_optimizers_and_a_second_one_are_refused() -> None:
    bench = Bench()
    with pytest.raises(StrategyError, match="is L-BFGS, and SGD is not"):
        bench.closures.attend(SGD(bench.model.parameters(), lr=0.1))
    bench.prepare()
    with pytest.raises(StrategyError, match="prepare one optimizer"):
        bench.closures.attend(bench.optimizer)
    with pytest.raises(StrategyError, match="steps with a closure"):
        bench.optimizer.step()  # pyright: ignore[reportCallIssue]


def test_another_history_is_said() -> None:
    assert "sandblaster(history=100)" in Bench(history_size=100).prepare().warned[0]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter([torch.zeros(1)])


def test_loaders_that_have_no_batches_to_deal_are_refused() -> None:
    bench = Bench(workers=4)
    for loader in ([torch.zeros(1)], DataLoader(Stream())):
        with pytest.raises(DataError, match="in every evaluation the same"):
            bench.closures.loader(loader, True)
    with pytest.raises(StrategyError, match="Omit split=False"):
        bench.closures.loader(bench.loader, False)
    with pytest.warns(OffbeatWarning, match="2 batches for 4 workers"):
        bench.closures.loader(DataLoader(bench.train, batch_size=20), True)


def test_without_a_loader_or_outside_a_closure_nothing_is_trained() -> None:
    bench = Bench()
    bench.closures.attend(bench.optimizer)
    with pytest.raises(StrategyError, match="needs the loader"):
        bench.optimizer.step(bench.closure)
    bench = Bench().prepare()
    with pytest.raises(StrategyError, match="no steps of single batches"):
        next(iter(bench.loader))

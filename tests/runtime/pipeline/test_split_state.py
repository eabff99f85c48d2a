"""Stages hold their own parameters, all of them for a while, and know the norm of what others hold: in threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from offbeat.errors import UsageError
from offbeat.runtime.pipeline.foreign_gradient import ForeignGradients
from offbeat.runtime.pipeline.state import SplitState

DEADLINE = 20.0


class ThreadGroup:
    """Workers that are threads, and what they share with each other."""

    def __init__(self, rank: int, size: int, barrier: Barrier, board: dict[int, Any]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board

    def share(self, tensor: Tensor, _what: str, root: int) -> Tensor:
        return tensor.copy_(self._all(tensor.clone())[root])

    def gather(self, numbers: list[float], _what: str) -> Tensor:
        return torch.tensor(self._all(numbers), dtype=torch.float64)

    def _all(self, own: Any) -> list[Any]:
        self._board[self.rank] = own
        self._barrier.wait(DEADLINE)
        everything = [self._board[rank] for rank in range(self.size)]
        self._barrier.wait(DEADLINE)
        return everything


def on_stages(act: Callable[[nn.Module, SplitState], Any]) -> list[Any]:
    """What each of three stages answers; the first and the last use one weight."""
    torch.manual_seed(0)
    first, middle, last = nn.Linear(4, 5, bias=False), nn.Linear(5, 5), nn.Linear(4, 5, bias=False)
    last.weight = first.weight
    whole = nn.Sequential(first, nn.Sequential(middle, nn.BatchNorm1d(5)), last)
    barrier, board = Barrier(3), dict[int, Any]()

    def run(rank: int) -> Any:
        model = models[rank]
        group: Any = ThreadGroup(rank, 3, barrier, board)
        state = SplitState(model, [[part] for part in model], group, [])
        try:
            return act(model, state)
        except BaseException:
            barrier.abort()
            raise

    models = [copy.deepcopy(whole) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        return [running.result() for running in [threads.submit(run, rank) for rank in range(3)]]


def memory(parameter: Parameter) -> int:
    return parameter.untyped_storage().nbytes()


def test_a_stage_has_memory_for_its_own_parameters_only_but_while_the_model_is_whole() -> None:
    def act(model: nn.Module, state: SplitState) -> dict[str, Any]:
        state.shed()
        for parameter in state.own:
            parameter.data += 1  # As a step of training.
        held: list[list[int]] = []
        with state.whole(), state.whole():
            values = {name: value.clone() for name, value in model.state_dict().items()}
        for _ in range(2):
            held.append([memory(parameter) for parameter in state.foreign])
            with state.whole():
                held.append([memory(parameter) for parameter in state.foreign])
        after = [parameter.isnan().all().item() for parameter in state.foreign]
        own = {id(parameter) for parameter in state.own}
        kept = [torch.equal(values[name], p) for name, p in model.named_parameters() if id(p) in own]
        return {"values": values, "held": held, "after": after, "kept": kept, "foreign": state.foreign}

    answers = on_stages(act)
    for answer in answers:
        assert all(torch.equal(value, answers[0]["values"][name]) for name, value in answer["values"].items())
        assert not any(value.isnan().any() for value in answer["values"].values())
        shed, whole = [4] * len(answer["foreign"]), [parameter.nbytes for parameter in answer["foreign"]]
        assert answer["held"] == [shed, whole, shed, whole]
        assert all(answer["after"])
        assert all(answer["kept"])
    assert [len(answer["foreign"]) for answer in answers] == [4, 1, 4]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_the_norm_of_all_gradients_counts_each_once(order: float) -> None:
    def act(model: nn.Module, state: SplitState) -> float:
        gradients = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=gradients)
        expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]), order)
        own = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in state.own]), order)
        together = torch.tensor([own, state.norm_elsewhere(order)], dtype=torch.float64)
        return float(torch.linalg.vector_norm(together, order) - expected)

    assert on_stages(act) == pytest.approx([0] * 3, abs=1e-5)


def test_an_evaluation_between_backward_and_clipping_does_not_hide_the_gradients_of_other_stages() -> None:
    def act(model: nn.Module, state: SplitState) -> float:
        state.shed()
        foreign = ForeignGradients(state, [])
        for parameter in state.own:
            parameter.grad = torch.ones_like(parameter)
        foreign.give()
        with state.whole():
            pass
        return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    count = 20 + 25 + 5 + 5 + 5
    assert on_stages(act) == pytest.approx([count**0.5] * 3)


def test_clipping_some_parameters_only_is_refused_by_the_stage_that_does_not_have_all_of_them() -> None:
    def act(model: nn.Module, state: SplitState) -> str:
        state.shed()
        foreign = ForeignGradients(state, [])
        for parameter in state.own:
            parameter.grad = torch.ones_like(parameter)
        foreign.give()
        middle = list(model[1].parameters())  # pyright: ignore[reportIndexIssue]
        try:
            nn.utils.clip_grad_norm_(middle[:2], 1.0)
        except UsageError as error:
            return str(error)
        return str(float(middle[0].grad.norm()))

    answers = on_stages(act)
    assert float(answers[1]) == pytest.approx(5 / 30**0.5)
    for stage in (0, 2):
        assert "of 2 of the 4 gradients that other stages hold" in answers[stage]
        assert "Clip all parameters at once" in answers[stage]

"""Models that cannot be split are refused with the place in their code and what to write instead."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from split_support import MODELS, run_parts
from torch import Tensor, nn
from torch.nn import functional

from offbeat import Task
from offbeat.errors import OffbeatError, StrategyError, TaskError
from offbeat.runtime.split.stages import split_model


class Written(nn.Module):
    """A model whose forward is a function of a test."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.code = code
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.holder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.loose = [nn.Parameter(torch.ones(4))]
        self.kept_tensor: Any = None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.code(self, x)


BATCH = (torch.linspace(-1, 1, 24).view(6, 4),)


def place(code: Callable[..., Any], text: str) -> str:
    lines, start = inspect.getsourcelines(code)
    return f"{__file__}:{start + next(number for number, line in enumerate(lines) if text in line)}"


def refusal(code: Callable[..., Any], parts: int = 2, **more: Any) -> str:
    with pytest.raises(OffbeatError) as refused:
        split_model(Written(code), BATCH, parts, **more)
    assert isinstance(refused.value, (TaskError, StrategyError))
    return str(refused.value)


def test_a_branch_on_the_data_is_refused_with_file_and_line() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = -x
        return self.second(x)

    message = refusal(code)
    assert message.startswith(f"{place(code, 'if x.sum')} branches on a tensor that depends on the data")
    assert "torch.where" in message


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, float, lambda x: x.numpy().item()])
def test_numbers_read_out_of_the_data_are_refused(read: Callable[[Tensor], float]) -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        scale = read(self.first(x).abs().max().detach())
        return self.second(x) * scale

    assert f"{__file__}:" in refusal(code)
    assert "depends on the data" in refusal(code)


def test_the_same_code_works_in_a_module_without_modules_of_its_own_or_in_one_that_is_kept() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        return self.second(self.inner(self.first(x)))

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.abs().max().item()

    class Wrapped(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Identity()

    for inner, kept in [(Inner(), None), (Wrapped(), ["inner"])]:
        model = Written(code)
        model.inner = inner
        split = split_model(model, BATCH, 3, kept=kept)
        assert torch.equal(run_parts(split, BATCH, backward=False), model(*BATCH))
    with pytest.raises(TaskError, match="depends on the data"):
        split_model(model, BATCH, 3)


def test_more_parts_than_layers_are_refused_with_both_numbers() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    assert "2 layers that can be separated (first, second), too few for 3 parts" in refusal(code, 3)


def test_values_changed_in_place_are_not_separated_and_named_where_parts_are_too_few() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        kept = self.first(x)
        x = self.second(kept * 1)
        kept += 1
        return self.norm(x + kept)

    message = refusal(code, 3)
    assert "2 layers that can be separated" in message
    assert "first to" in message
    assert place(code, "kept += 1") in message
    model = Written(code)
    split = split_model(model, BATCH, 2)
    assert torch.equal(run_parts(split, BATCH, backward=False), model(*BATCH))


def test_an_input_that_is_changed_in_place_is_used_by_one_part_only() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        y = self.first(x * 1)
        x.mul_(2)
        return self.second(y) + x

    def harmless(self: Written, x: Tensor) -> Tensor:
        return code(self, x.clone())

    assert "changed in place" in refusal(code)
    assert len(split_model(Written(harmless), BATCH, 2).parts) == 2


def test_a_module_with_running_statistics_that_two_parts_use_is_refused() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        return self.norm(self.second(self.norm(self.first(x))))

    message = refusal(code, 4)
    assert "Module norm is used by parts 1 and 3" in message
    assert "Make a module for each use" in message


def test_a_result_that_is_not_made_of_tensors_is_refused() -> None:
    def code(self: Written, x: Tensor) -> Any:
        return slice, self.second(self.first(x)), np.zeros(3)

    assert "returns a type, which cannot be sent" in refusal(code)

    def kept(self: Written, x: Tensor) -> Tensor:
        return self.second(self.first(self.holder(x)["x"]))

    model = Written(kept)
    model.holder.forward = lambda x: {"x": x, "rows": len(x)}
    with pytest.raises(TaskError, match="Module holder is to be run as a whole, and returns int"):
        split_model(model, BATCH, 2, kept=["holder"])
    assert len(split_model(model, BATCH, 2).parts) == 2


def test_parameters_that_no_module_has_registered_are_refused() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.loose[0])

    assert f"{place(code, 'loose')} uses a tensor of shape (4,)" in refusal(code)


def test_a_parameter_that_a_module_uses_behind_the_back_of_its_owner_is_refused() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        return self.thief(self.first(x))

    class Thief(nn.Module):
        def __init__(self, victim: nn.Linear) -> None:
            super().__init__()
            self.victims = [victim]

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x, self.victims[0].weight)

    model = Written(code)
    model.thief = Thief(model.second)
    with pytest.raises(TaskError, match=r"Parameter second\.weight of Written is used by a module"):
        split_model(model, BATCH, 2)


def test_state_that_is_assigned_rather_than_changed_is_refused() -> None:
    def buffer(self: Written, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.second(self.first(x))

    def attribute(self: Written, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y if self.kept_tensor is None else y + self.kept_tensor
        self.kept_tensor = y
        return self.second(y)

    assert "buffer 'count' in forward" in refusal(buffer)
    assert "keep no tensor from one batch to the next" in refusal(attribute)


def test_random_decisions_outside_of_torch_are_noticed() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        return self.second(self.first(x) * random.random())

    assert "may take random decisions outside of torch" in refusal(code)


def test_a_batch_that_takes_another_branch_is_refused_when_it_comes() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.shape[1] > 4 or x.shape[0] > 8:
            x = -x
        return self.second(x)

    model = Written(code)
    split = split_model(model, BATCH, 2)
    assert torch.equal(run_parts(split, (BATCH[0][:2],), backward=False), model(BATCH[0][:2]))
    with pytest.raises(TaskError) as refused:
        run_parts(split, (torch.ones(9, 4),), backward=False)
    assert f"{place(code, 'if x.shape')} depends on the size of the batch" in str(refused.value)
    assert "gt was False for the batch" in str(refused.value)


def test_a_branch_that_makes_no_difference_for_a_single_example_is_not_refused_for_it() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        places = torch.arange(4.0)[None]
        if x.shape[0] != places.shape[0]:
            places = places.expand(x.shape[0], -1)
        return self.second(self.first(x + places))

    model = Written(code)
    split = split_model(model, BATCH, 2)
    for rows in (1, 2, 6):
        batch = (BATCH[0][:rows],)
        assert torch.equal(run_parts(split, batch, backward=False), model(*batch))


def test_parts_refuse_to_evaluate_a_model_that_makes_other_calls_in_evaluation() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            x = x + torch.rand(4)
        return self.second(x)

    model = Written(code)
    split = split_model(model, BATCH, 2)
    torch.manual_seed(0)
    expected = model(*BATCH)
    torch.manual_seed(0)
    assert torch.equal(run_parts(split, BATCH, backward=False), expected)
    split.parts[0].eval()
    with pytest.raises(TaskError, match="makes other calls in evaluation than in training, first at"):
        run_parts(split, BATCH, backward=False)


def test_a_list_of_layers_that_is_not_of_the_model_is_refused() -> None:
    model = Written(lambda self, x: self.first(x))
    with pytest.raises(TaskError, match=r"layers\[1\], a Linear, is not a module of Written"):
        split_model(model, BATCH, 2, layers=[model.first, nn.Linear(4, 4)])
    with pytest.raises(TaskError, match="empty"):
        split_model(model, BATCH, 1, layers=[])


def test_names_and_bounds_that_do_not_fit_are_refused() -> None:
    def code(self: Written, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    assert "kept='fist' is not a module of Written. Did you mean 'first'?" in refusal(code, kept=["fist"])
    assert "do not cut 2 layers" in refusal(code, bounds=[0, 3])
    assert "cut into 1 parts, but 2 were asked for" in refusal(code, bounds=[0, 2])
    assert "No cut of 2 layers into 2 parts keeps each part within 0.00 MB" in refusal(code, memory_limit=10)


def test_an_error_in_a_part_says_in_which_module_it_happened() -> None:
    make, batch_of = MODELS["mlp"]
    split = split_model(make(), batch_of(4, 1), 2)
    with pytest.raises(RuntimeError) as raised:
        split.parts[0](torch.ones(4, 3))
    assert any("in 1, called at" in note for note in raised.value.__notes__)
    with pytest.raises(TypeError, match="takes 1 tensors, and was called with 2"):
        split.parts[0](torch.ones(4, 8), torch.ones(1))


def test_a_task_finds_its_layers_by_itself_unless_it_says() -> None:
    assert Task.stages(None, nn.Linear(1, 1)) is None  # type: ignore[arg-type]

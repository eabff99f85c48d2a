"""Parts run one after another compute what the model computes: outputs, gradients and buffers."""

from __future__ import annotations

from functools import lru_cache
from types import FunctionType
from typing import Any

import pytest
import torch
from split_support import MODELS, Batch, in_double, loss_of, run_parts
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.runtime.split.stages import SplitModel, split_model

OTHER_SIZES = ((4, 6), (3, 6), (5, 9))
"""Examples and lengths of batches; the model is captured on the first."""


def even(model: nn.Module, batch: Batch, parts: int) -> SplitModel:
    """Parts of about equally many layers."""
    layers = len(split_model(model, batch, 1).costs)
    return split_model(model, batch, parts, bounds=[layers * part // parts for part in range(parts + 1)])


def buffers_and_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    state: dict[str, Any] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        state[name], parameter.grad = parameter.grad, None
    return state


def same(expected: Any, computed: Any, exactly: bool) -> bool:
    if not isinstance(expected, Tensor):
        return expected == computed
    if exactly:
        return torch.equal(expected, computed)
    return torch.allclose(expected, computed, rtol=0, atol=1e-12)


def assert_equal(model: nn.Module, split: SplitModel, batch: Batch, training: bool) -> None:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train(training)
    for part in split.parts:
        part.train(training)
    torch.manual_seed(1)
    expected = model(*batch)
    loss_of(expected).backward()
    left = buffers_and_gradients(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    torch.manual_seed(1)
    computed = run_parts(split, batch)
    assert pytree.tree_structure(expected) == pytree.tree_structure(computed)
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(computed), strict=True)
    assert all(same(a, b, exactly=True) for a, b in pairs)
    after = buffers_and_gradients(model)
    assert [name for name, value in left.items() if not same(value, after[name], exactly=False)] == []


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_a_model_compute_what_it_computes_for_batches_of_any_size(name: str, parts: int) -> None:
    torch.manual_seed(0)
    make, batch_of = MODELS[name]
    model = make().double()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    split = even(model, in_double(batch_of(*OTHER_SIZES[0])), parts)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    for rows, length in OTHER_SIZES:
        for training in (True, False):
            assert_equal(model, split, in_double(batch_of(rows, length)), training)


@pytest.mark.parametrize(
    ("kind", "config", "settings"),
    [
        ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64}),
        ("BertForMaskedLM", "BertConfig", {"hidden_size": 32, "intermediate_size": 64, "pad_token_id": 0}),
        ("LlamaForCausalLM", "LlamaConfig", {"hidden_size": 32, "intermediate_size": 64}),
        ("T5ForConditionalGeneration", "T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}),
    ],
)
def test_models_of_transformers_are_split_as_they_are(kind: str, config: str, settings: dict[str, Any]) -> None:
    library = pytest.importorskip("transformers", reason="models of transformers are tried with its own code")
    torch.manual_seed(0)
    common = {"vocab_size": 50, "num_attention_heads": 4, "num_hidden_layers": 2, "use_cache": False}
    common |= {"bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    inner = getattr(library, kind)(getattr(library, config)(**common | settings))
    model = Masked(inner).double()
    batch = masked(4, 6)
    split = even(model, batch, 3)
    if kind != "LlamaForCausalLM":
        assert len(split.tied) == 1
    assert_equal(model, split, masked(4, 6), training=True)
    assert_equal(model, split, masked(3, 9), training=False)


class Masked(nn.Module):
    """A model of transformers as scripts call it, with a mask for what is only padding."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        more = {"decoder_input_ids": ids} if "T5" in type(self.inner).__name__ else {}
        return self.inner(input_ids=ids, attention_mask=mask, **more).logits


def masked(rows: int, length: int) -> Batch:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, -2:] = 0
    return torch.randint(0, 50, (rows, length)), mask


def test_a_value_that_several_parts_need_is_given_once_and_taken_by_each() -> None:
    make, batch_of = MODELS["convolutions"]
    split = even(make(), batch_of(4, 6), 4)
    skips = [value for value in split.parts[0].gives if sum(value in part.takes for part in split.parts) > 1]
    assert len(skips) == 1
    assert skips[0] in split.parts[3].takes
    assert len(set(split.parts[0].gives)) == len(split.parts[0].gives)


def test_inputs_of_the_model_are_taken_from_the_batch_by_every_part_that_needs_them() -> None:
    make, batch_of = MODELS["translator"]
    model = make()
    split = even(model, batch_of(4, 6), 4)
    users = {
        value.index: number for number, part in enumerate(split.parts) for value in part.takes if value.producer < 0
    }
    assert users[1] > 0
    assert not any(value.differentiable for part in split.parts for value in part.takes if value.producer < 0)


def test_tied_parameters_are_reported_by_part_and_local_name_and_belong_to_the_model() -> None:
    make, batch_of = MODELS["tied_text"]
    model = make()
    split = even(model, batch_of(4, 6), 3)
    assert split.tied == [((0, "0.symbol.weight"), (2, "4.weight"))]
    assert split.parts[2].logical["4.weight"] == "0.symbol.weight"
    assert split.parts[2].get_parameter("4.weight") is model.get_parameter("0.symbol.weight")
    logical = {name for part in split.parts for name in part.logical.values()}
    assert logical == {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}


def test_layers_named_by_the_user_are_the_only_places_to_cut() -> None:
    model = Convolutional()
    batch = (torch.randn(4, 3, 8, 8),)
    layers = [model.first, model.second, model.last]
    split = split_model(model, batch, 2, layers=layers)
    assert [cost.name for cost in split.costs] == ["first", "second", "last"]
    expected = model.last(*model.second(model.first(*batch)))
    assert torch.equal(run_parts(split, batch, backward=False), expected)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.second = Pair()
        self.last = nn.Bilinear(4, 4, 5)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean((2, 3)), x.amax((2, 3))


def test_modules_that_are_kept_whole_are_one_layer() -> None:
    make, batch_of = MODELS["convolutions"]
    split = split_model(make(), batch_of(4, 6), 2, kept=["blocks.0", "blocks.2"])
    names = [cost.name for cost in split.costs]
    assert [name for name in names if name.startswith(("blocks.0", "blocks.2"))] == ["blocks.0", "blocks.2"]
    assert "blocks.1.first" in names


def test_splitting_leaves_no_trace() -> None:
    make, batch_of = MODELS["convolutions"]
    model, batch = make(), batch_of(4, 6)
    model.blocks[1].eval()
    torch.manual_seed(7)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    split = split_model(model, batch, 2)
    assert torch.equal(torch.rand(3), drawn)
    assert model.training
    assert not model.blocks[1].norms[0].training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert int(model.stem[1].num_batches_tracked) == 0
    assert len(split.parts) == 2


class Mixed(nn.Module):
    """Half precision in the middle, set by the model itself, and a buffer among its results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("places", torch.arange(8.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(self.first(x))
        with torch.autocast("cpu", enabled=False):
            return self.third(x.float()), self.places, x.shape[0]


@pytest.mark.parametrize("around", [False, True])
def test_autocast_inside_the_model_and_around_the_parts_is_kept(around: bool) -> None:
    torch.manual_seed(0)
    model, batch = Mixed(), (torch.randn(4, 8),)
    split = split_model(model, batch, 3)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        expected, places, rows = model(*batch)
        computed = run_parts(split, batch, backward=False)
    assert computed[0].dtype == expected.dtype
    assert torch.equal(computed[0], expected)
    assert torch.equal(computed[1], places)
    assert (computed[2], rows) == (4, 4)
    assert run_parts(split, (torch.randn(7, 8),), backward=False)[2] == 7


def test_a_compiled_model_is_cut_like_the_one_inside() -> None:
    make, batch_of = MODELS["mlp"]
    model, batch = torch.compile(make(), backend="eager"), batch_of(4, 1)
    split = split_model(model, batch, 2)
    assert {name for part in split.parts for name in part.logical.values()} == set(dict(model.named_parameters()))
    model.eval()
    with torch.no_grad():
        assert torch.equal(run_parts(split, batch, backward=False), model._orig_mod(*batch))


def test_what_einops_keeps_for_a_shape_has_no_recorded_sizes() -> None:
    def cached(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[0], 1, *shape[1:]

    def rearrange(x: Tensor) -> Tensor:
        shape = tuple(x.shape)
        try:
            shape = kept(shape)
        except TypeError:  # As einops does for torch's symbolic sizes.
            shape = cached(shape)
        return x.reshape(shape)

    kept = lru_cache(cached)
    code = FunctionType(rearrange.__code__, {"__name__": "einops.einops"}, None, None, rearrange.__closure__)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = lambda x: model[1](code(model[0](x)))  # type: ignore[method-assign]
    split = split_model(model, (torch.randn(6, 4),), 2)
    for rows in (6, 3):
        batch = (torch.randn(rows, 4),)
        assert torch.equal(run_parts(split, batch, backward=False), model(*batch))


def test_frozen_layers_take_part_and_get_no_gradient() -> None:
    make, batch_of = MODELS["mlp"]
    model, batch = make(), batch_of(4, 1)
    model[1].requires_grad_(False)
    split = split_model(model, batch, 2, bounds=[0, 2, 6])
    assert [value.differentiable for value in split.parts[1].takes] == [False]
    assert split.costs[1].parameter_bytes > 0

"""Layers of which every way holds a part, made from the model's own modules.

The modules stay the model's objects: their parameters are cut in place, so that an existing optimizer keeps them, and
their `forward` is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from offbeat.runtime.tensor_parallel.cuts import Cut, range_of
from offbeat.runtime.tensor_parallel.dropout import HeadsRegion, dropout
from offbeat.runtime.tensor_parallel.functions import Entrance, leave
from offbeat.runtime.tensor_parallel.logits import VocabularyLogits
from offbeat.runtime.tensor_parallel.ways import TensorWays

_CUT = "_offbeat_cut"  # The attribute of a parameter that is cut.
_CUTS = "_offbeat_cuts"  # The attribute of a module that has such parameters; unlike the other, it is copied with it.


def cut_of(parameter: Tensor) -> Cut | None:
    """How a parameter is cut; None if every way has the whole."""
    return getattr(parameter, _CUT, None)


def mark_cut(parameter: Tensor, cut: Cut | None) -> None:
    """Note how a parameter is cut, or that it is whole."""
    setattr(parameter, _CUT, cut)


def cuts_in(model: nn.Module) -> dict[str, Cut]:
    """How the model's parameters are cut, by all of their names."""
    cuts = {
        id(module.get_parameter(own)): cut
        for module in model.modules()
        for own, cut in vars(module).get(_CUTS, {}).items()
    }
    named = model.named_parameters(remove_duplicate=False)
    return {name: cuts[id(parameter)] for name, parameter in named if id(parameter) in cuts}


def cut_parameters(module: nn.Module, cuts: Mapping[str, Cut], ways: TensorWays) -> None:
    """Keep this way's parts of a module's parameters, which stay the same objects; a tied one is cut once."""
    for name, cut in cuts.items():
        parameter = module.get_parameter(name)
        if cut_of(parameter) is None:
            parameter.data = ways.part(parameter.data, cut)
            parameter.grad = None
            mark_cut(parameter, cut)
    if cuts:
        vars(module)[_CUTS] = dict(cuts)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is `nn.Linear`, or transformers' `Conv1D`, with no forward of its own."""
    return type(module) in (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`: a linear layer whose weight has its inputs first."""
    return type(module).__name__ == "Conv1D" and {"nf", "nx"} <= vars(module).keys()


def widths(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    inputs, outputs = module.weight.shape if is_transposed(module) else reversed(module.weight.shape)
    return int(inputs), int(outputs)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module compute by this function, whose first argument is the module."""
    vars(module)["forward"] = MethodType(forward, module)


def linear_cuts(module: Any, by_outputs: bool, blocks: int = 1) -> dict[str, Cut]:
    """How the parameters of a linear layer are cut, by outputs or by inputs."""
    inputs, outputs = widths(module)
    if not by_outputs:
        return {"weight": Cut(int(not is_transposed(module)), inputs, blocks)}
    cuts = {"weight": Cut(int(is_transposed(module)), outputs, blocks)}
    return cuts if module.bias is None else {**cuts, "bias": Cut(0, outputs, blocks)}


def _product(module: Any, value: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(value, module.weight.t() if is_transposed(module) else module.weight, bias)


def split_by_column(module: Any, entrance: Entrance) -> None:
    """Every way computes a part of the outputs, from all inputs."""

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return _product(self, entrance(input), self.bias)

    _record_width(module)
    replace_forward(module, forward)


def split_by_row(module: Any, ways: TensorWays) -> None:
    """Every way computes from its part of the inputs; their results are summed, and the bias is added once."""

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return leave(_product(self, input, None), ways, self.bias)

    _record_width(module)
    replace_forward(module, forward)


def _record_width(module: Any) -> None:
    inputs, outputs = widths(module)
    if is_transposed(module):
        module.nx, module.nf = inputs, outputs
    else:
        module.in_features, module.out_features = inputs, outputs


def split_output(module: Any, ways: TensorWays, entrance: Entrance, size: int) -> None:
    """Every way computes the logits of its part of the vocabulary."""

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return VocabularyLogits(_product(self, entrance(input), self.bias), size, ways)

    _record_width(module)
    replace_forward(module, forward)


def split_embedding(module: nn.Embedding, ways: TensorWays) -> None:
    """Every way looks up what is in its part of the vocabulary; the results are summed, of which one is not zero."""
    size = module.num_embeddings
    low, high = range_of(size, ways.rank, ways.size)
    padding = module.padding_idx
    module.padding_idx = padding - low if padding is not None and low <= padding < high else None
    module.num_embeddings = high - low

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < size:
            raise IndexError(
                f"an embedding of {size} rows was asked for rows {int(input.min())} to {int(input.max())}; they are "
                f"numbered from 0. Check the vocabulary of the data."
            )
        outside = (input < low) | (input >= high)
        rows = functional.embedding((input - low).masked_fill(outside, 0), self.weight, self.padding_idx)
        return leave(rows.masked_fill(outside.unsqueeze(-1), 0), ways)

    replace_forward(module, forward)


def split_dropout(module: nn.Dropout, ways: TensorWays) -> None:
    """Dropout between a layer split by column and one split by row."""

    def forward(self: nn.Dropout, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        return dropout(input, self.p, input.dim() - 1, ways) if self.training else input

    replace_forward(module, forward)


def enter_heads(module: Any, heads: int, attributes: tuple[str, ...], ways: TensorWays) -> None:
    """Tell an attention module that it has only this way's heads, by its attributes that depend on their number."""
    for name in attributes:
        setattr(module, name, getattr(module, name) // ways.size)
    if not _drops(module):
        return
    whole = module.forward

    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        if not self.training:
            return whole(*args, **named)
        with HeadsRegion(heads // ways.size, ways):
            return whole(*args, **named)

    replace_forward(module, forward)


def _drops(module: nn.Module) -> bool:
    """Whether an attention module drops anything."""
    rates = [child.p for child in module.modules() if isinstance(child, nn.Dropout)]
    rates += [value for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
    return any(rate > 0 for rate in rates)


def sum_gradient(parameter: Parameter, ways: TensorWays) -> None:
    """Sum the gradient of a replicated parameter that every way uses on its own part of a value."""

    def total(gradient: Tensor) -> Tensor:
        return ways.sum(
            gradient.clone(memory_format=torch.contiguous_format), "the sum of a shared parameter's gradient"
        )

    parameter.register_hook(total)

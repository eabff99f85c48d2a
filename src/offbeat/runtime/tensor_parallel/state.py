"""Split models as one logical model: whole parameters and optimizer state by name, and global norms."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.runtime.groups.group import DirectGroup
from offbeat.runtime.tensor_parallel.cuts import Cut
from offbeat.runtime.tensor_parallel.layers import cut_of, cuts_in
from offbeat.runtime.tensor_parallel.ways import TensorWays


def logical_state(model: nn.Module, group: DirectGroup) -> dict[str, Tensor]:
    """The model's `state_dict` with whole tensors, on every way; all ways call this together."""
    ways, whole = TensorWays(group), dict[int, Tensor]()
    cuts = cuts_in(model)
    result: dict[str, Tensor] = {}
    held: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, value in held.items():
        if name in cuts and id(value) not in whole:  # Tied parameters are gathered once.
            whole[id(value)] = ways.whole(value.detach(), cuts[name], f"the gathering of {name}")
        result[name] = whole.get(id(value), value.detach())
    return result


def load_logical_state(model: nn.Module, state: Mapping[str, Tensor], group: DirectGroup) -> None:
    """Load whole tensors into a model that is split, or into one that is not."""
    ways, cuts = TensorWays(group), cuts_in(model)
    model.load_state_dict(
        {name: ways.part(value, cuts[name]) if name in cuts else value for name, value in state.items()}
    )


def logical_optimizer_state(optimizer: Optimizer, group: DirectGroup) -> dict[str, Any]:
    """The optimizer's `state_dict` with whole tensors, on every way; all ways call this together."""
    ways, state = TensorWays(group), optimizer.state_dict()
    state = {**state, "state": {number: dict(own) for number, own in state["state"].items()}}
    for number, parameter in _numbered(optimizer):
        cut = cut_of(parameter)
        for name, value in state["state"].get(number, {}).items():
            if cut is not None and isinstance(value, Tensor) and value.shape == parameter.shape:
                state["state"][number][name] = ways.whole(value, cut, f"the gathering of {name}")
    return state


def load_logical_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], group: DirectGroup) -> None:
    """Load whole optimizer state into the optimizer of a model that is split, or of one that is not."""
    ways = TensorWays(group)
    own: dict[str, Any] = {**state, "state": {number: dict(each) for number, each in state["state"].items()}}
    for number, parameter in _numbered(optimizer):
        cut = cut_of(parameter)
        for name, value in own["state"].get(number, {}).items():
            if cut is not None and isinstance(value, Tensor) and _is_whole(value, parameter, cut):
                own["state"][number][name] = ways.part(value, cut)
    optimizer.load_state_dict(copy.copy(own))


def _is_whole(value: Tensor, parameter: Tensor, cut: Cut) -> bool:
    shape = list(parameter.shape)
    shape[cut.dim] = cut.size
    return list(value.shape) == shape


def _numbered(optimizer: Optimizer) -> list[tuple[int, Tensor]]:
    """Parameters by their number in the optimizer's `state_dict`."""
    return list(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))


def global_norm(parameters: Iterable[Tensor], group: DirectGroup, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of the logical model: split ones over all ways, replicated ones once."""
    gradients = [(cut_of(each), each.grad) for each in parameters if each.grad is not None]
    split = [gradient.detach() for cut, gradient in gradients if cut is not None]
    shared = [gradient.detach() for cut, gradient in gradients if cut is None]
    ways = TensorWays(group)
    if norm_type == float("inf"):
        largest = torch.stack([_norm(split, norm_type), _norm(shared, norm_type)])
        return ways.largest(largest, "the global norm").max()
    total = _norm(split, norm_type) ** norm_type
    return (ways.sum(total, "the global norm") + _norm(shared, norm_type) ** norm_type) ** (1 / norm_type)


def _norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=torch.float64)

"""Optimizer state of slices, made whole for checkpoints and for `optimizer.state_dict()`, and sliced again.

So a checkpoint does not depend on what was sharded: a run resumes under any `shard=...`, and without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import Parameter

from offbeat.runtime.gradients.slices import Range
from offbeat.runtime.groups.group import DirectGroup

_WHAT = "the gathering of the optimizer's state (every worker must call optimizer.state_dict())"
_COUNTERS = frozenset(["step", "mu_product", "eta", "mu"])
"""State that is one number, also of a parameter that is one."""
State = Mapping[str, Any]


def sliced(state: State, parameter: Tensor, own: Range) -> dict[str, Any]:
    """A parameter's state for a slice of it: what has the parameter's shape is sliced."""
    low, high = own

    def part(key: str, value: Any) -> Any:
        like = isinstance(value, Tensor) and value.shape == parameter.shape and key not in _COUNTERS
        return value.reshape(-1)[low:high].clone() if like else value

    return {key: part(key, value) for key, value in state.items()}


def gathered(
    state: Mapping[int, State],
    parameters: Sequence[Parameter],
    owned: Mapping[int, Sequence[Range]],
    group: DirectGroup,
) -> dict[int, dict[str, Any]]:
    """The state of whole parameters, from every worker's state of slices. Collective.

    Args:
        state: this worker's, by the number of the parameter in the optimizer.
        parameters: of the optimizer, in order.
        owned: by the number of a parameter that is sliced, each rank's range of it.
        group: the workers.

    """
    mine: dict[str, Tensor] = {}
    whole: dict[int, dict[str, Any]] = {}
    for number, entries in state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor) and number in owned:
                mine[f"{number}/{key}"] = value.detach().contiguous()
            else:
                whole.setdefault(number, {})[key] = value
    message = torch.frombuffer(bytearray(save(mine)), dtype=torch.uint8)
    for rank, payload in enumerate(group.payloads(message, False, _WHAT)):
        for name, value in load(payload.numpy().tobytes()).items():
            number, key = name.split("/", 1)
            index = int(number)
            (low, high), parameter = owned[index][rank], parameters[index]
            place = whole.setdefault(index, {})
            if key in _COUNTERS or value.shape != (high - low,):
                place[key] = value
                continue
            flat = place.setdefault(key, torch.zeros(parameter.shape, dtype=value.dtype))
            flat.view(-1)[low:high] = value
    return {index: whole[index] for index in sorted(whole)}

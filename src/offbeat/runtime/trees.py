"""State as tensors and text: nested plain data is taken apart into named tensors and JSON, and put together again.

Nothing is pickled, so a checkpoint from a stranger can damage a run but not run code.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import CheckpointError

_TENSOR, _TUPLE, _PAIRS = "~tensor", "~tuple", "~pairs"


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON data that stands for `value`; its tensors are put into `tensors` under names that begin with `name`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor | np.ndarray):
        tensors[name] = _stored(value if isinstance(value, Tensor) else torch.from_numpy(value))
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return {
            _PAIRS: [[take_apart(k, f"{name}.key", tensors), take_apart(v, f"{name}.{k}", tensors)] for k, v in pairs]
        }
    if isinstance(value, list | tuple | deque | set | frozenset):
        items: list[Any] = list(cast("Any", value))
        parts = [take_apart(item, f"{name}.{i}", tensors) for i, item in enumerate(items)]
        return {_TUPLE: parts} if isinstance(value, tuple) else parts
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it keeps tensors, numbers, text, lists "
        f"and "
        f"dictionaries, never pickles. Give that object a state_dict() of those."
    )


def put_together(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `take_apart` took apart."""
    if isinstance(data, list):
        return [put_together(item, tensors) for item in cast("list[Any]", data)]
    if isinstance(data, dict):
        held = cast("dict[str, Any]", data)
        if _TENSOR in held:
            return _found(held[_TENSOR], tensors)
        if _TUPLE in held:
            return tuple(put_together(item, tensors) for item in held[_TUPLE])
        return {put_together(k, tensors): put_together(v, tensors) for k, v in held[_PAIRS]}
    return data


def like(value: Any, example: Any) -> Any:
    """`value` with the container types of `example`: JSON knows lists and dictionaries only."""
    if isinstance(example, Counter | OrderedDict | deque | set):
        return type(cast("Any", example))(value)
    if isinstance(example, defaultdict):
        return defaultdict(cast("Any", example).default_factory, value)
    return value


def _found(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    try:
        return tensors[name]
    except KeyError:
        raise CheckpointError(f"the checkpoint's tensor {name!r} is missing from its file") from None


def _stored(tensor: Tensor) -> Tensor:
    # A copy of its own: safetensors refuses tensors that share memory, and training goes on while it is written.
    return tensor.detach().to("cpu", copy=True).contiguous()

"""Nested state as named tensors and JSON, and back.

Nothing is pickled, so an untrusted checkpoint can damage a run but not run code.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from itertools import chain, count
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import CheckpointError

_TENSOR, _ARRAY = "~tensor", "~array"
_PAIRS: dict[str, Any] = {"~pairs": dict, "~ordered": OrderedDict, "~counter": Counter}
_ITEMS: dict[str, Any] = {"~tuple": tuple, "~set": set, "~frozen": frozenset}
_DEQUE = "~deque"
_NUMBERS = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    }
)  # Data types of safetensors.


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON data for `value`; its tensors are put into `tensors` under names that begin with `name`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return take_apart(value.item(), name, tensors)
    if isinstance(value, Tensor | np.ndarray):
        # Keys `a.b`, or 1 and "1", may give two tensors the same path.
        free = next(text for text in chain([name], (f"{name}#{n}" for n in count(2))) if text not in tensors)
        tensors[free] = _stored(value if isinstance(value, Tensor) else _as_tensor(value, name), name)
        return {_TENSOR if isinstance(value, Tensor) else _ARRAY: free}
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        held = [[take_apart(k, f"{name}.key", tensors), take_apart(v, f"{name}.{k}", tensors)] for k, v in pairs]
        return {_tag(value, _PAIRS, "~pairs"): held}
    if isinstance(value, list | tuple | deque | set | frozenset):
        items: list[Any] = list(cast("Any", value))
        parts = [take_apart(item, f"{name}.{i}", tensors) for i, item in enumerate(items)]
        if isinstance(value, deque):
            return {_DEQUE: parts, "longest": cast("deque[Any]", value).maxlen}
        return parts if isinstance(value, list) else {_tag(value, _ITEMS, "~tuple"): parts}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it keeps tensors, numbers, text, lists "
        f"and dictionaries, never pickles. Give that object a state_dict() of those."
    )


def put_together(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `take_apart`."""
    if isinstance(data, list):
        return [put_together(item, tensors) for item in cast("list[Any]", data)]
    if not isinstance(data, dict):
        return data
    held = cast("dict[str, Any]", data)
    tag = next(iter(held))
    if tag in (_TENSOR, _ARRAY):
        tensor = tensors.get(held[tag])
        if tensor is None:
            raise CheckpointError(f"the checkpoint's tensor {held[tag]!r} is missing from its file")
        return tensor if tag == _TENSOR else tensor.numpy()
    if tag in _PAIRS:
        return _PAIRS[tag]({put_together(k, tensors): put_together(v, tensors) for k, v in held[tag]})
    items = [put_together(item, tensors) for item in held[tag]]
    return deque(items, held["longest"]) if tag == _DEQUE else _ITEMS[tag](items)


def like(value: Any, example: Any) -> Any:
    """`value` as a defaultdict if `example` is one: its factory cannot be stored."""
    if isinstance(example, defaultdict):
        return defaultdict(cast("Any", example).default_factory, value)
    return value


def _tag(value: Any, tags: Mapping[str, Any], otherwise: str) -> str:
    return next((tag for tag, kind in tags.items() if type(value) is kind), otherwise)


def _as_tensor(array: Any, name: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(array))  # A copy: torch warns about read-only arrays.
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{name} is an array of {array.dtype}, which a checkpoint cannot hold: {error}"
        ) from error


def _stored(tensor: Tensor, name: str) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _NUMBERS:
        kind = tensor.layout if tensor.layout != torch.strided else tensor.dtype
        raise CheckpointError(
            f"{name} is a tensor of {kind} on {tensor.device}, which a checkpoint cannot hold: its files keep dense "
            f"tensors of common types. Keep it in another form, such as its values and indices."
        )
    # A copy: safetensors refuses tensors that share memory, and training goes on while it is written.
    return tensor.detach().to("cpu", copy=True).contiguous()

"""A batch as one piece of memory: a description as MessagePack, then the numbers of its tensors. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import DataError

Memory = NDArray[np.uint8]
_ALIGNED = 64  # Bytes; torch's own alignment, so that its kernels take the same way as on tensors of its own.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_TENSOR, _ARRAY, _SCALAR, _LIST, _TUPLE, _MAPPING, _VALUE = range(7)


def written(batch: Any, allocate: Callable[[int], Memory]) -> Memory:
    """A batch, written into memory that `allocate` returns for a number of bytes: each tensor is copied once."""
    parts: list[tuple[int, NDArray[Any]]] = []
    end = 0

    def place(array: NDArray[Any]) -> int:
        nonlocal end
        start = -(-end // _ALIGNED) * _ALIGNED
        parts.append((start, array))
        end = start + array.nbytes
        return start

    try:
        header = msgspec.msgpack.encode(_described(batch, "the batch", place))
    except OverflowError as error:
        raise DataError(f"a batch has a whole number of more than 64 bits, which cannot be sent: {error}.") from error
    first = -(-(8 + len(header)) // _ALIGNED) * _ALIGNED
    memory = allocate(first + end)
    memory[:8].view("<u8")[0] = len(header)
    memory[8 : 8 + len(header)] = np.frombuffer(header, dtype=np.uint8)
    for start, array in parts:
        room = memory[first + start : first + start + array.nbytes]
        np.copyto(room.view(array.dtype).reshape(array.shape), array)
    return memory


def read(memory: Memory) -> Any:
    """The batch in this memory, as a copy of its own."""
    # Freshly allocated memory of torch's is aligned, and a loop may write into its batch.
    own = torch.empty(memory.nbytes, dtype=torch.uint8)
    own.numpy()[:] = memory
    length = int(memory[:8].view("<u8")[0])
    tree = msgspec.msgpack.decode(memory[8 : 8 + length].tobytes())
    first = -(-(8 + length) // _ALIGNED) * _ALIGNED
    return _restored(tree, own[first:])


def _described(value: Any, name: str, place: Callable[[NDArray[Any]], int]) -> list[Any]:
    kind = type(value)
    if kind in _PLAIN:
        return [_VALUE, value]
    if kind is Tensor:
        return [_TENSOR, *_of_tensor(value, name, place)]
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.names is not None:
            raise DataError(f"{name} is an array of {array.dtype}. {_advice()}")
        code = _SCALAR if isinstance(value, np.generic) else _ARRAY
        return [code, array.dtype.str, array.shape, place(array)]
    if kind is list or kind is tuple:
        items = [_described(item, f"{name}[{i}]", place) for i, item in enumerate(value)]
        return [_LIST if kind is list else _TUPLE, items]
    if kind is dict:
        pairs = cast("dict[Any, Any]", value).items()
        if strange := [key for key in value if type(key) not in _PLAIN]:
            raise DataError(f"{name} has the key {strange[0]!r}. {_advice()}")
        return [_MAPPING, [[key, _described(item, f"{name}[{key!r}]", place)] for key, item in pairs]]
    raise DataError(f"{name} is a {kind.__module__}.{kind.__qualname__}. {_advice()}")


def _advice() -> str:
    return (
        "Data servers send batches as tensors, arrays, numbers, text, lists, tuples and dictionaries of them, never as "
        "pickles. Return such from collate_fn (dict(...) or tuple(...) will often do), or omit --data-servers."
    )


def _of_tensor(tensor: Tensor, name: str, place: Callable[[NDArray[Any]], int]) -> list[Any]:
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        kind = tensor.layout if tensor.layout != torch.strided else f"a tensor on {tensor.device}"
        raise DataError(f"{name} is {kind}. {_advice()}")
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype).removeprefix("torch."), tensor.shape, place(flat), tensor.requires_grad]


def _restored(tree: list[Any], memory: Tensor) -> Any:
    code = tree[0]
    if code == _VALUE:
        return tree[1]
    if code == _TENSOR:
        dtype = cast("torch.dtype", getattr(torch, tree[1]))
        return _cut(memory, tree, dtype.itemsize).view(dtype).reshape(tree[2])
    if code in (_ARRAY, _SCALAR):
        dtype = np.dtype(tree[1])
        array = _cut(memory, tree, dtype.itemsize).numpy().view(dtype).reshape(tree[2])
        return array[()] if code == _SCALAR else array
    if code in (_LIST, _TUPLE):
        items = [_restored(item, memory) for item in tree[1]]
        return items if code == _LIST else tuple(items)
    return {key: _restored(item, memory) for key, item in tree[1]}


def _cut(memory: Tensor, tree: list[Any], itemsize: int) -> Tensor:
    count = 1
    for length in tree[2]:
        count *= length
    return memory[tree[3] : tree[3] + count * itemsize]

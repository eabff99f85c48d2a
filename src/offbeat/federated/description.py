"""What a process knows of model and task, so that a client with another one is refused and told the difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from math import prod
from pathlib import Path
from typing import Annotated, Final

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from offbeat.protocols.machine import Payload
from offbeat.task import TaskReference, load_module

MOST_NAMED: Final = 3
"""Differences that are named."""
LARGEST: Final = 16 * 1024**2
"""Largest description in bytes."""
MOST_STATISTICS: Final = 2**23
"""Numbers in the statistics of a client."""
_MOST_NAMES: Final = 1000
_MOST_DIMENSIONS: Final = 16
_TYPES: Final = ("bfloat16", "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")


class TensorForm(msgspec.Struct, frozen=True):
    """The type and shape of a tensor."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=MOST_STATISTICS)], ...], Meta(max_length=_MOST_DIMENSIONS)]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def empty(self) -> Tensor:
        """A tensor of this type and shape, without memory."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta")

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor."""
        return cls(str(tensor.dtype)[6:], tuple(tensor.shape))


StatisticForms = Annotated[dict[str, TensorForm], Meta(max_length=_MOST_NAMES)]
"""The form of each statistic, by name."""


class TaskDescription(msgspec.Struct, frozen=True):
    """A task and its model."""

    task: str
    """Name of the task's class."""
    source: str
    """Checksum of the file that defines it."""
    arguments: str
    """Its arguments, as JSON."""
    tensors: dict[str, str]
    """Type and shape of each parameter that is trained, and of each floating-point buffer."""
    statistics: StatisticForms = {}
    """What a client of an iterative task sums; empty: it has no examples, or its task is not iterative."""


def describe(reference: TaskReference, model: nn.Module) -> TaskDescription:
    """The description of a task and its model."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return described(reference, trained | {name: b for name, b in model.named_buffers() if b.is_floating_point()})


def described(
    reference: TaskReference, tensors: Mapping[str, Tensor], statistics: Mapping[str, Tensor] | None = None
) -> TaskDescription:
    """The description of a task whose global model is these tensors, and whose clients sum these statistics."""
    module = load_module(reference.source)
    source = getattr(module, "__file__", None)
    content = b"" if source is None else Path(source).read_bytes()
    return TaskDescription(
        task=reference.find().__name__,
        source=hashlib.sha256(content).hexdigest()[:16],
        arguments=json.dumps(reference.arguments, sort_keys=True),
        tensors={name: str(TensorForm.of(tensor)) for name, tensor in tensors.items()},
        statistics={name: TensorForm.of(tensor) for name, tensor in (statistics or {}).items()},
    )


def encoded(description: TaskDescription) -> Payload:
    """A description as a payload."""
    content = msgspec.msgpack.encode(description)
    return Payload(len(content), content)


def decoded(payload: Payload) -> TaskDescription | str:
    """A client's description; or, as text, why it cannot be read."""
    if not 0 < payload.nbytes <= LARGEST:
        return f"it describes its task in {payload.nbytes:,} bytes"
    try:
        return msgspec.msgpack.decode(bytes(payload.handle), type=TaskDescription)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return f"its description of the task cannot be read: {error}"


def difference(own: TaskDescription, other: TaskDescription) -> str:
    """How a client's description differs from the server's own; empty if it does not."""
    return "; ".join(islice(_differences(own, other), MOST_NAMED))


def bad_statistics(forms: Mapping[str, TensorForm]) -> str:
    """Why statistics of these forms cannot be summed; empty if they can."""
    if len(forms) > _MOST_NAMES:
        return f"it has {len(forms):,} statistics, and {_MOST_NAMES:,} are the limit: put some into one tensor"
    for name, form in forms.items():
        if form.dtype not in _TYPES:
            return f"statistic {name} is {form.dtype[:40]}, and federated sums real numbers"
    numbers = sum(prod(form.shape) for form in forms.values())
    if forms and not 0 < numbers <= MOST_STATISTICS:
        return f"its statistics have {numbers:,} numbers, and can have 1 to {MOST_STATISTICS:,}"
    return ""


def _differences(own: TaskDescription, other: TaskDescription) -> Iterator[str]:
    for name in dict.fromkeys((*own.tensors, *other.tensors)):
        mine, its = own.tensors.get(name), other.tensors.get(name)
        if mine != its:
            yield f"parameter {name} is {its or 'missing'} at the client, {mine or 'missing'} at the server"
    # Of clients without examples nothing is known, and of the server before the first client with some.
    for name in sorted({*own.statistics, *other.statistics}) if own.statistics and other.statistics else ():
        mine, its = own.statistics.get(name), other.statistics.get(name)
        if mine != its:
            yield f"statistic {name} is {its or 'missing'} at the client, {mine or 'missing'} at the first that joined"
    if list(own.tensors) != list(other.tensors) and set(own.tensors) == set(other.tensors):
        yield "its parameters have another order"
    if own.task != other.task:
        yield f"its task is {other.task}, the server's {own.task}"
    elif own.source != other.source:
        yield f"the file of task {own.task} differs: checksum {other.source} at the client, {own.source} at the server"
    if own.arguments != other.arguments:
        yield f"its task has arguments {other.arguments}, the server's {own.arguments}"

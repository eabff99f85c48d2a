"""What a process knows of model and task, so that a client with another one is refused and told the difference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
from torch import nn

from offbeat.protocols.machine import Payload
from offbeat.task import TaskReference, load_module

MOST_NAMED: Final = 3
"""Differences that are named."""
LARGEST: Final = 16 * 1024**2
"""Largest description in bytes."""


class Description(msgspec.Struct, frozen=True):
    """A task and its model."""

    task: str
    """Name of the task's class."""
    source: str
    """Checksum of the file that defines it."""
    arguments: str
    """Its arguments, as JSON."""
    tensors: dict[str, str]
    """Type and shape of each parameter that is trained, and of each floating-point buffer."""


def describe(reference: TaskReference, model: nn.Module) -> Description:
    """The description of a task and its model."""
    module = load_module(reference.source)
    source = getattr(module, "__file__", None)
    content = b"" if source is None else Path(source).read_bytes()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    buffers = [(name, b) for name, b in model.named_buffers() if b.is_floating_point()]
    return Description(
        task=reference.find().__name__,
        source=hashlib.sha256(content).hexdigest()[:16],
        arguments=json.dumps(reference.arguments, sort_keys=True),
        tensors={name: f"{str(t.dtype)[6:]} {tuple(t.shape)}" for name, t in (*trained, *buffers)},
    )


def encoded(description: Description) -> Payload:
    """A description as a payload."""
    content = msgspec.msgpack.encode(description)
    return Payload(len(content), content)


def difference(own: Description, payload: Payload) -> str:
    """How a client's description differs from the server's own; empty if it does not."""
    if not 0 < payload.nbytes <= LARGEST:
        return f"it describes its task in {payload.nbytes:,} bytes"
    try:
        other = msgspec.msgpack.decode(bytes(payload.handle), type=Description)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return f"its description of the task cannot be read: {error}"
    return "; ".join(islice(_differences(own, other), MOST_NAMED))


def _differences(own: Description, other: Description) -> Iterator[str]:
    for name in dict.fromkeys((*own.tensors, *other.tensors)):
        mine, its = own.tensors.get(name), other.tensors.get(name)
        if mine != its:
            yield f"parameter {name} is {its or 'missing'} at the client, {mine or 'missing'} at the server"
    if list(own.tensors) != list(other.tensors) and set(own.tensors) == set(other.tensors):
        yield "its parameters have another order"
    if own.task != other.task:
        yield f"its task is {other.task}, the server's {own.task}"
    elif own.source != other.source:
        yield f"the file of task {own.task} differs: checksum {other.source} at the client, {own.source} at the server"
    if own.arguments != other.arguments:
        yield f"its task has arguments {other.arguments}, the server's {own.arguments}"

"""Messages between the workers of a run and its data servers.

A worker reads a loader in *passes*. In each, it orders its batches by number, up to a window ahead of what it has used,
and each order says all that the batch depends on. So any data server can prepare any batch, again if need be: a data
server keeps nothing that another could not compute, and the cursor is the worker's, in its checkpoint.
"""

from __future__ import annotations

from msgspec import Struct

from offbeat.protocols.machine import Name


class Order(Struct, frozen=True, array_like=True, tag=True):
    """A worker needs this batch. The payload says which examples, and the seed of what is drawn for them."""

    loader: int
    turn: int  # The worker's passes over this loader so far, in all lives of its process: a later one ends the others.
    number: int  # Of the batch in its pass.
    floor: int  # The batches before this number are used: their memory is free.
    step: int  # Batches that the worker has used in this run, over all loaders.


class Used(Struct, frozen=True, array_like=True, tag=True):
    """Batches of this pass before `floor` are used: their memory is free."""

    loader: int
    turn: int
    floor: int


class Supply(Struct, frozen=True, array_like=True, tag=True):
    """A prepared batch, in the payload. Its memory stays as it is until the worker says that it is used."""

    loader: int
    turn: int
    number: int


class Spoiled(Struct, frozen=True, array_like=True, tag=True):
    """A batch could not be prepared: what happened, for the worker to raise when it comes to this batch."""

    loader: int
    turn: int
    number: int
    reason: str


class Busy(Struct, frozen=True, array_like=True, tag=True):
    """The data server lives, and has the worker's orders."""

    loader: int


DataMessage = Order | Used | Supply | Spoiled | Busy


def data_server_name(number: int) -> Name:
    """The name of a data server."""
    return f"data server {number}"

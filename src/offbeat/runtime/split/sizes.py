"""Sizes of tensors that remember where they come from, so that no size of one batch is taken for that of all."""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offbeat.errors import TaskError

WHOLE = "a module without modules of its own, or into one that Task.stages(model) returns (their code may do anything)"
"""Where code belongs that cannot be recorded."""


@dataclass
class SizeCheck:
    """Checks that a decision that was taken on a size, or on a constant, is taken the same way for a later batch."""

    operation: Callable[..., Any]
    """What was asked."""
    expected: Any
    """The answer for the batch on which the model was captured."""
    place: str
    """File and line of the code that asked."""
    accepted: list[Any] = field(default_factory=list[Any], compare=False)
    """Other answers that are known to make no difference."""
    surprises: list[Any] | None = field(default=None, compare=False)
    """Other answers, where they are to be collected rather than refused."""

    def __call__(self, *operands: Any, **keywords: Any) -> None:
        """Raise an error if the decision is another one now."""
        decided = self.operation(*operands, **keywords)
        if decided == self.expected or decided in self.accepted:
            return
        if self.surprises is not None:
            self.surprises.append(decided)
            return
        raise TaskError(
            f"{self.place} depends on the size of the batch: {getattr(self.operation, '__name__', 'a decision')} "
            f"was {self.expected!r} for the batch on which the model was captured, and is {decided!r} for this one, so "
            f"other calls would be needed. Put that code into {WHOLE}, or use batches of one size."
        )


class SizeRecorder(Protocol):
    """Where operations on sizes are recorded."""

    def compute(self, operation: Callable[..., Any], *operands: Any) -> Any:
        """The result of an operation on sizes, recorded."""
        ...

    def decide(self, operation: Callable[..., Any], *operands: Any) -> Any:
        """The same as a plain value, with a check that it is the same for every later batch."""
        ...


def _computed(operation: Callable[..., Any]) -> Any:
    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float, TracedInt, TracedFloat)) for other in others):
            return NotImplemented
        return self.recording.compute(operation, self, *others)

    return method


def _reflected(operation: Callable[..., Any]) -> Any:
    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            # A list times a size is as long as the size says, which must then be the same for every batch.
            return operation(other, self.__index__())
        return self.recording.compute(operation, other, self)

    return method


def _decided(operation: Callable[..., Any]) -> Any:
    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float, TracedInt, TracedFloat)) for other in others):
            return NotImplemented
        return self.recording.decide(operation, self, *others)

    return method


def _divided(self: Any, other: Any) -> Any:
    return self // other, self % other


def _hashed(self: Any) -> int:
    frame = inspect.currentframe()
    caller = None if frame is None else frame.f_back
    if caller is not None and caller.f_globals.get("__name__") == "einops.einops":
        # It keeps what it computes from sizes for later calls, unless they cannot be hashed, as torch's own cannot.
        raise TypeError("sizes that are recorded cannot be hashed here")
    return hash(self.recording.decide(operator.pos, self))


def _spelled(self: Any) -> str:
    return str(self.value)


def _formatted(self: Any, form: str) -> str:
    return format(self.value, form)


_METHODS: dict[str, Any] = {
    **{f"__{name}__": _computed(getattr(operator, name)) for name in ("add", "sub", "mul", "floordiv", "mod", "pow")},
    **{f"__r{name}__": _reflected(getattr(operator, name)) for name in ("add", "sub", "mul", "floordiv", "mod", "pow")},
    **{f"__{name}__": _decided(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "__truediv__": _computed(operator.truediv),
    "__rtruediv__": _reflected(operator.truediv),
    "__neg__": _computed(operator.neg),
    "__pos__": _computed(operator.pos),
    "__abs__": _computed(operator.abs),
    "__floor__": _computed(math.floor),
    "__ceil__": _computed(math.ceil),
    "__trunc__": _computed(math.trunc),
    "__round__": _computed(builtins.round),
    "__divmod__": _divided,
    "__int__": _decided(int),
    "__float__": _decided(float),
    "__bool__": _decided(bool),
    "__index__": _decided(operator.index),
    "__hash__": _hashed,
    "__repr__": _spelled,
    "__str__": _spelled,
    "__format__": _formatted,
}


class TracedInt(torch.SymInt):
    """A size as the model's code sees it. torch takes it wherever it takes an integer."""

    def __init__(self, recording: SizeRecorder, number: int, value: int) -> None:
        # The base class's `node` is for torch's own tracing, which never sees these.
        self.recording, self.number, self.value = recording, number, value


class TracedFloat(torch.SymFloat):
    """A fraction that was computed from sizes."""

    def __init__(self, recording: SizeRecorder, number: int, value: float) -> None:
        self.recording, self.number, self.value = recording, number, value


for _kind in (TracedInt, TracedFloat):
    for _name, _method in _METHODS.items():
        if _kind is TracedInt or _name != "__index__":
            setattr(_kind, _name, _method)


def plain(leaf: Any) -> Any:
    """A plain number in place of a traced one; anything else as it is."""
    return leaf.value if isinstance(leaf, (TracedInt, TracedFloat)) else leaf

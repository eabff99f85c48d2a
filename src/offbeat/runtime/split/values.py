"""The values that a model's code works with while it is recorded: which have been seen, and where they come from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import TaskError
from offbeat.runtime.split.graph import OwnTensor, Ref, leaves
from offbeat.runtime.split.sizes import TracedFloat, TracedInt

_HERE, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)


class KnownValues:
    """Tensors and sizes by number, and the parameters and buffers of the model by path."""

    def __init__(self, model: nn.Module) -> None:
        self.values: list[Any] = []
        """All values, by number; kept alive, so that no two of them have the same id."""
        self.inputs: list[int] = []
        """Values that are the model's inputs."""
        self.data: set[int] = set()
        """Values that depend on what is in the batch, in a parameter, or on random numbers."""
        self._own = {id(tensor): path for path, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._numbers: dict[int, int] = {}
        self._constants: list[Tensor] = []

    def add(self, value: Any) -> int:
        """The number of a new value; from now on it is what an object stands for."""
        self.values.append(value)
        number = len(self.values) - 1
        if isinstance(value, Tensor):
            self._numbers[id(value)] = number
        return number

    def add_input(self, leaf: Any) -> Any:
        """A leaf of the batch: a tensor becomes an input; anything else is a constant."""
        if isinstance(leaf, Tensor) and id(leaf) not in self._numbers:
            self.inputs.append(self.add(leaf))
            self.data.add(self.inputs[-1])
        return leaf

    def number(self, tensor: Tensor) -> int | None:
        """The number of a tensor, if it is a value."""
        return self._numbers.get(id(tensor))

    def is_own(self, leaf: Any) -> bool:
        """Whether it is a parameter or buffer of the model."""
        return id(leaf) in self._own

    def is_parameter(self, leaf: Any) -> bool:
        """Whether it is a parameter of the model."""
        return id(leaf) in self._parameters

    def from_data(self, arguments: Any) -> bool:
        """Whether the arguments depend on the contents of the batch or of parameters."""
        return any(
            self._numbers.get(id(leaf)) in self.data or id(leaf) in self._parameters
            for leaf in leaves(arguments)
            if isinstance(leaf, Tensor)
        )

    def reference(self, leaf: Any) -> Any:
        """What stands for a value in recorded arguments."""
        if isinstance(leaf, (TracedInt, TracedFloat)):
            return Ref(leaf.number)
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._numbers:
            return Ref(self._numbers[id(leaf)])
        if id(leaf) in self._own:
            return OwnTensor(self._own[id(leaf)])
        if leaf.grad_fn is not None or isinstance(leaf, nn.Parameter):
            raise TaskError(
                f"{place()} uses a tensor of shape {tuple(leaf.shape)} that is neither computed from this batch nor a "
                f"parameter or buffer of the model, so no part can own it. Register it with the module that uses it "
                f"(nn.Parameter as an attribute, register_buffer), and keep no tensor from one batch to the next."
            )
        self._constants.append(leaf)
        return leaf


def place() -> str:
    """File and line of the innermost code that is neither torch's nor this folder's."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch's own code"

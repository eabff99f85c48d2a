"""What the parts of a stage cost, measured as they will run: with the criterion, while other stages compute too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.runtime.pipeline.backward import backward, input_gradients
from offbeat.runtime.split.capture import undisturbed
from offbeat.runtime.split.stages import SplitModel, StagePart, Value

RUNS = range(4, 21)
"""Runs that count: at least and at most; within that, as many as `QUICK` has room for."""
QUICK, LONG = 0.25, 3.0
"""Seconds of measuring that are enough, and seconds of a run that is not repeated."""


class PartCost(NamedTuple):
    """What a part costs for one microbatch."""

    forward: float  # Seconds of forward, with the criterion on the last part.
    backward: float  # Seconds of both gradients.
    weights: float  # Of these, seconds of the gradients of weights; 0 if they are not computed apart.
    saved_bytes: int  # Bytes kept from forward to backward, beside parameters, buffers and the batch itself.


@dataclass(frozen=True)
class PartSettings:
    """How a stage runs its parts."""

    criterion: Callable[[Any, Any], Tensor]
    apart: bool
    """Whether gradients of weights are computed apart from those of inputs."""


@dataclass(frozen=True)
class Rehearsal:
    """A microbatch as it passes through all parts of a model, to measure some of them."""

    split: SplitModel
    values: Mapping[Value, Tensor]
    """Every value that a part takes."""
    target: Any
    """The microbatch's target."""

    @classmethod
    def of(cls, split: SplitModel, model: nn.Module, inputs: Any, target: Any) -> Rehearsal:
        """Run the parts one after the other, which needs the whole model."""
        tensors, values = split.inputs(inputs), dict[Value, Tensor]()
        with undisturbed(model), torch.no_grad():
            for part in split.parts:
                values |= {value: tensors[value.index] for value in part.takes if value.producer < 0}
                values |= dict(zip(part.gives, part(*(values[value] for value in part.takes)), strict=True))
        return cls(split, values, target)

    def nbytes(self, values: Iterable[Value]) -> int:
        """Bytes of these values."""
        return sum(self.values[value].nbytes for value in values)

    def costs(
        self, numbers: Sequence[int], settings: PartSettings, longest: Callable[[float], float]
    ) -> list[PartCost]:
        """What these parts cost; `longest` answers the largest of the seconds that the workers give it.

        Gradients are collected as in a step, and dropped in the end.
        """
        runs = [_PartRun(self, number, settings) for number in numbers]
        parts = nn.ModuleList(self.split.parts[number] for number in numbers)
        seconds = 0.0
        with undisturbed(parts), torch.enable_grad():
            for _ in range(2):  # The first one warms up.
                began = time.perf_counter()
                for run in runs:
                    run.once()
                seconds = longest(time.perf_counter() - began)
            # The same number on all workers, as some may have to meet in each run.
            count = 0 if seconds > LONG else min(RUNS.stop - 1, max(RUNS.start, round(QUICK / max(seconds, 1e-9))))
            for _ in range(count):
                for run in runs:
                    run.once()
        for parameter in parts.parameters():
            parameter.grad = None
        return [run.cost() for run in runs]


@dataclass
class _PartRun:
    """A part that is run forward and backward again and again."""

    rehearsal: Rehearsal
    number: int
    settings: PartSettings
    times: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    saved: int = 0

    def once(self) -> None:
        """Run it; the first time, also count what it keeps."""
        part = self.rehearsal.split.parts[self.number]
        values = self.rehearsal.values
        taken = {value: values[value].detach().requires_grad_(value.differentiable) for value in part.takes}
        kept = None if self.times else _Storages()
        began = time.perf_counter()
        with nullcontext() if kept is None else torch.autograd.graph.saved_tensors_hooks(kept.add, _same):
            outputs = self._outputs(part, list(taken.values()))
        forward = time.perf_counter() - began
        if kept is not None:
            for tensor in (*(t for value, t in taken.items() if value.producer >= 0), *outputs):
                kept.add(tensor)  # They stay, too, to begin backward with, or to hold gradients.
            self.saved = kept.nbytes(without=[*part.parameters(), *part.buffers(), *self._batch()])
        roots = [output for output in outputs if output.requires_grad]
        gradients: list[Tensor | None] = [torch.ones_like(root) for root in roots]
        leaves = [tensor for value, tensor in taken.items() if value.producer >= 0 and value.differentiable]
        began, weights = time.perf_counter(), 0.0
        if self.settings.apart:
            rest = input_gradients(roots, gradients, leaves)
            middle = time.perf_counter()
            rest()
            weights = time.perf_counter() - middle
        else:
            backward(roots, gradients)
        self.times.append((forward, time.perf_counter() - began, weights))

    def _outputs(self, part: StagePart, taken: Sequence[Tensor]) -> list[Tensor]:
        """What backward begins with: the loss on the last part, if it is one."""
        given = part(*taken)
        if self.number == len(self.rehearsal.split.parts) - 1:
            loss = self.settings.criterion(self.rehearsal.split.restore(given), self.rehearsal.target)
            if isinstance(loss, Tensor) and loss.numel() == 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                return [loss]  # Anything else is refused when the step computes it.
        return list(given)

    def _batch(self) -> list[Tensor]:
        """The tensors of the batch, which are kept anyway."""
        inputs = [tensor for value, tensor in self.rehearsal.values.items() if value.producer < 0]
        return [*inputs, *self.rehearsal.split.inputs(self.rehearsal.target)]

    def cost(self) -> PartCost:
        """The means: in a step, too, some runs are held up by what else the machine does."""
        times = self.times[2:] or self.times[1:]
        forward, both, weights = (statistics.fmean(column) for column in zip(*times, strict=True))
        return PartCost(forward, both, weights, self.saved)


class _Storages:
    """Different pieces of memory, of which tensors may share one."""

    def __init__(self) -> None:
        self._nbytes: dict[int, int] = {}

    def add(self, tensor: Tensor) -> Tensor:
        """Note the memory of a tensor; returns the tensor."""
        storage = tensor.untyped_storage()
        self._nbytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def nbytes(self, without: Iterable[Tensor]) -> int:
        """Their size together, without the memory of these tensors."""
        left_out = {tensor.untyped_storage().data_ptr() for tensor in without}
        return sum(nbytes for pointer, nbytes in self._nbytes.items() if pointer not in left_out)


def _same(tensor: Tensor) -> Tensor:
    return tensor

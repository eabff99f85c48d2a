"""Parts of a captured model: which values each takes and gives, and how it computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from offbeat.errors import TaskError
from offbeat.runtime.split.graph import Graph, ModelCall, ModelLayer, OwnTensor, Ref, flat, leaves, mapped

INPUT = -1
"""Producer of values that are the model's own inputs."""


@dataclass(frozen=True)
class Value:
    """A tensor that crosses from one part to others, or enters as an input of the model."""

    producer: int
    """The part that gives it, or -1 for an input of the model."""
    index: int
    """Its place among what that part gives, or among the model's input tensors."""
    differentiable: bool = True
    """Whether a gradient comes back for it."""


class StagePart(nn.Module):
    """Consecutive layers of a model; it has the model's own modules and parameters, under their own names."""

    takes: tuple[Value, ...]
    """What it is called with."""
    gives: tuple[Value, ...]
    """What it returns."""
    logical: dict[str, str]
    """For each of its parameters and buffers, the name that the model has for it."""
    layers: tuple[str, ...]
    """Names of its layers."""

    def __init__(self, graph: Graph, calls: Sequence[ModelCall], layers: Sequence[str], wanted: _Wanted) -> None:
        super().__init__()
        self.takes, self.gives, self.layers = wanted.takes, wanted.gives, tuple(layers)
        _adopt(self, graph, calls)
        names = {id(tensor): name for name, tensor in _state(graph.model, remove_duplicate=True)}
        self.logical = {name: names.get(id(tensor), name) for name, tensor in _state(self)}
        self._program = _Program(graph, calls, wanted)
        self._differs = graph.evaluation_differs
        self.training = graph.model.training  # Not its modules', which are the model's own.

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the part gives, from what it takes."""
        if len(tensors) != len(self.takes):
            raise TypeError(f"this part takes {len(self.takes)} tensors, and was called with {len(tensors)}")
        if self._differs is not None and not self.training:
            raise TaskError(
                f"The model makes other calls in evaluation than in training, first at {self._differs}, so its parts "
                f"cannot evaluate. Let both take the same way, such as functional.dropout(x, training=self.training) "
                f"in place of `if self.training`, or put that code into a module without modules of its own."
            )
        return self._program.run(tensors, self.training)


@dataclass(frozen=True)
class _Wanted:
    """What a part takes and gives, as values and as numbers in the graph."""

    takes: tuple[Value, ...]
    taken: tuple[int, ...]
    gives: tuple[Value, ...]
    given: tuple[int, ...]


def assemble(graph: Graph, layers: Sequence[ModelLayer], bounds: Sequence[int]) -> list[StagePart]:
    """The parts of a cut at these layers."""
    ranges = [(layers[start].start, layers[stop - 1].stop) for start, stop in pairwise(bounds)]
    parts = [_with_repeats(graph, start, stop) for start, stop in ranges]
    wanted = _wanted(graph, parts)
    names = [[layer.name for layer in layers[start:stop]] for start, stop in pairwise(bounds)]
    return [StagePart(graph, *each) for each in zip(parts, names, wanted, strict=True)]


def crossing(graph: Graph, layers: Sequence[ModelLayer]) -> list[list[int]]:
    """Bytes of each value that would cross a cut directly after each layer."""
    producers = graph.producers()
    last_use = dict.fromkeys(graph.outputs(), len(graph.calls))
    for index, call in reversed(list(enumerate(graph.calls))):
        for number in call.refs():
            last_use.setdefault(number, index)
    return [
        [
            graph.facts[number].nbytes
            for number, index in producers.items()
            if index < layer.stop <= last_use.get(number, -1) and not graph.calls[index].repeatable
        ]
        for layer in layers
    ]


def _with_repeats(graph: Graph, start: int, stop: int) -> list[ModelCall]:
    """The calls of a part, preceded by cheap ones of earlier parts that it computes again."""
    producers = graph.producers()
    needed = {number for call in graph.calls[start:stop] for number in call.refs()}
    if stop == len(graph.calls):
        needed |= set(graph.outputs())
    repeats: list[ModelCall] = []
    for index in range(start - 1, -1, -1):
        call = graph.calls[index]
        if call.repeatable and any(producers.get(number) == index for number in needed):
            repeats.append(call)
            needed |= call.refs()
    return [*reversed(repeats), *graph.calls[start:stop]]


def _wanted(graph: Graph, parts: Sequence[Sequence[ModelCall]]) -> list[_Wanted]:
    """What every part takes and gives."""
    outputs = graph.outputs()
    home: dict[int, int] = dict.fromkeys(graph.inputs, INPUT)
    taken: list[list[int]] = []
    for number, calls in enumerate(parts):
        own = {value for call in calls for value in call.results if value is not None}
        uses = [value for call in calls for value in sorted(call.refs())]
        if number == len(parts) - 1:
            uses += outputs
        taken.append([value for value in dict.fromkeys(uses) if value not in own])
        for value in own:
            home.setdefault(value, number)
    given = [
        sorted({value for uses in taken[number + 1 :] for value in uses if home[value] == number})
        for number in range(len(parts))
    ]
    given[-1] = list(outputs)
    places = {(INPUT, value): index for index, value in enumerate(graph.inputs)}
    places |= {(part, value): index for part, values in enumerate(given) for index, value in enumerate(values)}

    def described(value: int, producer: int) -> Value:
        return Value(producer, places[producer, value], graph.facts[value].differentiable)

    return [
        _Wanted(
            tuple(described(value, home[value]) for value in uses),
            tuple(uses),
            tuple(described(value, number) for value in gives),
            tuple(gives),
        )
        for number, (uses, gives) in enumerate(zip(taken, given, strict=True))
    ]


def _state(module: nn.Module, *, remove_duplicate: bool = False) -> list[tuple[str, Tensor]]:
    return [
        *module.named_parameters(remove_duplicate=remove_duplicate),
        *module.named_buffers(remove_duplicate=remove_duplicate),
    ]


def _adopt(part: nn.Module, graph: Graph, calls: Sequence[ModelCall]) -> None:
    """Register what the calls use of the model in the part, under the same paths."""
    model = graph.model
    paths = {id(module): path for path, module in model.named_modules(remove_duplicate=False)}
    modules = {paths[id(call.module)]: call.module for call in calls if call.module is not None}
    for path in sorted(modules, key=len):
        parent, _, name = path.rpartition(".")
        folder = _folder(part, parent)
        # Directly, because a model may have names that a part uses itself, such as `takes`.
        folder._modules.setdefault(name, modules[path])  # pyright: ignore[reportPrivateUsage]
    for path in sorted({path for call in calls for path in call.held()}):
        parent, _, name = path.rpartition(".")
        folder, tensor = _folder(part, parent), graph.tensor(path)
        tensors = folder._parameters if isinstance(tensor, nn.Parameter) else folder._buffers  # pyright: ignore[reportPrivateUsage]
        cast("dict[str, Tensor]", tensors).setdefault(name, tensor)


def _folder(part: nn.Module, path: str) -> nn.Module:
    """The module at a path of the part; empty ones are made where there is none."""
    folder = part
    for name in path.split(".") if path else []:
        inner = folder._modules.setdefault(name, nn.Module())  # pyright: ignore[reportPrivateUsage]
        assert inner is not None  # noqa: S101 -- a model's path leads through modules only
        folder = inner
    return folder


Slots = list[Any]
Getter = Callable[[Slots], Any]


class _Program:
    """The calls of a part, prepared to run quickly: every value has a slot."""

    def __init__(self, graph: Graph, calls: Sequence[ModelCall], wanted: _Wanted) -> None:
        self._model = graph.model
        numbers = [*wanted.taken, *(value for call in calls for value in call.results if value is not None)]
        self._slots = {value: slot for slot, value in enumerate(dict.fromkeys(numbers))}
        self._integers = [slot for slot, value in enumerate(wanted.taken) if graph.facts[value].integer]
        self._given = [self._slots[value] for value in wanted.given]
        self._sends_integers = any(graph.facts[value].integer for value in wanted.given)
        self._steps = [_Prepared(self, call, graph.model) for call in calls]
        kept = set(self._given)
        for step in reversed(self._steps):
            step.last_uses = [slot for slot in step.touched if slot not in kept]
            kept |= set(step.last_uses)

    def slot(self, value: int) -> int:
        return self._slots[value]

    def run(self, tensors: Sequence[Tensor], training: bool) -> tuple[Tensor, ...]:
        slots: Slots = [None] * len(self._slots)
        slots[: len(tensors)] = tensors
        for slot in self._integers:
            slots[slot] = int(slots[slot])
        for step in self._steps:
            step.run(slots, training)
        if self._sends_integers:
            return tuple(
                slots[slot] if isinstance(slots[slot], Tensor) else torch.tensor(slots[slot]) for slot in self._given
            )
        return tuple([slots[slot] for slot in self._given])


class _Prepared:
    """One call with the slots of its arguments and results."""

    def __init__(self, program: _Program, call: ModelCall, model: nn.Module) -> None:
        self._call = call
        self._target = call.target
        self._results = [None if value is None else program.slot(value) for value in call.results]
        self._plain = not call.grad or call.autocast is not None
        self.touched = {program.slot(value) for value in call.refs()} | {s for s in self._results if s is not None}
        self.last_uses: list[int] = []

        def getter(arguments: Any) -> Getter:
            return _getter(arguments, program, model)

        self._args, self._kwargs = [getter(arg) for arg in call.args], _keywords(call.kwargs, getter)
        self._other = None
        if call.in_evaluation is not None:
            args, kwargs = call.in_evaluation
            self._other = [getter(arg) for arg in args], _keywords(kwargs, getter)

    def run(self, slots: Slots, training: bool) -> None:
        args, kwargs = (self._args, self._kwargs) if training or self._other is None else self._other
        try:
            if self._plain:
                with self._modes():
                    result = self._called(slots, args, kwargs)
            else:
                result = self._called(slots, args, kwargs)
        except TaskError:
            raise
        except Exception as error:
            error.add_note(f"in {self._call.name or 'the model'}, called at {self._call.place}")
            raise
        if self._results:
            parts = (result,) if isinstance(result, Tensor) else flat(result)
            if len(parts) != len(self._results):
                raise TaskError(_other_results(self._call, len(parts)))
            for slot, part in zip(self._results, parts, strict=True):
                if slot is not None:
                    slots[slot] = part
        for slot in self.last_uses:
            slots[slot] = None

    def _called(self, slots: Slots, args: list[Getter], kwargs: dict[str, Getter]) -> Any:
        if kwargs:
            return self._target(*[get(slots) for get in args], **{name: get(slots) for name, get in kwargs.items()})
        return self._target(*[get(slots) for get in args])

    def _modes(self) -> AbstractContextManager[Any]:
        modes = ExitStack()
        modes.enter_context(nullcontext() if self._call.grad else torch.no_grad())
        if self._call.autocast is not None:
            enabled, dtype = self._call.autocast
            modes.enter_context(torch.autocast("cpu", dtype, enabled=enabled))
        return modes


def _keywords(kwargs: dict[str, Any], getter: Callable[[Any], Getter]) -> dict[str, Getter]:
    return {name: getter(value) for name, value in kwargs.items()}


def _getter(argument: Any, program: _Program, model: nn.Module) -> Getter:
    """A function from the slots to the argument."""
    if isinstance(argument, Ref):
        slot = program.slot(argument.number)
        return lambda slots: slots[slot]
    if isinstance(argument, OwnTensor):
        parent, _, name = argument.path.rpartition(".")
        owner = model.get_submodule(parent)
        return lambda _: getattr(owner, name)
    if not any(isinstance(leaf, (Ref, OwnTensor)) for leaf in leaves(argument)):
        return lambda _: argument
    if type(argument) in (tuple, list):
        kind, getters = type(argument), [_getter(part, program, model) for part in argument]
        return lambda slots: kind([get(slots) for get in getters])

    def build(slots: Slots) -> Any:
        return mapped(
            argument,
            lambda leaf: _getter(leaf, program, model)(slots) if isinstance(leaf, (Ref, OwnTensor)) else leaf,
        )

    return build


def _other_results(call: ModelCall, count: int) -> str:
    name = getattr(call.target, "__name__", type(call.target).__name__)
    return (
        f"{name} at {call.place} returned {count} values, and {len(call.results)} for the batch on which the model was "
        f"captured, so other calls would be needed. Put that code into a module that is kept whole (a module without "
        f"modules of its own, or one named in `kept`), or use batches of one size."
    )

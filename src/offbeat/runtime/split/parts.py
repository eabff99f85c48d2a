"""Parts of a captured model: which values each takes and gives, and how it computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from offbeat.errors import TaskError
from offbeat.runtime.split.graph import Graph, ModelCall, ModelLayer, OwnTensor, Ref, flat, leaves, mapped
from offbeat.runtime.split.sizes import WHOLE

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


class _Program:
    """The calls of a part as one Python function, a line for each call, so that running them costs nothing extra."""

    def __init__(self, graph: Graph, calls: Sequence[ModelCall], wanted: _Wanted) -> None:
        self._model, self._calls, self._facts = graph.model, calls, graph.facts
        self._names: dict[str, Any] = {"spread": _spread, "whole": int, "sent": torch.tensor, "rebuilt": _rebuilt}
        last_uses = self._last_uses(wanted)
        lines = [f"def run(training, {', '.join(f'v{value}' for value in wanted.taken)}):"]
        whole = [f"v{value} = whole(v{value})" for value in wanted.taken if graph.facts[value].integer]
        lines.append(f"    {'; '.join(whole) or 'pass'}")
        for index, call in enumerate(calls):
            unused = "".join(f"; v{value} = None" for value in last_uses[index])
            lines.append(f"    {self._line(call)}{unused}")
        given = [f"sent(v{v})" if graph.facts[v].integer else f"v{v}" for v in wanted.given]
        lines.append(f"    return ({''.join(f'{value}, ' for value in given)})")
        self._file = f"<part of {type(graph.model).__name__}>"
        # The text is made of numbers and names that were made here, and of nothing that comes from outside.
        exec(compile("\n".join(lines), self._file, "exec"), self._names)  # noqa: S102
        self._function = cast("Callable[..., tuple[Tensor, ...]]", self._names["run"])

    def run(self, tensors: Sequence[Tensor], training: bool) -> tuple[Tensor, ...]:
        try:
            return self._function(training, *tensors)
        except TaskError:
            raise
        except Exception as error:
            call = self._failed(error)
            if call is not None:
                error.add_note(f"in {call.name or 'the model'}, called at {call.place}")
            raise

    def _failed(self, error: Exception) -> ModelCall | None:
        """The call that raised an error, by its line."""
        trace = error.__traceback__
        while trace is not None:
            line = trace.tb_lineno - 3
            if trace.tb_frame.f_code.co_filename == self._file and 0 <= line < len(self._calls):
                return self._calls[line]
            trace = trace.tb_next
        return None

    def _last_uses(self, wanted: _Wanted) -> list[list[int]]:
        """For each call, the values that nothing needs after it, so that their memory is free early."""
        needed = set(wanted.given)
        unused: list[list[int]] = []
        for call in reversed(self._calls):
            own = call.refs() | {value for value in call.results if value is not None}
            unused.append(sorted(own - needed))
            needed |= own
        return unused[::-1]

    def _line(self, call: ModelCall) -> str:
        target = self._named(call.target)
        line = f"{target}({self._arguments(call.args, call.kwargs)})"
        if call.in_evaluation is not None:
            line = f"{line} if training else {target}({self._arguments(*call.in_evaluation)})"
        if call.results:
            names = ", ".join(f"v{value}" if value is not None else "_" for value in call.results)
            line = f"{names} = {line}" if call.direct else f"{names}, = spread({line}, {self._named(call)})"
        modes: list[str] = []
        if not call.grad:
            modes.append(f"{self._named(torch.no_grad)}()")
        if call.autocast is not None:
            enabled, dtype = call.autocast
            modes.append(f"{self._named(torch.autocast)}('cpu', {self._named(dtype)}, {enabled})")
        return f"with {', '.join(modes)}: {line}" if modes else line

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        spelled = [self._spelled(arg) for arg in args]
        if kwargs:
            spelled.append(f"**{self._spelled(kwargs)}")
        return ", ".join(spelled)

    def _spelled(self, argument: Any) -> str:
        """A Python expression for an argument."""
        if isinstance(argument, Ref):
            return f"v{argument.number}"
        if isinstance(argument, OwnTensor):
            parent, _, name = argument.path.rpartition(".")
            return f"getattr({self._named(self._model.get_submodule(parent))}, {name!r})"
        if not any(isinstance(leaf, (Ref, OwnTensor)) for leaf in leaves(argument)):
            return self._named(argument)
        if type(argument) in (tuple, list):
            inner = "".join(f"{self._spelled(part)}, " for part in argument)
            return f"({inner})" if isinstance(argument, tuple) else f"[{inner}]"
        if type(argument) is dict:
            items = cast("dict[Any, Any]", argument).items()
            return "{" + ", ".join(f"{self._named(key)}: {self._spelled(part)}" for key, part in items) + "}"
        if type(argument) is slice:
            parts = (argument.start, argument.stop, argument.step)
            return f"slice({', '.join(self._spelled(part) for part in parts)})"
        inner = ", ".join(self._spelled(leaf) for leaf in leaves(argument))
        return f"rebuilt({self._named(argument)}, [{inner}])"

    def _named(self, value: Any) -> str:
        """A name that stands for a value in the function."""
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


def _spread(result: Any, call: ModelCall) -> Sequence[Any]:
    """The parts of a result that has several, or may be more than a tensor."""
    parts = (result,) if isinstance(result, Tensor) else flat(result)
    if len(parts) != len(call.results):
        raise TaskError(_other_results(call, len(parts)))
    return parts


def _rebuilt(structure: Any, parts: Sequence[Any]) -> Any:
    """A structure with other leaves."""
    following = iter(parts)
    return mapped(structure, lambda _: next(following))


def _other_results(call: ModelCall, count: int) -> str:
    name = getattr(call.target, "__name__", type(call.target).__name__)
    return (
        f"{name} at {call.place} returned {count} values, and {len(call.results)} for the batch on which the model was "
        f"captured, so other calls would be needed. Put that code into {WHOLE}, or use batches of one size."
    )

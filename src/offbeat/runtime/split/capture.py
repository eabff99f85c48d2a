"""From a model and a batch to the calls that the model makes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from offbeat.errors import OffbeatError, TaskError, did_you_mean
from offbeat.runtime.split.graph import Graph, ModelCall, OwnTensor, Ref, ValueFacts, copied, leaves, mapped
from offbeat.runtime.split.recorder import CallRecorder, DataDependentError, address, recording
from offbeat.runtime.split.verify import verify


def capture(model: nn.Module, inputs: tuple[Any, ...], kept: frozenset[str] = frozenset()) -> Graph:
    """The calls that the model makes on these inputs, for training and, where they differ, for evaluation."""
    names = dict(model.named_modules())
    for name in kept:
        if name not in names:
            raise TaskError(f"kept={name!r} is not a module of {type(model).__name__}.{did_you_mean(name, names)}")
    # What torch.compile returns has the model inside; its calls are recorded, and parts run them uncompiled.
    return _captured(model, getattr(model, "_orig_mod", model), inputs, kept)


def capture_layers(model: nn.Module, inputs: tuple[Any, ...], layers: Sequence[nn.Module]) -> Graph:
    """The graph of modules that run one after another, each on what the one before it returned."""
    names = {id(module): name for name, module in model.named_modules()}
    for index, layer in enumerate(layers):
        if id(layer) not in names:
            raise TaskError(
                f"layers[{index}], a {type(layer).__name__}, is not a module of {type(model).__name__}, so its "
                f"parameters would not be trained or saved. Return modules that are attributes of the model."
            )
    if not layers:
        raise TaskError(f"The list of layers of {type(model).__name__} is empty, so there is nothing to cut.")
    return _captured(model, _Chain(layers), inputs, frozenset(names[id(layer)] for layer in layers))


class _Chain:
    """Modules that run one after another, as a function; a tuple is passed on as several arguments."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers

    def __call__(self, *inputs: Any) -> Any:
        values: tuple[Any, ...] = inputs
        result: Any = None
        for layer in self._layers:
            result = layer(*values)
            values = cast("tuple[Any, ...]", result) if isinstance(result, tuple) else (result,)
        return result


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """Leaves buffers and the state of random numbers afterwards as they were before."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _captured(model: nn.Module, run: Any, inputs: tuple[Any, ...], kept: frozenset[str]) -> Graph:
    """Capture a model as its code runs; or, if that depends on the data, as it runs under torch.compile.

    Libraries such as transformers look at the data to save work, and leave that out where `torch.compiler` says that
    the model is being compiled.
    """
    try:
        graph = _in_both_modes(model, run, inputs, kept)
    except DataDependentError as refusal:
        try:
            with _as_if_compiling():
                graph = _in_both_modes(model, run, inputs, kept)
        except Exception:
            raise refusal from None
    with undisturbed(model), torch.no_grad():
        verify(graph, run, inputs)
    return graph


@contextmanager
def _as_if_compiling() -> Generator[None]:
    """Makes `torch.compiler.is_compiling()` true, as `torch.export` does while it traces."""
    compiler = cast("Any", torch.compiler)
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def _in_both_modes(model: nn.Module, run: Any, inputs: tuple[Any, ...], kept: frozenset[str]) -> Graph:
    """The calls for training, with the arguments that differ in evaluation."""
    modes = {module: module.training for module in model.modules()}
    if not model.training:
        model.train()
    try:
        with undisturbed(model), torch.enable_grad():
            graph = _recorded(model, run, inputs, kept)
        model.eval()
        with undisturbed(model), torch.enable_grad():
            return _with_evaluation(graph, _recorded(model, run, inputs, kept))
    finally:
        for module, mode in modes.items():
            module.training = mode


def _recorded(model: nn.Module, run: Any, inputs: tuple[Any, ...], kept: frozenset[str]) -> Graph:
    recorder = CallRecorder(model, kept)
    inputs = mapped(copied(inputs), recorder.known.add_input)
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    versions = {name: buffer._version for name, buffer in model.named_buffers()}  # pyright: ignore[reportPrivateUsage]
    try:
        with recording(recorder):
            output = run(*inputs)
    except OffbeatError:
        raise
    except Exception as error:
        error.add_note(f"while {type(model).__name__} was run on a batch to see what it calls")
        raise
    after = dict(model.named_buffers())
    for name, identity in before.items():
        if id(after.get(name)) != identity:
            raise TaskError(
                f"{type(model).__name__} assigns a new tensor to its buffer {name!r} in forward, which its parts could "
                f"not see. Change the buffer in place instead, such as `self.{name}.copy_(...)`."
            )
    changing = frozenset(name for name, buffer in after.items() if buffer._version != versions[name])  # pyright: ignore[reportPrivateUsage]
    returned = _output(output, recorder, model)
    graph = Graph(model, tuple(recorder.known.inputs), recorder.calls, _facts(recorder), returned)
    graph.changing = changing
    graph.glued = _glued(graph, recorder)
    _mark_repeatable(graph, recorder)
    _check_parameters(graph, output)
    recorder.forget()
    return _without_unused_sizes(graph)


def _facts(recorder: CallRecorder) -> dict[int, ValueFacts]:
    """What is known of each value, once nothing changes any more."""
    facts: dict[int, ValueFacts] = {}
    for number, value in enumerate(recorder.known.values):
        if isinstance(value, Tensor):
            floating = value.is_floating_point() or value.is_complex()
            facts[number] = ValueFacts(value.nbytes, floating and value.requires_grad)
        else:
            facts[number] = ValueFacts(8, integer=True)
    return facts


def _output(output: Any, recorder: CallRecorder, model: nn.Module) -> Any:
    """The model's output with references in place of tensors."""

    def reference(leaf: Any) -> Any:
        reference = recorder.known.reference(leaf)
        if isinstance(reference, (OwnTensor, Tensor)):
            return recorder.give(leaf)
        if isinstance(reference, Ref) or leaf is None or isinstance(leaf, (bool, int, float, str)):
            return reference
        raise TaskError(
            f"{type(model).__name__} returns a {type(leaf).__name__}, which cannot be sent from part to part. Let it "
            f"return tensors, alone or in tuples, lists and dictionaries (a model of transformers: config.use_cache = "
            f"False)."
        )

    return mapped(output, reference)


def _glued(graph: Graph, recorder: CallRecorder) -> list[tuple[int, int, str]]:
    """Calls that must stay together because one of them changes in place what the others use."""
    addresses = {n: address(value) for n, value in enumerate(recorder.known.values) if isinstance(value, Tensor)}
    ranges: list[tuple[int, int, str]] = []
    for changing, storage in dict.fromkeys(recorder.mutations):
        if not storage:
            continue
        numbers = {number for number, where in addresses.items() if where == storage}
        users = [
            index
            for index, call in enumerate(graph.calls)
            if call.refs() & numbers or numbers & set(call.results) or _holds(graph, call, storage)
        ]
        outside = bool(numbers & set(graph.inputs)) or any(_holds(graph, graph.calls[i], storage) for i in users)
        last = max(users) if outside else changing
        ranges.append((min(users), max(last, changing), graph.calls[changing].place))
    return ranges


def _holds(graph: Graph, call: ModelCall, storage: int) -> bool:
    return any(address(graph.tensor(path)) == storage for path in call.held())


def _mark_repeatable(graph: Graph, recorder: CallRecorder) -> None:
    """Mark calls that depend on sizes of the model's inputs and on constants only: any part may repeat them."""
    together = {index for first, last, _ in graph.glued for index in range(first, last + 1)}
    available: set[int] = set()
    for index, call in enumerate(graph.calls):
        enough = available | set(graph.inputs)
        if index in recorder.pure and index not in together and call.refs() <= enough:
            graph.calls[index] = replace(call, repeatable=True)
            available |= {number for number in call.results if number is not None}


def _check_parameters(graph: Graph, output: Any) -> None:
    """Every parameter that gets a gradient must be one that the recorded calls use."""
    seen: set[Any] = set()
    nodes: list[Any] = [
        leaf.grad_fn for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    reached: set[int] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    used = {id(p) for call in graph.calls if call.module is not None for p in call.module.parameters()}
    used |= {id(graph.tensor(path)) for call in graph.calls for path in call.held()}
    for name, parameter in graph.model.named_parameters():
        if id(parameter) in reached - used:
            raise TaskError(
                f"Parameter {name} of {type(graph.model).__name__} is used by a module that has not registered it, so "
                f"that no part would own it. Assign it to an attribute of the module that uses it."
            )


def _without_unused_sizes(graph: Graph) -> Graph:
    """The graph without sizes that nothing uses."""
    needed = set(graph.outputs())
    kept: list[int] = []
    for index in reversed(range(len(graph.calls))):
        call = graph.calls[index]
        numbers = [number for number in call.results if number is not None]
        if numbers and all(graph.facts[n].integer for n in numbers) and not needed & set(numbers):
            continue
        kept.append(index)
        needed |= call.refs()
    places = {index: place for place, index in enumerate(reversed(kept))}
    below = [sum(1 for index in places if index < bound) for bound in range(len(graph.calls) + 1)]
    graph.glued = [(below[first], below[last + 1] - 1, why) for first, last, why in graph.glued]
    graph.calls = [graph.calls[index] for index in places]
    return graph


def _with_evaluation(graph: Graph, evaluation: Graph) -> Graph:
    """The graph for training, with what differs in evaluation."""
    difference = _difference(graph, evaluation)
    if difference is not None:
        graph.evaluation_differs = difference
        return graph
    for index, (call, other) in enumerate(zip(graph.calls, evaluation.calls, strict=True)):
        if not _same((call.args, call.kwargs), (other.args, other.kwargs)):
            graph.calls[index] = replace(call, in_evaluation=(other.args, other.kwargs))
    return graph


def _difference(graph: Graph, evaluation: Graph) -> str | None:
    """Where evaluation makes other calls than training, if it does."""
    for call, other in zip(graph.calls, evaluation.calls, strict=False):
        if (call.target, call.results, call.name) != (other.target, other.results, other.name):
            return call.place
        if _references(call) != _references(other):
            return call.place
    longer = max(graph.calls, evaluation.calls, key=len)
    shorter = min(len(graph.calls), len(evaluation.calls))
    if len(longer) > shorter:
        return longer[shorter].place
    return None if _references(graph.output) == _references(evaluation.output) else "the model's output"


def _references(arguments: Any) -> list[Any]:
    if isinstance(arguments, ModelCall):
        arguments = (arguments.args, arguments.kwargs)
    return [leaf for leaf in leaves(arguments) if isinstance(leaf, (Ref, OwnTensor))]


def _same(arguments: Any, others: Any) -> bool:
    mine, theirs = list(leaves(arguments)), list(leaves(others))
    return len(mine) == len(theirs) and all(_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _equal(leaf: Any, other: Any) -> bool:
    if isinstance(leaf, Tensor) or isinstance(other, Tensor):
        return leaf is other or (isinstance(leaf, Tensor) and isinstance(other, Tensor) and torch.equal(leaf, other))
    return leaf is other or (type(leaf) is type(other) and bool(leaf == other))

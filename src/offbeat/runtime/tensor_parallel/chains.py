"""Chains of linear layers with nothing but elementwise operations between them, found by tracing.

In such a chain the first layers can be split by column and the last by row: what is between them stays split.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from offbeat.runtime.tensor_parallel.layers import is_linear, widths
from offbeat.runtime.tensor_parallel.splits import Manner, Split

_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid),
    *(nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Identity, nn.Dropout),
)
_NAMES = (
    *("relu", "sigmoid", "tanh", "mul", "add", "sub", "div", "neg", "pow", "square", "exp", "erf", "abs", "clamp"),
    *("float", "double", "half", "bfloat16", "contiguous", "clone"),
)
_FUNCTIONS = {
    *(getattr(torch, name) for name in _NAMES if hasattr(torch, name)),
    *(getattr(operator, name) for name in ("mul", "add", "sub", "truediv", "neg", "pow", "imul", "iadd", "isub")),
    *(functional.relu, functional.gelu, functional.silu, functional.leaky_relu, functional.elu, functional.softplus),
    *(functional.mish, functional.hardswish, functional.sigmoid, functional.tanh, functional.relu6),
}


def elementwise(operation: object) -> bool:
    """Whether an activation treats every number by itself."""
    return type(operation) in _MODULES or (callable(operation) and operation in _FUNCTIONS)


class _Tracer(fx.Tracer):
    """Sees modules of torch, linear layers, and modules that are split already, from outside."""

    def __init__(self, closed: Iterable[nn.Module]) -> None:
        super().__init__()
        self._closed = {id(module) for module in closed}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_linear(m) or id(m) in self._closed or super().is_leaf_module(m, module_qualified_name)


def chains(model: nn.Module, taken: set[str], closed: Iterable[nn.Module]) -> list[Split]:
    """Splits of all chains of linear layers that are not taken; `closed` modules are not looked into."""
    splits: list[Split] = []
    inside = {id(module) for module in closed}
    uses: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        uses[id(module)] = uses.get(id(module), 0) + 1

    def look(module: nn.Module, name: str) -> None:
        if id(module) in inside or _free(module, name, taken) < 2:
            return
        graph = _trace(module, closed)
        if graph is not None:
            splits.extend(_split_chains(module, name, graph, taken))
            return
        for child, sub in module.named_children():
            look(sub, f"{name}.{child}" if name else child)

    with _undisturbed(model):
        look(model, "")
    once = {id(module) for module in model.modules() if uses[id(module)] == 1}
    several = {split.chain for split in splits if id(model.get_submodule(split.name)) not in once}
    return [split for split in splits if split.chain not in several]


@contextmanager
def _undisturbed(model: nn.Module) -> Generator[None]:
    """Leaves a model and torch's generator as they were: tracing runs the code of forward, which may change them."""
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]  # pyright: ignore[reportPrivateUsage]
    contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        yield
    for module, attributes, buffers in kept:
        vars(module).clear()
        vars(module).update(attributes)
        module._buffers.clear()  # pyright: ignore[reportPrivateUsage]
        module._buffers.update(buffers)  # pyright: ignore[reportPrivateUsage]
    with torch.no_grad():
        for buffer, before in contents:
            buffer.copy_(before)


def _free(module: nn.Module, name: str, taken: set[str]) -> int:
    """The linear layers below this module that are not taken."""
    prefix = f"{name}." if name else ""
    return sum(is_linear(sub) and f"{prefix}{own}" not in taken for own, sub in module.named_modules())


def _trace(module: nn.Module, closed: Iterable[nn.Module]) -> fx.Graph | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Tracer(closed).trace(module)
    except Exception:  # A module may do anything: then its parts are looked at one by one.
        return None


class _Chains:
    """The chains of one traced module."""

    def __init__(self, module: nn.Module, prefix: str, graph: fx.Graph, taken: set[str]) -> None:
        self._module, self._prefix, self._taken = module, f"{prefix}." if prefix else "", taken
        self.assigned: dict[fx.Node, Manner] = {}
        calls: dict[str, int] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                calls[str(node.target)] = calls.get(str(node.target), 0) + 1
        self._once = {name for name, count in calls.items() if count == 1}
        self.linear = [node for node in graph.nodes if self._is_linear(node)]

    def module(self, node: fx.Node) -> Any:
        return self._module.get_submodule(str(node.target))

    def name(self, node: fx.Node) -> str:
        return f"{self._prefix}{node.target}"

    def _is_linear(self, node: fx.Node) -> bool:
        if node.op != "call_module" or str(node.target) not in self._once or self.name(node) in self._taken:
            return False
        return is_linear(self.module(node)) and len(node.args) == 1 and isinstance(node.args[0], fx.Node)

    def _elementwise(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self.module(node)) in _MODULES
        if node.op == "call_method":
            return node.target in _NAMES
        return node.op == "call_function" and node.target in _FUNCTIONS

    def chain(self, first: fx.Node) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]] | None:
        """Columns, elementwise operations and rows of the chain that begins here; None if something breaks it."""
        columns, between, rows = {first}, set[fx.Node](), set[fx.Node]()
        waiting = [first]
        while waiting:
            node = waiting.pop()
            for user in node.users:
                if user in self.linear:
                    rows.add(user)
                elif not self._elementwise(user):
                    return None
                elif user not in between:
                    between.add(user)
                    waiting.append(user)
            for source in node.all_input_nodes if node in between else ():
                if source in columns or source in between:
                    continue
                if source in self.linear:
                    columns.add(source)
                elif self._elementwise(source):
                    between.add(source)
                else:
                    return None
                waiting.append(source)
        outputs = {widths(self.module(node))[1] for node in columns}
        if not rows or rows & columns or len(outputs) > 1 or any(node in self.assigned for node in rows | columns):
            return None
        return [sorted(group, key=lambda node: node.name) for group in (columns, between, rows)]  # pyright: ignore[reportReturnType]


def _split_chains(module: nn.Module, prefix: str, graph: fx.Graph, taken: set[str]) -> list[Split]:
    traced = _Chains(module, prefix, graph, taken)
    splits: list[Split] = []
    for first in traced.linear:
        chain = None if first in traced.assigned else traced.chain(first)
        if chain is None:
            continue
        columns, between, rows = chain
        size, name = widths(traced.module(columns[0]))[1], traced.name(first)
        for node in columns:
            traced.assigned[node] = Manner.COLUMN
            enters = f"{prefix}:{node.args[0]}"
            splits.append(Split(traced.name(node), Manner.COLUMN, size, "features", name, enters=enters))
        splits += [
            Split(traced.name(node), Manner.COLUMN, size, "features", name)
            for node in between
            if node.op == "call_module" and type(traced.module(node)) is nn.Dropout
        ]
        for node in rows:
            traced.assigned[node] = Manner.ROW
            splits.append(Split(traced.name(node), Manner.ROW, size, "features", name))
    return splits

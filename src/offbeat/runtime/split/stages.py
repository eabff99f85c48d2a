"""A model in consecutive parts: each takes values from parts before it, and gives values to parts after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from offbeat.errors import TaskError
from offbeat.protocols.pipelines.cut import LayerCost, PipelineCut, as_cut, best_cut
from offbeat.runtime.split.capture import capture, capture_layers
from offbeat.runtime.split.graph import Graph, ModelLayer, Ref, leaves, mapped
from offbeat.runtime.split.layer_costs import measured_costs, sizes_only
from offbeat.runtime.split.parts import StagePart, Value, assemble, crossing

__all__ = ["CapturedModel", "SplitModel", "StagePart", "Value", "split_model"]

MESSAGE = 4_096
"""Bytes that take about as long to send as it takes to send one more value, however small."""
SLACK = 0.03
"""Share by which the slowest part may be slower than the least possible, in favour of fewer bytes sent: times that are
measured differ by about as much from one measurement to the next."""


@dataclass
class SplitModel:
    """A model in parts, which together compute what the model computes."""

    parts: list[StagePart]
    """The parts, in the order in which they run."""
    cut: PipelineCut
    """Which layers each part has, and how long it takes."""
    costs: list[LayerCost]
    """What each layer costs; times are 0 if bounds were said rather than found."""
    tied: list[tuple[tuple[int, str], ...]]
    """Parameters that several parts use: for each, all its (part, local name). Their gradients have to be summed."""
    output: Any
    """What the model returns, with a `Ref` in place of each tensor."""
    integers: frozenset[int] = frozenset()
    """Tensors of the last part that stand for Python integers in the model's output."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """The first layer of each part, and the number of layers."""
        return self.cut.bounds

    def inputs(self, *batch: Any) -> tuple[Tensor, ...]:
        """The tensors of a batch in the order in which `Value(-1, index)` counts them."""
        return tuple(leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))

    def restore(self, tensors: Sequence[Tensor]) -> Any:
        """What the model would return, from what the last part gave: a tensor, or the model's own structure."""

        def returned(leaf: Any) -> Any:
            if not isinstance(leaf, Ref):
                return leaf
            tensor = tensors[leaf.number]
            return int(tensor) if leaf.number in self.integers else tensor

        return mapped(self.output, returned)

    def explain(self) -> str:
        """A table of the parts: their layers, times, and bytes."""
        rows = [("part", "layers", "from", "to", "fwd+bwd ms", "parameters MB", "sends MB")]
        for number, layers in enumerate(self.cut.ranges):
            costs = [self.costs[layer] for layer in layers]
            rows.append(
                (
                    str(number),
                    str(len(costs)),
                    costs[0].name,
                    costs[-1].name,
                    f"{1e3 * sum(cost.seconds for cost in costs):.2f}",
                    f"{sum(cost.parameter_bytes for cost in costs) / 1e6:.2f}",
                    f"{costs[-1].activation_bytes / 1e6:.2f}" if number < len(self.parts) - 1 else "-",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        if self.cut.slowest > 0:
            lines.append(
                f"The slowest part takes {1e3 * self.cut.slowest:.2f} ms, an even cut would take "
                f"{1e3 * self.cut.total / len(self.parts):.2f} ms: {self.cut.evenness:.0%} even."
            )
        return "\n".join(lines)


class CapturedModel:
    """A model whose calls and layers are known, and that is not cut yet.

    Before it is cut, `tensor(ways)` may split its modules in place: parts call the modules as they are then.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        *,
        kept: Collection[str] | None = None,
        layers: Sequence[nn.Module] | None = None,
    ) -> None:
        self._inputs = inputs
        if layers is not None:
            self._graph = capture_layers(model, inputs, layers)
        else:
            self._graph = capture(model, inputs, frozenset(kept or ()))
        self._layers = self._graph.layers()

    def check(self, parts: int) -> None:
        """Refuse more parts than there are layers, where the reason is code that works in place."""
        _check_layers(self._graph, self._layers, parts)

    def measured(self, agreed: Callable[[bool], bool] = bool) -> list[LayerCost]:
        """What each layer costs, measured on the batch; `agreed` as in `measured_costs`."""
        return measured_costs(self._graph, self._layers, self._inputs, agreed)

    def best_cut(self, costs: Sequence[LayerCost], parts: int, memory_limit: int | None = None) -> tuple[int, ...]:
        """The bounds of the cut whose slowest part is fastest."""
        sent = [
            replace(cost, activation_bytes=cost.activation_bytes + MESSAGE * len(values))
            for cost, values in zip(costs, crossing(self._graph, self._layers), strict=True)
        ]
        return best_cut(sent, parts, memory_limit, slack=SLACK).bounds

    def cut_at(self, bounds: Sequence[int], costs: Sequence[LayerCost] | None = None) -> SplitModel:
        """The model in parts that begin at these layers."""
        known = sizes_only(self._graph, self._layers) if costs is None else list(costs)
        cut, graph = as_cut(known, bounds), self._graph
        made = assemble(graph, self._layers, cut.bounds)
        _check_buffers(graph, made)
        integers = frozenset(index for index, number in enumerate(graph.outputs()) if graph.facts[number].integer)
        return SplitModel(made, cut, known, _tied(graph.model, made), _numbered(graph), integers)


def split_model(
    model: nn.Module,
    inputs: tuple[Any, ...],
    parts: int,
    *,
    kept: Collection[str] | None = None,
    memory_limit: int | None = None,
    bounds: Sequence[int] | None = None,
    layers: Sequence[nn.Module] | None = None,
) -> SplitModel:
    """Cut a model into parts that take about equally long, or where `bounds` say.

    The model is run once on the inputs to see what it calls, and its layers a few times to measure them; its buffers,
    gradients and the state of random numbers are afterwards what they were. The parts use the model's own modules and
    parameters. Every process that is to have a part of the same cut needs the same bounds: let one of them measure,
    and pass its `SplitModel.bounds` to the others.

    Args:
        model: The model.
        inputs: A real microbatch: what the model is called with, by position.
        parts: Number of parts: stages x chunks.
        kept: Names of modules that are never cut, and whose code is not looked into.
        memory_limit: Bytes that the parameters of a part, and what it keeps for one microbatch, may need.
        bounds: Where to cut, instead of measuring: the first layer of each part, and the number of layers.
        layers: Modules that, run one after another, are the model; instead of looking for layers.

    """
    captured = CapturedModel(model, inputs, kept=kept, layers=layers)
    captured.check(parts)
    if bounds is None:
        costs = captured.measured()
        return captured.cut_at(captured.best_cut(costs, parts, memory_limit), costs)
    split = captured.cut_at(bounds)
    if split.cut.parts != parts:
        raise TaskError(f"bounds={tuple(bounds)} cut into {split.cut.parts} parts, but {parts} were asked for.")
    return split


def _tied(model: nn.Module, parts: Sequence[StagePart]) -> list[tuple[tuple[int, str], ...]]:
    """Parameters that more than one part uses, in the order in which the model has them."""
    users: Mapping[int, list[tuple[int, str]]] = defaultdict(list)
    for number, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            users[id(parameter)].append((number, name))
    groups = [tuple(users[id(parameter)]) for parameter in model.parameters() if id(parameter) in users]
    return [group for group in groups if len({number for number, _ in group}) > 1]


def _check_buffers(graph: Graph, parts: Sequence[StagePart]) -> None:
    """Refuse a buffer that several parts would change, each its own copy."""
    for name in sorted(graph.changing):
        buffer = graph.tensor(name)
        users = [n for n, part in enumerate(parts) if any(buffer is other for other in part.buffers())]
        if len(users) > 1:
            module = name.rpartition(".")[0] or type(graph.model).__name__
            raise TaskError(
                f"Module {module} is used by parts {' and '.join(map(str, users))}, and each use changes its buffer "
                f"{name!r}, of which every part would have its own. Make a module for each use, or cut elsewhere."
            )


def _check_layers(graph: Graph, layers: Sequence[ModelLayer], parts: int) -> None:
    """Say which layers work in place where that is why there are too few of them."""
    if parts <= len(layers) or not graph.glued:
        return
    first, last, place = graph.glued[0]
    names = [call.name or type(graph.model).__name__ for call in graph.calls[first : last + 1]]
    raise TaskError(
        f"The model has {len(layers)} layers that can be separated, too few for {parts} parts. Some cannot be, because "
        f"a value that would cross the cut is changed in place: {names[0]} to {names[-1]}, changed at {place}. Use "
        f"functions that return a new tensor (`x = x + y` for `x += y`, ReLU() for ReLU(inplace=True)), or ask for at "
        f"most {len(layers)} parts."
    )


def _numbered(graph: Graph) -> Any:
    """The model's output with references to what the last part gives."""
    place = {number: index for index, number in enumerate(graph.outputs())}
    return mapped(graph.output, lambda leaf: Ref(place[leaf.number]) if isinstance(leaf, Ref) else leaf)

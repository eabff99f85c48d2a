"""Backward through a part of a model, at once or in two: gradients of its inputs first, those of its weights later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of all leaves."""
    if roots:
        torch.autograd.backward(list(roots), list(gradients))


def input_gradients(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> Callable[[], None]:
    """Add the gradients of a part's inputs; call the result to add those of its weights.

    What lies between the inputs and the outputs is computed once: the second call begins at the places where weights
    join that path (Qi et al. 2024, section 2.1).
    """
    if not roots or not inputs:
        return lambda: backward(roots, gradients)  # Nobody waits for anything of it.
    groups = _weight_groups(roots, gradients, inputs)
    hooks = [node.register_prehook(group.keeper(node)) for group in groups for node in group.joints]
    try:
        torch.autograd.backward(list(roots), list(gradients), retain_graph=True, inputs=list(inputs))
    finally:
        for hook in hooks:
            hook.remove()

    def rest() -> None:
        while groups:
            groups.pop().backward()

    return rest


@dataclass
class _WeightGroup:
    """Weights whose gradients are computed together, because they join the path of the inputs at common places."""

    joints: list[Node] = field(default_factory=list[Node])
    """Where they join it: nodes of the graph that the first backward passes through."""
    weights: list[Tensor] = field(default_factory=list[Tensor])
    came: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict[Node, tuple[Tensor | None, ...]])
    """What the first backward brought to each joint."""
    apart: list[tuple[GradientEdge, Tensor | None]] = field(default_factory=list[tuple[GradientEdge, Tensor | None]])
    """Outputs that depend on these weights and on no input, with their gradients."""

    def keeper(self, joint: Node) -> Callable[[tuple[Tensor, ...]], None]:
        """A hook that keeps what comes to a joint."""

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            self.came[joint] = gradients

        return keep

    def bringer(self, joint: Node) -> Callable[[Any], Any]:
        """A hook that brings what was kept, whatever comes."""
        came = self.came[joint]
        return lambda _: came

    def backward(self) -> None:
        """Add the gradients of the weights."""
        starts = [
            (GradientEdge(joint, number), gradient)
            for joint, gradients in self.came.items()
            for number, gradient in enumerate(gradients)
            if gradient is not None
        ]
        starts += self.apart
        # A joint may lie behind another one: what came to it must not be added once more.
        several = list(self.came) if len(self.came) > 1 else []
        hooks = [joint.register_prehook(self.bringer(joint)) for joint in several]
        try:
            if starts:
                edges, gradients = zip(*starts, strict=True)
                # Retained: of two joints of this group, one of another group may lie between them.
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=self.weights)
        finally:
            for hook in hooks:
                hook.remove()


def _weight_groups(
    roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[_WeightGroup]:
    """The weights that the roots depend on, in groups that share no node beyond their joints."""
    starts = [get_gradient_edge(root) for root in roots]
    order = _ordered(edge.node for edge in starts)
    ends = {get_gradient_edge(tensor).node for tensor in inputs}
    path = set[Node]()  # What leads to an input.
    useful = set[Node]()  # What leads to a weight, and to no input.
    for node in order:
        following = _following(node)
        if node in ends or not path.isdisjoint(following):
            path.add(node)
        elif hasattr(node, "variable") or not useful.isdisjoint(following):
            useful.add(node)
    joined = _Sets()
    joints = [node for node in order if node in path and not useful.isdisjoint(_following(node))]
    for node in (*joints, *useful):
        for other in useful.intersection(_following(node)):
            joined.unite(node, other)
    groups: defaultdict[Node, _WeightGroup] = defaultdict(_WeightGroup)
    for node in joints:
        groups[joined.of(node)].joints.append(node)
    for node in useful:
        if hasattr(node, "variable"):
            groups[joined.of(node)].weights.append(_variable(node))
    for edge, gradient in zip(starts, gradients, strict=True):
        if edge.node in useful:
            groups[joined.of(edge.node)].apart.append((edge, gradient))
    return list(groups.values())


class _Sets:
    """Nodes in disjoint sets."""

    def __init__(self) -> None:
        self._above: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        """The node that stands for a node's set."""
        while node in self._above:
            node = self._above[node]
        return node

    def unite(self, one: Node, other: Node) -> None:
        """Make one set of the sets of two nodes."""
        top, of_other = self.of(one), self.of(other)
        if top is not of_other:
            self._above[of_other] = top


def _ordered(starts: Iterable[Node]) -> list[Node]:
    """The nodes of a graph, each after those that follow it in backward."""
    order: list[Node] = []
    seen = set[Node]()
    stack = [(node, False) for node in starts]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following in _following(node) if following not in seen]
    return order


def _following(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _variable(node: Any) -> Tensor:
    return node.variable

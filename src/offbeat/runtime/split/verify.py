"""Checks that the recorded calls compute what the model computes, also for batches with fewer examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import TaskError
from offbeat.runtime.split.graph import Graph, copied, leaves, mapped
from offbeat.runtime.split.parts import StagePart, assemble
from offbeat.runtime.split.sizes import WHOLE, SizeCheck


def verify(graph: Graph, run: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Compare the recorded calls with the model on the batch itself and on fewer of its examples.

    A size check that fails on fewer examples without making a difference to the result accepts both outcomes from
    then on: code often asks whether there is one example only, to save an expansion that would do nothing.
    """
    layers = graph.layers()
    part = assemble(graph, layers, [0, len(layers)])[0]
    checks = [call.target for call in graph.calls if isinstance(call.target, SizeCheck)]
    for rows, batch in _batches(inputs):
        try:
            expected = _seeded(run, *copied(batch))
        except Exception:
            if rows is None:
                raise
            continue  # The model does not take so few examples, such as batch normalization of a single one.
        for check in checks:
            check.surprises = []
        result = _outcome(part, [leaf for leaf in leaves(copied(batch)) if isinstance(leaf, Tensor)])
        same = result is not None and _close(list(leaves(expected)), graph, result)
        surprised = [check for check in checks if check.surprises]
        for check in checks:
            if same:
                check.accepted += check.surprises or []
            check.surprises = None
        if not same and not surprised:
            raise TaskError(_differs(graph, rows))


def _batches(inputs: tuple[Any, ...]) -> Iterator[tuple[int | None, tuple[Any, ...]]]:
    """The batch itself, and where its tensors have as many rows as each other, its first rows."""
    yield None, inputs
    tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        return
    rows = len(tensors[0])
    if any(len(tensor) != rows for tensor in tensors):
        return
    for fewer in sorted({1, rows // 2 + 1} - {rows}):
        if fewer < rows:
            yield fewer, mapped(inputs, lambda leaf, n=fewer: leaf[:n] if isinstance(leaf, Tensor) else leaf)


def _seeded(run: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a run that starts with the same state of random numbers each time."""
    with torch.random.fork_rng(devices=[]):
        return run(*arguments)


def _outcome(part: StagePart, tensors: list[Tensor]) -> tuple[Tensor, ...] | None:
    """What the recorded calls return for these inputs; None if they fail."""
    takes = [tensors[value.index] for value in part.takes]
    try:
        return _seeded(part, *takes)
    except (RuntimeError, TaskError, IndexError, ValueError):
        return None


def _close(expected: list[Any], graph: Graph, result: tuple[Tensor, ...]) -> bool:
    places = {number: index for index, number in enumerate(graph.outputs())}
    references = list(leaves(graph.output))
    if len(references) != len(expected):
        return False
    for leaf, reference in zip(expected, references, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        computed = result[places[reference.number]] if hasattr(reference, "number") else reference
        try:
            torch.testing.assert_close(computed, leaf, equal_nan=True, check_stride=False)
        except AssertionError:
            return False
    return True


def _differs(graph: Graph, rows: int | None) -> str:
    kind = type(graph.model).__name__
    where = "the batch on which it was captured" if rows is None else f"its first {rows} examples"
    return (
        f"The calls that {kind} made while it was captured give another result than {kind} itself on {where}. It may "
        f"take random decisions outside of torch, keep something from one call to the next, or read sizes in a way "
        f"that cannot be seen (such as through numpy). Put the code that does so into {WHOLE}."
    )

"""Per-example gradients by `torch.func`: the exact gradient noise, to check estimates against.

A pass over all training examples needs the memory of a model for each example at hand: it is for small models.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_map  # pyright: ignore[reportPrivateUsage]
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.hooks import RemovableHandle

from offbeat.errors import DataError, TaskError
from offbeat.protocols.partition import share
from offbeat.runtime.groups.group import Group
from offbeat.task import Task
from offbeat.team.team import Team

LARGEST = 5_000_000
"""Largest number of parameters of a model."""
_AT_ONCE = 64
_KEPT = 0.1
"""Share of a gradient that sparsification keeps."""

Sparsify = Callable[[Tensor], Tensor]
Figures = dict[str, float]


def checks(task: Task, model: nn.Module, team: Team) -> Callable[[], None]:
    """What is called after each step of a run that measures gradient noise: a pass over single examples, if due.

    The last time, ways to raise gradient diversity are compared.
    """
    passes, steps, count = PerSample(task, model, team.group), team.goal.steps or 0, team.goal.gauge or 0
    due = sorted({max(1, round((i + 0.5) * steps / count)) for i in range(count)})

    def stepped() -> None:
        if team.gauge is None or team.step not in due:
            return
        with team.stopwatch.spent_on("other"), torch.random.fork_rng():
            figures: dict[str, Any] = {"step": team.step, **passes.plain()}
            if team.step == due[-1]:
                figures["ways"] = passes.ways()
        team.gauge.checks.append(figures)

    return stepped


class PerSample:
    """Passes over the gradients of a task's single training examples."""

    def __init__(self, task: Task, model: nn.Module, group: Group) -> None:
        _refuse(model)
        self._model, self._group = model, group
        self._loss = _Loss(task, model)
        train = cast("Any", task.data().train)
        if isinstance(train, IterableDataset):
            raise DataError("the training data is a stream, which has no end. Omit the check.")
        part = Subset(train, range(*share(len(train), group.rank, group.size)))
        self._part = DataLoader(part, batch_size=_AT_ONCE, collate_fn=task.collate)

    def plain(self) -> Figures:
        """For the model as it is: sum of squared norms, squared norm of the sum, and number of examples."""
        return self._figures(lambda rows: rows)[0]

    def ways(self) -> dict[str, Figures]:
        """The same under ways to raise diversity, with the cosine between each one's mean gradient and the plain one.

        Dropout is put before every layer with weights but the first; where there is only one, before that one.
        Sparsification keeps a tenth of each example's gradient: the largest numbers, or random ones, scaled up.
        """
        plain, direction = self._figures(lambda rows: rows)
        figures = {"as it is": plain | {"cosine": 1.0}}
        for rate in (0.2, 0.5):
            with _dropout(self._model, rate):
                figures[f"dropout {rate:g}"] = self._compared(lambda rows: rows, direction)
        figures[f"largest {100 * _KEPT:.0f} %"] = self._compared(_largest, direction)
        figures[f"random {100 * _KEPT:.0f} %"] = self._compared(_random, direction)
        return figures

    def _compared(self, sparsify: Sparsify, direction: Tensor) -> Figures:
        figures, total = self._figures(sparsify)
        return figures | {"cosine": float(functional.cosine_similarity(total, direction, dim=0))}

    def _figures(self, sparsify: Sparsify) -> tuple[Figures, Tensor]:
        squares = torch.zeros((), dtype=torch.float64)
        total, count = None, 0
        for rows in self._gradients():
            kept = sparsify(rows)
            squares += kept.double().square().sum()
            summed = kept.double().sum(0)
            total = summed if total is None else total + summed
            count += len(rows)
        examples = torch.tensor(float(count), dtype=torch.float64)
        mine = {"squares": squares, "total": cast("Tensor", total), "examples": examples}
        sums = self._group.sums(mine, "the sum of gradients of single examples")
        figures = {name: float(sums[name]) for name in ("squares", "examples")}
        return figures | {"joint": float(sums["total"].square().sum())}, sums["total"]

    def _gradients(self) -> Iterator[Tensor]:
        """Per-example gradients, one in each row, `_AT_ONCE` at a time."""
        named = {
            name: p.detach() for name, p in self._loss.named_parameters() if p.requires_grad and p.is_floating_point()
        }

        def loss(parameters: dict[str, Tensor], example: Any) -> Tensor:
            return functional_call(self._loss, parameters, (example,))

        each = vmap(grad(loss), in_dims=(None, 0), randomness="different")
        for batch in self._part:
            rows = each(named, tree_map(partial(torch.unsqueeze, dim=1), batch))  # Every example as a batch of one.
            yield torch.cat([rows[name].flatten(1) for name in named], dim=1)


class _Loss(nn.Module):
    """A task's loss as a module, for `functional_call`."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, batch: Any) -> Tensor:
        """The loss on a batch."""
        return self._task.loss(self.model, batch)


def _refuse(model: nn.Module) -> None:
    """Refuse models without per-example gradients, or with too large ones."""
    if any(isinstance(module, BatchNorm) for module in model.modules()):
        raise TaskError(
            "this model has batch normalization, by which an example's gradient depends on the others in its batch: "
            "single examples have none of their own. Omit the check."
        )
    count = sum(p.numel() for p in model.parameters())
    if count > LARGEST:
        raise TaskError(
            f"this model has {count:,} parameters, and a gradient of each of {_AT_ONCE} examples at once is too much. "
            f"Omit the check: it is for models of up to {LARGEST:,}."
        )


@contextmanager
def _dropout(model: nn.Module, rate: float) -> Generator[None]:
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    chosen: Iterable[nn.Module] = layers[1:] or layers or [model]

    def drop(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        dropped = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs]
        return tuple(functional.dropout(x, rate) if drops else x for x, drops in zip(inputs, dropped, strict=True))

    with ExitStack() as stack:
        for module in chosen:
            handle: RemovableHandle = module.register_forward_pre_hook(drop)
            stack.callback(handle.remove)
        yield


def _largest(rows: Tensor) -> Tensor:
    """The largest of each row, in magnitude."""
    count = max(1, round(_KEPT * rows.shape[1]))
    chosen = rows.abs().topk(count, dim=1, sorted=False).indices
    return torch.zeros_like(rows).scatter_(1, chosen, rows.gather(1, chosen))


def _random(rows: Tensor) -> Tensor:
    """Random numbers of each row, scaled so that the mean stays the same."""
    return rows * (torch.rand_like(rows) < _KEPT) / _KEPT

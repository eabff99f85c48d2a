"""Local training: one model that takes the place of one client after the other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset, default_collate

from offbeat.errors import TaskError
from offbeat.protocols.partition import Indices, mixed, order
from offbeat.runtime.federated.client_state import ClientState
from offbeat.runtime.federated.flat_model import FlatModel

Examples = Callable[[Indices], Any]
"""Collates the examples of these indices into a batch."""


class Correction(Protocol):
    """What an algorithm does beside plain local steps (`strategies.federated.algorithms.base.ClientSide`)."""

    def begin(self, base: Tensor, state: ClientState | None) -> None:
        """A client begins from these global parameters."""
        ...

    def adjust(self) -> None:
        """Change the gradients of a batch."""
        ...

    def finish(self, update: Tensor, steps: int, optimizer: Optimizer) -> Tensor | None:
        """The client's further vector, if there is one."""
        ...


@dataclass(frozen=True)
class Visit:
    """One client's turn in one round."""

    client: int
    number: int
    """Of the round."""
    indices: Indices
    """The client's examples."""


@dataclass(frozen=True)
class LocalResult:
    """What a client sends. The vectors are the trainer's own buffers: they are overwritten by the next client."""

    update: Tensor
    """Its parameters minus those it started from; or its gradient, if it only computes that."""
    extra: Tensor | None
    """The algorithm's further vector."""
    loss: float
    """Mean loss of its batches, as they came."""
    examples: int
    """How many examples it went through."""


class LocalTrainer:
    """Trains clients, one after the other, in one model.

    Everything a client does follows from (seed, round, client), so it does not matter which process it runs in.
    """

    def __init__(
        self,
        model: FlatModel,
        optimizer: Optimizer,
        loss: Callable[[Any], Tensor],
        examples: Examples,
        seed: int,
        epochs: int,
        batch: int | None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._loss, self._examples = loss, examples
        self._seed, self._epochs, self._batch = seed, epochs, batch
        self._update = torch.zeros_like(model.values)
        self._modules = list(model.module.modules())

    def train(
        self, visit: Visit, base: Tensor, correction: Correction, state: ClientState | None = None
    ) -> LocalResult:
        """Train the model on a client's examples, from these global parameters."""
        model, optimizer = self.model, self.optimizer
        self._draw_as(visit)
        model.load(base)
        self._train_mode()
        correction.begin(base, state)
        total, steps, examples = torch.zeros(()), 0, 0
        for epoch in range(self._epochs):
            for indices in self._batches(visit, epoch):
                optimizer.zero_grad()
                loss = self._loss(self._examples(indices))
                loss.backward()
                correction.adjust()
                optimizer.step()
                total += loss.detach()
                steps += 1
                examples += len(indices)
        update = torch.sub(model.values, base, out=self._update)
        extra = correction.finish(update, max(steps, 1), optimizer)
        optimizer.state.clear()  # Of this client: the next one begins anew.
        return LocalResult(update, extra, float(total) / max(steps, 1), examples)

    def gradient(self, visit: Visit, base: Tensor) -> LocalResult:
        """Compute the gradient of a client's mean loss at these global parameters."""
        model = self.model
        self._draw_as(visit)
        model.load(base)
        self._train_mode()
        self.optimizer.zero_grad()
        loss = self._loss(self._examples(visit.indices))
        loss.backward()
        gradient = model.gradient(self._update)
        # Running statistics of normalization layers move by their change, as in training.
        count = model.trainable
        torch.sub(model.values[count:], base[count:], out=gradient[count:])
        return LocalResult(gradient, None, float(loss.detach()), len(visit.indices))

    def step(self, base: Tensor, gradient: Tensor) -> None:
        """One step of the optimizer from these parameters with this gradient, in place; buffers move by theirs."""
        model, count = self.model, self.model.trainable
        model.values.copy_(base)
        for parameter, piece in zip(model.parameters, model.pieces(gradient), strict=False):
            parameter.grad = piece.clone()
        self.optimizer.step()
        model.values[count:] += gradient[count:]
        base.copy_(model.values)

    def _batches(self, visit: Visit, epoch: int) -> Iterator[Indices]:
        count = len(visit.indices)
        if self._batch is None or self._batch >= count:
            yield visit.indices
            return
        shuffled = visit.indices[order(count, mixed(self._seed, visit.number, visit.client), epoch)]
        for start in range(0, count, self._batch):
            yield shuffled[start : start + self._batch]

    def _train_mode(self) -> None:
        """As `module.train()`, which takes as long as a small model's step."""
        if not all(module.training for module in self._modules):
            self.model.module.train()

    def _draw_as(self, visit: Visit) -> None:
        """Seed all generators that a model may draw from, as dropout does."""
        seed = mixed(self._seed, visit.client, visit.number)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def examples_of(dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None) -> Examples:
    """How batches are made from indices: of tensors by one selection each, which is many times faster."""
    if type(dataset) is TensorDataset and collate is None:
        tensors = dataset.tensors

        def select(indices: Indices) -> list[Tensor]:
            chosen = torch.from_numpy(indices)
            return [tensor.index_select(0, chosen) for tensor in tensors]

        return select
    join = collate or default_collate
    many = getattr(dataset, "__getitems__", None)

    def load(indices: Indices) -> Any:
        numbers: Sequence[int] = indices.tolist()
        return join(many(numbers) if many else [dataset[number] for number in numbers])

    return load


def check_loss(loss: object, task: str) -> Tensor:
    """A loss that is one number; refused otherwise."""
    if not (isinstance(loss, Tensor) and loss.numel() == 1):
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TaskError(f"{task}: the loss is {shape}, not a tensor of one number. Return a mean over the batch.")
    return loss

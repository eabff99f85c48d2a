"""A model whose floating-point state is one flat vector, so that it is replaced, subtracted and summed at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offbeat.errors import StrategyError


class FlatModel:
    """A model's trainable parameters, and then its floating-point buffers, as views of one vector.

    Buffers of other types, such as the count of batches of a normalization layer, are not averaged: every client
    begins with those of the new model, and the global model keeps them.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        buffers = [b for b in model.buffers() if b.is_floating_point()]
        tensors = [*parameters, *buffers]
        kinds = {(str(t.dtype), str(t.device)) for t in tensors}
        if not parameters:
            raise StrategyError("federated trains parameters, and this model has none that require a gradient.")
        if len(kinds) > 1:
            raise StrategyError(
                f"federated sums models as one vector, and this one has numbers of several kinds: "
                f"{', '.join(' on '.join(kind) for kind in sorted(kinds))}. Convert it to one, as by model.float()."
            )
        self.module = model
        self.parameters = parameters
        self._sizes = [t.numel() for t in tensors]
        self._shapes = [t.shape for t in tensors]
        self.values = torch.cat([t.detach().reshape(-1) for t in tensors])
        """All of it; writing here changes the model."""
        self.trainable = sum(p.numel() for p in parameters)
        """How many numbers of the vector belong to parameters; the others are buffers."""
        for tensor, piece in zip(tensors, self.pieces(self.values), strict=True):
            tensor.data = piece
        self._counters = [(b, b.clone()) for b in model.buffers() if not b.is_floating_point()]

    @property
    def nbytes(self) -> int:
        """Size of the vector."""
        return self.values.nbytes

    def load(self, vector: Tensor) -> None:
        """Become the model with this vector."""
        self.values.copy_(vector)
        for counter, first in self._counters:
            counter.copy_(first)

    def pieces(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector of this layout, shaped as the parameters and buffers."""
        return [part.view(shape) for part, shape in zip(vector.split(self._sizes), self._shapes, strict=True)]

    def add_to_gradients(self, correction: Tensor, scale: float = 1.0) -> None:
        """Add `scale` times a vector to the gradients of the parameters that have one."""
        chosen: list[Tensor] = []
        terms: list[Tensor] = []
        for parameter, piece in zip(self.parameters, self.pieces(correction), strict=False):
            if parameter.grad is not None:
                chosen.append(parameter.grad)
                terms.append(piece)
        if chosen:
            torch._foreach_add_(chosen, terms, alpha=scale)  # pyright: ignore[reportPrivateUsage]

    def gradient(self, into: Tensor) -> Tensor:
        """The gradients as a vector of this layout; 0 where there is none."""
        into.zero_()
        for parameter, piece in zip(self.parameters, self.pieces(into), strict=False):
            if parameter.grad is not None:
                piece.copy_(parameter.grad)
        return into

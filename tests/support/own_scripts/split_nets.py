"""Models that may be split in any way, their data and their loss; all but one draw nothing after the start."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

EXAMPLES, BATCH = 40, 16
"""The last of three batches is half as large."""
SYMBOLS, LENGTH, WIDTH = 521, 6, 16
"""A prime number of symbols, large enough for tensor parallelism to split the vocabulary."""


class Skips(nn.Module):
    """A network with convolutions, and connections over several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        start = x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.norm(x)
        return self.head(torch.cat([x.mean((2, 3)), start.mean((2, 3))], dim=1))


class Words(nn.Module):
    """A small transformer whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place[: tokens.shape[1]]
        mask = torch.full((tokens.shape[1], tokens.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.output(self.norm(x))


def mlp() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(12, 4))


def halves() -> nn.Module:
    """A transformer in two halves, whose output layer is its embedding; most parameters are those of its layers."""
    layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(10)]
    model = nn.Sequential(
        nn.Sequential(nn.Embedding(SYMBOLS, 32), *layers[:5]),
        nn.Sequential(*layers[5:], nn.Linear(32, SYMBOLS, bias=False)),
    )
    model[1][-1].weight = model[0][0].weight
    return model


def normed() -> nn.Module:
    """Normalizes by the statistics of a batch, which one example alone does not have."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(12, 4))


def tied() -> nn.Module:
    """Two parts, of which the first has the parameters of both."""
    first = nn.Sequential(nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(first, nn.Linear(WIDTH, SYMBOLS, bias=False))
    model[1].weight = first[0].weight
    return model


def gpt2() -> nn.Module:
    """GPT-2 as it is in transformers, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 3, "n_head": 4}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=SYMBOLS, use_cache=False, **sizes, **dropout))


class Noisy(nn.Module):
    """Draws a mask of what is split, and noise for what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(12, 16), nn.Dropout(0.3), nn.Linear(16, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.drop(torch.tanh(self.up(x))))
        return self.head(x + torch.randn_like(x) * self.training)


class Flipped(Dataset[tuple[Tensor, Tensor]]):
    """Examples and targets that are changed by all global generators whenever they are read."""

    def __init__(self, examples: TensorDataset) -> None:
        self.tensors = examples.tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        factor = float(torch.rand(())) + random.random() + float(np.random.random())
        return self.tensors[0][index] * factor, (self.tensors[1][index] + int(8 * factor)) % 4


class Failing(nn.Module):
    """Raises once it is told to."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise ZeroDivisionError("the last layer was told to fail")
        return x * 1


def failing() -> nn.Module:
    return nn.Sequential(*mlp(), Failing())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "skips": Skips,
    "words": Words,
    "gpt2": gpt2,
    "normed": normed,
    "halves": halves,
    "tied": tied,
    "noisy": Noisy,
    "failing": failing,
    "flipped": mlp,
}


def data_for(kind: str) -> TensorDataset | Flipped:
    """Examples and targets of a model, in the default precision."""
    draws = torch.Generator().manual_seed(3)
    if kind in ("words", "gpt2", "tied", "halves"):
        tokens = torch.randint(0, SYMBOLS, (EXAMPLES, LENGTH + 1), generator=draws)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    shape = (EXAMPLES, 3, 6, 6) if kind == "skips" else (EXAMPLES, 12)
    data = TensorDataset(torch.randn(shape, generator=draws), torch.randint(0, 4, (EXAMPLES,), generator=draws))
    return Flipped(data) if kind in ("noisy", "flipped") else data


def criterion(output: Any, target: Tensor) -> Tensor:
    """The mean cross entropy of examples or of their words."""
    logits = output if isinstance(output, Tensor) else output.logits
    return cross_entropy(logits.flatten(0, -2), target.flatten())

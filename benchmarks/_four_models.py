"""A training loop for models that may be split: an MLP, a CNN with skips, text with a tied embedding, GPT-2."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import offbeat

EXAMPLES = 64
SYMBOLS, LENGTH = 512, 32


class Skips(nn.Module):
    """Convolutions, with connections over several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(24, 24, 3, padding=1) for _ in range(8))
        self.norm = nn.GroupNorm(4, 24)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images."""
        start = x = self.first(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        x = self.norm(x)
        return self.head(torch.cat([x.mean((2, 3)), start.mean((2, 3))], dim=1))


class TiedWords(nn.Module):
    """A transformer whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 128)
        self.place = nn.Parameter(torch.randn(LENGTH, 128) * 0.1)
        layer = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(layer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(4))
        self.norm = nn.LayerNorm(128)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next symbol."""
        x = self.embedding(tokens) + self.place[: tokens.shape[1]]
        mask = torch.full((tokens.shape[1], tokens.shape[1]), float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.norm(x) @ self.embedding.weight.T


class Gpt2(nn.Module):
    """GPT-2 by its logits, with random weights and without dropout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(vocab_size=SYMBOLS, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.inner = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each next symbol."""
        return self.inner(input_ids=tokens).logits


def mlp() -> nn.Module:
    """Eight layers of 512."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), *layers, nn.Linear(512, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": Skips, "text": TiedWords, "gpt2": Gpt2}


def data_for(model: str, batch: int) -> TensorDataset:
    """Two batches of examples."""
    draws = torch.Generator().manual_seed(3)
    if model in ("text", "gpt2"):
        tokens = torch.randint(0, SYMBOLS, (2 * batch, LENGTH + 1), generator=draws)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    shape = (64,) if model == "mlp" else (3, 16, 16)
    target = torch.randint(0, 10, (2 * batch,), generator=draws)
    return TensorDataset(torch.randn(2 * batch, *shape, generator=draws), target)


def criterion(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of examples or of their words."""
    return cross_entropy(output.flatten(0, -2), target.flatten())


def main() -> None:
    """Train, and write the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    batch = 512 if options.model == "mlp" else EXAMPLES
    losses: list[float] = []
    with offbeat.init(seed=5) as team:
        torch.manual_seed(5)
        model = MODELS[options.model]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(data_for(options.model, batch), batch_size=batch)
        model, optimizer, loader = team.prepare(model, optimizer, loader)
        step = team.pipeline(model, criterion)
        while team.step < options.steps and not team.stopping:
            for inputs, target in loader:
                optimizer.zero_grad()
                losses.append(float(step(inputs, target)))
                optimizer.step()
                if team.step >= options.steps:
                    break
        if team.rank == 0:
            options.out.write_text(json.dumps(losses), encoding="utf-8")


main()

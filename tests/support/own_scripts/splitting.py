"""A loop for models that may be split: saves its losses and its last model, to compare runs under any strategies."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import offbeat

EXAMPLES, BATCH = 72, 16


class Skips(nn.Module):
    """A network with convolutions, and connections over several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))
        self.norm = nn.GroupNorm(2, 6)
        self.head = nn.Linear(12, 4)

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
        self.embedding = nn.Embedding(24, 16)
        self.place = nn.Parameter(torch.randn(6, 16) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place[: tokens.shape[1]]
        mask = torch.full((tokens.shape[1], tokens.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.norm(x) @ self.embedding.weight.T


def data_for(kind: str) -> TensorDataset:
    """Examples and targets of a model."""
    draws = torch.Generator().manual_seed(3)
    if kind == "words":
        tokens = torch.randint(0, 24, (EXAMPLES, 7), generator=draws)
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    shape = (EXAMPLES, 3, 6, 6) if kind == "skips" else (EXAMPLES, 10)
    return TensorDataset(
        torch.randn(shape, generator=draws, dtype=torch.float64), torch.randint(0, 4, (EXAMPLES,), generator=draws)
    )


def criterion(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of examples or of their words."""
    return cross_entropy(output.flatten(0, -2), target.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(10, 10), nn.Tanh())), nn.Linear(10, 4)
    ),
    "skips": Skips,
    "words": Words,
}


def main() -> None:
    """Train, and save what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--steps", type=int, default=20)
    for wrong in ("--clip", "--called", "--summed"):
        parser.add_argument(wrong, action="store_true")
    words = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    losses: list[float] = []
    with offbeat.init(seed=5) as team:
        torch.manual_seed(5)
        model = MODELS[words.model]()
        rate = {"lr": 0.1, "momentum": 0.9} if words.optimizer == "SGD" else {"lr": 0.01}
        optimizer = getattr(torch.optim, words.optimizer)(model.parameters(), **rate)
        loader = DataLoader(data_for(words.model), batch_size=BATCH, shuffle=True)
        model, optimizer, loader = team.prepare(model, optimizer, loader)
        step = team.pipeline(model, (lambda x, y: cross_entropy(x, y, reduction="sum")) if words.summed else criterion)
        score = 0.0
        while team.step < words.steps and not team.stopping:
            for inputs, target in loader:
                optimizer.zero_grad()
                if words.called:
                    model(inputs)
                losses.append(float(step(inputs, target)) * len(target))
                if words.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                if team.step >= words.steps:
                    break
            with team.averaged(model), torch.no_grad():
                model.eval()
                score = float(criterion(model(data_for(words.model).tensors[0]), data_for(words.model).tensors[1]))
                model.train()
            team.report(score=score)
        with team.averaged(model):
            state = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save({"losses": losses, "model": state, "score": score}, f"{words.out}-{team.rank}.pt")


main()

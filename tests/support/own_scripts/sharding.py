"""Models large enough to be divided into units, in loops that clip: `python sharding.py FOLDER CASE...`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from parts import run_cases
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import offbeat

STEPS, BATCH = 20, 8
Facts = dict[str, Any]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 512), nn.ReLU(), nn.Linear(512, 600), nn.ReLU(), nn.Linear(600, 500), nn.Linear(500, 5)
    )


class Residual(nn.Module):
    """A convolution with batch norm, and a connection that skips it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.convolution(x)).relu_()


def cnn() -> nn.Module:
    head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 36, 300), nn.Linear(300, 5))
    return nn.Sequential(nn.Conv2d(1, 32, 3), *(Residual(32) for _ in range(2)), *head)


class Text(nn.Module):
    """A transformer whose output reads the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1500, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.encoder(self.embedding(x)).mean(1), self.embedding.weight)[:, :5]


def numbers(*shape: int) -> Tensor:
    return torch.randn(64, *shape, generator=torch.Generator().manual_seed(3))


def words() -> Tensor:
    return torch.randint(0, 1500, (64, 6), generator=torch.Generator().manual_seed(3))


def sgd(model: nn.Module) -> Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return SGD([{"params": weights, "weight_decay": 0.01}, {"params": others, "lr": 0.02}], lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3, eps=1e-3)  # Less would magnify rounding.


def train(
    team: offbeat.Team, facts: Facts, model: nn.Module, inputs: Tensor, optimizer: Optimizer, precise: bool
) -> Mapping[str, nn.Module]:
    labels = torch.arange(64) % 5
    data = DataLoader(TensorDataset(inputs, labels), batch_size=BATCH)
    model, optimizer, loader = team.prepare(model, optimizer, data)
    facts["norms"], facts["held"] = [], 0
    while team.step < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
                loss = cross_entropy(model(x), y)
            loss.backward()
            facts["norms"].append(float(clip_grad_norm_(model.parameters(), 0.5)))
            clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            if team.step >= STEPS:
                break
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    facts["held"], facts["all"] = sum(storages.values()), sum(p.nbytes for p in model.parameters())
    return {"model": model}


def case(
    make: Callable[[], nn.Module], inputs: Tensor, optimizer: Callable[[nn.Module], Optimizer], dtype: torch.dtype
) -> Callable[[offbeat.Team, Facts], Mapping[str, nn.Module]]:
    def run(team: offbeat.Team, facts: Facts) -> Mapping[str, nn.Module]:
        half = dtype is torch.bfloat16
        model = make().to(torch.float32 if half else dtype)
        own = inputs.to(model[0].weight.dtype if isinstance(model, nn.Sequential) else inputs.dtype)
        return train(team, facts, model, own, optimizer(model), precise=not half)

    return run


def foreign(team: offbeat.Team, facts: Facts) -> Mapping[str, nn.Module]:
    """What may be read and changed of a summed gradient, and what may not."""
    model = mlp()
    before = model[0].weight.detach().clone()
    losses = [model(numbers(24)[: 8 * (rank + 1)]).square().mean() for rank in range(team.size)]
    (sum(losses) / team.size).backward()
    facts["expected"] = model[0].weight.grad * 2 + 0.25
    model.zero_grad()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = team.prepare(model, optimizer)
    weight = model[0].weight
    model(numbers(24)[: 8 * (team.rank + 1)]).square().mean().backward()
    weight.grad.mul_(2).add_(0.25)
    facts["whole"] = weight.grad.clone()
    facts["mean"] = float(weight.grad.abs().mean())
    facts["norms"] = [float(weight.grad.norm(p)) for p in (1, 2, 3, float("inf"))]
    facts["refused"] = []
    rows = torch.tensor([0])
    for change in (lambda g: g.view(-1), lambda g: g.cumsum_(0), lambda g: g.index_fill_(0, rows, 1.0)):
        try:
            change(weight.grad)
        except offbeat.errors.UsageError as error:
            facts["refused"].append(str(error))
    weight.grad = facts["whole"] * 0.5
    optimizer.step()
    facts["expected weight"] = before - 0.1 * facts["expected"] * 0.5
    return {"model": model}


def apart(team: offbeat.Team, facts: Facts) -> Mapping[str, nn.Module]:
    """Worker 1 runs the second half of the model once more than worker 0."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = team.prepare(model, optimizer)
    for step in range(3):
        output = model(numbers(24))
        if team.rank == 1 and step == 1:
            output = output + model[2:](torch.zeros(64, 512))
        output.sum().backward()
        optimizer.step()
    return {"model": model}


KINDS = {"": torch.float32, "_double": torch.float64, "_half": torch.bfloat16}
CASES = {
    **{f"mlp{end}": case(mlp, numbers(24), sgd, kind) for end, kind in KINDS.items()},
    "cnn": case(cnn, numbers(1, 8, 8), sgd, torch.float32),
    **{f"text{end}": case(Text, words(), adamw, kind) for end, kind in KINDS.items()},
    "foreign": foreign,
    "apart": apart,
}

if __name__ == "__main__":
    run_cases(CASES)

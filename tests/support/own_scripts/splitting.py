"""A loop for models that may be split: saves its losses and its last model, to compare runs under any strategies."""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

import torch
from split_nets import BATCH, MODELS, criterion, data_for
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import offbeat

RATES = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.01, "eps": 1e-5}, "LBFGS": {"lr": 0.01}}
"""With this eps, biases of keys, whose gradients are 0 but for rounding, do not move by it."""


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of memory of parameters, gradients and optimizer state, as they are in this process."""
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    kept += [tensor for p in model.parameters() for tensor in (p.detach(), p.grad) if tensor is not None]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept}
    return sum(storage.nbytes() for storage in storages.values())


def main() -> None:
    """Train, and save what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", choices=("prepared", "own", "divided"), default="prepared")
    for wrong in ("--clip", "--called", "--summed"):
        parser.add_argument(wrong, action="store_true")
    words = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    losses: list[float] = []
    with offbeat.init(seed=5) as team:
        torch.manual_seed(5)
        model = MODELS[words.model]()
        optimizer = getattr(torch.optim, words.optimizer)(model.parameters(), **RATES[words.optimizer])
        loader = DataLoader(data_for(words.model), batch_size=BATCH, shuffle=True)
        if words.batches == "prepared":
            model, optimizer, loader = team.prepare(model, optimizer, loader)
        else:
            model, optimizer = team.prepare(model, optimizer)
            loader = DataLoader(data_for(words.model), batch_size=BATCH)
        if words.batches == "divided":
            loader = [each for number, each in enumerate(loader) if number % team.size == team.rank]
        loss = (lambda x, y: cross_entropy(x, y, reduction="sum")) if words.summed else criterion
        step = team.pipeline(model, loss, list(model) if words.model in ("tied", "halves") else None)
        score, most = 0.0, 0
        while team.step < words.steps and not team.stopping:
            for inputs, target in loader:
                Path(f"{words.out}-{team.rank}.new").write_text(f"{os.getpid()} {team.step}")
                Path(f"{words.out}-{team.rank}.new").replace(
                    f"{words.out}-{team.rank}.pid"
                )  # Whole, whoever is killed.
                optimizer.zero_grad()
                if words.model == "failing":
                    model[-1].armed = team.step == 2
                if words.called:
                    model(inputs)
                losses.append(float(step(inputs, target)) * len(target))
                if words.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step(*[lambda: losses[-1]] * (words.optimizer == "LBFGS"))
                most = max(most, held(model, optimizer))
                if team.step >= words.steps:
                    break
            with team.averaged(model), torch.no_grad():
                torch.rand(team.rank)  # As evaluations of other examples might.
                random.random() if team.rank else None
                model.eval()
                score = float(criterion(model(data_for(words.model).tensors[0]), data_for(words.model).tensors[1]))
                model.train()
            team.report(score=score)
        with team.averaged(model):
            state = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save({"losses": losses, "model": state, "score": score, "held": most}, f"{words.out}-{team.rank}.pt")


main()

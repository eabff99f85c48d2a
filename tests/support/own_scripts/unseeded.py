"""Nobody says a seed; two loaders are trained from, one after the other: `python unseeded.py FOLDER [KILL]`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from parts import network
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import offbeat

folder, kill = Path(sys.argv[1]), sys.argv[2]
with offbeat.init() as team:
    model = network()
    numbered = [DataLoader(TensorDataset(torch.arange(24.0)), batch_size=6, shuffle=True) for _ in range(2)]
    model, optimizer, first, second = team.prepare(model, SGD(model.parameters(), lr=0.01), *numbered)
    for epoch in team.epochs(2):
        for name, loader in (("first", first), ("second", second)):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x[:, None].repeat(1, 6) / 24).pow(2).mean().backward()
                optimizer.step()
                place = f"{epoch}.{name}.{loader.batches}.{team.rank}"
                (folder / f"{place}.json").write_text(json.dumps(x.tolist()))
                if place == kill and not (folder / "struck").exists():
                    (folder / "struck").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            torch.rand(1)
    (folder / f"end-{team.rank}.json").write_text(json.dumps([team.step, *model[0].weight.flatten().tolist()]))

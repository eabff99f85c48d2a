"""A team under bounded staleness, and one worker falls asleep for longer than anybody waits for it in silence."""

import time

import torch
from helping import Slow, falls_ill
from torch.utils.data import DataLoader

import offbeat

with offbeat.init() as team:
    model = torch.nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = team.prepare(model, optimizer, DataLoader(Slow(16 * 40), batch_size=16))
    for number, batch in enumerate(batches):
        if team.rank == 0 and number == 9:
            falls_ill()
            time.sleep(13)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

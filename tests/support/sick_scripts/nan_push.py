"""A team on servers, and one worker's gradient is not finite in one step."""

import time

import torch
from helping import Slow, falls_ill
from torch.utils.data import DataLoader

import offbeat

with offbeat.init(check_finite=False) as team:
    model = torch.nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = team.prepare(model, optimizer, DataLoader(Slow(16 * 60), batch_size=16))
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if team.rank == 1 and number == 9:
            falls_ill()
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        time.sleep(0.02)

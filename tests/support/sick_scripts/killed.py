"""A team on servers; who is killed, and when, is asked for from outside."""

import time

import torch
from helping import Slow
from torch.utils.data import DataLoader

import offbeat

with offbeat.init() as team:
    model = torch.nn.Linear(100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, batches = team.prepare(model, optimizer, DataLoader(Slow(16 * 60), batch_size=16))
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)

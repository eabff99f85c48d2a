"""The digits task as a loop of one's own, with nothing in it that knows of leagues."""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import offbeat
from offbeat.tasks.digits import Digits

options = argparse.ArgumentParser()
options.add_argument("--batch", type=int, required=True)
told = options.parse_args()
data = Digits().data()
with offbeat.init() as team:
    model = Digits().model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    loader = DataLoader(data.train, batch_size=told.batch, shuffle=True)
    model, optimizer, loader = team.prepare(model, optimizer, loader)
    for _ in team.epochs(20):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        with team.averaged(model), torch.no_grad():
            images, digits = data.validation[:]
            right = (model(images).argmax(1) == digits).double().mean()
        if team.report(accuracy=right):
            break

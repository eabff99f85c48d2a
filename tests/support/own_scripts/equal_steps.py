"""Twenty steps of four models with two optimizers in two precisions: `python equal_steps.py FOLDER CASE...`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from parts import run_cases
from split_nets import BATCH, MODELS, criterion, data_for
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader

import offbeat
from offbeat.runtime.gradients import slices

STEPS = 20
slices.LEAST_UNIT = 4096  # So that what is sharded is divided into several units in these small models, too.
PRECISIONS = {"float64": torch.float64, "float32": torch.float32}
OPTIMIZERS = {
    "SGD": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-3, eps=1e-3),  # Less would magnify rounding.
}


def train(
    name: str, optimizer_name: str, precision: str, team: offbeat.Team, facts: dict[str, Any]
) -> Mapping[str, nn.Module]:
    """Losses times examples, and the whole model in the end, go into the facts."""
    torch.set_default_dtype(PRECISIONS[precision])
    model = MODELS[name]()
    facts["before"] = {key: value.clone() for key, value in model.state_dict().items()}
    data = DataLoader(data_for(name), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = team.prepare(model, OPTIMIZERS[optimizer_name](model), data)
    step = team.pipeline(model, criterion)
    facts["losses"] = []
    while team.step < STEPS:
        for inputs, target in loader:
            optimizer.zero_grad()
            facts["losses"].append(float(step(inputs, target)) * len(target))
            optimizer.step()
            if team.step >= STEPS:
                break
    with team.averaged(model):
        facts["model"] = {key: value.clone() for key, value in model.state_dict().items()}
    return {}


CASES = {
    f"{name}-{optimizer}-{precision}": partial(train, name, optimizer, precision)
    for name, optimizer, precision in product(MODELS, OPTIMIZERS, PRECISIONS)
}

if __name__ == "__main__":
    run_cases(CASES)

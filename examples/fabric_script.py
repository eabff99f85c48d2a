"""Handwritten digits, learned with Lightning Fabric: stock DDP, which asks torch.distributed for Gloo by name.

On Gloo, then with offbeat's shared memory in its place; not a line of the script differs:

    offbeat run examples/fabric_script.py --workers 2
    offbeat run --backend offbeat examples/fabric_script.py --workers 2
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch.utils.data import DataLoader

from offbeat.runtime.backend import OffbeatGroup
from offbeat.tasks.digits import Digits


def main() -> None:
    """Train for two epochs; print the mean loss of each, the accuracy, and what carried the gradients."""
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    digits = Digits()
    model, optimizer = fabric.setup(net := digits.model(), digits.optimizer(net.parameters()))
    batches = fabric.setup_dataloaders(
        DataLoader(digits.data().train, batch_size=64 // fabric.world_size, shuffle=True, drop_last=True)
    )
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, labels in batches:
            optimizer.zero_grad()
            loss = digits.criterion(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = fabric.all_reduce(total / len(batches), reduce_op="mean")
        fabric.print(f"epoch {epoch}: loss {mean.item():.6f}")
    score = digits.score(model, DataLoader(digits.data().validation, batch_size=100))
    fabric.print(f"accuracy {score:.3f}")
    world = dist.group.WORLD
    shared = isinstance(world, OffbeatGroup) and world.local is not None
    fabric.print(f"{dist.get_backend()} is {type(world).__name__}, through {'shared memory' if shared else 'sockets'}")


if __name__ == "__main__":
    main()

"""Handwritten digits, learned with Accelerate: stock DDP, which asks torch.distributed for Gloo by name.

On Gloo, then with offbeat's shared memory in its place; not a line of the script differs:

    offbeat run examples/accelerate_script.py --workers 2
    offbeat run --backend offbeat examples/accelerate_script.py --workers 2
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from offbeat.runtime.backend import OffbeatGroup
from offbeat.tasks.digits import Digits


def main() -> None:
    """Train for two epochs; print the mean loss of each, the accuracy, and what carried the gradients."""
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    digits = Digits()
    net = digits.model()
    model, optimizer, batches = accelerator.prepare(
        net,
        digits.optimizer(net.parameters()),
        DataLoader(digits.data().train, batch_size=64 // accelerator.num_processes, shuffle=True, drop_last=True),
    )
    for epoch in range(2):
        total = torch.zeros(())
        for images, labels in batches:
            optimizer.zero_grad()
            loss = digits.criterion(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = accelerator.reduce(total / len(batches), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.6f}")
    score = digits.score(model, DataLoader(digits.data().validation, batch_size=100))
    accelerator.print(f"accuracy {score:.3f}")
    world = dist.group.WORLD
    shared = isinstance(world, OffbeatGroup) and world.local is not None
    accelerator.print(
        f"{dist.get_backend()} is {type(world).__name__}, through {'shared memory' if shared else 'sockets'}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

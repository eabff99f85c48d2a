"""A stock DDP script that hangs: rank 0 waits for a message that rank 1 will send after its next step, which needs 0.

The deadlock is named within two seconds; without --monitor it hangs until torch's timeout of half an hour:

    offbeat run examples/hanging_ddp.py --workers 2 --monitor
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train on random numbers; rank 0 prints everybody's loss after 20 steps."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        loss = cross_entropy(model(torch.randn(32, 64)), torch.randint(10, (32,)))
        loss.backward()
        optimizer.step()
        if rank == 0 and step == 20:
            theirs = torch.empty(())
            dist.recv(theirs, src=1)
            print(f"losses: {loss.item():.3f}, {theirs.item():.3f}")
        if rank == 1 and step == 21:  # The mistake: 21 for 20.
            dist.send(loss.detach(), dst=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

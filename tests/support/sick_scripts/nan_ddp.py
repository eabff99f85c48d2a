"""Stock DDP, and one worker's batch has a number in it that is not finite."""

import time

import torch
from helping import begin, falls_ill, training

rank, _ = begin()
step = training()
for number in range(60):
    batch = torch.ones(8, 100)
    if rank == 1 and number == 9:
        falls_ill()
        batch[0, 0] = float("nan")
    step(batch)
    time.sleep(0.03)

"""One worker's data is slow to come."""

import os

from helping import Slow, begin, training
from torch.utils.data import DataLoader

rank, _ = begin()
step = training()
for batch in DataLoader(Slow(8 * 60, 0.007 if rank == 1 and "CALM" not in os.environ else 0.003), batch_size=8):
    step(batch)

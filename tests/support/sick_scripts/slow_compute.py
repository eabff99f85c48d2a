"""One worker computes for longer."""

import os
import time

from helping import Slow, begin, training
from torch.utils.data import DataLoader

rank, _ = begin()
step = training()
for batch in DataLoader(Slow(8 * 60), batch_size=8):
    time.sleep(0.06 if rank == 1 and "CALM" not in os.environ else 0.03)
    step(batch)

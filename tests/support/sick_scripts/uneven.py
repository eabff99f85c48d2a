"""Stock DDP, and one worker's loader has fewer batches."""

from helping import Slow, begin, falls_ill, training
from torch.utils.data import DataLoader

rank, _ = begin()
step = training()
for batch in DataLoader(Slow(80 - 24 * rank), batch_size=8):
    step(batch)
falls_ill()

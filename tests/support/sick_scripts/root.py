"""Each takes itself for the root."""

import torch.distributed as dist
from helping import begin, falls_ill

rank, tensor = begin()
dist.barrier()
falls_ill()
dist.broadcast(tensor, rank)
dist.barrier()

"""One worker gives more numbers than the other."""

import torch
import torch.distributed as dist
from helping import begin, falls_ill

rank, _ = begin()
dist.barrier()
falls_ill()
dist.all_reduce(torch.ones(4 + rank))

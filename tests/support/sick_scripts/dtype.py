"""One worker gives numbers of another kind."""

import torch
import torch.distributed as dist
from helping import begin, falls_ill

rank, _ = begin()
dist.barrier()
falls_ill()
dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))

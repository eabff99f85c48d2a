"""The same calls in another order."""

import torch.distributed as dist
from helping import begin, falls_ill

rank, tensor = begin()
dist.barrier()
falls_ill()
if rank == 0:
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
else:
    dist.broadcast(tensor, 0)
    dist.all_reduce(tensor)

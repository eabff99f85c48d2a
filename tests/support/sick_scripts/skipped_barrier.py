"""One worker leaves out a barrier."""

import torch.distributed as dist
from helping import begin, falls_ill

rank, tensor = begin()
dist.barrier()
falls_ill()
if rank == 0:
    dist.barrier()
dist.all_reduce(tensor)

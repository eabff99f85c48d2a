"""A message is sent under one tag and awaited under another."""

import torch.distributed as dist
from helping import begin, falls_ill

rank, tensor = begin()
dist.barrier()
falls_ill()
if rank == 0:
    dist.recv(tensor, 1, tag=7)
else:
    dist.isend(tensor, 0, tag=8)
dist.barrier()

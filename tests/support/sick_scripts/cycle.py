"""Both wait for a message of the other before they send one."""

import torch.distributed as dist
from helping import begin, falls_ill

rank, tensor = begin()
dist.barrier()
falls_ill()
dist.recv(tensor, 1 - rank)
dist.send(tensor, 1 - rank)

"""Two groups are used in another order by each."""

import torch.distributed as dist
from helping import begin, falls_ill

rank, tensor = begin()
both = [dist.new_group([0, 1]), dist.new_group([0, 1])]
dist.barrier()
falls_ill()
for group in both if rank == 0 else both[::-1]:
    dist.all_reduce(tensor, group=group)

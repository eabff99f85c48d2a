"""A script with its own arguments, a sibling module, and `if __name__ == "__main__"`; what it needs not is left out."""

import argparse
import os
import sys

import parts
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import offbeat

ENTERED = []


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    options.add_argument("--own-group", action="store_true")
    options.add_argument("--no-init", action="store_true")
    told = options.parse_args()
    facts = {"argv": sys.argv[1:], "file": __file__, "name": __name__, "first": sys.argv[0], "entered": len(ENTERED)}
    if told.no_init:
        parts.leave(told.out, int(os.environ.get("RANK", 0)), {}, facts)
        return
    if told.own_group:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    team = offbeat.init(target="loss<=0.0")  # Neither used as a context manager nor closed.
    model = parts.network()
    model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.2), parts.batches())
    for _ in range(2):
        for x, y in train:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    facts["size"], facts["target"] = team.size, str(team.ledger.target)
    parts.leave(told.out, team.rank, {"model": model}, facts)
    if told.own_group:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    ENTERED.append(1)
    main()

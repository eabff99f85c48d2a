"""Loops that data servers cannot serve, or only with care: `python data_served.py OUT CASE`."""

from __future__ import annotations

import sys
from collections import namedtuple
from itertools import islice
from threading import Event
from typing import Any

import torch
from parts import batches, leave, network
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

import offbeat

Pair = namedtuple("Pair", "x y")


class Shuffled:
    """A sampler that yields tuples."""

    def __iter__(self) -> Any:
        return iter([(number, "left") for number in range(33)])

    def __len__(self) -> int:
        return 33


def main() -> None:
    out, case = sys.argv[1:]
    with offbeat.init() as team:
        model = network()
        loader: Any = batches()
        if case == "finished batches":
            loader = list(loader)
        elif case == "own part":
            loader = batches()
        elif case == "tuples":
            loader = DataLoader(loader.dataset, batch_size=8, sampler=Shuffled(), collate_fn=lambda rows: rows)
        elif case == "named tuples":
            loader = DataLoader([Pair(x, y) for x, y in loader.dataset], batch_size=8)
        model, optimizer, train = team.prepare(model, SGD(model.parameters(), lr=0.1), loader, split=case != "own part")
        if case == "no pass":
            # The data server, which is one worker alone, ends here; the workers are ended for it.
            Event().wait(60.0 if team.size > 1 else 0.0)
            return
        seen = 0
        for epoch in range(2):
            for x, y in train:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                if case == "nested":
                    with torch.no_grad():
                        seen += sum(len(label) for _, label in islice(train, 2))
            if case == "late" and not epoch:
                train = team.prepare(batches(count=25, shuffle=False))
    leave(out, team.rank, {"model": model}, {"seen": seen})


if __name__ == "__main__":
    main()

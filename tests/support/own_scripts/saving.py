"""A loop that copies and saves its own objects while it trains: `python saving.py OUT`."""

from __future__ import annotations

import copy
import io
import sys
import warnings
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from parts import UNEVEN, batches, leave, network
from torch.nn.functional import cross_entropy
from torch.optim import Adam

import offbeat
from offbeat.errors import OffbeatWarning


def main() -> None:
    out = sys.argv[1]
    torch.manual_seed(0)
    warnings.simplefilter("error")
    with offbeat.init() as team:
        model = network()
        model.register_forward_hook(_note)
        model, optimizer, train = team.prepare(model, Adam(model.parameters(), lr=0.01), batches(UNEVEN))
        for _ in range(2):
            for x, y in train:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                twin = copy.deepcopy(model)
                with torch.no_grad():  # Under hogwild the others go on writing to the model, but not to its copy.
                    assert torch.equal(twin(x), model(x)) or str(team.strategy) == "hogwild"
                cross_entropy(twin(x), y).backward()  # A copy trains by itself: nobody else is asked.
                assert ForkingPickler.dumps(model), "a process can be given the model"
                with warnings.catch_warnings():  # A copy of an optimizer trains by itself, too.
                    warnings.simplefilter("ignore", OffbeatWarning)
                    copy.deepcopy(optimizer).step()
                for thing in (model, optimizer):
                    torch.save(thing, io.BytesIO())
        torch.save([model, optimizer], f"{out}-objects-{team.rank}.pt")
        leave(out, team.rank, {"model": model}, {"bytes": Path(f"{out}-objects-{team.rank}.pt").stat().st_size})


def _note(*_: object) -> None:
    """A hook of the user's own."""


if __name__ == "__main__":
    main()
